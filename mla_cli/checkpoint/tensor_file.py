"""Write a safetensors file of any size: each tensor's bytes come from where they lie, so that none has to be in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from mla_cli.checkpoint.disk import sync
from mla_cli.checkpoint.weight_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Bytes:
    """A tensor's type and shape, and its bytes: a tensor in memory, or a file and the position in it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    held: torch.Tensor | None = None
    file: Path | None = None
    position: int = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> Bytes:
        """The bytes of a contiguous tensor on the CPU."""
        return Bytes(tensor.dtype, tuple(tensor.shape), tensor)

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(target: Path, tensors: Mapping[str, Bytes]) -> int:
    """Write these tensors to `target`, and to the disk; gives the file's size.

    Raises:
        OSError: it cannot be written or a tensor's file not be read.
    """
    # Wide types first keeps every tensor aligned, as the library itself writes them.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        table[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    opened: dict[Path, BinaryIO] = {}
    try:
        with open(target, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                found = tensors[name]
                if found.held is not None:
                    stream.write(memoryview_of(found.held))
                elif found.file is not None:
                    if found.file not in opened:
                        opened[found.file] = open(found.file, "rb")  # noqa: SIM115 (closed below, with the others)
                    _copy(opened[found.file], found, stream)
        sync(target)
    finally:
        for file in opened.values():
            file.close()
    return 8 + len(text) + end


def memoryview_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def _copy(source: BinaryIO, found: Bytes, stream: BinaryIO) -> None:
    source.seek(found.position)
    left = found.nbytes
    while left and (chunk := source.read(min(left, _CHUNK))):
        stream.write(chunk)
        left -= len(chunk)
    if left:
        raise OSError(None, "a file changed while it was copied", str(found.file))
