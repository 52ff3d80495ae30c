"""Which prompts follow which: counted over chunks of prompts, to know what will be wanted next.

A chunk's name follows from all tokens up to its end, so names are the nodes of the tree of all prompts: to count a name is to
count a node. What follows a prompt is counted under the deepest of its nodes that more than one prompt went through: the part
that is a template, not the text of one user.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

MOST_NODES = 4096  # those that were not passed for the longest time are forgotten
FEWEST = 2  # times that something must have been seen before it is expected again


class PrefixTree:
    """Counts prompts in the order in which they come."""

    def __init__(self) -> None:
        self._passed: OrderedDict[bytes, int] = OrderedDict()
        self._after: OrderedDict[bytes, Counter[bytes]] = OrderedDict()  # of each node; b"": all that followed
        self._last: bytes | None = None  # the node that the latest prompt counts under

    def add(self, names: Sequence[bytes]) -> None:
        """A prompt with chunks of these names comes."""
        if self._last is not None:
            after = self._after.setdefault(self._last, Counter())
            self._after.move_to_end(self._last)
            after[b""] += 1
            after.update(names)
            if len(after) > MOST_NODES:
                self._after[self._last] = Counter(dict(after.most_common(MOST_NODES // 2)))
        for name in names:
            self._passed[name] = self._passed.get(name, 0) + 1
            self._passed.move_to_end(name)
        self._last = next((name for name in reversed(names) if self._passed[name] >= FEWEST), None)
        while len(self._passed) > MOST_NODES:
            self._passed.popitem(last=False)
        while len(self._after) > MOST_NODES // 16:
            self._after.popitem(last=False)

    def expected(self, most: int, threshold: float) -> list[bytes]:
        """At most so many chunks of the next prompt, the surest first; each at least as sure as `threshold`."""
        after = None if self._last is None else self._after.get(self._last)
        if after is None or after[b""] < FEWEST:
            return []
        found = [(name, count) for name, count in after.items() if name and count >= threshold * after[b""]]
        # A chunk is never surer than those before it, and these were counted first: the order is the prompt's.
        return [name for name, _ in sorted(found, key=lambda pair: -pair[1])[:most]]
