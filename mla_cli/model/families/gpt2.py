"""GPT-2: multi-head attention, learned positions, layer norm, fused and transposed projections."""

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
    head_width,
    integer,
    layer_count,
    number,
)
from mla_cli.model.families.layout import Names, stacked_qkv, tensor_rules
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

_KEYS = frozenset(
    """n_embd n_layer n_head n_positions n_inner activation_function layer_norm_epsilon scale_attn_weights
    scale_attn_by_inverse_layer_idx add_cross_attention""".split()
)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, "gpt2")
    if flag(config, "add_cross_attention"):
        raise InputError(
            "a GPT-2 with cross-attention is not a decoder-only model", where="add_cross_attention", fix=RESTORE
        )
    hidden, heads = integer(config, "n_embd"), integer(config, "n_head")
    head_dim = head_width(hidden, heads, "n_embd")
    scale = head_dim**-0.5 if flag(config, "scale_attn_weights", True) else 1.0
    by_layer = flag(config, "scale_attn_by_inverse_layer_idx")
    return DecoderSpec(
        model_type="gpt2",
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "n_inner", 4 * hidden),
        max_position_embeddings=integer(config, "n_positions", 1024),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        mlp_bias=True,
        tied=flag(config, "tie_word_embeddings", True),
        attention=tuple(
            StandardAttentionSpec(
                heads,
                heads,
                head_dim,
                scale / (i + 1) if by_layer else scale,
                None,
                q_bias=True,
                kv_bias=True,
                o_bias=True,
            )
            for i in range(layer_count(config, "n_layer"))
        ),
        learned_positions=True,
    )


_PARTS = {
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    root = "" if "wte.weight" in names else "transformer."
    top = {"model.embed_tokens": f"{root}wte", "model.embed_positions": f"{root}wpe", "model.norm": f"{root}ln_f"}
    transposed = frozenset(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
    return tensor_rules(spec, Names(top, root + "h.{}", _PARTS, stacked_qkv("attn.c_attn"), transposed))


# The causal mask was once stored as a buffer.
GPT2 = Family(("gpt2",), _spec, _tensors, (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",))
