"""Chunks of prompts in a memory-mapped file, which the next run finds again.

    header    a line of text that says what the file is for, and its SHA-256; 4,096 bytes
    records   one a slot: whose page it holds, which of how many, when it was used, SHA-256 of all this and of the page
    slots     one page of a pool each

A page counts only with a record that fits it: what a crash, a full disk or a faulty one leaves behind is not found again,
in whatever order it came to the disk. The file belongs to one process at a time, and nobody but its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mla_cli.checkpoint.disk import disk_error
from mla_cli.errors import InputError, UnsupportedError, UsageError
from mla_cli.model.page_bytes import Bytes

MAGIC = b"kept prompts of mla 1 "
BLOCK = 4096  # of the header; records and slots begin at multiples of it
_RECORD = struct.Struct("<32sIIQ16s")  # name, which page, of how many, turn of its last use, digest
_BODY = struct.Struct("<32sII")  # what of it the digest covers, beside the page


class KeptFile:
    """The file; its methods may be called by one thread at a time.

    Args:
        path: it is made if it is not there. facts: what the pages depend on; a file with others is emptied.
        page_bytes: of a page. slots: most pages. say: is told that a file was emptied.

    Attributes:
        hits, evictions, damaged: chunks that were found, made place for others, did not fit their records.

    Raises:
        InputError: the file is another one, somebody else's, or another process uses it.
        OutputError: it cannot be made: the disk is full, no permission.
    """

    def __init__(
        self, path: Path, facts: Mapping[str, Any], page_bytes: int, slots: int, say: Callable[[str], None]
    ) -> None:
        self.path, self.hits, self.evictions, self.damaged = path, 0, 0, 0
        self._page_bytes, self._slots = page_bytes, slots
        self._records_at, self._pages_at = BLOCK, BLOCK + -(-slots * _RECORD.size // BLOCK) * BLOCK
        self._size = self._pages_at + slots * page_bytes
        self._chunks: OrderedDict[bytes, list[int]] = OrderedDict()  # slots of each; latest use last
        self._turn = 0
        self._handle = _open_private(path)
        try:
            self._map = self._mapped({**facts, "page_bytes": page_bytes, "slots": slots}, say)
        except BaseException:
            os.close(self._handle)
            raise
        self._find()

    def __contains__(self, name: bytes) -> bool:
        return name in self._chunks

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that can be found."""
        return sum(map(len, self._chunks.values())) * self._page_bytes

    def pages_of(self, name: bytes) -> int:
        """Pages of a chunk; 0: it is not there."""
        return len(self._chunks.get(name, ()))

    def get(self, name: bytes) -> Bytes | None:
        """The pages `[N, page_bytes]` of a chunk, checked; None if there are none, or not as they were."""
        slots = self._chunks.get(name)
        if slots is None or not self._is_whole():
            return None
        data = np.empty((len(slots), self._page_bytes), dtype=np.uint8)
        self._turn += 1
        for part, slot in enumerate(slots):
            data[part] = np.frombuffer(self._map, np.uint8, self._page_bytes, self._page_at(slot))
            record = _RECORD.unpack_from(self._map, self._record_at(slot))
            if record[4] != _digest(name, part, len(slots), data[part]):
                self.damaged += 1
                self._drop(name)
                return None
            self._write_record(slot, (*record[:3], self._turn, record[4]))
        self._chunks.move_to_end(name)
        self.hits += 1
        return data

    def put(self, name: bytes, data: Bytes) -> None:
        """Keep a chunk, in the place of those that were not used for the longest time; one too large for the file is not."""
        if name in self._chunks:
            self._chunks.move_to_end(name)
            return
        if len(data) > self._slots or not self._is_whole():
            return
        while len(self._free) < len(data):
            self._drop(next(iter(self._chunks)))
            self.evictions += 1
        slots = [self._free.pop() for _ in range(len(data))]
        self._turn += 1
        for part, (slot, page) in enumerate(zip(slots, data, strict=True)):
            at = self._page_at(slot)
            self._map[at : at + self._page_bytes] = page.data
            self._write_record(slot, (name, part, len(slots), self._turn, _digest(name, part, len(slots), page)))
        self._chunks[name] = slots

    def close(self, *, keep: bool) -> None:
        """Let go of the file; without `keep` it is removed."""
        if not keep:
            self.path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._handle)  # and with it the lock

    def _mapped(self, facts: Mapping[str, Any], say: Callable[[str], None]) -> mmap.mmap:
        line = MAGIC + json.dumps(facts, sort_keys=True, default=str).encode()
        header = (line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n").ljust(BLOCK, b"\0")
        assert len(header) == BLOCK, "the facts of a file of kept prompts must be short"
        held = os.pread(self._handle, BLOCK, 0)
        size = os.fstat(self._handle).st_size
        if held and not held.startswith(MAGIC):
            what = "the file holds something else than kept prompts"
            raise InputError(what, where=self.path, fix="choose another file for latent_attention.tiers.file")
        if (held, size) != (header, self._size):
            if held:
                say(f"{self.path} is emptied: it held prompts of {_difference(held, facts)}")
            self._make(header)
        return mmap.mmap(self._handle, self._size)

    def _make(self, header: bytes) -> None:
        """An empty file that has all its blocks: writing to a mapped one on a full disk would end the process."""
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, header, 0)
            _allocate(self._handle, self._size)
        except OSError as error:
            with suppress(OSError):
                self.path.unlink()
            raise disk_error(error, self.path, self._size) from error

    def _find(self) -> None:
        """What the records name, as far as all pages of a chunk are there."""
        found: dict[bytes, dict[int, int]] = {}
        facts: dict[bytes, tuple[int, int]] = {}  # pages of the whole, latest turn
        for slot in range(self._slots):
            name, part, parts, turn, _ = _RECORD.unpack_from(self._map, self._record_at(slot))
            if part < parts <= self._slots:
                found.setdefault(name, {})[part] = slot
                facts[name] = (parts, max(turn, facts.get(name, (0, 0))[1]))
                self._turn = max(self._turn, turn)
        for name in sorted(found, key=lambda name: facts[name][1]):
            if len(found[name]) == facts[name][0]:
                self._chunks[name] = [found[name][part] for part in range(facts[name][0])]
        taken = {slot for slots in self._chunks.values() for slot in slots}
        self._free = [slot for slot in range(self._slots - 1, -1, -1) if slot not in taken]

    def _drop(self, name: bytes) -> None:
        slots = self._chunks.pop(name)
        for slot in slots:
            self._write_record(slot, (b"", 0, 0, 0, b""))
        self._free += slots

    def _is_whole(self) -> bool:
        """Whether nobody has cut the file off: reading behind its end would end the process."""
        return os.fstat(self._handle).st_size >= self._size

    def _page_at(self, slot: int) -> int:
        return self._pages_at + slot * self._page_bytes

    def _record_at(self, slot: int) -> int:
        return self._records_at + slot * _RECORD.size

    def _write_record(self, slot: int, record: Sequence[Any]) -> None:
        _RECORD.pack_into(self._map, self._record_at(slot), *record)


