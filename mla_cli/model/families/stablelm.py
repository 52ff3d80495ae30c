"""StableLM: layer norm, a quarter of each head rotates, attention and MLP in parallel in some."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import Config, Family, check_keys, flag, refuse_unless, with_defaults
from mla_cli.model.families.layout import llama_names
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, llama_block
from mla_cli.model.spec import DecoderSpec


def _spec(config: Config) -> DecoderSpec:
    extra = {"layer_norm_eps", "use_qkv_bias", "qk_layernorm", "use_parallel_residual"}
    check_keys(config, (BLOCK_KEYS - {"rms_norm_eps", "head_dim"}) | extra, "stablelm")
    refuse_unless(config, "qk_layernorm", False)
    config = with_defaults(config, layer_norm_eps=1e-5, max_position_embeddings=4096)
    spec = llama_block(config, q_kv_bias=flag(config, "use_qkv_bias"), rotary_share=0.25, eps="layer_norm_eps")
    return replace(spec, norm="layer", parallel="one_norm" if flag(config, "use_parallel_residual") else None)


STABLELM = Family(("stablelm",), _spec, llama_names, SKIPPED)
