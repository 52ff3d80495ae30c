"""OPT: learned positions (the table begins two rows early), layer norm, biases."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import (
    Config,
    Family,
    TensorRule,
    activation,
    check_keys,
    flag,
    head_counts,
    head_width,
    integer,
    layer_count,
    refuse_unless,
)
from mla_cli.model.families.layout import Names, tensor_rules
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

_EARLY = 2  # rows before that of the first position
_KEYS = frozenset(
    """hidden_size num_hidden_layers ffn_dim max_position_embeddings do_layer_norm_before _remove_final_layer_norm
    word_embed_proj_dim num_attention_heads activation_function layerdrop enable_bias layer_norm_elementwise_affine init_std
    activation_dropout""".split()
)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, "opt")
    hidden, (heads, _) = integer(config, "hidden_size"), head_counts(config)
    refuse_unless(config, "do_layer_norm_before", True)
    refuse_unless(config, "_remove_final_layer_norm", False)
    refuse_unless(config, "layer_norm_elementwise_affine", True)
    refuse_unless(config, "word_embed_proj_dim", hidden)
    bias, head_dim = flag(config, "enable_bias", True), head_width(hidden, heads)
    attention = StandardAttentionSpec(heads, heads, head_dim, head_dim**-0.5, None, bias, bias, bias)
    return DecoderSpec(
        model_type="opt",
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "ffn_dim"),
        max_position_embeddings=integer(config, "max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,
        activation=activation(config, "activation_function", "relu"),
        gated_mlp=False,
        mlp_bias=bias,
        tied=flag(config, "tie_word_embeddings", True),
        attention=(attention,) * layer_count(config),
        learned_positions=True,
    )


_PARTS = {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm",
          "self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"}  # fmt: skip


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    root = "decoder" if "decoder.embed_tokens.weight" in names else "model.decoder"
    top = {
        "model.embed_tokens": f"{root}.embed_tokens", "model.embed_positions": f"{root}.embed_positions",
        "model.norm": f"{root}.final_layer_norm",
    }  # fmt: skip
    rules = tensor_rules(spec, Names(top, root + ".layers.{}", _PARTS))
    positions, rows = rules["model.embed_positions.weight"], spec.max_position_embeddings
    rules["model.embed_positions.weight"] = replace(
        positions, shape=(rows + _EARLY, positions.shape[1]), rows=range(_EARLY, rows + _EARLY)
    )
    return rules


OPT = Family(("opt",), _spec, _tensors)
