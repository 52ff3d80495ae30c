"""From a checked request to sequences: templates rendered, texts turned into tokens, lengths compared with the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_cli.errors import MlaError
from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.request import Request
from mla_cli.runtime.sequence import ActiveSequence
from mla_cli.server.errors import ApiError, invalid
from mla_cli.server.parameters import Call


@dataclass(frozen=True)
class Prepared:
    """The sequences of a call, all choices of the first prompt first; the tokens of its prompts, each counted once."""

    sequences: tuple[ActiveSequence, ...]
    prompt_tokens: int


def prepare(call: Call, generator: Generator, number: Callable[[], int], started: float) -> Prepared:
    """The sequences that answer a call.

    Args:
        number: gives each its number; started: when the request came (`perf_counter`).

    Raises:
        ApiError: a prompt cannot be used, or is too long.
    """
    try:
        prompts = _prompts(call, generator.tokenizer)
    except MlaError as error:  # without the place: it is a path of this machine
        raise invalid("messages" if call.kind == "chat" else "prompt", error.what) from error
    sequences: list[ActiveSequence] = []
    tokens = 0
    for name, prompt in prompts:
        _check_length(call, name, len(prompt), generator.context)
        for params in call.seeds():
            try:
                request = Request(prompt, params, call.logprobs)
                sequences.append(generator.prepare(number(), request, started))
            except MlaError as error:
                raise invalid(name, error.what) from error
        tokens += len(sequences[-1].prompt)
    return Prepared(tuple(sequences), tokens)


def _prompts(call: Call, tokenizer: Tokenizer) -> list[tuple[str, tuple[int, ...]]]:
    """The parameter that each prompt came from, and its token ids."""
    if call.kind == "chat":
        return [("messages", tuple(tokenizer.encode_chat(call.messages)))]
    names = ["prompt"] if len(call.prompts) == 1 else [f"prompt[{i}]" for i in range(len(call.prompts))]
    return [
        (name, tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt)
        for name, prompt in zip(names, call.prompts, strict=True)
    ]


def _check_length(call: Call, name: str, prompt: int, context: int) -> None:
    if prompt >= context:
        message = f"{name} has {prompt} tokens, and the context holds {context} with the answer"
    elif call.asked is not None and prompt + call.asked > context:
        message = f"{name} has {prompt} tokens and {call.asked} are asked for, and the context holds {context}"
    else:
        return
    raise ApiError(400, message, param=name, code="context_length_exceeded")
