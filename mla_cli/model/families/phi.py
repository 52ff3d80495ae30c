"""Phi-3 (Llama's block with fused projections) and Phi-1.5/2 (attention and MLP in parallel, layer norm, partial rotary)."""

from __future__ import annotations

from dataclasses import replace

from mla_cli.model.families.base import (
    Config,
    Family,
    TensorRule,
    activation,
    check_keys,
    integer,
    layer_count,
    refuse_unless,
    rope_entries,
    with_defaults,
)
from mla_cli.model.families.layout import Names, Part, stacked, stacked_qkv, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, llama_block
from mla_cli.model.spec import DecoderSpec


def _phi3(config: Config) -> DecoderSpec:
    extra = {"sliding_window", "original_max_position_embeddings", "attention_bias"}
    check_keys(config, BLOCK_KEYS | extra, "phi3")
    refuse_unless(config, "attention_bias", False)
    config = with_defaults(config, max_position_embeddings=4096, rms_norm_eps=1e-5)
    key, rope = rope_entries(config)
    if rope:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        kind = "longrope" if kind in ("su", "yarn") else kind
        rope = {**rope, "rope_type": kind, "type": kind}
        if kind == "longrope":
            # The context before scaling stands outside the table here.
            rope = with_defaults(
                rope, original_max_position_embeddings=config.get("original_max_position_embeddings", 4096)
            )
        config = {**config, "rope_scaling": None, "rope_parameters": None, key: rope}
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    return llama_block(config, windows=[window] * layer_count(config), rotary_share=1.0)


def _phi3_fused(spec: DecoderSpec, layer: int) -> dict[str, Part]:
    inner = spec.intermediate_size
    gate_up = stacked("mlp.gate_up_proj", mlp__gate_proj=inner, mlp__up_proj=inner)
    return {**stacked_qkv("self_attn.qkv_proj")(spec, layer), **gate_up}


def _phi3_tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(fused=_phi3_fused))


def _phi(config: Config) -> DecoderSpec:
    check_keys(config, (BLOCK_KEYS - {"rms_norm_eps", "head_dim"}) | {"layer_norm_eps", "qk_layernorm"}, "phi")
    refuse_unless(config, "qk_layernorm", False)
    config = with_defaults(config, layer_norm_eps=1e-5)
    config["hidden_act"] = activation(config, "hidden_act", "gelu_new")
    spec = llama_block(config, q_kv_bias=True, o_bias=True, mlp_bias=True, rotary_share=0.5, eps="layer_norm_eps")
    return replace(spec, norm="layer", gated_mlp=False, parallel="one_norm", head_bias=not spec.tied)


_PHI_PARTS = {"self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}


def _phi_tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names({"model.norm": "model.final_layernorm"}, parts=_PHI_PARTS))


PHI3 = Family(("phi3",), _phi3, _phi3_tensors, SKIPPED)
PHI = Family(("phi",), _phi, _phi_tensors, SKIPPED)
