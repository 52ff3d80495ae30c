"""StarCoder2: layer norm, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import (
    Config,
    Family,
    TensorRule,
    check_keys,
    flag,
    integer,
    layer_count,
    refuse_unless,
    with_defaults,
)
from mla_cli.model.families.layout import Names, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, llama_block
from mla_cli.model.spec import DecoderSpec


def _spec(config: Config) -> DecoderSpec:
    extra = {"norm_epsilon", "sliding_window", "use_bias", "mlp_type", "norm_type"}
    check_keys(config, (BLOCK_KEYS - {"rms_norm_eps"}) | extra, "starcoder2")
    refuse_unless(config, "mlp_type", "default")
    refuse_unless(config, "norm_type", "layer_norm")
    config = with_defaults(
        config, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, norm_epsilon=1e-5, tie_word_embeddings=True,
        num_key_value_heads=2,
    )  # fmt: skip
    bias = flag(config, "use_bias", True)
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    spec = llama_block(
        config, q_kv_bias=bias, o_bias=bias, mlp_bias=bias, windows=[window] * layer_count(config), eps="norm_epsilon"
    )
    return replace(spec, norm="layer", gated_mlp=False)


def _tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(parts={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}))


STARCODER2 = Family(("starcoder2",), _spec, _tensors, SKIPPED)
