"""Progress and notes on stderr, results on stdout; silent progress where stderr is not a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Silence progress and notes (`--quiet`); warnings and errors still appear."""
    global _quiet
    _quiet = quiet


def progress(items: Iterable[T], description: str, *, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Iterate with a progress bar on stderr (none where stderr is not a terminal or `--quiet` is set)."""
    from tqdm import tqdm

    silent = _quiet or not sys.stderr.isatty()
    yield from tqdm(items, desc=description, total=total, unit=unit, disable=silent, leave=False, file=sys.stderr)


def note(text: str) -> None:
    """Say on stderr what is being done."""
    if not _quiet:
        _write(sys.stderr, text)


def warn(text: str) -> None:
    """Say on stderr what the user should know even with `--quiet`."""
    _write(sys.stderr, f"warning: {text}")


def result(text: str) -> None:
    """Print a result on stdout."""
    _write(sys.stdout, text)


def result_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout; non-finite numbers must have been made null before."""
    _write(sys.stdout, json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2))


def _write(stream: Any, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    safe = text.encode(encoding, errors="backslashreplace").decode(encoding)
    stream.write(safe + "\n")
    stream.flush()
