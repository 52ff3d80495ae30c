"""Tiny models written to GGUF as llama.cpp's converter writes each family: its keys, names, permutations and offsets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import quantize
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "phi": "phi2", "gpt_neox": "gptneox",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}  # fmt: skip
PERMUTED = ("llama", "internlm2", "olmo", "smollm3", "granite")
REGROUPED = ("bloom", "gptneox", "falcon")
Tensors = Iterator[tuple[str, torch.Tensor]]


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of queries and keys where llama.cpp rotates neighbours."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_family(
    path: Path,
    folder: Path,
    config: Any,
    add_tokenizer: Callable[[GGUFWriter], None],
    *,
    architecture: str | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    keys: dict[str, Any] | None = None,
) -> Path:
    """Write the Hugging Face checkpoint in `folder` to the GGUF file `path`; `keys` are written besides."""
    architecture = architecture or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, architecture)
    for key, value in {**_keys(config, architecture), **(keys or {})}.items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    add_tokenizer(writer)
    for name, weight in _renamed(_tensors(folder, config, architecture), architecture, _layers(config)):
        array = weight.float().squeeze().contiguous().numpy()
        as_kind = kind if array.ndim > 1 and "ffn_gate_inp" not in name else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(array, as_kind), raw_dtype=as_kind)
    for name, table in _tables(config, architecture):
        writer.add_tensor(name, table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _layers(config: Any) -> int:
    return int(_first(config, "num_hidden_layers", "n_layer", "n_layers"))


def _heads(config: Any) -> tuple[int, int]:
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return heads, 1 if config.multi_query else heads
    return heads, _first(config, "num_kv_heads", "num_key_value_heads") or heads


def _keys(config: Any, architecture: str) -> dict[str, Any]:
    hidden, (heads, kv_heads) = _first(config, "hidden_size", "n_embd", "d_model"), _heads(config)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    norm = "attention.layer_norm_epsilon"
    keys = {
        "block_count": _layers(config),
        "context_length": _first(config, "max_position_embeddings", "seq_length", "n_positions", "max_seq_len")
        or hidden,
        "embedding_length": hidden,
        "feed_forward_length": _first(config, "ffn_hidden_size", "intermediate_size", "n_inner") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads if architecture not in ("gptneox", "gpt2") else None,
        "attention.layer_norm_rms_epsilon": _first(config, "rms_norm_eps"),
        norm: _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "rope.freq_base": rope.get("rope_theta") if architecture not in ("gptneox", "falcon") else None,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)) if rope else None,
    }
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        trained = rope["original_max_position_embeddings"]
        keys |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": trained,
        }  # fmt: skip
    if getattr(config, "head_dim", None):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    experts = _first(config, "num_local_experts", "num_experts")
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    return keys | _own_keys(config, architecture)


def _own_keys(config: Any, architecture: str) -> dict[str, Any]:
    window = {"attention.sliding_window": getattr(config, "sliding_window", None)}
    cap = {"final_logit_softcapping": getattr(config, "final_logit_softcapping", None)}
    if architecture == "gemma2":
        return {**window, **cap, "attn_logit_softcapping": config.attn_logit_softcapping}
    if architecture == "gemma3":
        return {**window, **cap}
    if architecture == "phi3":
        trained = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        return {"attention.sliding_window": config.sliding_window or 0, "rope.scaling.original_context_length": trained}
    if architecture == "granite":
        return {
            "attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
        }  # fmt: skip
    if architecture in ("gptneox", "stablelm"):
        return {"use_parallel_residual": config.use_parallel_residual}
    if architecture == "mpt":
        return {"attention.max_alibi_bias": float(config.attn_config.alibi_bias_max)}
    if architecture == "olmo":
        return {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None}
    if architecture == "qwen2moe":
        shared = config.shared_expert_intermediate_size
        return {"expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_feed_forward_length": shared}
    return {}


def _tensors(folder: Path, config: Any, architecture: str) -> Tensors:
    """The converter's `modify_tensors`, family by family."""
    heads, kv_heads = _heads(config)
    experts: dict[str, list[torch.Tensor]] = {}
    for name, weight in sorted(load_file(folder / "model.safetensors").items(), key=_by_number):
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight.float() + 1
        if architecture in PERMUTED and ".q_proj." in name:
            weight = permuted(weight, heads)
        if architecture in PERMUTED and ".k_proj." in name:
            weight = permuted(weight, kv_heads)
        if architecture in REGROUPED and "query_key_value" in name:
            groups = weight.reshape(kv_heads, heads // kv_heads + 2, -1, *weight.shape[1:])
            parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
            weight = torch.cat([part.reshape(-1, *weight.shape[1:]) for part in parts])
        if architecture == "gpt2" and ".c_" in name and weight.dim() == 2:
            weight = weight.T
        if match := re.fullmatch(r"(.*\.experts)\.\d+(\..*)", name):
            experts.setdefault(match[1] + match[2], []).append(weight)
            continue
        if name == "lm_head.weight" and architecture.startswith("gemma"):
            continue
        yield name.removeprefix("transformer.") if architecture == "bloom" else name, weight
    for name, weights in experts.items():
        yield name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward"), torch.stack(weights)


def _by_number(item: tuple[str, torch.Tensor]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", item[0])]


def _renamed(tensors: Tensors, architecture: str, layers: int) -> Tensors:
    kind = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == architecture)
    names = get_tensor_name_map(kind, layers)
    for name, weight in tensors:
        found = names.get_name(name, (".weight", ".bias")) or names.get_name("model." + name, (".weight", ".bias"))
        assert found, name
        yield found, weight


def _tables(config: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        width = 2 * len(scaled)
        yield "rope_freqs.weight", (rope["rope_theta"] ** -(torch.arange(0, width, 2) / width) / scaled).float().numpy()
    if architecture == "phi3" and "long_factor" in rope:
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.asarray(rope[f"{length}_factor"], np.float32)
