"""What goes into the generator and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mla_cli.errors import MlaError
from mla_cli.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt to continue: its text, or its token ids as they are (a rendered conversation).

    Attributes:
        logprobs: also give each token's log-probability, and those of so many of the likeliest tokens; None: neither.
    """

    prompt: str | tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None


@dataclass(frozen=True)
class Text:
    """A piece of the text of request `index`; the pieces of a request make up its completion's text."""

    index: int
    piece: str


@dataclass(frozen=True)
class Completion:
    """The answer to request `index`.

    Attributes:
        text: the generated text, without stop text and end of text.
        token_ids: every generated token, the end-of-text token and those of a stop text included.
        finish_reason: `stop` (end of text or a stop text), or `length` (all tokens asked for, or the context is full).
        logprobs: of each token under the model, if asked for.
        ttft_s: seconds to the first token, waiting for a place in the batch included; seconds: to the last one.
        note: what a user should know, e.g. that the context limit cut the text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    ttft_s: float
    seconds: float
    logprobs: tuple[float, ...] | None = None
    note: str | None = None

    def as_dict(self, *, times: bool = True) -> dict[str, Any]:
        """For JSON; what does not apply is left out. Without `times`, the same answer is the same in every run."""
        values: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.token_ids),
        }
        if times:
            values |= {"ttft_ms": round(self.ttft_s * 1e3, 3), "total_ms": round(self.seconds * 1e3, 3)}
        if self.logprobs is not None:
            values["logprobs"] = list(self.logprobs)
        if self.note is not None:
            values["note"] = self.note
        return values


@dataclass(frozen=True)
class Failure:
    """Request `index` could not be answered; the others of its batch are."""

    index: int
    error: MlaError


Event = Text | Completion | Failure
