"""What every write of a checkpoint needs: tensors that own finite values, durable files, errors that say the sizes."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from mla_cli.checkpoint.weight_file import DTYPES
from mla_cli.console import note
from mla_cli.errors import OutputError

_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)

# Temporary names of this process: in a container a dead run often had the same process id.
_mine: set[str] = set()


def owned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor so that it can be stored: contiguous, on the CPU, sharing no bytes, and finite."""
    return storable(name, tensor).clone(memory_format=torch.contiguous_format)


def storable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor contiguous, on the CPU and finite; it may share its bytes with the one given.

    Raises:
        OutputError: its name, its type or its values cannot be stored.
    """
    if not name or not name.isprintable() or name == "__metadata__":
        raise OutputError(f"{name!r} cannot be the name of a tensor")
    if tensor.dtype not in DTYPES.values():
        raise OutputError(
            f"tensor {name} has dtype {tensor.dtype}, which cannot be stored", fix="use --dtype bfloat16 or float32"
        )
    copy = tensor.detach().cpu().contiguous()
    if copy.is_floating_point() and not finite(copy):
        raise OutputError(
            f"tensor {name} holds values that are not finite in {str(copy.dtype).removeprefix('torch.')}",
            fix="choose an output dtype with a wider range (bfloat16 or float32), or check the source for damage",
        )
    return copy


def disk_error(error: Exception, path: Path, needed: int) -> OutputError:
    """Say why a write failed; safetensors reports the operating system's number only inside its text."""
    number = re.search(r"os error (\d+)", str(error))
    code = getattr(error, "errno", None) or (int(number[1]) if number else None)
    if code in _FULL:
        free = shutil.disk_usage(existing_parent(path)).free
        why = "the file size limit is reached (ulimit -f)" if code == errno.EFBIG else "the disk is full"
        what = f"{why}: {needed} bytes needed for {path.name}, {free} bytes free"
        return OutputError(what, where=path.parent, fix="free some space, or write to another disk")
    if code in _DENIED:
        return OutputError(f"no permission to write {path.name}", where=path.parent, fix="choose another output folder")
    cause = os.strerror(code) if code else f"{error}"
    return OutputError(
        f"{path.name} cannot be written: {cause}",
        where=path.parent,
        fix="check the disk, or choose another output folder",
    )


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that is there already."""
    return next((parent for parent in path.parents if os.path.lexists(parent)), path)


def check_writable(out: Path) -> None:
    """Refuse an output whose folder takes no files, by trying: permissions alone do not say (root, network, /proc).

    Raises:
        OutputError: nothing can be created in the nearest folder above `out` that is there.
    """
    parent = existing_parent(out)
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        why = "cannot be written to" if parent.is_dir() else "is no folder"
        what = f"the output cannot be created: {parent} {why}"
        raise OutputError(what, where=out, fix="choose another folder") from error


def check_report_folder(out: Path, names: Iterable[str]) -> None:
    """Refuse a folder for a report's files that cannot be one, before any work.

    Raises:
        OutputError: it is a file, cannot be written to, or holds folders where the files go.
    """
    blocking = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
    if blocking is not None:
        raise OutputError("the report needs a folder, this is a file", where=blocking, fix="choose another --out")
    for name in names:
        if (out / name).is_dir():
            raise OutputError("the report needs a file, this is a folder", where=out / name, fix="choose another --out")
        check_writable(out / name)


def write_report_files(out: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write a report's files to a folder, each whole or not at all; replaces those of an earlier one.

    Raises:
        OutputError: they cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, out, sum(map(len, files.values()))) from error
    for name, data in files.items():
        temporary = temporary_sibling(out / name)
        try:
            write_file(temporary, data)
            temporary.replace(out / name)
        except BaseException:
            remove(temporary)
            raise
    return [out / name for name in files]


def temporary_sibling(path: Path, kind: str = "tmp") -> Path:
    """A new hidden name beside `path`; `kind` is tmp for what is being written, old for what is being replaced."""
    sibling = path.with_name(f".{path.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")
    _mine.add(sibling.name)
    return sibling


def clean_leftovers(path: Path) -> None:
    """Remove what killed runs left beside `path`, and put back a folder that one had moved aside."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(tmp|old)-(\d+)-[0-9a-f]{{8}}")
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    for match in filter(None, map(pattern.fullmatch, names)):
        if match[0] in _mine or _alive(int(match[2])):
            continue
        leftover = path.parent / match[0]
        if match[1] == "old" and not os.path.lexists(path):
            leftover.rename(path)
            note(f"put back {path}, which an interrupted run had moved aside")
            continue
        note(f"removing what an interrupted run left: {leftover}")
        remove(leftover)


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        _unlock(path)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _unlock(folder: Path) -> None:
    """Make a folder and those in it writable: what is in a read-only one cannot be deleted, by its owner neither."""
    with suppress(OSError):
        folder.chmod(folder.stat().st_mode | 0o700)
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                _unlock(entry)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file so that it survives a power cut."""
    try:
        path.write_bytes(data)
        sync(path)
    except OSError as error:
        raise disk_error(error, path, len(data)) from error


def sync(path: Path) -> None:
    """Have the operating system put a file, or the entries of a folder, on the disk."""
    if path.is_dir():
        if os.name == "nt":  # folders cannot be opened there, and need not be
            return
        handle = os.open(path, os.O_RDONLY)
    else:
        handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are, found without a temporary of its size."""
    if not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no comparisons of its own
        return all(bool(part.float().isfinite().all()) for part in torch.split(tensor.reshape(-1), 1 << 22))
    low, high = torch.aminmax(tensor)  # a nan comes through
    return bool(low.isfinite() and high.isfinite())


def _alive(pid: int) -> bool:
    if os.name == "nt":  # there os.kill would end the process
        return True
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
