"""Text from token ids as they come, without ever cutting a character in two."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns ids into text one at a time; what it returns, joined, is the decoding of all ids.

    Only the ids since the last complete piece of text are decoded again, with that piece before them, because
    decoders treat the beginning of a text differently (a leading space is dropped).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        skipped: Collection[int] = (),
        joins_next: Callable[[int], bool] = lambda _: False,
        hold_all: bool = False,
    ) -> None:
        """Args:
        decode: text of a sequence of ids.
        skipped: ids that give no text.
        joins_next: whether an id's text can still change with the next id. Byte fallback decodes a run of bytes as
            a whole: one broken byte at its end turns all of it into replacement characters.
        hold_all: nothing is certain before the end (a decoder that edits across pieces).
        """
        self._decode = decode
        self._skipped = skipped
        self._joins_next = joins_next
        self._hold_all = hold_all
        self._ids: list[int] = []
        self._start = 0  # where the last complete piece begins
        self._done = 0  # where it ends
        self._emitted: list[str] = []

    def push(self, token: int) -> str:
        """The text that is complete now that `token` has come; empty while a character is unfinished."""
        if token in self._skipped:
            return ""
        self._ids.append(token)
        if self._hold_all or self._joins_next(token):
            return ""
        before = self._decode(self._ids[self._start : self._done])
        text = self._decode(self._ids[self._start :])
        if text.endswith(_REPLACEMENT) or not text.startswith(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return self._emit(text[len(before) :])

    def finish(self) -> str:
        """The rest: with an unfinished character at the end it holds what decoding all ids gives."""
        text = self._decode(self._ids)
        emitted = "".join(self._emitted)
        if text.startswith(emitted):
            return self._emit(text[len(emitted) :])
        return self._emit(self._decode(self._ids[self._done :]))

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text
