"""SmolLM3: Llama's block, with layers that have no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.errors import InputError
from mla_cli.model.families.base import (
    RESTORE,
    Config,
    Family,
    check_keys,
    flag,
    integer,
    layer_count,
    with_defaults,
)
from mla_cli.model.families.layout import llama_names
from mla_cli.model.families.llama import BIAS_KEYS, BLOCK_KEYS, SKIPPED, WINDOW_KEYS, kinds_of_window, llama_block
from mla_cli.model.spec import DecoderSpec


def _spec(config: Config) -> DecoderSpec:
    keys = BLOCK_KEYS | BIAS_KEYS | WINDOW_KEYS | {"no_rope_layers", "no_rope_layer_interval"}
    check_keys(config, keys, "smollm3")
    config = with_defaults(
        config, max_position_embeddings=32768, rope_theta=2e6, tie_word_embeddings=True, num_key_value_heads=4
    )
    layers, bias = layer_count(config), flag(config, "attention_bias")
    interval = integer(config, "no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")  # 1 where there is a rotary embedding, in spite of the name
    rotates = [int((i + 1) % interval != 0) for i in range(layers)] if rotates is None else rotates
    if not isinstance(rotates, list) or len(rotates) != layers or any(r not in (0, 1) for r in rotates):
        raise InputError(
            f"config.json: no_rope_layers must be {layers} times 0 or 1", where="no_rope_layers", fix=RESTORE
        )
    windows: list[int | None] = [None] * layers
    if flag(config, "use_sliding_window") and config.get("sliding_window") is not None:
        kinds = ["full_attention" if rotary else "sliding_attention" for rotary in rotates]
        windows = kinds_of_window(config, integer(config, "sliding_window"), kinds)
    spec = llama_block(config, q_kv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias"), windows=windows)
    return spec.with_attention(
        tuple(a if r else replace(a, rotary=None) for a, r in zip(spec.attention, rotates, strict=True))
    )


SMOLLM3 = Family(("smollm3",), _spec, llama_names, SKIPPED)
