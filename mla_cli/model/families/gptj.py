"""GPT-J: attention and MLP in parallel behind one norm; rotary pairs side by side, of the first `rotary_dim` channels."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.errors import InputError
from mla_cli.model.families.base import RESTORE, Config, Family, TensorRule, check_keys, integer, with_defaults
from mla_cli.model.families.layout import Names, Part, tensor_rules
from mla_cli.model.families.llama import llama_block
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

_KEYS = frozenset(
    "n_embd n_layer n_head n_positions n_inner rotary rotary_dim activation_function layer_norm_epsilon".split()
)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, "gptj")
    hidden, heads, width = integer(config, "n_embd"), integer(config, "n_head"), integer(config, "rotary_dim", 64)
    if hidden % heads or width > hidden // heads or width % 2:
        raise InputError(
            f"config.json: rotary_dim {width} does not fit {heads} heads of {hidden} channels",
            where="rotary_dim",
            fix=RESTORE,
        )
    config = with_defaults(config, n_inner=4 * hidden, n_positions=2048, activation_function="gelu_new")
    as_llama = {
        "model_type": "gptj", "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": config.get("vocab_size"),
        "num_hidden_layers": config.get("n_layer"), "intermediate_size": config["n_inner"],
        "max_position_embeddings": config["n_positions"], "hidden_act": config["activation_function"],
        "layer_norm_eps": config.get("layer_norm_epsilon") or 1e-5, "tie_word_embeddings": config.get("tie_word_embeddings"),
    }  # fmt: skip
    share = width / (hidden // heads)
    spec = llama_block(as_llama, mlp_bias=True, rotary_share=share, eps="layer_norm_eps")
    return replace(spec, norm="layer", gated_mlp=False, parallel="one_norm", head_bias=not spec.tied)


_TOP = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
_PARTS = {"input_layernorm": "ln_1", "self_attn": "attn", "self_attn.o_proj": "attn.out_proj",
          "mlp.up_proj": "mlp.fc_in", "mlp.down_proj": "mlp.fc_out"}  # fmt: skip


def _halves(spec: DecoderSpec, layer: int) -> dict[str, Part]:
    """Queries and keys with their rotary pairs in two halves, as the decoder turns them."""
    attention = spec.attention[layer]
    assert isinstance(attention, StandardAttentionSpec)
    assert attention.rotary is not None
    turning, d = attention.rotary.dim, attention.head_dim
    order = [*range(0, turning, 2), *range(1, turning, 2), *range(turning, d)]
    rows = tuple(head * d + row for head in range(attention.num_heads) for row in order)
    return {f"self_attn.{name}_proj": Part(f"attn.{name}_proj", rows, len(rows)) for name in "qk"}


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(_TOP, "transformer.h.{}", _PARTS, _halves))


GPTJ = Family(("gptj",), _spec, _tensors, (r"transformer\.h\.\d+\.attn\.(masked_bias|bias|embed_positions)",))
