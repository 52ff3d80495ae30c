"""Granite: Llama's block with multipliers of embeddings, attention, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import Config, Family, check_keys, flag, number
from mla_cli.model.families.layout import llama_names
from mla_cli.model.families.llama import BIAS_KEYS, BLOCK_KEYS, SKIPPED, llama_block
from mla_cli.model.spec import DecoderSpec

_MULTIPLIERS = {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"}


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | BIAS_KEYS | _MULTIPLIERS, "granite")
    bias = flag(config, "attention_bias")
    spec = llama_block(config, q_kv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias"))
    scale = number(config, "attention_multiplier", 1.0)
    return replace(
        spec,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
        attention=tuple(replace(attention, scale=scale) for attention in spec.attention),
    )


GRANITE = Family(("granite",), _spec, llama_names, SKIPPED)
