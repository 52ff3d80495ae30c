"""Small additions to a finished checkpoint (calibrated scales), each file replaced in one step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import torch

from mla_cli.checkpoint.disk import clean_leftovers, disk_error, owned, remove, sync, temporary_sibling, write_file
from mla_cli.checkpoint.reader import open_tensors
from mla_cli.checkpoint.tensor_file import Bytes, write_tensors
from mla_cli.checkpoint.weight_file import read_header, read_json_object
from mla_cli.errors import OutputError

INDEX = "model.safetensors.index.json"
# Sorts after every shard: readers that go by the files' names instead of the index read its tensors last.
_MOVED = "model-recalibrated-{}.safetensors"
Content = bytes | Callable[[Path], None]
"""What a file will hold, or what writes it where it is told to."""


def replace_files(
    folder: Path,
    files: Mapping[str, bytes],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    before: Mapping[str, bytes] | None = None,
) -> None:
    """Add or replace small files and tensors of a checkpoint; a kill at any moment leaves one that can be read.

    The tensors change all at once. A new one goes into the smallest weight file; others stay where they are, or, where that are
    several files, move to one of their own, which the index names from one moment on. Readers opened before refuse to read on.
    The order is weights, index, other files, config.json: what refers to something comes after it.

    Args:
        before: small files that are put in place just before the weights: true of them whether they have changed or not.
    """
    before = before or {}
    kept_back = [n for n in (*files, *before) if Path(n).name != n or n.startswith(".") or _is_weights(n)]
    if kept_back:
        raise OutputError(f"{kept_back[0]!r} cannot be replaced as a small file", where=folder)
    added = {name: owned(name, tensor) for name, tensor in (tensors or {}).items()}
    small = sorted(files.items(), key=lambda file: file[0] == "config.json")
    if not added:
        _put(folder, [*before.items(), *small])
        return
    files_before = open_tensors(folder).files
    home = _home(folder, added)
    contents: list[tuple[str, Content]] = [*before.items(), (home.name, partial(_write_extended, home, added, ()))]
    if (folder / INDEX).exists():
        contents.append((INDEX, _new_index(folder, home, added, ())))
    _put(folder, [*contents, *small])
    # Where they were before, now or when a run was killed at this point, the index names them no more.
    used = open_tensors(folder).files
    stale = [file for file in used if file != home and not added.keys().isdisjoint(read_header(file))]
    _put(folder, [(file.name, partial(_write_extended, file, {}, added)) for file in stale])
    for file in files_before:
        if file not in used:  # it held nothing else
            remove(file)


def remove_tensors(folder: Path, names: Collection[str]) -> None:
    """Drop tensors that nothing refers to any more; names that are not there are passed over.

    The index goes first: a tensor that it does not name is not read.
    """
    reader = open_tensors(folder)
    files = sorted({reader.infos[name].file for name in names if name in reader.infos})
    if not files:
        return
    contents: list[tuple[str, Content]] = []
    if (folder / INDEX).exists():
        contents.append((INDEX, _new_index(folder, None, {}, names)))
    _put(folder, [*contents, *((file.name, partial(_write_extended, file, {}, names)) for file in files)])


def _put(folder: Path, contents: Sequence[tuple[str, Content]]) -> None:
    """Write files beside those that they replace, then put them in place in this order."""
    for name, _ in contents:
        if (folder / name).is_symlink():
            what = f"{name} is a link into a download cache, which is not changed"
            raise OutputError(what, where=folder, fix="give --out, so that a new checkpoint is written")
    written: list[tuple[Path, Path]] = []
    try:
        for name, content in contents:
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


def _home(folder: Path, added: Mapping[str, torch.Tensor]) -> Path:
    """Where all these tensors go."""
    reader = open_tensors(folder)
    if reader.files[0].suffix != ".safetensors":
        raise OutputError(
            "tensors can be added to safetensors files only", where=reader.files[0], fix="give --out for a new folder"
        )
    known = {reader.infos[name].file for name in added if name in reader.infos}
    if len(known) > 1:
        # No two files are replaced at once, and half of a turn is another model: so a new file, and the index.
        fresh = (folder / _MOVED.format(number) for number in count(1))
        return next(file for file in fresh if file not in reader.files)
    # One home for all new tensors, so that a second calibration finds them together.
    return next(iter(known)) if known else min(reader.files, key=lambda file: file.stat().st_size)


def _new_index(folder: Path, home: Path | None, added: Mapping[str, torch.Tensor], removed: Collection[str]) -> bytes:
    index = read_json_object(folder / INDEX)
    old = open_tensors(folder).infos
    kept = [info.nbytes for name, info in old.items() if name not in added and name not in removed]
    total = sum(kept) + sum(t.nbytes for t in added.values())
    owners = index["weight_map"] | {name: home.name for name in added if home is not None}
    index["weight_map"] = {name: owners[name] for name in sorted(owners) if name not in removed}
    metadata = index.get("metadata")
    index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": total}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_extended(file: Path, added: Mapping[str, torch.Tensor], removed: Collection[str], target: Path) -> None:
    """Copy a safetensors file with some tensors added, exchanged or left out, without loading the others.

    One that is not there, or that a killed run left and no index names, counts as empty.
    """
    used = open_tensors(file.parent).files
    header = read_header(file) if file in used else {}
    kept = {
        name: Bytes(stored.info.dtype, stored.info.shape, None, file, stored.position)
        for name, stored in header.items()
        if name not in added and name not in removed
    }
    tensors = kept | {name: Bytes.of(tensor) for name, tensor in added.items()}
    try:
        write_tensors(target, tensors)
    except OSError as error:
        raise disk_error(error, target, sum(tensor.nbytes for tensor in tensors.values())) from error
