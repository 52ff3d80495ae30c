"""InternLM2: Llama's block under other names, its projections fused group by group."""

from __future__ import annotations

from mla_cli.model.families.base import Config, Family, TensorRule, check_keys, flag, refuse_unless
from mla_cli.model.families.layout import Names, grouped_qkv, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, llama_block
from mla_cli.model.spec import DecoderSpec


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | {"bias"}, "internlm2")
    refuse_unless(config, "head_dim")
    bias = flag(config, "bias", True)
    return llama_block(config, q_kv_bias=bias, o_bias=bias)


_TOP = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(_TOP, parts=_PARTS, fused=grouped_qkv("attention.wqkv")))


INTERNLM2 = Family(("internlm2",), _spec, _tensors, SKIPPED)
