"""One request on its way through the server: its sequences, and the pieces of text that wait for its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mla_cli.runtime.request import Completion
from mla_cli.runtime.sequence import ActiveSequence


@dataclass(frozen=True)
class TokenScore:
    """A token, its log-probability, those of the likeliest tokens (id, log-probability), and where in the text it begins."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    start: int


@dataclass(frozen=True)
class Part:
    """More of choice `choice`: text, the tokens that it came from if they were asked for, and the whole once it has ended."""

    choice: int
    text: str
    scores: tuple[TokenScore, ...] = ()
    ended: Completion | None = None


@dataclass(frozen=True)
class Failed:
    """The request could not be answered; the reason is one for its client."""

    status: int
    reason: str
    code: str


@dataclass(frozen=True)
class Gone:
    """The worker is done with the request, whatever became of it."""


Event = Part | Failed | Gone


class Job:
    """A request while it is answered. Its methods belong to the thread of the event loop.

    Args:
        sequences: one a choice, prepared; prompt_tokens: of its prompts, each counted once.
        pending: most events that wait to be taken.

    Attributes:
        started: by the loop's clock. overflowed: more events came than may wait.
    """

    def __init__(
        self, name: str, sequences: Sequence[ActiveSequence], *, prompt_tokens: int, started: float, pending: int
    ) -> None:
        self.name, self.sequences, self.prompt_tokens, self.started = name, tuple(sequences), prompt_tokens, started
        self.overflowed = False
        self._pending, self._events, self._news = pending, deque[Event](), asyncio.Event()

    def put(self, events: Sequence[Event]) -> None:
        """Hand out what the worker gave."""
        self._events += events
        self.overflowed = self.overflowed or len(self._events) > self._pending
        self._news.set()

    async def take(self) -> list[Event]:
        """All that has come since, as soon as there is something."""
        await self._news.wait()
        self._news.clear()
        taken = list(self._events)
        self._events.clear()
        return taken


class Choice:
    """A sequence of a job, in the worker's thread: what of it has been handed out.

    Args:
        number: of the choice in its job.
    """

    def __init__(self, job: Job, number: int, sequence: ActiveSequence) -> None:
        self.job, self.number, self.sequence = job, number, sequence
        self._characters = self._scored = 0

    def part(self, text: str, ended: Completion | None = None) -> Part:
        """The next part, with the tokens whose text has been handed out by it."""
        self._characters += len(text)
        own = self.sequence
        begin = self._scored
        if own.likeliest is not None:
            # A stop text, or the end of the text, is none of the answer.
            while self._scored < len(own.logprobs) and own.starts[self._scored] < self._characters:
                self._scored += 1
        scores = tuple(
            TokenScore(own.tokens[i], own.logprobs[i], tuple(own.alternatives[i]), own.starts[i])
            for i in range(begin, self._scored)
        )
        return Part(self.number, text, scores, ended)
