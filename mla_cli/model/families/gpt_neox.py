"""GPT-NeoX and Pythia: attention and MLP in parallel behind norms of their own, a quarter of each head rotates."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import (
    Config,
    Family,
    TensorRule,
    check_keys,
    flag,
    number,
    refuse_unless,
    with_defaults,
)
from mla_cli.model.families.layout import Names, grouped_qkv, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, llama_block
from mla_cli.model.spec import DecoderSpec

_KEYS = (BLOCK_KEYS - {"rms_norm_eps", "head_dim", "num_key_value_heads"}) | set(
    "layer_norm_eps use_parallel_residual attention_bias rotary_pct rotary_emb_base classifier_dropout hidden_dropout".split()
)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, "gpt_neox")
    refuse_unless(config, "num_key_value_heads")
    config = with_defaults(
        config,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
        rope_theta=config.get("rotary_emb_base"),
        intermediate_size=24576,
    )
    bias = flag(config, "attention_bias", True)
    share = number(config, "rotary_pct", 0.25)
    spec = llama_block(config, q_kv_bias=bias, o_bias=bias, mlp_bias=True, rotary_share=share, eps="layer_norm_eps")
    parallel = flag(config, "use_parallel_residual", True)
    return replace(spec, norm="layer", gated_mlp=False, parallel="own_norms" if parallel else None)


_TOP = {"model.embed_tokens": "gpt_neox.embed_in", "model.norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out"}
_PARTS = {
    "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(_TOP, "gpt_neox.layers.{}", _PARTS, grouped_qkv("attention.query_key_value")))


_BUFFERS = (r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",)
GPT_NEOX = Family(("gpt_neox",), _spec, _tensors, _BUFFERS)