def _digest(name: bytes, part: int, parts: int, page: Bytes) -> bytes:
    digest = hashlib.sha256(_BODY.pack(name, part, parts))
    digest.update(page.data)
    return digest.digest()[:16]


def _difference(held: bytes, facts: Mapping[str, Any]) -> str:
    """In what a file was made for something else, in words."""
    try:
        line, digest = held.split(b"\n")[:2]
        before = json.loads(line[len(MAGIC) :])
    except ValueError:
        return "a damaged run"
    if digest.decode("ascii", "replace") != hashlib.sha256(line).hexdigest() or not isinstance(before, dict):
        return "a damaged run"
    other = [
        name.replace("_", " ") for name in facts if before.get(name) != json.loads(json.dumps(facts[name], default=str))
    ]
    return f"another {' and another '.join(other)}" if other else "a run that broke off"


def _open_private(path: Path) -> int:
    """A file that is this user's alone, and this process's while it is open.

    Raises:
        InputError: it is not; OutputError: it cannot be made.
    """
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise UnsupportedError(
            "prompts are kept in a file on POSIX systems only", where=path, fix="leave out latent_attention.tiers.file"
        ) from error
    fix = "choose another file for latent_attention.tiers.file"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except IsADirectoryError as error:
        raise InputError("kept prompts need a file, this is a folder", where=path, fix=fix) from error
    except FileNotFoundError as error:
        raise InputError("the folder of the file of kept prompts does not exist", where=path, fix=fix) from error
    except OSError as error:
        if path.is_symlink():
            raise InputError("kept prompts go to no symbolic link", where=path, fix=fix) from error
        raise disk_error(error, path, 0) from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise InputError("kept prompts need a file", where=path, fix=fix)
        if found.st_uid != os.geteuid():  # who can write there decides what is answered
            raise InputError("the file of kept prompts belongs to another user", where=path, fix=fix)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(handle, 0o600)
    except BlockingIOError as error:
        os.close(handle)
        raise UsageError(
            "another process keeps its prompts in this file", where=path, fix=f"end it, or {fix}"
        ) from error
    except BaseException:
        os.close(handle)
        raise
    return handle


def _allocate(handle: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
        return
    zeros = bytes(1 << 20)  # macOS
    for start in range(BLOCK, size, len(zeros)):
        os.pwrite(handle, zeros[: size - start], start)
