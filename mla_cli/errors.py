"""Every error that a user can cause or meet, as one line: what is wrong, where, and what to do.

Errors are raised where the fact is known; only `mla_cli.app` turns them into text and exit codes.
"""

from __future__ import annotations

import re
import sys

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_QUALITY = 3
EXIT_INTERRUPTED = 130
LONGEST_PART = 1000  # characters of a part of a message; a path of that length is still whole


class MlaError(Exception):
    """A failure with a cause the user can act on (exit code 1).

    Args:
        what: what is wrong, in one clause.
        where: the file, tensor or key it was found at.
        fix: what the user can do about it.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, where: object = None, fix: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f" [{_literal(self.where)}]" if self.where else ""
        advice = f" -> {_one_line(self.fix)}" if self.fix else ""
        return f"{_one_line(self.what)}{place}{advice}"


class UsageError(MlaError):
    """An option has a value that cannot be used (exit code 2)."""

    exit_code = EXIT_USAGE


class InputError(MlaError):
    """An input (checkpoint, text, prompt file) cannot be used (exit code 2)."""

    exit_code = EXIT_USAGE


class UnsupportedError(InputError):
    """The input is sound, but asks for mathematics that is not implemented (exit code 2)."""


class OutputError(MlaError):
    """The output could not be written: it exists, the disk is full, no permission (exit code 1)."""


class NetworkError(MlaError):
    """Something had to be fetched and could not be (exit code 1)."""


class QualityError(MlaError):
    """Measured quality misses the gate the user set (exit code 3)."""

    exit_code = EXIT_QUALITY


def is_out_of_memory(failure: Exception) -> bool:
    """Whether memory ran out, of the machine or of a device."""
    if isinstance(failure, MemoryError):
        return True
    torch = sys.modules.get("torch")  # where torch was never imported, the failure is not torch's
    if torch is not None and isinstance(failure, torch.OutOfMemoryError):
        return True
    # The CPU allocator raises a bare RuntimeError, whose text differs between systems.
    return isinstance(failure, RuntimeError) and "DefaultCPUAllocator" in str(failure)


def first_line(failure: Exception) -> str:
    """The first line of what an exception of a library says."""
    lines = str(failure).strip().splitlines()
    return lines[0][:500] if lines else "no message"


def internal_error(failure: Exception) -> MlaError:
    """A failure that nobody foresaw."""
    text = f"internal error: {type(failure).__name__}: {first_line(failure)}"
    return MlaError(text, fix="rerun with --debug and report what it prints")


def _one_line(text: str) -> str:
    """A message of several lines as one; double spaces stay, they may belong to a path."""
    return _literal(re.sub(r"\s*[\r\n]+\s*", " ", text.strip()))


def _literal(text: str) -> str:
    """A path as it is, brackets and spaces included; control characters, which would break the line, are escaped.

    What a damaged file says may be of any length, so the middle of a long text is left out.
    """
    if len(text) > LONGEST_PART:
        text = f"{text[: LONGEST_PART // 2]} ... {text[-LONGEST_PART // 2 :]}"
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda match: repr(match[0])[1:-1], text)
