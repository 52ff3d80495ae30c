"""OLMo (layer norm without weights) and OLMo 2 (norms behind the branches, and of all queries and all keys at once)."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import Config, Family, TensorRule, check_keys, flag, refuse_unless, with_defaults
from mla_cli.model.families.layout import Names, llama_names, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, llama_block
from mla_cli.model.families.qwen3 import with_head_norms
from mla_cli.model.spec import DecoderSpec

_OLMO_EPS = 1e-5  # fixed


def _olmo(config: Config) -> DecoderSpec:
    check_keys(config, (BLOCK_KEYS - {"rms_norm_eps"}) | {"attention_bias", "clip_qkv"}, "olmo")
    refuse_unless(config, "clip_qkv")  # clipped keys and values are no product of a matrix and a latent
    bias = flag(config, "attention_bias")
    spec = llama_block({**config, "rms_norm_eps": _OLMO_EPS}, q_kv_bias=bias, o_bias=bias)
    return replace(spec, norm="layer_without_weight")


def _olmo2(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | {"attention_bias"}, "olmo2")
    bias = flag(config, "attention_bias")
    spec = llama_block(with_defaults(config, rms_norm_eps=1e-5), q_kv_bias=bias, o_bias=bias)
    return with_head_norms(replace(spec, branch_norm="after"), whole=True)


_NORMS = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}


def _olmo2_tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(parts=_NORMS))


OLMO = Family(("olmo",), _olmo, llama_names, SKIPPED)
OLMO2 = Family(("olmo2",), _olmo2, _olmo2_tensors, SKIPPED)
