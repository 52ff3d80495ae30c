"""One run at a time on one output: a lock that ends with its process, however that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mla_cli.checkpoint.disk import existing_parent
from mla_cli.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows has no such locks, and the outputs are put in place by one rename there too
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of an output folder, `.NAME.lock` beside it; the lock of a dead process is taken over.

    The operating system lets go of it when the process ends. A folder for the output to be in is made, if there is none, and
    removed again if it stays empty. Where no file can be made there is no lock: nothing can be written there either, and the
    writer says why.

    Raises:
        OutputError: another process writes to the same output.
    """
    if os.environ.get("RANK", "0") != "0":  # torchrun starts several processes of one run, of which the first writes
        yield
        return
    out = Path(os.path.realpath(out))
    file = out.with_name(f".{out.name}.lock")
    above = existing_parent(file)
    made = [parent for parent in file.parents if parent != above and above in parent.parents]
    handle = None
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(file) if fcntl is not None else None
    try:
        yield
    finally:
        if handle is not None:
            file.unlink(missing_ok=True)  # before the lock goes: who opens the name then makes a new file
            os.close(handle)
        with suppress(OSError):
            for parent in made:
                parent.rmdir()


def _acquire(file: Path) -> int:
    """Lock the file that has the name now: one that was removed in the meantime is nobody's to see."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            what = f"another run (process {holder}) is writing to the same output"
            raise OutputError(what, where=file, fix="wait for it, end it, or choose another folder") from None
        except BaseException:
            os.close(handle)
            raise
        with suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == file.stat().st_ino:
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
                return handle
        os.close(handle)
