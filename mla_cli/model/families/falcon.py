"""Falcon: the old block (multi-query or multi-head, one norm) and the new one (groups, a norm for each branch), or ALiBi."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import (
    Config,
    Family,
    TensorRule,
    check_keys,
    flag,
    head_width,
    integer,
    refuse_unless,
    with_defaults,
)
from mla_cli.model.families.bloom import alibi_slopes
from mla_cli.model.families.layout import Names, grouped_qkv, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, llama_block
from mla_cli.model.spec import DecoderSpec

_KEYS = (BLOCK_KEYS - {"rms_norm_eps", "head_dim", "hidden_act", "intermediate_size", "num_key_value_heads"}) | set(
    """num_ln_in_parallel_attn layer_norm_epsilon num_kv_heads alibi new_decoder_architecture multi_query parallel_attn bias
    ffn_hidden_size activation n_embed apply_residual_connection_post_layernorm""".split()
)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, "falcon")
    refuse_unless(config, "apply_residual_connection_post_layernorm", False)
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    new, parallel = flag(config, "new_decoder_architecture"), flag(config, "parallel_attn", True)
    if new:
        refuse_unless(config, "parallel_attn", True)
    kv_heads = integer(config, "num_kv_heads", heads) if new or not flag(config, "multi_query", True) else 1
    if not new and kv_heads != 1:
        refuse_unless(config, "num_kv_heads", heads)
    config = {
        **with_defaults(config, layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        "num_key_value_heads": kv_heads,
        "intermediate_size": integer(config, "ffn_hidden_size", 4 * hidden),
        "hidden_act": config.get("activation") or "gelu",
    }
    bias = flag(config, "bias")
    spec = llama_block(config, q_kv_bias=bias, o_bias=bias, mlp_bias=bias, eps="layer_norm_epsilon")
    own = new and integer(config, "num_ln_in_parallel_attn", 2) == 2
    if flag(config, "alibi"):  # added before scores are scaled
        slopes = tuple(slope * head_width(hidden, heads) ** -0.5 for slope in alibi_slopes(heads))
        spec = spec.with_attention(tuple(replace(a, rotary=None, alibi=slopes) for a in spec.attention))  # type: ignore[arg-type]
    kind = None if not parallel else "own_norms" if own else "one_norm"
    return replace(spec, norm="layer", gated_mlp=False, parallel=kind)  # type: ignore[arg-type]


_TOP = {"model.embed_tokens": "transformer.word_embeddings", "model.norm": "transformer.ln_f"}
_PARTS = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_OWN_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    parts = _PARTS | (_OWN_NORMS if spec.parallel == "own_norms" else {})
    return tensor_rules(spec, Names(_TOP, "transformer.h.{}", parts, grouped_qkv("self_attention.query_key_value")))


FALCON = Family(("falcon",), _spec, _tensors, (r".*rotary_emb\.inv_freq",))
