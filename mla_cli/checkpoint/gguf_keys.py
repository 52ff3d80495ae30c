"""The metadata of a GGUF file: read by name and checked; a key that nobody reads here is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mla_cli.checkpoint.gguf_file import GgufFile
from mla_cli.errors import InputError, UnsupportedError

ORIGINAL = "convert from the original Hugging Face checkpoint"

# Keys without a meaning for the mathematics, or that are read for every architecture; what an architecture reads besides
# stands with it. Any other key is refused by name.
_KNOWN = frozenset(
    """block_count context_length embedding_length feed_forward_length vocab_size tensor_data_layout
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon attention.layer_norm_epsilon
    rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow""".split()
)
# Keys that are understood only with the value that changes nothing, unless the architecture reads them.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (0, 1),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
}


class Keys:
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def check(self, read: frozenset[str]) -> None:
        """Refuse keys that neither every architecture has nor this one reads (`read`)."""
        prefix = self.architecture + "."
        for key, value in self.file.metadata.items():
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in _KNOWN | read:
                continue
            if name not in _NEUTRAL or value not in _NEUTRAL[name]:
                raise self.unsupported(f"the GGUF key {key} = {value!r} is not supported")

    def unsupported(self, what: str) -> UnsupportedError:
        """The error of a file that is sound but holds what is not known here."""
        return UnsupportedError(what, where=self.file.path, fix=ORIGINAL)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number; where the file has one a layer, they must be equal."""
        value = self._value(name, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise self.unsupported(f"the GGUF key {self.architecture}.{name} differs by layer")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(name, value)
        # float32 in the file: 1e-05 would become 9.999999747378752e-06
        return float(str(np.float32(value)))

    def flag(self, name: str, default: bool) -> bool:
        """A truth value."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value)
        return value

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def optional(self, name: str) -> float | None:
        """A positive number; absent and zero mean none."""
        return None if not self.get(name) else self.number(name)

    def window(self) -> int | None:
        """Tokens of the sliding window; absent and zero mean none."""
        return None if not self.get("attention.sliding_window") else self.integer("attention.sliding_window")

    def layers(self) -> int:
        count = self.integer("block_count")
        if count > len(self.file.tensors):
            raise InputError(
                f"the GGUF file has too few tensors for {count} layers", where=self.file.path, fix=ORIGINAL
            )
        return count

    def heads(self) -> int:
        """Query heads."""
        return self.integer("attention.head_count")

    def kv_heads(self) -> int:
        """Heads of keys and values; as many as queries have where the file does not say."""
        return self.integer("attention.head_count_kv", self.heads())

    def head_dim(self) -> int:
        """Width of a head, of keys and values alike."""
        width = self.integer("attention.key_length", self.integer("embedding_length") // self.heads() or 1)
        if self.integer("attention.value_length", width) != width:
            raise self.unsupported("values of another width than keys are not supported")
        return width

    def rows(self) -> int:
        """Rows of the embedding: the vocabulary with its padding."""
        return self.shape("token_embd.weight")[0]

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor that has to be there."""
        found = self.file.tensors.get(tensor)
        if found is None:
            raise InputError(f"the GGUF file lacks the tensor {tensor}", where=self.file.path, fix=ORIGINAL)
        return found.shape

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

    def token_ids(self) -> dict[str, int | None]:
        """Ids of special tokens; none where the file has none: a configuration's own default may lie outside the vocabulary."""
        names = {"bos": "bos", "eos": "eos", "padding": "pad"}
        found = {ours: self.file.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
        rows = self.rows()
        return {f"{ours}_token_id": i if isinstance(i, int) and i < rows else None for ours, i in found.items()}

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise InputError(
                f"the GGUF file lacks the key {self.architecture}.{name}", where=self.file.path, fix=ORIGINAL
            )
        return value

    def _wrong(self, name: str, value: Any) -> InputError:
        return InputError(f"the GGUF key {self.architecture}.{name} is {value!r}", where=self.file.path, fix=ORIGINAL)
