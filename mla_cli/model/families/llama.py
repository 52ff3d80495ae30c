"""Llama (SmolLM, TinyLlama, Llama 2 and 3), Mistral and Qwen2: one block with small differences."""

from __future__ import annotations

from collections.abc import Sequence

from mla_cli.errors import InputError
from mla_cli.model.families.base import (
    RESTORE,
    Config,
    Family,
    activation,
    check_keys,
    flag,
    head_counts,
    head_width,
    integer,
    layer_count,
    number,
    rotary,
)
from mla_cli.model.families.layout import llama_names
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

BLOCK_KEYS = frozenset(
    """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor""".split()
)
BIAS_KEYS = frozenset(("attention_bias", "mlp_bias"))
WINDOW_KEYS = frozenset(("sliding_window", "use_sliding_window", "layer_types"))


# In the native form no tensor has this width, so nothing else would stop a damaged one from filling the memory.
MOST_HEAD_DIM = 1 << 16


def llama_block(
    config: Config,
    *,
    q_kv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    windows: Sequence[int | None] | None = None,
    rotary_share: float | None = None,
    eps: str = "rms_norm_eps",
) -> DecoderSpec:
    """A decoder of Llama's block: RMSNorm, rotary embedding, gated MLP.

    Args:
        windows: one a layer; None: no layer has one. rotary_share: see `rotary`. eps: the key of the norms' eps.
    """
    heads, kv_heads = head_counts(config)
    hidden = integer(config, "hidden_size")
    said = config.get("head_dim")
    head_dim = integer(config, "head_dim", head_width(hidden, heads) if said is None else None, most=MOST_HEAD_DIM)
    rope = rotary(config, head_dim, rotary_share)
    return DecoderSpec(
        model_type=config["model_type"],
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        max_position_embeddings=integer(config, "max_position_embeddings", 2048),
        norm="rms",
        norm_eps=number(config, eps, 1e-6),
        activation=activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        mlp_bias=mlp_bias,
        tied=flag(config, "tie_word_embeddings"),
        attention=tuple(
            StandardAttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope, q_kv_bias, q_kv_bias, o_bias, window)
            for window in (windows if windows is not None else [None] * layer_count(config))
        ),
    )


def _with_context(config: Config, default: int) -> Config:
    return {**config, "max_position_embeddings": integer(config, "max_position_embeddings", default)}


def _llama(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | BIAS_KEYS, "llama")
    bias = flag(config, "attention_bias")
    return llama_block(config, q_kv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias"))


def _mistral(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | {"sliding_window"}, "mistral")
    config = _with_context(config, 131072)
    window = config.get("sliding_window", 4096)  # absent means 4096, null means none
    window = None if window is None else integer(config, "sliding_window", 4096)
    return llama_block(config, windows=[window] * layer_count(config))


def _qwen2(config: Config) -> DecoderSpec:
    check_keys(config, BLOCK_KEYS | WINDOW_KEYS, "qwen2")
    config = _with_context(config, 32768)
    return llama_block(config, q_kv_bias=True, windows=qwen_windows(config))


def qwen_windows(config: Config) -> list[int | None]:
    """The window of each layer, as Qwen's configurations say it."""
    layers = layer_count(config)
    window = config.get("sliding_window", 4096)  # absent means 4096, null means none
    if not flag(config, "use_sliding_window") or window is None:
        return [None] * layers
    window = integer(config, "sliding_window", 4096)
    first = integer(config, "max_window_layers", 28, least=0)
    return kinds_of_window(
        config, window, ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    )


def kinds_of_window(config: Config, window: int | None, default: list[str]) -> list[int | None]:
    """The window of each layer from `layer_types`; default: where they are not given."""
    kinds = config.get("layer_types") or default
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != len(default) or any(kind not in known for kind in kinds):
        raise InputError(
            f"config.json: layer_types must name {len(default)} known attention types", where="layer_types", fix=RESTORE
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


SKIPPED = (r".*rotary_emb\.inv_freq", r".*\.rotary_emb\..*_cached")

LLAMA = Family(("llama",), _llama, llama_names, SKIPPED)
MISTRAL = Family(("mistral",), _mistral, llama_names, SKIPPED)
QWEN2 = Family(("qwen2",), _qwen2, llama_names, SKIPPED)
