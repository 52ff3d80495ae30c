"""What is scored: a context and its continuation as token ids, split and clipped as lm-evaluation-harness does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mla_cli.errors import MlaError

Encode = Callable[[str], list[int]]
OTHER_DATA = "mend the item in the task's data, or evaluate another task"


@dataclass(frozen=True)
class Request:
    """Token ids whose likelihood is wanted (`continuation`) after token ids that are given (`context`)."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


def move_trailing_space(context: str, continuation: str) -> tuple[str, str]:
    """Both texts with the context's trailing white space at the head of the continuation.

    Tokenizers join a space to the word after it: `"The "` + `"answer"` must be scored as `"The"` + `" answer"`.
    """
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def encode_pair(encode: Encode, encode_bare: Encode, prefix: int | None, context: str, continuation: str) -> Request:
    """The request for `continuation` after `context`.

    Args:
        encode: text to ids with the tokenizer's own special tokens; encode_bare: without any.
        prefix: token that stands for an empty context (BOS, else EOS).

    Raises:
        MlaError: there is nothing to score, or the context is empty and the tokenizer has no token to stand for it.
    """
    if not continuation and not context:
        raise MlaError("nothing to score: context and continuation are both empty", fix=OTHER_DATA)
    context, continuation = move_trailing_space(context, continuation)
    if not continuation:
        what = "nothing to score: the continuation is empty"
        raise MlaError(what, where=f"after '{context[-40:]}'", fix=OTHER_DATA)
    given = encode(context) if context else []
    if not given:
        return _without_context(encode_bare(continuation), prefix)
    rest = encode(context + continuation)[len(given) :]
    # Both texts can merge into as many tokens as the context alone has; the continuation is then scored by itself.
    return Request(tuple(given), tuple(rest or encode_bare(continuation)))


def _without_context(continuation: list[int], prefix: int | None) -> Request:
    if prefix is None:
        raise no_prefix()
    if len(continuation) > 1 and continuation[0] == prefix:
        return Request((prefix,), tuple(continuation[1:]))
    return Request((prefix,), tuple(continuation))


def no_prefix() -> MlaError:
    """Nothing can stand for an empty context."""
    return MlaError(
        "a text without context cannot be evaluated: the tokenizer has neither a BOS nor an EOS token",
        fix="evaluate a task whose items have a context",
    )


def clip(request: Request, max_length: int) -> Request:
    """The request as the model can hold it: of `context + continuation`, the last `max_length + 1` tokens.

    One more than the model reads, since the last token is only predicted.
    """
    if not request.context or not request.continuation:
        what = "nothing to score: a request needs a context and a continuation of at least one token each"
        raise MlaError(what, fix=OTHER_DATA)
    if len(request.continuation) > max_length:
        raise MlaError(
            f"a continuation of {len(request.continuation)} tokens exceeds the model's {max_length} positions",
            fix="evaluate a task with shorter answers",
        )
    keep = max_length + 1 - len(request.continuation)
    return Request(request.context[-keep:], request.continuation)


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of each stop string, one after the other in their order."""
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text


def stop_list(until: str | Sequence[str] | None) -> list[str]:
    """Stop strings as a list: one string is one stop string, not a list of letters."""
    if until is None:
        return []
    return [until] if isinstance(until, str) else [str(stop) for stop in until]
