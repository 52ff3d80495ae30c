"""Where a computation over layers keeps what is too much for memory: files of a folder that goes with it.

What is kept is read back bit for bit, so that a result does not depend on where it lay.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from mla_cli.checkpoint.disk import check_writable, clean_leftovers, disk_error, remove, temporary_sibling
from mla_cli.checkpoint.tensor_file import memoryview_of
from mla_cli.errors import OutputError

T = TypeVar("T")
U = TypeVar("U")

# Bytes of hidden states between layers that a pass keeps: in memory, and in files at the most.
ROUND_IN_MEMORY = 1 << 30
ROUND_IN_FILES = 64 << 30
# Of the free disk, a pass takes at most this share.
DISK_SHARE = 4


class Workplace:
    """Keeps values by layer and hidden states by sequence: in memory, or, where it has a folder, in files there."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._numbers = count()

    @property
    def round_bytes(self) -> int:
        """Bytes of hidden states that a pass over the layers may keep."""
        if self.folder is None:
            return ROUND_IN_MEMORY
        return min(ROUND_IN_FILES, shutil.disk_usage(self.folder).free // DISK_SHARE)

    def rows(self, shape: Sequence[int], device: torch.device) -> Rows:
        """Float32 numbers `[N, ...]` that are written and read by slices of the first dimension; zeros before."""
        if self.folder is None:
            return torch.zeros(*shape, device=device)
        return FileRows(self.folder / f"rows-{next(self._numbers)}", shape, device)

    def series(self) -> Path | None:
        """What to make a `Series` in: a new folder, or None for memory."""
        return None if self.folder is None else self.folder / f"series-{next(self._numbers)}"


@contextmanager
def workplace(near: Path | None) -> Iterator[Workplace]:
    """A workplace with a hidden folder beside `near`, which is removed at the end; None: in memory.

    What a killed run left there is removed first.

    Raises:
        OutputError: the folder cannot be made.
    """
    if near is None:
        yield Workplace()
        return
    check_writable(near)
    clean_leftovers(near)
    folder = temporary_sibling(near)
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise disk_error(error, folder, 0) from error
    try:
        yield Workplace(folder)
    finally:
        remove(folder)


class Series(Sequence[T], Generic[T]):
    """Values, one a layer; in a folder each is a file, which is read anew when it is asked for, and goes with the series."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._length = folder, 0
        self._held: list[T] = []
        if folder is not None:
            folder.mkdir()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> T:  # type: ignore[override]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        index %= self._length
        if self.folder is None:
            return self._held[index]
        # Our own file, written by this process into a folder that is its user's alone.
        return cast(T, torch.load(self._file(index), weights_only=False))

    def append(self, value: T) -> None:
        """Keep one more."""
        self._length += 1
        if self.folder is None:
            self._held.append(value)
        else:
            self[self._length - 1] = value

    def __setitem__(self, index: int, value: T) -> None:
        if self.folder is None:
            self._held[index] = value
            return
        try:
            torch.save(value, self._file(index), pickle_protocol=pickle.HIGHEST_PROTOCOL)
        except (OSError, RuntimeError) as error:  # torch's own writer tells a full disk as a RuntimeError
            raise _full(self._file(index), error) from error

    def __del__(self) -> None:
        folder = getattr(self, "folder", None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _file(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / str(index)


class Mapped(Sequence[U], Generic[T, U]):
    """What a function makes of each value of a sequence, made when it is asked for."""

    def __init__(self, values: Sequence[T], change: Callable[[T], U]) -> None:
        self._values, self._change = values, change

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> U:  # type: ignore[override]
        return self._change(self._values[index])


class FileRows:
    """Float32 numbers `[N, ...]` in a file, which goes when they do."""

    def __init__(self, file: Path, shape: Sequence[int], device: torch.device) -> None:
        self._file, self.device = file, device
        self.shape = torch.Size(shape)
        self._bytes_per_row = 4 * self.shape[1:].numel()
        try:
            self._stream = open(file, "w+b")  # noqa: SIM115 (closed with the object)
            self._stream.truncate(self.shape[0] * self._bytes_per_row)
        except OSError as error:
            raise disk_error(error, file, self.shape.numel() * 4) from error

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        found = torch.empty(stop - start, *self.shape[1:])
        self._stream.seek(start * self._bytes_per_row)
        read = self._stream.readinto(memoryview_of(found)) if found.numel() else 0
        if read != found.nbytes:
            raise OutputError("a file of the offload folder was cut short", where=self._file, fix="run again")
        return found.to(self.device)

    def __setitem__(self, rows: slice, values: Tensor) -> None:
        start, _, _ = rows.indices(self.shape[0])
        try:
            self._stream.seek(start * self._bytes_per_row)
            self._stream.write(memoryview_of(values.detach().float().cpu().contiguous()))
            self._stream.flush()
        except OSError as error:
            raise disk_error(error, self._file, self.shape.numel() * 4) from error

    def close(self) -> None:
        """Remove the file."""
        self._stream.close()
        self._file.unlink(missing_ok=True)

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self.close()


Rows = Tensor | FileRows


def _full(file: Path, error: Exception) -> OutputError:
    if isinstance(error, OSError):
        return disk_error(error, file, 0)
    free = shutil.disk_usage(file.parent).free
    what = f"what does not fit into memory cannot be written: {free} bytes free"
    return OutputError(what, where=file.parent, fix="free some space, or give --offload a folder of another disk")
