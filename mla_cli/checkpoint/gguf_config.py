"""The Hugging Face configuration that a GGUF file's metadata describes, architecture by architecture.

What the metadata leave out (activations, Gemma's pattern of windows, the scale of its scores) is what llama.cpp computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mla_cli.checkpoint.gguf_keys import Keys
from mla_cli.checkpoint.gguf_rope import long_rope, rope_scaling, rotary_share, whole_head

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture is read.

    Attributes:
        config: metadata to configuration. read: keys that it reads besides those of every architecture.
        interleaved: rows of queries and keys stand in rotating pairs (0,1),(2,3).., not in halves (0,d/2),(1,d/2+1)..
    """

    config: Callable[[Keys], Config]
    read: frozenset[str] = frozenset()
    interleaved: bool = False


def _architecture(config: Callable[[Keys], Config], read: str = "", *, interleaved: bool = False) -> Architecture:
    return Architecture(config, frozenset(read.split()), interleaved)


def _common(keys: Keys, model_type: str, class_name: str) -> Config:
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": keys.rows(),
        "tie_word_embeddings": not keys.untied(),
        **keys.token_ids(),
    }


def _block(keys: Keys, model_type: str, class_name: str, *, share: bool = False, layer_norm: str = "") -> Config:
    """Llama's block. `share`: only a part of each head may rotate; `layer_norm`: key of the eps where it is no RMSNorm."""
    if not share:
        whole_head(keys)
    hidden, heads, head_dim = keys.integer("embedding_length"), keys.heads(), keys.head_dim()
    config = {
        **_common(keys, model_type, class_name),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.kv_heads(),
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys) if model_type != "phi3" else long_rope(keys),
    }
    if layer_norm:
        config[layer_norm] = keys.number("attention.layer_norm_epsilon")
    else:
        config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    if share:
        config["partial_rotary_factor"] = rotary_share(keys)
    if head_dim * heads != hidden:
        config["head_dim"] = head_dim
    return config


def _biases(keys: Keys) -> Config:
    return {"attention_bias": keys.has("blk.0.attn_q.bias"), "mlp_bias": keys.has("blk.0.ffn_down.bias")}


def _llama(keys: Keys) -> Config:
    """Llama and what llama.cpp calls so: Mistral, SmolLM, Mixtral."""
    if keys.get("expert_count"):
        return {
            **_block(keys, "mixtral", "MixtralForCausalLM"),
            "num_local_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "sliding_window": None,
        }
    return {**_block(keys, "llama", "LlamaForCausalLM"), **_biases(keys)}


def _qwen2(keys: Keys) -> Config:
    return {**_block(keys, "qwen2", "Qwen2ForCausalLM"), "use_sliding_window": False}


def _qwen3(keys: Keys) -> Config:
    config = _block(keys, "qwen3", "Qwen3ForCausalLM")
    return {**config, "head_dim": keys.head_dim(), "attention_bias": keys.has("blk.0.attn_q.bias")}


