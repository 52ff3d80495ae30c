"""What single tokens stand for, as bytes: a character may be spread over several tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"  # SentencePiece's sign for a space


def token_bytes(backend: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """A function from ids to the bytes that they stand for inside a text; of special tokens, their names.

    The bytes of a text's tokens, joined, are the text's, but for what a decoder does at its beginning (SentencePiece drops
    one space) or across tokens.
    """
    added = backend.get_added_tokens_decoder()
    decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
    byte_level, spaces = b'"ByteLevel"' in decoder, _WORD_START.encode() in decoder
    falls_back = b'"ByteFallback"' in decoder

    def of(token: int) -> bytes:
        piece = backend.id_to_token(token)
        if piece is None:
            return b""
        if token in added:
            return str(added[token].content).encode()
        byte = _BYTE.fullmatch(piece) if falls_back else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if byte_level:
            table = _byte_level_table()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in piece)
        return (piece.replace(_WORD_START, " ") if spaces else piece).encode()

    return of


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """The characters that byte-level BPE (GPT-2) writes bytes as: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}
