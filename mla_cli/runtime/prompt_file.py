"""Prompts in a JSONL file: one request a line, with its own parameters where it gives some."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cli.errors import InputError, MlaError
from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.prompt_text import is_message, text_of_bytes
from mla_cli.runtime.request import Completion, Failure, Request
from mla_cli.runtime.sampling_params import SamplingParams

_PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_KEYS = ("prompt", "messages", "id", *_PARAMS)
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file.

    Attributes:
        number: of the line, from 1; id: the line's own, handed through to its result.
        prompt: a text, or the messages of a conversation; None if the line is unusable, and `error` says why.
    """

    number: int
    id: Any
    prompt: str | Messages | None
    params: SamplingParams
    error: MlaError | None = None


def read_prompt_file(path: Path, defaults: SamplingParams) -> list[PromptLine]:
    """The requests of a JSONL file; empty lines count, but are no requests.

    Raises:
        InputError: the file cannot be read, or holds no request at all.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the prompts: {error.strerror}", where=path, fix="check the path and its permissions"
        ) from error
    lines = [_line(number, raw, defaults) for number, raw in enumerate(content.split(b"\n"), start=1) if raw.strip()]
    if not lines:
        raise InputError("the file holds no prompts", where=path, fix='write one JSON object a line: {"prompt": "..."}')
    return lines


def to_request(line: PromptLine, tokenizer: Tokenizer, system: str | None, *, chat: bool) -> Request:
    """The request of a usable line; with `chat` a plain prompt is a conversation of one message.

    Raises:
        InputError: the model has no chat template, or refuses the messages.
    """
    assert line.prompt is not None
    if isinstance(line.prompt, str) and not chat:
        return Request(line.prompt, line.params)
    messages = conversation(line.prompt, system)
    return Request(tuple(tokenizer.encode_chat(messages)), line.params)


def answer_lines(
    generator: Generator,
    lines: Sequence[PromptLine],
    system: str | None,
    *,
    chat: bool,
    times: bool = False,
    done: Collection[int] = (),
) -> Iterator[dict[str, Any]]:
    """One result a line, each as soon as it is there; `error` in place of a text.

    Args:
        times: also how long each took; without, the same line has the same result in every run.
        done: indices of lines that were answered before: they are left out.
    """

    def result(index: int, answer: dict[str, Any]) -> dict[str, Any]:
        line = lines[index]
        own = {} if line.id is None else {"id": line.id}
        return {"index": index, "line": line.number, **own, **answer}

    requests: list[Request] = []
    owners: list[int] = []  # request -> line
    for index, line in enumerate(lines):
        if index in done:
            continue
        try:
            if line.error is not None:
                raise line.error
            requests.append(to_request(line, generator.tokenizer, system, chat=chat))
            owners.append(index)
        except MlaError as error:
            yield result(index, {"error": str(error)})
    for event in generator.events(requests):
        if isinstance(event, Completion):
            yield result(owners[event.index], event.as_dict(times=times))
        elif isinstance(event, Failure):
            yield result(owners[event.index], {"error": str(event.error)})


def in_order(answers: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results of all lines in their order, each as soon as it and all before it are there."""
    early: dict[int, dict[str, Any]] = {}
    following = 0
    for answer in answers:
        early[answer["index"]] = answer
        while following in early:
            yield early.pop(following)
            following += 1


def conversation(said: str | Messages, system: str | None) -> list[Mapping[str, Any]]:
    """Messages of a conversation that a user's text begins, or as given, with a system message unless it has one."""
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _line(number: int, raw: bytes, defaults: SamplingParams) -> PromptLine:
    entry: Any = None
    try:
        entry = _entry(raw)
        changes = {key: entry[key] for key in _PARAMS if key in entry}
        stop = changes.get("stop")
        if isinstance(stop, (str, list)):
            changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        params = dataclasses.replace(defaults, **changes)
        prompt = entry["prompt"] if "prompt" in entry else entry["messages"]
        return PromptLine(number, entry.get("id"), prompt, params)
    except MlaError as error:
        identity = entry.get("id") if isinstance(entry, dict) else None
        return PromptLine(number, identity, None, defaults, error)


def _entry(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(text_of_bytes(raw, None))
    except (ValueError, RecursionError) as error:
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(
            f"not valid JSON{place}", fix='write one JSON object on the line: {"prompt": "..."}'
        ) from error
    if not isinstance(entry, dict):
        raise InputError("not a JSON object", fix='write {"prompt": "..."}')
    for key in entry:
        if key not in _KEYS:
            nearest = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.6)
            raise InputError(
                f"unknown key '{key}'", fix=f"did you mean '{nearest[0]}'?" if nearest else f"known: {', '.join(_KEYS)}"
            )
    if ("prompt" in entry) == ("messages" in entry):
        raise InputError(
            "a line needs either 'prompt' or 'messages'", fix='write {"prompt": "..."} or {"messages": [...]}'
        )
    if "prompt" in entry and not isinstance(entry["prompt"], str):
        raise InputError("'prompt' is not a text", fix='write {"prompt": "..."}')
    messages = entry.get("messages")
    if "messages" in entry and not (isinstance(messages, list) and all(is_message(message) for message in messages)):
        raise InputError(
            "'messages' is not a list of objects with 'role' and 'content'",
            fix='write {"messages": [{"role": "user", "content": "..."}]}',
        )
    return entry
