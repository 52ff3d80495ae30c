"""Small additions to a finished checkpoint (calibrated scales), each file replaced in one step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from mla_cli.checkpoint.disk import clean_leftovers, disk_error, owned, remove, sync, temporary_sibling, write_file
from mla_cli.checkpoint.reader import open_tensors
from mla_cli.checkpoint.weight_file import DTYPES, read_header, read_json_object
from mla_cli.errors import OutputError

INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 24
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def replace_files(folder: Path, files: Mapping[str, bytes], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Add or replace small files and tensors of a checkpoint; a kill at any moment leaves one that can be read.

    A tensor goes where its name already is, a new one into the smallest weight file. Readers opened before refuse
    to read on. The order is weights, index, other files, config.json: what refers to something comes after it.
    """
    kept_back = [name for name in files if Path(name).name != name or name.startswith(".") or _is_weights(name)]
    if kept_back:
        raise OutputError(f"{kept_back[0]!r} cannot be replaced as a small file", where=folder)
    added = {name: owned(name, tensor) for name, tensor in (tensors or {}).items()}
    homes = _homes(folder, added) if added else {}
    small = dict(files)
    if homes and (folder / INDEX).exists():
        small = {INDEX: _new_index(folder, homes, added)} | small
    order = sorted({file.name for file in homes.values()}) + sorted(small, key=lambda name: name == "config.json")
    for name in order:
        if (folder / name).is_symlink():
            what = f"{name} is a link into a download cache, which is not changed"
            raise OutputError(what, where=folder, fix="give --out, so that a new checkpoint is written")
    written: list[tuple[Path, Path]] = []
    try:
        for name in order:
            target = folder / name
            clean_leftovers(target)
            written.append((temporary_sibling(target), target))
            if name in small:
                write_file(written[-1][0], small[name])
            else:
                _write_extended(target, {n: added[n] for n in added if homes[n] == target}, written[-1][0])
            if target.exists():
                shutil.copymode(target, written[-1][0])
        for temporary, target in written:
            os.replace(temporary, target)
        sync(folder)
    except OSError as error:
        raise disk_error(error, written[-1][1] if written else folder, 0) from error
    finally:
        for temporary, _ in written:
            remove(temporary)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".index.json"))


def _homes(folder: Path, added: Mapping[str, torch.Tensor]) -> dict[str, Path]:
    reader = open_tensors(folder)
    if reader.files[0].suffix != ".safetensors":
        raise OutputError(
            "tensors can be added to safetensors files only", where=reader.files[0], fix="give --out for a new folder"
        )
    # One home for all new tensors, so that a second calibration finds them together.
    known = [reader.infos[name].file for name in added if name in reader.infos]
    smallest = min(reader.files, key=lambda file: file.stat().st_size)
    home = known[0] if known else smallest
    return {name: reader.infos[name].file if name in reader.infos else home for name in added}


def _new_index(folder: Path, homes: Mapping[str, Path], added: Mapping[str, torch.Tensor]) -> bytes:
    index = read_json_object(folder / INDEX)
    old = open_tensors(folder).infos
    total = sum(info.nbytes for name, info in old.items() if name not in added) + sum(t.nbytes for t in added.values())
    index["weight_map"] = dict(sorted((index["weight_map"] | {n: file.name for n, file in homes.items()}).items()))
    metadata = index.get("metadata")
    index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": total}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_extended(file: Path, added: Mapping[str, torch.Tensor], target: Path) -> None:
    """Copy a safetensors file with some tensors added or exchanged, without loading the others."""
    kept = {name: stored for name, stored in read_header(file).items() if name not in added}
    shapes = {name: (s.info.dtype, list(s.info.shape)) for name, s in kept.items()}
    shapes |= {name: (tensor.dtype, list(tensor.shape)) for name, tensor in added.items()}
    # Wide types first keeps every tensor aligned, as the library itself writes them.
    order = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + (added[name].nbytes if name in added else kept[name].info.nbytes)
        dtype, shape = shapes[name]
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with open(file, "rb") as source, open(target, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                if name in added:
                    stream.write(added[name].reshape(-1).view(torch.uint8).numpy().data)
                    continue
                source.seek(kept[name].position)
                left = kept[name].info.nbytes
                while left and (chunk := source.read(min(left, _CHUNK))):
                    stream.write(chunk)
                    left -= len(chunk)
        sync(target)
    except OSError as error:
        raise disk_error(error, target, 8 + len(text) + end) from error
