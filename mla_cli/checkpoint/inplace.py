"""Small additions to a finished checkpoint (calibrated scales), each file replaced in one step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
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
        small = {INDEX: _new_index(folder, homes, added, ())} | small
    weights = {
        file.name: partial(_write_extended, file, {name: added[name] for name in added if homes[name] == file}, ())
        for file in sorted(set(homes.values()))
    }
    last = {name: small[name] for name in sorted(small, key=lambda name: name == "config.json")}
    _put(folder, {**weights, **last})


def remove_tensors(folder: Path, names: Collection[str]) -> None:
    """Drop tensors that nothing refers to any more; names that are not there are passed over.

    The index goes first: a tensor that it does not name is not read.
    """
    reader = open_tensors(folder)
    files = sorted({reader.infos[name].file for name in names if name in reader.infos})
    if not files:
        return
    index = {INDEX: _new_index(folder, {}, {}, names)} if (folder / INDEX).exists() else {}
    _put(folder, {**index, **{file.name: partial(_write_extended, file, {}, names) for file in files}})


def _put(folder: Path, contents: Mapping[str, bytes | Callable[[Path], None]]) -> None:
    """Write files beside those that they replace (a function is given where to write), then put them in place in this order."""
    for name in contents:
        if (folder / name).is_symlink():
            what = f"{name} is a link into a download cache, which is not changed"
            raise OutputError(what, where=folder, fix="give --out, so that a new checkpoint is written")
    written: list[tuple[Path, Path]] = []
    try:
        for name, content in contents.items():
            target = folder / name
            clean_leftovers(target)
            written.append((temporary_sibling(target), target))
            if isinstance(content, bytes):
                write_file(written[-1][0], content)
            else:
                content(written[-1][0])
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


def _new_index(
    folder: Path, homes: Mapping[str, Path], added: Mapping[str, torch.Tensor], removed: Collection[str]
) -> bytes:
    index = read_json_object(folder / INDEX)
    old = open_tensors(folder).infos
    kept = [info.nbytes for name, info in old.items() if name not in added and name not in removed]
    total = sum(kept) + sum(t.nbytes for t in added.values())
    owners = index["weight_map"] | {name: file.name for name, file in homes.items()}
    index["weight_map"] = {name: owners[name] for name in sorted(owners) if name not in removed}
    metadata = index.get("metadata")
    index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": total}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_extended(file: Path, added: Mapping[str, torch.Tensor], removed: Collection[str], target: Path) -> None:
    """Copy a safetensors file with some tensors added, exchanged or left out, without loading the others."""
    kept = {name: stored for name, stored in read_header(file).items() if name not in added and name not in removed}
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
