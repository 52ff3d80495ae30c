"""Mixtures of experts: Mixtral, Qwen2-MoE and Qwen3-MoE. Attention is converted, experts stay as they are."""

from __future__ import annotations

from dataclasses import replace

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
    with_defaults,
)
from mla_cli.model.families.layout import Names, tensor_rules
from mla_cli.model.families.llama import BLOCK_KEYS, SKIPPED, WINDOW_KEYS, llama_block, qwen_windows
from mla_cli.model.families.qwen3 import with_head_norms
from mla_cli.model.spec import DecoderSpec, ExpertsSpec

_TRAINING = frozenset(("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"))  # no part of inference
_QWEN_KEYS = BLOCK_KEYS | WINDOW_KEYS | _TRAINING | set(
    """decoder_sparse_step moe_intermediate_size num_experts_per_tok num_experts num_local_experts norm_topk_prob
    mlp_only_layers qkv_bias attention_bias shared_expert_intermediate_size""".split()
)  # fmt: skip


def _checked(experts: ExpertsSpec) -> ExpertsSpec:
    if experts.per_token > experts.count:
        raise InputError(
            f"config.json: {experts.per_token} experts a token of {experts.count}",
            where="num_experts_per_tok",
            fix=RESTORE,
        )
    return experts


def _mixtral(config: Config) -> DecoderSpec:
    keys = BLOCK_KEYS | _TRAINING | {"sliding_window", "num_experts_per_tok", "num_local_experts", "num_experts"}
    check_keys(config, keys, "mixtral")
    config = with_defaults(
        config, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6, num_key_value_heads=8,
        num_local_experts=config.get("num_experts", 8),
    )  # fmt: skip
    layers = layer_count(config)
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    spec = llama_block(config, windows=[window] * layers)
    count = integer(config, "num_local_experts", most=1 << 16)
    experts = _checked(ExpertsSpec(count, integer(config, "num_experts_per_tok", 2), spec.intermediate_size))
    return replace(spec, experts=(experts,) * layers)


def _qwen_experts(config: Config, shared: int) -> tuple[ExpertsSpec | None, ...]:
    every, plain = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(i) is not int for i in plain):
        raise InputError("config.json: mlp_only_layers must be layer numbers", where="mlp_only_layers", fix=RESTORE)
    experts = _checked(
        ExpertsSpec(
            integer(config, "num_experts", most=1 << 16),
            integer(config, "num_experts_per_tok"),
            integer(config, "moe_intermediate_size"),
            flag(config, "norm_topk_prob"),
            shared,
        )
    )
    return tuple(experts if i not in plain and (i + 1) % every == 0 else None for i in range(layer_count(config)))


def _qwen2(config: Config) -> DecoderSpec:
    check_keys(config, _QWEN_KEYS - {"attention_bias"}, "qwen2_moe")
    config = with_defaults(
        config, max_position_embeddings=32768, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    )  # fmt: skip
    spec = llama_block(config, q_kv_bias=flag(config, "qkv_bias", True), windows=qwen_windows(config))
    return replace(spec, experts=_qwen_experts(config, integer(config, "shared_expert_intermediate_size")))


def _qwen3(config: Config) -> DecoderSpec:
    check_keys(config, _QWEN_KEYS - {"qkv_bias", "shared_expert_intermediate_size", "layer_types"}, "qwen3_moe")
    config = with_defaults(
        config, max_position_embeddings=32768, num_key_value_heads=4, num_experts=config.get("num_local_experts", 128),
        num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    window = config.get("sliding_window", 4096) if flag(config, "use_sliding_window") else None
    window = None if window is None else integer(config, "sliding_window", 4096)
    bias = flag(config, "attention_bias")
    spec = llama_block(config, q_kv_bias=bias, o_bias=bias, windows=[window] * layer_count(config))
    return with_head_norms(replace(spec, experts=_qwen_experts(config, 0)))


_MIXTRAL_PARTS = {"mlp": "block_sparse_moe", "mlp.router": "block_sparse_moe.gate"}
_MIXTRAL_MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_QWEN_PARTS = {"mlp.router": "mlp.gate", "mlp.shared": "mlp.shared_expert", "mlp.shared_gate": "mlp.shared_expert_gate"}


def _mixtral_tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    rules = tensor_rules(spec, Names(parts=_MIXTRAL_PARTS))
    for name, rule in rules.items():
        if ".experts." in name:
            begin, matrix, part = rule.source.rsplit(".", 2)
            rules[name] = replace(rule, source=f"{begin}.{_MIXTRAL_MATRICES[matrix]}.{part}")
    return rules


def _qwen_tensors(spec: DecoderSpec, names: frozenset[str]) -> dict[str, TensorRule]:
    return tensor_rules(spec, Names(parts=_QWEN_PARTS))


MIXTRAL = Family(("mixtral",), _mixtral, _mixtral_tensors, SKIPPED)
QWEN2_MOE = Family(("qwen2_moe",), _qwen2, _qwen_tensors, SKIPPED)
QWEN3_MOE = Family(("qwen3_moe",), _qwen3, _qwen_tensors, SKIPPED)
