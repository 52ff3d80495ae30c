"""What llama.cpp's converter does to a checkpoint, undone: configuration keys, tensor names, rows, transposes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mla_cli.checkpoint.gguf_file import GgufFile
from mla_cli.errors import InputError, UnsupportedError

ORIGINAL = "convert from the original Hugging Face checkpoint"

Undo = Literal["none", "rows", "transpose"]

# Keys without a meaning for the mathematics, or whose meaning is checked below; any other key is refused by name.
_KNOWN_TEXT = """
    block_count context_length embedding_length feed_forward_length vocab_size tensor_data_layout
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon attention.layer_norm_epsilon
    rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
"""
# Keys that are understood only with the value that changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
}
# Tensors that hold nothing of their own: rotary tables (the first is read into the configuration), and an output
# that is equal to the embedding.
_DERIVED = frozenset({"rope_freqs.weight", "output.weight"})
_DERIVED_ENDINGS = (".attn_rot_embd", ".attn_rot_embd.weight", ".attn_rot_embd.freqs")
_KNOWN = frozenset(_KNOWN_TEXT.split()) | _NEUTRAL.keys()
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Target:
    """One tensor of the Hugging Face checkpoint and how it follows from the GGUF tensor `source`.

    Attributes:
        undo: `rows` of each of `heads` heads go back from pairs (0,1),(2,3).. to halves (0,d/2),(1,d/2+1)..
    """

    source: str
    name: str
    shape: tuple[int, ...]
    undo: Undo = "none"
    heads: int = 1


@dataclass(frozen=True)
class Layout:
    """A Hugging Face configuration and its tensors, in the order in which they are written."""

    config: Mapping[str, Any]
    targets: tuple[Target, ...] = field(repr=False)


def layout(file: GgufFile) -> Layout:
    """Plan the Hugging Face checkpoint of a GGUF file; every tensor is used or known to be derived from the others.

    Raises:
        InputError: keys or tensors are missing or do not fit. UnsupportedError: architecture or key is not known.
    """
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            f"GGUF architecture {architecture!r} is not supported; supported are {', '.join(_ARCHITECTURES)}",
            where=file.path,
            fix=ORIGINAL,
        )
    keys = _Keys(file, architecture)
    keys.check()
    planned = _ARCHITECTURES[architecture](keys)
    _check_tensors(file, planned)
    return planned


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def check(self) -> None:
        prefix = self.architecture + "."
        for key, value in self.file.metadata.items():
            name = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if name not in _KNOWN or value not in _NEUTRAL.get(name, (value,)):
                raise UnsupportedError(
                    f"the GGUF key {key} = {value!r} is not supported", where=self.file.path, fix=ORIGINAL
                )

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedError(
                f"the GGUF key {self.architecture}.{name} differs by layer", where=self.file.path, fix=ORIGINAL
            )
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise InputError(
                f"the GGUF key {self.architecture}.{name} is {value!r}", where=self.file.path, fix=ORIGINAL
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise InputError(
                f"the GGUF key {self.architecture}.{name} is {value!r}", where=self.file.path, fix=ORIGINAL
            )
        # float32 in the file: 1e-05 would become 9.999999747378752e-06
        return float(str(np.float32(value)))

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def layers(self) -> int:
        count = self.integer("block_count")
        if count > len(self.file.tensors):
            raise InputError(
                f"the GGUF file has too few tensors for {count} layers", where=self.file.path, fix=ORIGINAL
            )
        return count

    def rows(self) -> int:
        """Rows of the embedding: the vocabulary with its padding."""
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise InputError("the GGUF file lacks the tensor token_embd.weight", where=self.file.path, fix=ORIGINAL)
        return embedding.shape[0]

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def untied(self) -> bool:
        """Whether the output has weights of its own: some converters write the embedding a second time."""
        output, embedding = self.file.tensors.get("output.weight"), self.file.tensors.get("token_embd.weight")
        if output is None or embedding is None:
            return output is not None
        if (output.kind, output.shape) != (embedding.kind, embedding.shape):
            return True
        first, second = (
            np.memmap(self.file.path, np.uint8, "r", tensor.offset, (tensor.size,)) for tensor in (output, embedding)
        )
        return not np.array_equal(first, second)

    def token_ids(self) -> dict[str, int]:
        names = {"bos": "bos", "eos": "eos", "padding": "pad"}
        found = {ours: self.file.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
        return {f"{ours}_token_id": i for ours, i in found.items() if isinstance(i, int) and i < self.rows()}

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise InputError(
                f"the GGUF file lacks the key {self.architecture}.{name}", where=self.file.path, fix=ORIGINAL
            )
        return value


def _llama(keys: _Keys) -> Layout:
    """Llama and what llama.cpp calls so (Mistral, SmolLM), and Qwen2, whose rows are not permuted."""
    qwen = keys.architecture == "qwen2"
    hidden, inner, rows = keys.integer("embedding_length"), keys.integer("feed_forward_length"), keys.rows()
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    head_dim = keys.integer("attention.key_length", hidden // heads or 1)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(
            "values of another width than keys are not supported", where=keys.file.path, fix=ORIGINAL
        )
    rotary = keys.integer("rope.dimension_count", head_dim)
    if rotary != head_dim or head_dim % 2:
        raise UnsupportedError(
            f"rotating {rotary} of {head_dim} head dimensions: not supported", where=keys.file.path, fix=ORIGINAL
        )
    undo: Undo = "none" if qwen else "rows"
    q, kv = heads * head_dim, kv_heads * head_dim
    attention_bias, mlp_bias = keys.has("blk.0.attn_output.bias"), keys.has("blk.0.ffn_down.bias")
    untied = keys.untied()
    targets = [
        Target("token_embd.weight", "model.embed_tokens.weight", (rows, hidden)),
        Target("output_norm.weight", "model.norm.weight", (hidden,)),
    ]
    if untied:
        targets.append(Target("output.weight", "lm_head.weight", (rows, hidden)))
    for i in range(keys.layers()):
        ours, theirs = f"model.layers.{i}", f"blk.{i}"
        targets += [
            Target(f"{theirs}.attn_norm.weight", f"{ours}.input_layernorm.weight", (hidden,)),
            Target(f"{theirs}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight", (hidden,)),
        ]
        projections: tuple[tuple[str, str, int, int, Undo, int, bool], ...] = (
            ("attn_q", "self_attn.q_proj", q, hidden, undo, heads, attention_bias or qwen),
            ("attn_k", "self_attn.k_proj", kv, hidden, undo, kv_heads, attention_bias or qwen),
            ("attn_v", "self_attn.v_proj", kv, hidden, "none", 1, attention_bias or qwen),
            ("attn_output", "self_attn.o_proj", hidden, q, "none", 1, attention_bias and not qwen),
            ("ffn_gate", "mlp.gate_proj", inner, hidden, "none", 1, mlp_bias and not qwen),
            ("ffn_up", "mlp.up_proj", inner, hidden, "none", 1, mlp_bias and not qwen),
            ("ffn_down", "mlp.down_proj", hidden, inner, "none", 1, mlp_bias and not qwen),
        )
        for source, name, out, into, how, count, bias in projections:
            targets.append(Target(f"{theirs}.{source}.weight", f"{ours}.{name}.weight", (out, into), how, count))
            if bias:
                targets.append(Target(f"{theirs}.{source}.bias", f"{ours}.{name}.bias", (out,), how, count))
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen else "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": keys.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, head_dim),
        "vocab_size": rows,
        "tie_word_embeddings": not untied,
        **keys.token_ids(),
    }
    if head_dim * heads != hidden:
        config["head_dim"] = head_dim
    config.update({"use_sliding_window": False} if qwen else {"attention_bias": attention_bias, "mlp_bias": mlp_bias})
    return Layout(config, tuple(targets))


def _gpt2(keys: _Keys) -> Layout:
    """GPT-2: Hugging Face stores its four projections as [in, out], llama.cpp as [out, in]."""
    hidden, inner, rows = keys.integer("embedding_length"), keys.integer("feed_forward_length"), keys.rows()
    context, untied = keys.integer("context_length"), keys.untied()
    targets = [
        Target("token_embd.weight", "transformer.wte.weight", (rows, hidden)),
        Target("position_embd.weight", "transformer.wpe.weight", (context, hidden)),
        Target("output_norm.weight", "transformer.ln_f.weight", (hidden,)),
        Target("output_norm.bias", "transformer.ln_f.bias", (hidden,)),
    ]
    if untied:
        targets.append(Target("output.weight", "lm_head.weight", (rows, hidden)))
    for i in range(keys.layers()):
        ours, theirs = f"transformer.h.{i}", f"blk.{i}"
        for source, name in (("attn_norm", "ln_1"), ("ffn_norm", "ln_2")):
            for part in ("weight", "bias"):
                targets.append(Target(f"{theirs}.{source}.{part}", f"{ours}.{name}.{part}", (hidden,)))
        for source, name, out, into in (
            ("attn_qkv", "attn.c_attn", 3 * hidden, hidden),
            ("attn_output", "attn.c_proj", hidden, hidden),
            ("ffn_up", "mlp.c_fc", inner, hidden),
            ("ffn_down", "mlp.c_proj", hidden, inner),
        ):
            targets += [
                Target(f"{theirs}.{source}.weight", f"{ours}.{name}.weight", (out, into), "transpose"),
                Target(f"{theirs}.{source}.bias", f"{ours}.{name}.bias", (out,)),
            ]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_inner": inner,
        "n_layer": keys.layers(),
        "n_head": keys.integer("attention.head_count"),
        "n_positions": context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "vocab_size": rows,
        "tie_word_embeddings": not untied,
        **keys.token_ids(),
    }
    return Layout(config, tuple(targets))


_ARCHITECTURES: Mapping[str, Callable[[_Keys], Layout]] = {"llama": _llama, "qwen2": _llama, "gpt2": _gpt2}


def _rope_scaling(keys: _Keys, head_dim: int) -> dict[str, Any] | None:
    linear = keys.get("rope.scale_linear")  # the key of old files
    kind = keys.get("rope.scaling.type") or ("linear" if linear not in (None, 1.0) else "none")
    if keys.has("rope_freqs.weight"):
        if kind != "none":
            raise UnsupportedError(
                f"rope_freqs.weight with {kind} scaling is not supported", where=keys.file.path, fix=ORIGINAL
            )
        return _llama3_scaling(keys, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor", linear)}
    if kind != "yarn":
        raise UnsupportedError(f"rope scaling {kind!r} is not supported", where=keys.file.path, fix=ORIGINAL)
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": keys.number("rope.scaling.factor")}
    if keys.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if keys.get(f"rope.scaling.{theirs}") is not None:
            scaling[ours] = keys.number(f"rope.scaling.{theirs}")
    return scaling


def _llama3_scaling(keys: _Keys, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling is only a table of divisors in GGUF; the parameters are those that give the same table."""
    table = np.concatenate([chunk.ravel() for chunk in keys.file.chunks("rope_freqs.weight")])
    if np.all(table == 1):
        return None
    factor = float(np.round(table.max(), 3))
    theta = keys.number("rope.freq_base", 10000.0)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, trained = _LLAMA3.values()
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-4):
        raise UnsupportedError(
            "rope_freqs.weight is not the table of Llama 3's scaling (low 1, high 4, context 8192)",
            where=keys.file.path,
            fix=ORIGINAL,
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _check_tensors(file: GgufFile, planned: Layout) -> None:
    for target in planned.targets:
        tensor = file.tensors.get(target.source)
        if tensor is None:
            raise InputError(f"the GGUF file lacks the tensor {target.source}", where=file.path, fix=ORIGINAL)
        if tensor.shape != target.shape:
            raise InputError(
                f"the tensor {target.source} has shape {list(tensor.shape)}, expected {list(target.shape)}",
                where=file.path,
                fix=ORIGINAL,
            )
    used = {target.source for target in planned.targets}
    for name in file.tensors:
        if name not in used | _DERIVED and not name.endswith(_DERIVED_ENDINGS):
            raise UnsupportedError(f"the tensor {name} would be unused", where=file.path, fix=ORIGINAL)
