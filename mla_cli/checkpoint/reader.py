"""The weight files of a folder as lazily read tensors; every header and the index are checked before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch

from mla_cli.checkpoint.weight_file import (
    AGAIN,
    Stored,
    TensorInfo,
    read_header,
    read_json_object,
    unpickle,
    unreadable,
)
from mla_cli.errors import InputError

__all__ = ["TensorInfo", "TensorReader", "open_tensors"]


@dataclass(frozen=True)
class _Layout:
    """How one kind of checkpoint names its files."""

    single: str
    index: str
    weights: re.Pattern[str]


# consolidated*.safetensors is the publisher's second copy, and adapter_model.safetensors no model: never candidates.
_LAYOUTS = (
    _Layout(
        "model.safetensors",
        "model.safetensors.index.json",
        re.compile(r"(?!consolidated|adapter_model|\.).*\.safetensors"),
    ),
    _Layout("pytorch_model.bin", "pytorch_model.bin.index.json", re.compile(r"pytorch_model.*\.bin")),
)
_SHARD_NUMBER = re.compile(r"\d+-of-0*(?!1\D)[1-9]")  # `1-of-1` is complete by itself


class TensorReader:
    """The tensors of a checkpoint, read one at a time.

    No safetensors file stays open between reads. Of a `.bin` checkpoint the pickle of the last used file stays
    mapped, because unpickling it again for each tensor costs more than the read.
    """

    def __init__(self, headers: Mapping[Path, Mapping[str, Stored]], owners: Mapping[str, Path], where: Path) -> None:
        """Take checked headers of all files, and which file owns each tensor; `where` is the index or only file."""
        self.files = tuple(sorted(headers))
        self._owners = dict(owners)
        self._headers = headers
        self._where = where
        self._versions = {file: _version(file.stat()) for file in headers}
        self._pickle: tuple[Path, dict[str, torch.Tensor]] | None = None
        self._stored = {name: headers[file][name] for name, file in owners.items() if name in headers.get(file, {})}
        self.infos: Mapping[str, TensorInfo] = MappingProxyType({n: s.info for n, s in self._stored.items()})

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype; it owns its bytes."""
        if name not in self._stored:
            self.missing(name)
        stored = self._stored[name]
        if not stored.info.file.is_file():
            self.missing(name)
        if stored.info.file.suffix == ".bin":
            return self._unpickled(stored.info.file)[name].clone(memory_format=torch.contiguous_format)
        raw = torch.empty(stored.info.nbytes, dtype=torch.uint8)
        try:
            with open(stored.info.file, "rb") as stream:
                same = _version(os.fstat(stream.fileno())) == self._versions[stored.info.file]
                stream.seek(stored.position)
                found = stream.readinto(raw.numpy().data) if same else 0
        except OSError as error:
            raise unreadable(stored.info.file, error) from error
        if not same or found != stored.info.nbytes:
            what = f"{stored.info.file.name} changed since it was opened: tensor {name!r} is not where it was"
            raise InputError(what, where=stored.info.file, fix="run again, and leave the file alone meanwhile")
        return raw.view(stored.info.dtype).reshape(stored.info.shape)

    def missing(self, name: str) -> NoReturn:
        """Raise the error that says why the tensor `name` cannot be had."""
        owner = self._owners.get(name)
        if owner is None:
            holders = [file.name for file, header in self._headers.items() if name in header]
            stray = f", though {holders[0]} holds it: the index does not match the files" if holders else ""
            raise InputError(f"no tensor {name!r} in {self._where.name}{stray}", where=self._where, fix=AGAIN)
        if not owner.is_file():
            raise InputError(
                f"tensor {name!r} is in {owner.name}, and that file is absent", where=owner.parent, fix=AGAIN
            )
        holders = [file.name for file, header in self._headers.items() if name in header]
        stray = f" ({holders[0]} holds it: were files swapped?)" if holders else ""
        raise InputError(
            f"{self._where.name} says that {owner.name} holds tensor {name!r}, but it does not{stray}",
            where=owner,
            fix=f"download {owner.name} and {self._where.name} again",
        )

    def _unpickled(self, file: Path) -> dict[str, torch.Tensor]:
        if self._pickle is None or self._pickle[0] != file:
            self._pickle = (file, unpickle(file))
        return self._pickle[1]


