"""The contents of a `.gguf` file: metadata at once, tensors one at a time.

The header is parsed here, not by `gguf.GGUFReader`: that one does not check lengths against the file (a damaged
one makes it loop for hours), and takes seconds for a vocabulary. Dequantisation is the `gguf` package's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mla_cli.errors import InputError, UnsupportedError

_AGAIN = "fetch the file again"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_LIST = 1 << 24  # vocabularies have at most some hundred thousand entries
_CHUNK = 1 << 24  # numbers dequantised at a time: bounds the memory of one large embedding


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies; `shape` is in PyTorch's order."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file with its header read and checked."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def chunks(self, name: str, wanted: range | None = None) -> Iterator[npt.NDArray[np.float32]]:
        """A tensor in float32, as groups of rows ([rows, last dimension]); `wanted`: only these rows.

        Raises:
            UnsupportedError: its number format is not known.
        """
        tensor = self.tensors[name]
        columns = tensor.shape[-1]
        rows = prod(tensor.shape[:-1])
        raw = np.memmap(self.path, np.uint8, "r", tensor.offset, (rows, tensor.size // rows))
        step = max(1, _CHUNK // columns)
        wanted = range(rows) if wanted is None else wanted
        for start in wanted[::step]:
            try:
                yield dequantize(np.array(raw[start : min(start + step, wanted.stop)]), tensor.kind)
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"numbers of type {tensor.kind.name} cannot be read",
                    where=f"{self.path}: {name}",
                    fix="take a file in another quantisation, as Q8_0 or F16",
                ) from error


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a GGUF file.

    Raises:
        InputError: the file is missing, damaged or cut short. UnsupportedError: it is one part of several.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except OSError as error:
        raise InputError(
            f"cannot read {path.name}: {error.strerror or error}", where=path, fix="check the path and its permissions"
        ) from error
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise InputError(f"{path.name} is damaged: {error}", where=path, fix=_AGAIN) from error


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise InputError(f"{path.name} is not a GGUF file", where=path, fix="give a .gguf file")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = int.from_bytes(struct.pack("<I", version), "big") in (2, 3)
        what = "was written for big-endian machines" if swapped else f"has the unknown version {version}"
        raise UnsupportedError(f"{path.name} {what}", where=path, fix="convert it again with a current llama.cpp")
    count, keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the key {key} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedError(
            f"{path.name} is one of {metadata['split.count']} parts",
            where=path,
            fix="join them with llama-gguf-split --merge",
        )
    found = [cursor.tensor() for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment!r}")
    start = cursor.at + -cursor.at % alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in found:
        tensor = _tensor(name, shape, kind, start + offset)
        if name in tensors:
            raise ValueError(f"the tensor {name} occurs twice")
        if tensor.offset + tensor.size > len(data):
            raise ValueError(f"it ends inside the tensor {name}")
        tensors[name] = tensor
    return GgufFile(path, metadata, tensors)


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    quantization = GGMLQuantizationType(kind)
    block, size = GGML_QUANT_SIZES[quantization]
    if not shape or 0 in shape or shape[-1] % block:
        raise ValueError(f"the tensor {name} has the impossible shape {list(shape)} for {quantization.name}")
    return GgufTensor(name, shape, quantization, offset, prod(shape) // block * size)


class _Cursor:
    """Reads values in order; every read past the end is a ValueError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if size > len(self.data) - self.at:
            raise ValueError("a text ends after the file")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"the unknown value type {kind}")
        element, count = self.scalar("I"), self.scalar("Q")
        if count > _LONGEST_LIST:
            raise ValueError(f"a list of {count} entries")
        if element in _SCALARS:
            size = count * struct.calcsize("<" + _SCALARS[element])
            if size > len(self.data) - self.at:
                raise ValueError("a list ends after the file")
            self.at += size
            return list(struct.unpack_from(f"<{count}{_SCALARS[element]}", self.data, self.at - size))
        if element != _STRING:
            raise ValueError(f"a list of the unknown value type {element}")
        return [self.string() for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > 4:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([int(self.scalar("Q")) for _ in range(dimensions)]))
        return name, shape, self.scalar("I"), self.scalar("Q")
