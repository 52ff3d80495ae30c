"""Progress and notes on stderr, results on stdout; a line a phase instead of a bar where stderr is not a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "HF_HUB_TOKEN")
_TOKEN_SHAPE = re.compile(r"\bhf_[A-Za-z0-9]{20,}")

_quiet = False
_debug = False
_phase: str | None = None


def set_quiet(quiet: bool) -> None:
    """Silence progress and notes (`--quiet`); warnings and errors still appear."""
    global _quiet, _phase
    _quiet, _phase = quiet, None


def set_debug(debug: bool) -> None:
    """Show the traceback of a failure (`--debug`)."""
    global _debug
    _debug = debug


def debug_enabled() -> bool:
    """Whether a failure is shown with its traceback."""
    return _debug


def progress(items: Iterable[T], description: str, *, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Iterate with a progress bar on stderr; where that is no terminal, say once what is being done."""
    with progress_bar(description, total, unit, items) as bar:
        yield from bar


def progress_bar(description: str, total: int | None, unit: str, items: Iterable[Any] | None = None) -> Any:
    """The same bar (tqdm's) for work that is no iteration: `update()` advances it; a context that closes it."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    if not terminal:
        _say_phase(description)
    return tqdm(
        items, desc=description, total=total, unit=unit, disable=_quiet or not terminal, leave=False, file=sys.stderr
    )


def _say_phase(description: str) -> None:
    """A line of a log that tells how far a long command is; work in several parts is one phase."""
    global _phase
    if description != _phase:
        _phase = description
        note(description)


def note(text: str) -> None:
    """Say on stderr what is being done."""
    if not _quiet:
        _write(sys.stderr, redact(text))


def warn(text: str) -> None:
    """Say on stderr what the user should know even with `--quiet`."""
    _write(sys.stderr, redact(f"warning: {text}"))


def error(text: str) -> None:
    """Say on stderr why the command failed."""
    _write(sys.stderr, redact(text))


def result(text: str) -> None:
    """Print a result on stdout."""
    _write(sys.stdout, text)


def result_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout; non-finite numbers must have been made null before."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)
    if not _encodable(text, sys.stdout):
        # `\xe9` and the like, which `_write` would put, are not JSON; `\u00e9` is, in every encoding.
        text = json.dumps(value, ensure_ascii=True, allow_nan=False, indent=2)
    _write(sys.stdout, text)


def redact(text: str) -> str:
    """`text` without the access tokens that the environment holds or that look like Hub tokens."""
    for name in TOKEN_VARIABLES:
        token = os.environ.get(name, "").strip()
        if token:
            text = text.replace(token, "***")
    return _TOKEN_SHAPE.sub("***", text)


def _encoding(stream: Any) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _encodable(text: str, stream: Any) -> bool:
    try:
        text.encode(_encoding(stream))
    except UnicodeEncodeError:
        return False
    return True


def _write(stream: Any, text: str) -> None:
    encoding = _encoding(stream)
    safe = text.encode(encoding, errors="backslashreplace").decode(encoding)
    stream.write(safe + "\n")
    stream.flush()
