"""Results as JSON lines, on stdout as they come or in a file that appears when it is whole."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mla_cli.errors import OutputError

Write = Callable[[dict[str, Any]], None]


def json_line(value: dict[str, Any], encoding: str = "utf-8") -> str:
    """A value on one line, escaped where the encoding is not able to hold every character."""
    return json.dumps(value, ensure_ascii=encoding.lower().replace("-", "") != "utf8", allow_nan=False)


def write_line(value: dict[str, Any]) -> None:
    """Print a value on stdout."""
    sys.stdout.write(json_line(value, getattr(sys.stdout, "encoding", None) or "utf-8") + "\n")
    sys.stdout.flush()


def check_result_file(path: Path, *, force: bool) -> None:
    """Refuse a place that cannot be written, before any work.

    Raises:
        OutputError: it exists, or its folder does not or cannot be written to.
    """
    from mla_cli.checkpoint.disk import check_writable

    if path.exists() and not path.is_file():
        raise OutputError("the output is no regular file", where=path, fix="give the name of a file")
    if path.exists() and not force:
        raise OutputError("the output exists", where=path, fix="choose another name, or replace it with --force")
    if not path.parent.is_dir():
        raise OutputError("the output's folder does not exist", where=path.parent, fix="create it first")
    check_writable(path)


@contextmanager
def result_file(path: Path) -> Iterator[Write]:
    """Write lines beside `path` and rename when all are there; an interruption leaves nothing behind.

    Raises:
        OutputError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        stream = open(  # noqa: SIM115 (closed below)
            partial, "w", encoding="utf-8", errors="backslashreplace", newline="\n"
        )
    except OSError as error:
        raise OutputError(f"cannot write: {error.strerror}", where=path, fix="choose another --out") from error
    try:
        with stream:
            yield lambda value: print(json_line(value), file=stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
