"""BLOOM: ALiBi, a norm of the embedding, projections fused head by head."""

from __future__ import annotations

import math

from mla_cli.model.families.base import (
    Config,
    Family,
    TensorRule,
    check_keys,
    head_counts,
    head_width,
    integer,
    layer_count,
    number,
    refuse_unless,
    with_defaults,
)
from mla_cli.model.families.layout import Names, grouped_qkv, tensor_rules
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

_KEYS = frozenset(
    """hidden_size n_embed n_layer num_hidden_layers n_head num_attention_heads layer_norm_epsilon seq_length
    apply_residual_connection_post_layernorm slow_but_exact skip_bias_add skip_bias_add_qkv attention_softmax_in_fp32
    masked_softmax_fusion bias_dropout_fusion offset_alibi""".split()
)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes by head (arXiv 2108.12409): a geometric series, and between its members where heads are no power of two."""
    power = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    between = 2.0 ** -(2.0 ** -(math.log2(2 * power) - 3))
    more = (between ** (2 * i + 1) for i in range(min(power, heads - power)))
    return (*(base ** (i + 1) for i in range(power)), *more)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, "bloom")
    refuse_unless(config, "apply_residual_connection_post_layernorm", False)
    refuse_unless(config, "slow_but_exact", False, True)
    config = with_defaults(
        config, hidden_size=config.get("n_embed"), num_hidden_layers=config.get("n_layer"),
        num_attention_heads=config.get("n_head"), tie_word_embeddings=True,
    )  # fmt: skip
    hidden, (heads, _) = integer(config, "hidden_size"), head_counts(config)
    head_dim = head_width(hidden, heads)
    attention = StandardAttentionSpec(
        heads, heads, head_dim, head_dim**-0.5, None, q_bias=True, kv_bias=True, o_bias=True, alibi=alibi_slopes(heads)
    )
    return DecoderSpec(
        model_type="bloom",
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        # ALiBi has no end; this is what BLOOM was trained with.
        max_position_embeddings=integer(config, "seq_length", 2048),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation="gelu_pytorch_tanh",
        gated_mlp=False,
        mlp_bias=True,
        tied=config["tie_word_embeddings"] is True,
        attention=(attention,) * layer_count(config),
        embedding_norm=True,
    )


_PARTS = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    root = "" if "word_embeddings.weight" in names else "transformer."
    top = {
        "model.embed_tokens": f"{root}word_embeddings", "model.embed_norm": f"{root}word_embeddings_layernorm",
        "model.norm": f"{root}ln_f",
    }  # fmt: skip
    return tensor_rules(spec, Names(top, root + "h.{}", _PARTS, grouped_qkv("self_attention.query_key_value")))


BLOOM = Family(("bloom",), _spec, _tensors)
