"""Qwen3: Llama's block with an RMSNorm of each query and key head."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import Config, Family, check_keys, flag, with_defaults
from mla_cli.model.families.layout import llama_names
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, WINDOW_KEYS, llama_block, qwen_windows
from mla_cli.model.spec import DecoderSpec, QkNormSpec, StandardAttentionSpec


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | WINDOW_KEYS | {"attention_bias"}, "qwen3")
    config = with_defaults(config, max_position_embeddings=32768, head_dim=128)
    bias = flag(config, "attention_bias")
    return with_head_norms(llama_block(config, q_kv_bias=bias, o_bias=bias, windows=qwen_windows(config)))


def with_head_norms(spec: DecoderSpec, *, offset: bool = False, whole: bool = False) -> DecoderSpec:
    """The decoder with norms of queries and keys in every layer."""
    layers = []
    for attention in spec.attention:
        assert isinstance(attention, StandardAttentionSpec)
        norm = QkNormSpec(spec.norm_eps, whole=whole, offset=offset, bias=attention.q_bias)
        layers.append(replace(attention, qk_norm=norm))
    return spec.with_attention(tuple(layers))


QWEN3 = Family(("qwen3",), _spec, llama_names, SKIPPED)
