"""Prompts as bytes and arguments: text only where it is valid, with the place of the first fault."""

from __future__ import annotations

import sys
from typing import Any

from mla_cli.errors import InputError


def text_of_bytes(content: bytes, where: object) -> str:
    """The text of UTF-8 bytes; a byte order mark is no part of it.

    Raises:
        InputError: they are not UTF-8; it names the offset.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"not valid UTF-8 at byte {error.start} (0x{content[error.start]:02x})",
            where=where,
            fix="convert it to UTF-8 first",
        ) from error


def text_of_argument(argument: str) -> str:
    """The text of a command-line argument, whatever the locale made of its bytes.

    Raises:
        InputError: it is not valid text.
    """
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        # Bytes that the locale's encoding lacks come as surrogates; in the C locale that is all of UTF-8.
        try:
            content = argument.encode(sys.getfilesystemencoding(), "surrogateescape")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt is not valid text at character {error.start}", where="PROMPT", fix="give it as UTF-8"
            ) from error
        return text_of_bytes(content, "PROMPT")
    return argument


def without_final_newline(text: str) -> str:
    """A text as `echo` or an editor ends it, without that one newline: it would change what a model continues with."""
    return text[:-2] if text.endswith("\r\n") else text[:-1] if text.endswith("\n") else text


def is_message(value: Any) -> bool:
    """Whether a value has the form of a message of a conversation."""
    said = isinstance(value, dict) and ("content" in value or "tool_calls" in value)
    return said and isinstance(value.get("role"), str)