def _experts(keys: Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.shape("blk.0.ffn_gate_exps.weight")[1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _qwen2_moe(keys: Keys) -> Config:
    config = _block(keys, "qwen2_moe", "Qwen2MoeForCausalLM")
    shared = keys.shape("blk.0.ffn_gate_shexp.weight")[0]
    # llama.cpp's graph of this architecture does not scale the chosen experts' weights to one.
    return {**config, **_experts(keys), "norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _qwen3_moe(keys: Keys) -> Config:
    config = {**_block(keys, "qwen3_moe", "Qwen3MoeForCausalLM"), **_experts(keys)}
    return {**config, "head_dim": keys.head_dim(), "norm_topk_prob": True}  # here it does


def _gemma_block(keys: Keys, model_type: str, class_name: str) -> Config:
    config = _block(keys, model_type, class_name)
    del config["hidden_act"]
    return {**config, "hidden_activation": "gelu_pytorch_tanh", "head_dim": keys.head_dim()}


def _query_scalar(keys: Keys, largest: int) -> int:
    """Scores are scaled by the head's width, in the model of `largest` layers (27B) by the hidden width over the heads."""
    return keys.integer("embedding_length") // keys.heads() if keys.layers() == largest else keys.head_dim()


def _gemma(keys: Keys) -> Config:
    return _gemma_block(keys, "gemma", "GemmaForCausalLM")


def _gemma2(keys: Keys) -> Config:
    return {
        **_gemma_block(keys, "gemma2", "Gemma2ForCausalLM"),
        "query_pre_attn_scalar": _query_scalar(keys, 46),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> Config:
    config, window = _gemma_block(keys, "gemma3_text", "Gemma3ForCausalLM"), keys.window()
    slides = _sliding_layers(keys, 6) if window else [False] * keys.layers()
    far = {"rope_theta": keys.number("rope.freq_base", 1_000_000.0), "rope_type": "default"}
    near = {"rope_theta": keys.number("rope.freq_base_swa", 10_000.0), "rope_type": "default"}
    scaling = config.pop("rope_scaling") or {}  # of the layers without a window alone
    del config["rope_theta"]
    return {
        **config,
        "rope_parameters": {"full_attention": {**far, **scaling}, "sliding_attention": near},
        "query_pre_attn_scalar": _query_scalar(keys, 62),
        "sliding_window": window or 4096,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
    }


def _sliding_layers(keys: Keys, every: int) -> list[bool]:
    """Which layers have the window: all but each `every`-th, unless the file says so itself."""
    pattern, layers = keys.get("attention.sliding_window_pattern"), keys.layers()
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise keys.unsupported(f"{len(pattern)} entries in sliding_window_pattern for {layers} layers")
        return [bool(slide) for slide in pattern]
    every = every if pattern is None else keys.integer("attention.sliding_window_pattern")
    return [(i + 1) % every != 0 for i in range(layers)]


def _phi2(keys: Keys) -> Config:
    config = _block(keys, "phi", "PhiForCausalLM", share=True, layer_norm="layer_norm_eps")
    return {**config, "hidden_act": "gelu_new"}


def _phi3(keys: Keys) -> Config:
    config = _block(keys, "phi3", "Phi3ForCausalLM", share=True)
    trained = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {**config, "sliding_window": keys.window(), "original_max_position_embeddings": trained}


def _gpt_neox(keys: Keys) -> Config:
    config = _block(keys, "gpt_neox", "GPTNeoXForCausalLM", share=True, layer_norm="layer_norm_eps")
    del config["num_key_value_heads"]
    return {
        **config,
        "hidden_act": "gelu",
        "rotary_pct": config.pop("partial_rotary_factor"),
        "rotary_emb_base": config.pop("rope_theta"),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": keys.has("blk.0.attn_qkv.bias"),
    }


def _gpt2(keys: Keys) -> Config:
    return {
        **_common(keys, "gpt2", "GPT2LMHeadModel"),
        "n_embd": keys.integer("embedding_length"),
        "n_inner": keys.integer("feed_forward_length"),
        "n_layer": keys.layers(),
        "n_head": keys.heads(),
        "n_positions": keys.integer("context_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def _starcoder2(keys: Keys) -> Config:
    config = _block(keys, "starcoder2", "Starcoder2ForCausalLM", layer_norm="norm_epsilon")
    bias = keys.has("blk.0.attn_q.bias")
    return {**config, "hidden_act": "gelu_pytorch_tanh", "use_bias": bias, "sliding_window": keys.window()}


def _olmo(keys: Keys) -> Config:
    config = _block(keys, "olmo", "OlmoForCausalLM", layer_norm="layer_norm_eps")
    del config["layer_norm_eps"]  # fixed in this family
    return config


def _olmo2(keys: Keys) -> Config:
    return _block(keys, "olmo2", "Olmo2ForCausalLM")


def _stablelm(keys: Keys) -> Config:
    return {
        **_block(keys, "stablelm", "StableLmForCausalLM", share=True, layer_norm="layer_norm_eps"),
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not keys.has("blk.0.ffn_norm.weight"),
    }


def _falcon(keys: Keys) -> Config:
    kv_heads, two_norms = keys.kv_heads(), keys.has("blk.0.attn_norm_2.weight")
    config = _block(keys, "falcon", "FalconForCausalLM", layer_norm="layer_norm_epsilon")
    for key in ("num_key_value_heads", "hidden_act"):
        del config[key]
    return {
        **config,
        "ffn_hidden_size": config.pop("intermediate_size"),
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": two_norms or kv_heads not in (1, keys.heads()),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": keys.has("blk.0.attn_qkv.bias"),
    }


def _bloom(keys: Keys) -> Config:
    return {
        **_common(keys, "bloom", "BloomForCausalLM"),
        "hidden_size": keys.integer("embedding_length"),
        "n_layer": keys.layers(),
        "n_head": keys.heads(),
        "seq_length": keys.integer("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def _mpt(keys: Keys) -> Config:
    if keys.kv_heads() != keys.heads():
        raise keys.unsupported("an MPT with fewer key heads than queries is not supported")
    slope = keys.optional("attention.max_alibi_bias")
    return {
        **_common(keys, "mpt", "MptForCausalLM"),
        "d_model": keys.integer("embedding_length"),
        "n_layers": keys.layers(),
        "n_heads": keys.heads(),
        "max_seq_len": keys.integer("context_length"),
        "expansion_ratio": 4,
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "no_bias": True,
        "attn_config": {"alibi": slope is not None, "alibi_bias_max": int(slope or 8)},
    }


def _smollm3(keys: Keys) -> Config:
    config = _block(keys, "smollm3", "SmolLM3ForCausalLM")
    return {**config, **_biases(keys), "no_rope_layer_interval": 4, "use_sliding_window": False}


def _granite(keys: Keys) -> Config:
    return {
        **_block(keys, "granite", "GraniteForCausalLM"),
        **_biases(keys),
        "attention_multiplier": keys.number("attention.scale", keys.head_dim() ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


_EXPERTS = """expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length"""
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _architecture(_llama, "expert_count expert_used_count", interleaved=True),
    "qwen2": _architecture(_qwen2),
    "qwen3": _architecture(_qwen3),
    "qwen2moe": _architecture(_qwen2_moe, _EXPERTS),
    "qwen3moe": _architecture(_qwen3_moe, _EXPERTS),
    "gemma": _architecture(_gemma),
    "gemma2": _architecture(
        _gemma2, "attention.sliding_window attn_logit_softcapping final_logit_softcapping"
    ),
    "gemma3": _architecture(
        _gemma3,
        """attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa rope.dimension_count_swa
        final_logit_softcapping""",
    ),
    "phi2": _architecture(_phi2),
    "phi3": _architecture(_phi3, "attention.sliding_window rope.scaling.attn_factor"),
    "gptneox": _architecture(_gpt_neox, "use_parallel_residual"),
    "gpt2": _architecture(_gpt2),
    "starcoder2": _architecture(_starcoder2, "attention.sliding_window"),
    "olmo": _architecture(_olmo, interleaved=True),
    "olmo2": _architecture(_olmo2),
    "stablelm": _architecture(_stablelm, "use_parallel_residual"),
    "falcon": _architecture(_falcon),
    "bloom": _architecture(_bloom),
    "mpt": _architecture(_mpt, "attention.max_alibi_bias"),
    "smollm3": _architecture(_smollm3, interleaved=True),
    # Without biases it is Llama's block, and its fused projection is split in GGUF.
    "internlm2": _architecture(_llama, interleaved=True),
    "granite": _architecture(
        _granite, "attention.scale embedding_scale residual_scale logit_scale", interleaved=True
    ),
}  # fmt: skip
