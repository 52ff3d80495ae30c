"""A checkpoint folder written all or nothing: into a hidden sibling first, then put in place by one rename."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import torch

from mla_cli.checkpoint.disk import (
    check_writable,
    clean_leftovers,
    disk_error,
    existing_parent,
    remove,
    storable,
    sync,
    temporary_sibling,
    write_file,
)
from mla_cli.checkpoint.inplace import INDEX, replace_files
from mla_cli.checkpoint.tensor_file import Bytes, memoryview_of, write_tensors
from mla_cli.checkpoint.weight_file import read_json_object, unreadable
from mla_cli.console import warn
from mla_cli.errors import MlaError, OutputError, UsageError

__all__ = ["CheckpointWriter", "check_output", "parse_size", "replace_files"]

MAX_SHARD_BYTES = 5 * 10**9  # what the Hub's own tools write: larger files download badly
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """Parse a number of bytes as `5GB`, `500MB`, `20KB` (decimal), `5GiB` (binary) or a plain number."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?I?B?)\s*", text.upper(), re.ASCII)
    size = round(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if match and match[2] in ("", "B") and "." in match[1]:
        size = 0
    if size < 1:
        raise UsageError(f"{text!r} is no size", fix="write it as 5GB, 500MB, 20KB or a number of bytes")
    return size


def check_output(out: Path, force: bool, *, source: Path | None = None, needed_bytes: int = 0) -> None:
    """Refuse an output folder that cannot or must not be written, before any long work; changes nothing."""
    shown, out = out, Path(os.path.realpath(out))
    if source is not None and _holds(out, source):
        raise OutputError("the output would replace the source", where=shown, fix="choose another output folder")
    if out.exists() and (_holds(out, Path.home()) or _holds(out, Path(os.path.abspath(os.curdir)))):
        what = "the output is the home or the working folder, or holds it"
        raise OutputError(what, where=shown, fix="give the name of a new folder")
    if out.exists() and not out.is_dir():
        raise OutputError("the output is an existing file", where=shown, fix="give the name of a new folder")
    if out.is_dir():
        try:
            entries = os.listdir(out)
        except OSError as error:
            raise disk_error(error, out, 0) from error
        replaceable = _is_checkpoint(out, entries)
        if entries and not force:
            advice = (
                "--force replaces it" if replaceable else "choose another folder (it does not look like a checkpoint)"
            )
            raise OutputError("the output folder exists and is not empty", where=shown, fix=advice)
        if entries and not replaceable:
            what = "the output folder holds something that does not look like a checkpoint, and --force would delete it"
            raise OutputError(what, where=shown, fix="choose another folder, or delete this one yourself")
        if os.path.ismount(out):
            what = "the output folder is a mount point, which cannot be put in place in one step"
            raise OutputError(what, where=shown, fix=f"give a folder inside it, as {shown / 'model'}")
    check_writable(out)
    free = shutil.disk_usage(existing_parent(out)).free
    if needed_bytes > free:
        what = f"not enough space for the output: {needed_bytes} bytes needed, {free} bytes free"
        raise OutputError(what, where=shown, fix="free some space, or write to another disk")


class CheckpointWriter:
    """Collects a checkpoint and puts it in place when the `with` block ends without an exception.

    A tensor goes to the disk as it comes, so that memory holds none; there a shard stands twice while it is being closed. A
    small file written twice keeps its last content.
    """

    def __init__(
        self, out: Path, *, force: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES, source: Path | None = None
    ) -> None:
        """Name the output; `source` is what the output must not replace."""
        self.out = Path(os.path.realpath(out))
        self._force, self._limit, self._source = force, max_shard_bytes, source
        self._folder = temporary_sibling(self.out)
        self._pending: dict[str, Bytes] = {}  # in the file `_spool`, of the shard being collected
        self._pending_bytes = 0
        self._flushed = 0  # shards on the disk, and so the number of the one being collected
        self._owners: dict[str, int] = {}  # tensor -> number of its shard
        self._total_bytes = 0
        self._small: dict[str, bytes] = {}

    def __enter__(self) -> CheckpointWriter:
        clean_leftovers(self.out)
        check_output(self.out, self._force, source=self._source)
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()
        except OSError as error:
            raise disk_error(error, self.out, 0) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
                self._put_in_place()
        except OSError as failure:
            raise disk_error(failure, self.out, self._total_bytes) from failure
        finally:
            remove(self._folder)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Store one tensor; values that are not finite are refused."""
        if name in self._owners:
            raise OutputError(f"tensor {name} is written twice", where=self.out)
        stored = storable(name, tensor)
        if self._pending and self._pending_bytes + stored.nbytes > self._limit:
            self._flush()
        self._pending[name] = Bytes(stored.dtype, tuple(stored.shape), None, self._spool, self._pending_bytes)
        self._pending_bytes += stored.nbytes
        self._total_bytes += stored.nbytes
        self._owners[name] = self._flushed
        try:
            with open(self._spool, "ab") as spool:
                spool.write(memoryview_of(stored))
        except OSError as error:
            raise disk_error(error, self._spool, self._pending_bytes) from error

    def write_json(self, name: str, value: Any) -> None:
        """Store a JSON file."""
        try:
            text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise OutputError(
                f"{name} would hold a number that JSON cannot say: {error}",
                where=self.out,
                fix="check the source's config.json",
            ) from error
        self.write_text(name, text + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Store a text file."""
        self.write_bytes(name, text.encode("utf-8", errors="backslashreplace"))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Store any small file."""
        self._small[self._relative(name)] = data

    def copy(self, file: Path, name: str | None = None) -> None:
        """Store a file, or a folder of files, as it is."""
        relative = self._relative(name or file.name)
        if file.is_dir():
            for inner in sorted(file.iterdir()):
                self.copy(inner, f"{relative}/{inner.name}")
            return
        target = self._folder / relative
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        except OSError as error:
            if error.filename == file or not file.is_file():
                raise unreadable(file, error) from error
            raise disk_error(error, target, file.stat().st_size) from error
        self._small.pop(relative, None)

    def _relative(self, name: str) -> str:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or "\\" in name or name.endswith(".safetensors"):
            raise OutputError(f"{name!r} cannot be the name of a small file", where=self.out)
        if str(path) == INDEX:
            raise OutputError(f"{name} is written by the writer itself", where=self.out)
        return str(path)

    @property
    def _spool(self) -> Path:
        return self._folder / "collected"

    def _flush(self) -> None:
        shard = self._folder / f"shard-{self._flushed}"
        try:
            write_tensors(shard, self._pending)
            self._spool.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, shard, self._pending_bytes) from error
        self._pending = {}
        self._pending_bytes = 0
        self._flushed += 1

    def _finish(self) -> None:
        """Name the shards, then write what describes them: the index before the configuration, which makes it whole."""
        if not self._owners:
            raise OutputError("no tensor was written", where=self.out)
        self._flush()
        count = self._flushed
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            (self._folder / f"shard-{number}").rename(self._folder / name)
        last = {}
        if count > 1:
            weight_map = {tensor: names[number] for tensor, number in sorted(self._owners.items())}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            last[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
        if "config.json" in self._small:
            last["config.json"] = self._small.pop("config.json")
        for name, data in (self._small | last).items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
        for path in self._folder.rglob("*"):
            sync(path)
        sync(self._folder)

    def _put_in_place(self) -> None:
        check_output(self.out, self._force, source=self._source)  # something may have come in the meantime
        aside = None
        if self.out.is_dir():
            aside = temporary_sibling(self.out, "old")
            self.out.rename(aside)
        try:
            self._folder.rename(self.out)
        except BaseException:
            if aside is not None:
                aside.rename(self.out)
            raise
        sync(self.out.parent)
        if aside is not None:
            remove(aside)
            if aside.exists():  # some of it is somebody else's
                warn(f"what was in {self.out} before could not be deleted: it is in {aside}")


def _holds(folder: Path, inner: Path) -> bool:
    real = Path(os.path.realpath(inner))
    return folder == real or folder in real.parents


def _is_checkpoint(folder: Path, entries: list[str]) -> bool:
    """Whether a folder may be replaced: a model's, and nobody's repository."""
    if "config.json" not in entries or ".git" in entries:
        return False
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in entries):
        return True
    try:
        config = read_json_object(folder / "config.json")
    except MlaError:
        return False
    return "model_type" in config or "architectures" in config
