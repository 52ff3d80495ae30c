"""One weight file: what it says it holds, checked byte by byte before any work, and named when it is damaged.

Headers are parsed here and not by the safetensors library, because its errors name neither the file nor the sizes.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mla_cli.errors import InputError

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself: a larger number is damage, not a header
AGAIN = "download the file again"


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor and the position of its first byte in its file (0 for a pickle, which has no such position)."""

    info: TensorInfo
    position: int


def read_header(file: Path) -> dict[str, Stored]:
    """Read and check what one weight file holds, without its data."""
    partial = file.with_name(file.name + ".incomplete")
    if partial.exists():
        raise InputError(
            f"an unfinished download lies beside {file.name}: {partial.name}",
            where=file,
            fix=f"finish the download, or delete {partial.name} if {file.name} is the file you want",
        )
    if file.suffix == ".bin":
        tensors = unpickle(file)
        return {name: Stored(TensorInfo(name, tuple(t.shape), t.dtype, file), 0) for name, t in tensors.items()}
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            head = stream.read(512)
            length = int.from_bytes(head[:8], "little")
            fits = size >= 8 and length <= min(MAX_HEADER_BYTES, size - 8)
            stream.seek(8)
            text = stream.read(length) if fits else b""
    except OSError as error:
        raise unreadable(file, error) from error
    if not fits or len(text) != length:
        raise _damaged(file, head, size, length)
    return _check_entries(file, _parse_header(file, text), 8 + length, size)


def _parse_header(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name stands twice")
        return table

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file.name} has a broken header: {error}", where=file, fix=AGAIN) from error
    if not isinstance(header, dict) or not isinstance(header.pop("__metadata__", None), dict | None):
        raise InputError(f"{file.name} has a broken header: not a table of tensors", where=file, fix=AGAIN)
    return header


def _check_entries(file: Path, header: dict[str, Any], start: int, size: int) -> dict[str, Stored]:
    """Check every entry, and that the tensors cover the bytes from `start` to `size` exactly, each byte once."""
    spans = sorted((*_check_entry(file, name, entry), name) for name, entry in header.items())
    position, before = 0, "the header"
    for begin, end, name in spans:
        if begin < position:
            what = f"tensors {before!r} and {name!r} claim the same bytes of {file.name}"
            raise InputError(what, where=file, fix="save the tensors again, each with its own bytes")
        if begin > position:
            what = f"{begin - position} bytes between {before!r} and {name!r} in {file.name} belong to no tensor"
            raise InputError(what, where=file, fix=AGAIN)
        position, before = end, name
    if start + position != size:
        what = "is cut short" if start + position > size else "is longer than its header says"
        raise InputError(f"{file.name} {what}: {size} bytes found, {start + position} wanted", where=file, fix=AGAIN)
    return {
        name: Stored(TensorInfo(name, tuple(header[name]["shape"]), DTYPES[header[name]["dtype"]], file), start + begin)
        for begin, _, name in spans
    }


def _check_entry(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Check one header entry by itself and return the range of its bytes in the data."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)

    def broken(why: str) -> InputError:
        return InputError(f"{file.name} has a broken header: tensor {name!r}: {why}", where=file, fix=AGAIN)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise broken("dtype, shape or data_offsets is absent")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(
            f"tensor {name!r} in {file.name} has dtype {dtype!r}, which is not read",
            where=file,
            fix=f"use one of {', '.join(DTYPES)}; dequantise a quantised checkpoint first",
        )
    if not whole(shape) or len(shape) > 64 or math.prod(max(n, 1) for n in shape) >= 2**60:
        raise broken(f"shape {str(shape)[:80]} is impossible")
    if not whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(f"data_offsets {str(offsets)[:80]} are impossible")
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != wanted:
        raise broken(f"{offsets[1] - offsets[0]} bytes found, {wanted} wanted for {dtype} {shape}")
    if not name.isprintable() or not name:
        raise broken("the name has unprintable characters")
    return offsets[0], offsets[1]


def unpickle(file: Path) -> dict[str, torch.Tensor]:
    """Load a `.bin` file; `weights_only` keeps any code in it from running."""
    import pickle

    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            head = stream.read(512)
    except OSError as error:
        raise unreadable(file, error) from error
    if size == 0 or _disguise(head):
        raise _damaged(file, head, size, 0)
    zipped = head.startswith(b"PK")  # files older than torch 1.6 cannot be mapped
    try:
        value = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped or None)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{file.name} is damaged, or holds more than tensors, and is not loaded for safety",
            where=file,
            fix="download it again, or use a safetensors version of the model",
        ) from error
    except Exception as error:  # torch raises a dozen unrelated types for a damaged archive
        what = f"{file.name} is damaged: {size} bytes found, no readable archive in them"
        raise InputError(what, where=file, fix=AGAIN) from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise InputError(
            f"{file.name} holds no table of tensors but a {type(value).__name__}",
            where=file,
            fix="use a safetensors version of the model",
        )
    for name, tensor in value.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise InputError(
                f"entry {name!r} of {file.name} is no plain tensor",
                where=file,
                fix="use a safetensors version of the model",
            )
        if tensor.dtype not in DTYPES.values():
            raise InputError(
                f"tensor {name!r} in {file.name} has dtype {tensor.dtype}, which is not read",
                where=file,
                fix="use a safetensors version of the model",
            )
    return {name: tensor.detach() for name, tensor in value.items()}


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that has to hold an object."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        disguise = _disguise(data[:512])
        what = disguise or f"is not valid JSON: line {error.lineno}: {error.msg}"
        raise InputError(f"{file.name} {what}", where=file, fix=AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file.name} is not valid JSON text", where=file, fix=AGAIN) from error
    if not isinstance(value, dict):
        raise InputError(f"{file.name} holds no JSON object but a {type(value).__name__}", where=file, fix=AGAIN)
    return value


def _disguise(head: bytes) -> str | None:
    """Recognise what servers and git leave in place of a file."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if text.startswith(b"version https://git-lfs"):
        return "is only a git-LFS pointer, not the file itself"
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "is a web page (HTML), not the file itself"
    if text.startswith((b"<?xml", b'{"error', b"entry not found", b"invalid username", b"access to model")):
        return "is an error message of a server, not the file itself"
    return None


def _damaged(file: Path, head: bytes, size: int, length: int) -> InputError:
    """Say how a file fails before its header can be read."""
    disguise = _disguise(head)
    if size == 0:
        return InputError(f"{file.name} is empty: 0 bytes found", where=file, fix=AGAIN)
    if disguise:
        wanted = re.search(rb"\nsize (\d+)", head)
        sizes = f"{size} bytes found" + (f", {wanted[1].decode()} wanted" if wanted else "")
        fix = f"{AGAIN}, in a clone with `git lfs pull`"
        return InputError(f"{file.name} {disguise} ({sizes})", where=file, fix=fix)
    if length > MAX_HEADER_BYTES:
        what = f"is no safetensors file: {size} bytes found, a header of {length} wanted"
        return InputError(f"{file.name} {what}", where=file, fix=AGAIN)
    what = f"is cut short: {size} bytes found, {8 + length} wanted for the header alone"
    return InputError(f"{file.name} {what}", where=file, fix=AGAIN)


def unreadable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path.name} cannot be read: {error.strerror or error}", where=path, fix="check the path and its permissions"
    )
