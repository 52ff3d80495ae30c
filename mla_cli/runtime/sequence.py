"""One request while it is being answered."""

from __future__ import annotations

from typing import Literal

import torch

from mla_cli.model.cache import Cache
from mla_cli.model.text_stream import TextStream
from mla_cli.runtime.request import Completion
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.runtime.stop_text import StopText


class ActiveSequence:
    """Prompt, tokens and text of one request.

    Args:
        index: of the request; prompt: its token ids, at least one.
        allowed: most tokens it may get; note: why these are fewer than asked for.
        stream: fresh decoder of ids to text; eos_ids: tokens that end it.
        started: when the request was handed in, by the caller's clock.
        likeliest: how many of the likeliest tokens to give beside each token's log-probability; None: no log-probabilities.

    Attributes:
        logprobs, alternatives: of each token, if asked for; alternatives are pairs of id and log-probability.
        starts: characters of text that came before each token (a stop text and what follows it included).
        most_tokens: that it can come to, prompt and answer.
        pages, cache: where it is kept, while it runs; cached: tokens that are there already.
        apart: whether it has a cache of its own instead of pages.
        ends: where its prompt is cut into chunks, the last at its end.
        names: of all chunks but the last, for others to share. refusals: times in a row that it found no pages.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        allowed: int,
        note: str | None,
        stream: TextStream,
        eos_ids: frozenset[int],
        started: float,
        likeliest: int | None = None,
    ) -> None:
        self.index, self.prompt, self.params = index, prompt, params
        self.random = torch.Generator().manual_seed(params.seed)
        self.tokens: list[int] = []
        self.likeliest = likeliest
        self.logprobs: list[float] = []
        self.alternatives: list[list[tuple[int, float]]] = []
        self.starts: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.started, self.first_at, self.last_at = started, started, started
        self.pages: list[int] = []
        self.ends: list[int] = []
        self.names: list[bytes] = []
        self.cache: Cache | None = None
        self.apart = False
        self.cached = self.refusals = 0
        self.most_tokens = len(prompt) + allowed
        self._allowed, self._note = allowed, note
        self._stream, self._stop = stream, StopText(params.stop)
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._pieces: list[str] = []
        self._characters = 0  # decoded so far

    @property
    def history(self) -> list[int]:
        """All tokens so far, prompt and answer."""
        return self.prompt + self.tokens

    def push(self, token: int, now: float) -> str:
        """Take a token that came at `now`; the text that is certain by it. It may set `finish_reason`."""
        if not self.tokens:
            self.first_at = now
        self.last_at = now
        self.tokens.append(token)
        self.starts.append(self._characters)
        ended = token in self._eos_ids
        decoded = "" if ended else self._stream.push(token)
        self._characters += len(decoded)
        text = self._stop.push(decoded)
        if ended or self._stop.found:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._allowed:
            self.finish_reason = "length"
        if self.finish_reason is not None and not self._stop.found:
            text += self._stop.push(self._stream.finish())
            if self._stop.found:
                self.finish_reason = "stop"
            text += self._stop.finish()
        self._pieces.append(text)
        return text

    def completion(self) -> Completion:
        """The answer, once `finish_reason` is set."""
        assert self.finish_reason is not None
        return Completion(
            index=self.index,
            text="".join(self._pieces),
            token_ids=tuple(self.tokens),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            ttft_s=self.first_at - self.started,
            seconds=self.last_at - self.started,
            logprobs=tuple(self.logprobs) if self.logprobs else None,
            note=self._note if self.finish_reason == "length" else None,
        )
