"""DeepSeek-V2/V3 with dense layers: genuine checkpoints, and the stock form that conversions are written in."""

from __future__ import annotations

from mla_cli.errors import UnsupportedError
from mla_cli.model.families.base import (
    Config,
    Family,
    activation,
    check_keys,
    flag,
    integer,
    layer_count,
    number,
    rope_entries,
    rotary,
    yarn_mscale,
)
from mla_cli.model.families.layout import llama_names
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec

LATENT_NORM_EPS = 1e-6  # transformers and vLLM use this for the latent norms, whatever rms_norm_eps says

_MOE_KEYS = """n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size moe_layer_freq n_group topk_group
    topk_method norm_topk_prob routed_scaling_factor scoring_func aux_loss_alpha seq_aux ep_size num_local_experts
    router_aux_loss_coef router_jitter_noise"""
_KEYS = frozenset(
    f"""hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor attention_bias mlp_bias
    rope_interleave
    kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim first_k_dense_replace
    num_nextn_predict_layers num_mtp_layers {_MOE_KEYS}""".split()
)


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, _KEYS, config["model_type"])
    layers = layer_count(config)
    dense = integer(config, "first_k_dense_replace", 0 if config["model_type"] == "deepseek_v2" else 3, least=0)
    if dense < layers and config.get("n_routed_experts", 256) is not None:
        raise UnsupportedError(
            f"layers {dense} to {layers - 1} are mixtures of experts; only dense DeepSeek models are supported",
            where="config.json: first_k_dense_replace",
            fix="give a dense model",
        )
    heads = integer(config, "num_attention_heads")
    rope_dim, nope_dim = integer(config, "qk_rope_head_dim"), integer(config, "qk_nope_head_dim")
    rope = rotary(config, rope_dim)
    scale = (nope_dim + rope_dim) ** -0.5
    _, parameters = rope_entries(config)
    if rope.kind == "yarn" and parameters.get("mscale_all_dim"):
        scale *= yarn_mscale(rope.factor, number(parameters, "mscale_all_dim")) ** 2
    bias = flag(config, "attention_bias")
    attention = LatentAttentionSpec(
        num_heads=heads,
        kv_lora_rank=integer(config, "kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=integer(config, "v_head_dim"),
        scale=scale,
        rotary=rope,
        q_lora_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        norm_eps=LATENT_NORM_EPS,
        interleaved=flag(config, "rope_interleave", True),
        kv_a_bias=bias,
        o_bias=bias,
    )
    return DecoderSpec(
        model_type=config["model_type"],
        vocab_size=integer(config, "vocab_size"),
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=integer(config, "intermediate_size"),
        max_position_embeddings=integer(config, "max_position_embeddings", 2048),
        norm="rms",
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        mlp_bias=flag(config, "mlp_bias"),
        tied=flag(config, "tie_word_embeddings"),
        attention=(attention,) * layers,
    )


_SKIPPED = (r".*rotary_emb\.inv_freq", r"model\.layers\.\d+\.self_attn\.[kv]_scale")

DEEPSEEK = Family(("deepseek_v3", "deepseek_v2"), _spec, llama_names, _SKIPPED)
