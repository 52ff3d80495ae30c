"""Stop texts in a stream: nothing is given out that could still turn out to be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on until the first stop text, which it swallows with all that follows.

    Attributes:
        found: whether a stop text has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to be part of the result, now that `text` has come."""
        if not self._stops or not text:
            return text
        if self.found:
            return ""
        text = self._held + text
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max(_shared(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back: no stop text came of it."""
        held, self._held = self._held, ""
        return held


def _shared(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