def open_tensors(folder: Path) -> TensorReader:
    """Find the one complete copy of the weights in `folder`; safetensors before `.bin`, never by file-name order."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    for layout in _LAYOUTS:
        if layout.index in entries:
            return _open_indexed(folder, layout, entries)
        weights = [name for name in entries if layout.weights.fullmatch(name) and (folder / name).is_file()]
        if weights:
            file = folder / _only_file(folder, layout, weights)
            header = read_header(file)
            return TensorReader({file: header}, dict.fromkeys(header, file), file)
    raise _no_weights(folder, entries)


def _open_indexed(folder: Path, layout: _Layout, entries: list[str]) -> TensorReader:
    index = folder / layout.index
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index.name} has no weight_map", where=index, fix=AGAIN)
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        # A name is a file of this folder; the entry itself may be a link, as in the Hub's cache.
        possible = shard.isprintable() and len(shard.encode()) <= 255  # longer ones no file system has
        if not possible or re.search(r"[/\\:]", shard) or not shard.endswith(Path(layout.single).suffix):
            raise InputError(
                f"{index.name} names {shard!r}, which is no weight file of this folder", where=index, fix=AGAIN
            )
    if layout.single in entries and layout.single not in shards:
        raise InputError(
            f"two copies of the weights: {layout.single}, and {index.name} with other files",
            where=folder,
            fix=f"delete the one that is not wanted: {layout.single} or {index.name}",
        )
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        found = [name for name in entries if layout.weights.fullmatch(name) and name not in shards]
        partial = [name for name in entries if name.endswith(".incomplete")]
        others = f"; present but not in the index: {_some(found)}" if found else ""
        unfinished = f"; unfinished downloads: {_some(partial)}" if partial else ""
        raise InputError(
            f"{index.name} does not match the files: {len(absent)} of {len(shards)} are absent: "
            f"{_some(absent)}{others}{unfinished}",
            where=folder,
            fix="download the model again",
        )
    headers = {folder / shard: read_header(folder / shard) for shard in shards}
    owners = {name: folder / shard for name, shard in weight_map.items()}
    reader = TensorReader(headers, owners, index)
    for name in owners:
        if name not in reader.infos:
            reader.missing(name)
    return reader


def _only_file(folder: Path, layout: _Layout, weights: list[str]) -> str:
    """Name the file that holds the whole model when there is no index."""
    shards = [name for name in weights if _SHARD_NUMBER.search(name)]
    if layout.single in weights:
        if shards:
            raise InputError(
                f"two copies of the weights: {layout.single}, and {_some(shards)}",
                where=folder,
                fix="delete the copy that is not wanted",
            )
        return layout.single
    if len(weights) > 1 or shards:
        raise InputError(
            f"{layout.index} is missing: without it nothing says which tensors {_some(weights)} must hold",
            where=folder,
            fix=f"download {layout.index} too",
        )
    return weights[0]


def _no_weights(folder: Path, entries: list[str]) -> InputError:
    weightlike = re.compile(r".*\.(safetensors|bin|gguf|pth|pt|h5|msgpack|onnx|ckpt|incomplete)")
    other = [name + ("/" if (folder / name).is_dir() else "") for name in entries if weightlike.fullmatch(name)]
    fix = "download the weights too: model.safetensors, or all files that its index names"
    if any(name.endswith(".gguf") for name in other):
        fix = "give the .gguf file itself"
    seen = f" (found, but not usable as such: {_some(other)})" if other else ""
    return InputError(f"no weights in the folder{seen}", where=folder, fix=fix)


def _version(status: os.stat_result) -> tuple[int, int, int]:
    """What differs once a file was replaced or written to: positions in the old one are void then."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
