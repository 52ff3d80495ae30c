"""Llama (SmolLM, TinyLlama, Llama 2 and 3), Mistral and Qwen2: one block with small differences."""

from __future__ import annotations

from mla_cli.errors import InputError
from mla_cli.model.families.base import (
    RESTORE,
    Config,
    Family,
    TensorRule,
    activation,
    check_keys,
    flag,
    head_counts,
    integer,
    layer_count,
    number,
    rotary,
)
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

_KEYS = frozenset(
    """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor attention_bias mlp_bias
    sliding_window use_sliding_window layer_types""".split()
)


# In the native form no tensor has this width, so nothing else would stop a damaged one from filling the memory.
MOST_HEAD_DIM = 1 << 16


def _spec(config: Config, *, q_kv_bias: bool, o_bias: bool, mlp_bias: bool, windows: list[int | None]) -> DecoderSpec:
    heads, kv_heads = head_counts(config)
    hidden = integer(config, "hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise InputError(
            f"config.json: hidden_size {hidden} is not a multiple of {heads} heads", where="hidden_size", fix=RESTORE
        )
    head_dim = integer(config, "head_dim", hidden // heads, most=MOST_HEAD_DIM)
    rope = rotary(config, head_dim)
    return DecoderSpec(
        model_type=config["model_type"],
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        max_position_embeddings=integer(config, "max_position_embeddings", 2048),
        norm="rms",
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        mlp_bias=mlp_bias,
        tied=flag(config, "tie_word_embeddings"),
        attention=tuple(
            StandardAttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope, q_kv_bias, q_kv_bias, o_bias, window)
            for window in windows
        ),
    )


def _with_context(config: Config, default: int) -> Config:
    return {**config, "max_position_embeddings": integer(config, "max_position_embeddings", default)}


def _llama(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS - {"sliding_window", "use_sliding_window", "layer_types"}, "llama")
    bias = flag(config, "attention_bias")
    layers = layer_count(config)
    return _spec(config, q_kv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias"), windows=[None] * layers)


def _mistral(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS - {"use_sliding_window", "attention_bias", "mlp_bias", "layer_types"}, "mistral")
    config = _with_context(config, 131072)
    window = config.get("sliding_window", 4096)  # absent means 4096, null means none
    window = None if window is None else integer(config, "sliding_window", 4096)
    layers = layer_count(config)
    return _spec(config, q_kv_bias=False, o_bias=False, mlp_bias=False, windows=[window] * layers)


def _qwen2(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS - {"attention_bias", "mlp_bias"}, "qwen2")
    config = _with_context(config, 32768)
    layers = layer_count(config)
    windows: list[int | None] = [None] * layers
    window = config.get("sliding_window", 4096)  # absent means 4096, null means none
    if flag(config, "use_sliding_window") and window is not None:
        window = integer(config, "sliding_window")
        first = integer(config, "max_window_layers", 28, least=0)
        kinds = config.get("layer_types") or [
            "sliding_attention" if i >= first else "full_attention" for i in range(layers)
        ]
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise InputError(
                f"config.json: layer_types must name {layers} known attention types", where="layer_types", fix=RESTORE
            )
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return _spec(config, q_kv_bias=True, o_bias=False, mlp_bias=False, windows=windows)


def llama_tensors(spec: DecoderSpec, names: frozenset[str] = frozenset()) -> dict[str, TensorRule]:
    """Rules for the Llama layout; the decoder's own names are Llama's, so each rule names itself."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for i, attention in enumerate(spec.attention):
        assert isinstance(attention, StandardAttentionSpec)
        layer = f"model.layers.{i}"
        q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, attention.q_bias),
            ("self_attn.k_proj", kv, hidden, attention.kv_bias),
            ("self_attn.v_proj", kv, hidden, attention.kv_bias),
            ("self_attn.o_proj", hidden, q, attention.o_bias),
            ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
            ("mlp.up_proj", inner, hidden, spec.mlp_bias),
            ("mlp.down_proj", hidden, inner, spec.mlp_bias),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    return {name: TensorRule(name, shape) for name, shape in shapes.items()}


_SKIPPED = (r".*rotary_emb\.inv_freq", r".*\.rotary_emb\..*_cached")

LLAMA = Family(("llama",), _llama, llama_tensors, _SKIPPED)
MISTRAL = Family(("mistral",), _mistral, llama_tensors, _SKIPPED)
QWEN2 = Family(("qwen2",), _qwen2, llama_tensors, _SKIPPED)
