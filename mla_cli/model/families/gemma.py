"""Gemma 1, 2 and 3 (text): offset norms, scaled embeddings, and from 2 on norms behind each branch and windows in turn."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.errors import InputError
from mla_cli.model.families.base import (
    RESTORE,
    Config,
    Family,
    TensorRule,
    check_keys,
    flag,
    integer,
    layer_count,
    number,
    refuse_unless,
    rotary,
    with_defaults,
)
from mla_cli.model.families.layout import Names, llama_names, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, kinds_of_window, llama_block
from mla_cli.model.families.qwen3 import with_head_norms
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

_LATER_KEYS = (BLOCK_KEYS - {"hidden_act"}) | set(
    """hidden_act hidden_activation attention_bias query_pre_attn_scalar sliding_window layer_types cache_implementation
    attn_logit_softcapping final_logit_softcapping use_bidirectional_attention""".split()
)


def _block(config: Config, windows: list[int | None] | None = None) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    spec = llama_block(config, q_kv_bias=bias, o_bias=bias, windows=windows)
    return replace(spec, norm="offset_rms", embedding_scale=spec.hidden_size**0.5)


def _gemma(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | {"hidden_activation", "attention_bias", "use_bidirectional_attention"}, "gemma")
    refuse_unless(config, "use_bidirectional_attention", False)
    config = with_defaults(config, max_position_embeddings=8192, head_dim=256, tie_word_embeddings=True)
    # The first releases say "gelu" and mean its approximation; a later key said so.
    named = config.get("hidden_activation") or config.get("hidden_act") or "gelu"
    return _block({**config, "hidden_act": "gelu_pytorch_tanh" if named == "gelu" else named})


def _later(config: Config, default_kinds: list[str]) -> DecoderSpec:
    refuse_unless(config, "use_bidirectional_attention", False)
    config = with_defaults(
        config, head_dim=256, query_pre_attn_scalar=256, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"
    )
    window = integer(config, "sliding_window", 4096) if config.get("sliding_window", 4096) is not None else None
    config = {**config, "hidden_act": config["hidden_activation"]}
    spec = _block(config, kinds_of_window(config, window, default_kinds))
    softcap = _cap(config, "attn_logit_softcapping")
    scale = number(config, "query_pre_attn_scalar") ** -0.5
    return replace(
        spec,
        branch_norm="both",
        logit_softcap=_cap(config, "final_logit_softcapping"),
        attention=tuple(replace(attention, scale=scale, softcap=softcap) for attention in spec.attention),
    )


def _cap(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def _gemma2(config: Config) -> DecoderSpec:
    check_keys(config, _LATER_KEYS, "gemma2")
    config = with_defaults(config, max_position_embeddings=8192)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # absent; null means none
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layer_count(config))]
    return _later({**caps, **config}, kinds)


def _gemma3(config: Config) -> DecoderSpec:
    keys = {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"}
    check_keys(config, _LATER_KEYS | keys, "gemma3_text")
    config = with_defaults(config, max_position_embeddings=131072)
    refuse_unless(config, "attn_logit_softcapping")  # transformers reads the key and does not use it
    older = config.get("_sliding_window_pattern")
    pattern = integer(with_defaults(config, sliding_window_pattern=older), "sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layer_count(config))]
    near, far = _two_rotaries(config)
    spec = with_head_norms(_later({**config, "rope_parameters": None, "rope_scaling": None}, kinds), offset=True)
    kinds = config.get("layer_types") or kinds  # known ones by now
    layers = []
    for attention, kind in zip(spec.attention, kinds, strict=True):
        assert isinstance(attention, StandardAttentionSpec)
        tables = near if kind == "sliding_attention" else far
        layers.append(replace(attention, rotary=rotary(tables, attention.head_dim)))
    return spec.with_attention(tuple(layers))


def _two_rotaries(config: Config) -> tuple[Config, Config]:
    """Configurations of the rotary embedding of layers with a window and of the others: one table each, or the older keys."""
    longest = {"max_position_embeddings": config["max_position_embeddings"]}
    tables = config.get("rope_parameters") or {}
    if not isinstance(tables, dict) or set(tables) - {"sliding_attention", "full_attention"}:
        raise InputError(
            "config.json: rope_parameters must have one entry a type of layer", where="rope_parameters", fix=RESTORE
        )
    far = tables.get("full_attention") or config.get("rope_scaling") or {}
    near = tables.get("sliding_attention") or {}
    return (
        {**longest, "rope_theta": number(config, "rope_local_base_freq", 10_000.0), "rope_parameters": near},
        {**longest, "rope_theta": number(config, "rope_theta", 1_000_000.0), "rope_parameters": far},
    )


# What Llama calls so stands behind attention here.
_NORMS = {
    "attention_output_norm": "post_attention_layernorm", "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}  # fmt: skip


def _later_tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(parts=_NORMS))


GEMMA = Family(("gemma",), _gemma, llama_names, SKIPPED)
GEMMA2 = Family(("gemma2",), _gemma2, _later_tensors, SKIPPED)
GEMMA3 = Family(("gemma3_text",), _gemma3, _later_tensors, SKIPPED)
