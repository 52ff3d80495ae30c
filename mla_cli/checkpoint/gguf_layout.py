"""What llama.cpp's converter does to a checkpoint, undone: tensor names, rows, transposes, stacked experts, offsets.

Which tensors a checkpoint has, and their shapes, is what the family of its configuration says (`model.families`), and how
llama.cpp names them what the `gguf` package says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map

from mla_cli.checkpoint.gguf_config import ARCHITECTURES, Architecture
from mla_cli.checkpoint.gguf_file import GgufFile
from mla_cli.checkpoint.gguf_keys import ORIGINAL, Keys
from mla_cli.checkpoint.gguf_rope import TABLES
from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.families import family_of
from mla_cli.model.families.base import TensorRule
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

# Tensors that hold nothing of their own: rotary tables, and an output that is equal to the embedding.
_DERIVED = TABLES | {"output.weight"}
_DERIVED_ENDINGS = (".attn_rot_embd", ".attn_rot_embd.weight", ".attn_rot_embd.freqs")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
# Families that are read from elsewhere and that llama.cpp has no converter for.
_NOT_IN_GGUF = {"gptj": "GPT-J", "opt": "OPT"}

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Target:
    """One tensor of the Hugging Face checkpoint and how it follows from the GGUF tensor `source`.

    Attributes:
        shape: in the Hugging Face checkpoint. source_shape: of the whole GGUF tensor.
        rows: of the GGUF tensor, seen as a matrix of rows, that are meant (of one expert); None: all.
        order: which of these rows each row of the target is; None: the same.
        transpose: the target is stored as `[in, out]`.
        offset: what is added to every number.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    source_shape: tuple[int, ...]
    rows: range | None = None
    order: Index | None = field(default=None, repr=False, compare=False)
    transpose: bool = False
    offset: float = 0.0


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
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        lacks = f"; llama.cpp itself knows no {_NOT_IN_GGUF[name]}" if name in _NOT_IN_GGUF else ""
        raise UnsupportedError(
            f"GGUF architecture {name!r} is not supported{lacks}; supported are {', '.join(ARCHITECTURES)}",
            where=file.path,
            fix=ORIGINAL,
        )
    architecture, keys = ARCHITECTURES[name], Keys(file, name)
    keys.check(architecture.read)
    config = architecture.config(keys)
    family = family_of(config)
    spec = family.spec(config)
    rules = family.tensors(spec, frozenset())
    kind = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES.get(kind) == name)
    targets = _targets(spec, rules, architecture, get_tensor_name_map(kind, spec.num_layers))
    _check_tensors(file, targets)
    return Layout(config, targets)


def _targets(
    spec: DecoderSpec, rules: Mapping[str, TensorRule], architecture: Architecture, names: TensorNameMap
) -> tuple[Target, ...]:
    by_source: dict[str, list[str]] = {}  # tensor of the checkpoint -> the decoder's tensors that are rows of it
    for name, rule in rules.items():
        by_source.setdefault(rule.source, []).append(name)
    targets = []
    for source, ours in by_source.items():
        rule, expert = rules[ours[0]], _EXPERT.fullmatch(source)
        # (BLOOM's names are known without their first part alone.)
        stacked = f"{expert[1]}{expert[3]}" if expert else source
        found = [names.get_name(key, (".weight", ".bias")) for key in (stacked, stacked.removeprefix("transformer."))]
        theirs = next((name for name in found if name), source)
        shape = rule.shape[::-1] if rule.transpose else rule.shape
        count = _expert_count(spec, ours[0]) if expert else 1
        first = int(expert[2]) * shape[0] if expert else 0
        targets.append(
            Target(
                source=theirs,
                name=source,
                shape=rule.shape,
                source_shape=(count, *shape) if expert else shape,
                rows=range(first, first + shape[0]) if expert else None,
                order=_order(spec, rules, ours, architecture),
                transpose=rule.transpose,
                offset=-1.0 if spec.norm == "offset_rms" and ours[0].endswith("norm.weight") else 0.0,
            )
        )
    return tuple(targets)


def _order(
    spec: DecoderSpec, rules: Mapping[str, TensorRule], ours: list[str], architecture: Architecture
) -> Index | None:
    """Which row of the GGUF tensor each row of the checkpoint's tensor is."""
    if len(ours) > 1:
        # Queries, keys and values stand one below the other in GGUF, whatever their order is in the checkpoint; a fused MLP
        # (Phi-3) is as it was.
        parts = [rules[name].rows for part in "qkv" for name in ours if f".{part}_proj." in name]
        place = np.asarray([row for rows in parts for row in rows or ()], np.int64)
        order = np.empty_like(place)
        order[place] = np.arange(len(place))
        return None if np.array_equal(order, np.arange(len(order))) else order
    module = ours[0].rpartition(".")[0]
    if not architecture.interleaved or not module.endswith((".q_proj", ".k_proj")):
        return None
    attention = spec.attention[int(ours[0].split(".")[2])]
    assert isinstance(attention, StandardAttentionSpec)
    heads = attention.num_heads if module.endswith(".q_proj") else attention.num_kv_heads
    pairs = np.arange(heads * attention.head_dim).reshape(heads, attention.head_dim // 2, 2)
    return pairs.transpose(0, 2, 1).reshape(-1)


def _expert_count(spec: DecoderSpec, name: str) -> int:
    experts = spec.experts[int(name.split(".")[2])] if spec.experts else None
    assert experts is not None
    return experts.count


def _check_tensors(file: GgufFile, targets: tuple[Target, ...]) -> None:
    for target in targets:
        tensor = file.tensors.get(target.source)
        if tensor is None:
            raise InputError(f"the GGUF file lacks the tensor {target.source}", where=file.path, fix=ORIGINAL)
        # Dimensions of one are left out by some converters.
        if _squeezed(tensor.shape) != _squeezed(target.source_shape):
            raise InputError(
                f"the tensor {target.source} has shape {list(tensor.shape)}, expected {list(target.source_shape)}",
                where=file.path,
                fix=ORIGINAL,
            )
    used = {target.source for target in targets}
    for name in file.tensors:
        if name not in used | _DERIVED and not name.endswith(_DERIVED_ENDINGS):
            raise UnsupportedError(f"the tensor {name} would be unused", where=file.path, fix=ORIGINAL)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
