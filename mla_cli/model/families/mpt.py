"""MPT: ALiBi, layer norms without biases, projections stacked."""

from __future__ import annotations

import math

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
)
from mla_cli.model.families.layout import Names, stacked_qkv, tensor_rules
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

_KEYS = frozenset(
    """d_model n_heads n_layers expansion_ratio max_seq_len attn_config no_bias layer_norm_epsilon logit_scale norm_type
    learned_pos_emb embedding_fraction emb_pdrop emb_init_std init_config hidden_size num_attention_heads num_hidden_layers
    verbose init_device""".split()
)
_ATTENTION_KEYS = frozenset(
    """alibi alibi_bias_max attn_impl attn_pdrop attn_type attn_uses_sequence_id clip_qkv prefix_lm qk_ln
    softmax_scale""".split()
)


def _slopes(heads: int, most: float) -> tuple[float, ...]:
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(i * most / power) for i in range(1, power + 1)]
    if power != heads:
        slopes = [*slopes[1::2], *slopes[::2]][:heads]
    return tuple(slopes)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, "mpt")
    hidden, heads = integer(config, "d_model"), integer(config, "n_heads")
    said = config.get("attn_config") or {}
    if hidden % heads or not isinstance(said, dict):
        raise InputError("config.json: d_model, n_heads or attn_config do not fit", where="d_model", fix=RESTORE)
    check_keys({key: value for key, value in said.items() if key != "model_type"}, _ATTENTION_KEYS, "mpt")
    for key, allowed in (("alibi", True), ("attn_type", "multihead_attention"), ("prefix_lm", False), ("qk_ln", False),
                         ("attn_uses_sequence_id", False)):  # fmt: skip
        refuse_unless(said, key, allowed)
    for owner, key in ((said, "clip_qkv"), (config, "logit_scale")):
        refuse_unless(owner, key)
    refuse_unless(config, "no_bias", True)
    refuse_unless(config, "embedding_fraction", 1, 1.0)
    refuse_unless(config, "expansion_ratio", 4)
    refuse_unless(config, "norm_type", "low_precision_layernorm", "layernorm")
    head_dim = hidden // heads
    attention = StandardAttentionSpec(
        heads, heads, head_dim, number(said, "softmax_scale", head_dim**-0.5), None,
        alibi=_slopes(heads, number(said, "alibi_bias_max", 8)),
    )  # fmt: skip
    return DecoderSpec(
        model_type="mpt",
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        max_position_embeddings=integer(config, "max_seq_len", 2048),
        norm="layer_without_bias",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation="gelu",
        gated_mlp=False,
        mlp_bias=False,
        tied=flag(config, "tie_word_embeddings", True),
        attention=(attention,) * layer_count(config, "n_layers"),
    )


_TOP = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.norm_f"}
_PARTS = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn.o_proj": "attn.out_proj",
          "mlp": "ffn"}  # fmt: skip


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(_TOP, "transformer.blocks.{}", _PARTS, stacked_qkv("attn.Wqkv")))


MPT = Family(("mpt",), _spec, _tensors)
