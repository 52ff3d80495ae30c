"""How one request is continued: the options of sampling, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_cli.errors import UsageError

# Far more than any context; a larger number is a slip, and the context limit cuts long before.
MOST_NEW_TOKENS = 10**9
SEED_LIMIT = 2**63
MOST_PENALTY = 1e6  # further from 1, scores would leave float32


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued, checked when it is made.

    Attributes:
        max_new_tokens: most tokens to generate, 1 to 10^9; the context limit cuts earlier.
        temperature: 0 takes the likeliest token.
        top_p: smallest set of likeliest tokens with at least this probability, in (0, 1].
        top_k: the k likeliest tokens; 0: all, as is any number above the vocabulary.
        min_p: tokens at least this fraction as likely as the likeliest, in [0, 1].
        repetition_penalty: above 1 makes tokens that already occurred (prompt included) less likely; 10^-6 to 10^6.
        stop: texts that end the generation; they are not part of the result.
        seed: of the request's own random numbers.
        ignore_eos: go on past the end-of-text token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 1, MOST_NEW_TOKENS)
        _whole("top_k", self.top_k, 0, None)
        _whole("seed", self.seed, 0, SEED_LIMIT - 1)
        _number("temperature", self.temperature, lambda t: t >= 0, "a number from 0 (0: greedy)")
        _number("top_p", self.top_p, lambda p: 0 < p <= 1, "a number above 0 and at most 1")
        _number("min_p", self.min_p, lambda p: 0 <= p <= 1, "a number from 0 to 1")
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            lambda p: 1 / MOST_PENALTY <= p <= MOST_PENALTY,
            f"a number from {1 / MOST_PENALTY:g} to {MOST_PENALTY:g} (1: none)",
        )
        if not isinstance(self.ignore_eos, bool):
            raise _refused("ignore_eos", self.ignore_eos, "true or false")
        sound = isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)
        if not sound:
            raise _refused("stop", self.stop, "texts of at least one character")


def _whole(name: str, value: Any, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        span = f"from {least}" if most is None else f"from {least} to {most}"
        raise _refused(name, value, f"a whole number {span}")


def _number(name: str, value: Any, allowed: Callable[[float], bool], span: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (abs(value) < 1e30 and allowed(value)):
        raise _refused(name, value, span)


def _refused(name: str, value: Any, span: str) -> UsageError:
    return UsageError(f"{name} cannot be {value!r}", where=f"--{name.replace('_', '-')}", fix=f"give {span}")
