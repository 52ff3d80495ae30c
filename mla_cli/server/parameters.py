"""What a request asks for: its body's fields checked one by one, and refused by name where they ask for what is not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Any

from mla_cli.errors import UsageError
from mla_cli.runtime.sampling_params import SEED_LIMIT, SamplingParams
from mla_cli.server.errors import ApiError, invalid, shown
from mla_cli.server.fields import Fields, check_kind

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1000
MOST_TOP_LOGPROBS = {"chat": 20, "completions": 5}  # of OpenAI's API
ROLES = ("system", "developer", "user", "assistant")

# They change no answer here: who asks, what it is filed under, how it is billed or sent.
_IGNORED = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip
# What is not here -> values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "logit_bias": ({},), "store": (False,),
}  # fmt: skip
_UNSUPPORTED_CHAT: dict[str, tuple[object, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": ("none",), "verbosity": (), "web_search_options": (), "moderation": (),
}  # fmt: skip
_UNSUPPORTED_COMPLETIONS: dict[str, tuple[object, ...]] = {"suffix": ("",), "echo": (False,)}

Message = Mapping[str, str]


@dataclass(frozen=True)
class Call:
    """One request, checked.

    Attributes:
        kind: `chat` or `completions`.
        messages: of a conversation; prompts: texts or token ids to continue; one of the two is empty.
        choices: answers to each prompt.
        asked: tokens that the client asked for at the most; None: it left that to the server.
        logprobs: see `Request`.
        stream: pieces as they come; usage: the stream ends with the number of tokens.
    """

    kind: str
    messages: tuple[Message, ...]
    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    choices: int
    asked: int | None
    logprobs: int | None
    stream: bool
    usage: bool

    def seeds(self) -> list[SamplingParams]:
        """The parameters of each choice: the first has the seed that was asked for, the others the ones that follow."""
        first = self.params.seed
        return [dataclasses.replace(self.params, seed=(first + i) % SEED_LIMIT) for i in range(self.choices)]


def parse_call(kind: str, body: Mapping[str, Any], defaults: SamplingParams, model: str, most_answers: int) -> Call:
    """The request that a body makes.

    Args:
        defaults: what a request does not say; a seed that it does not say is drawn.
        model: the one that is served. most_answers: prompts times `n`.

    Raises:
        ApiError: a field is missing, wrong, unknown or unsupported; it is named.
    """
    fields = Fields(body)
    named = fields.take("model", "a string", required=True)
    if named != model:
        raise ApiError(404, f"there is no model {shown(named)} here", param="model", code="model_not_found")
    fields.ignore(*_IGNORED)
    unsupported = _UNSUPPORTED_CHAT if kind == "chat" else _UNSUPPORTED_COMPLETIONS
    for field, allowed in {**_UNSUPPORTED, **unsupported}.items():
        fields.refuse_but(field, *allowed)
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    if kind == "chat":
        messages = _messages(fields.take("messages", "an array", required=True))
        logprobs = _chat_logprobs(fields)
    else:
        prompts = _prompts(fields.take("prompt", required=True))
        logprobs = _count(fields, "logprobs", 0, MOST_TOP_LOGPROBS[kind])
    choices = _count(fields, "n", 1, most_answers) or 1
    if kind == "completions":
        fields.refuse_but("best_of", choices)
    if choices * max(1, len(prompts)) > most_answers:
        raise invalid("n", f"{len(prompts)} prompts times n={choices} are over {most_answers} answers to one request")
    stream = bool(fields.take("stream", "a boolean"))
    usage = _usage(fields, stream)
    asked, params = _sampling(fields, kind, defaults)
    fields.refuse_rest()
    return Call(kind, messages, prompts, params, choices, asked, logprobs, stream, usage)


def _count(fields: Fields, field: str, least: int, most: int) -> int | None:
    value = fields.take(field, "an integer")
    if value is not None and not least <= value <= most:
        raise invalid(fields.name(field), f"'{fields.name(field)}' must be from {least} to {most}, not {shown(value)}")
    return value


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.take("logprobs", "a boolean")
    top = _count(fields, "top_logprobs", 0, MOST_TOP_LOGPROBS["chat"])
    if top and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")
    return (top or 0) if wanted else None


def _usage(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options", "an object")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "'stream_options' needs 'stream' to be true")
    inner = Fields(options, "stream_options")
    usage = bool(inner.take("include_usage", "a boolean"))
    inner.refuse_but("include_obfuscation", False)
    inner.refuse_rest()
    return usage


def _sampling(fields: Fields, kind: str, defaults: SamplingParams) -> tuple[int | None, SamplingParams]:
    """Most tokens that were asked for, and the parameters."""
    names = {"max_tokens": "max_new_tokens"}
    changes: dict[str, Any] = {"seed": randbits(63)}
    asked = fields.take("max_tokens", "an integer")
    if kind == "chat":
        other = fields.take("max_completion_tokens", "an integer")
        if asked is not None and other is not None and asked != other:
            raise invalid("max_completion_tokens", "'max_tokens' and 'max_completion_tokens' say different numbers")
        if other is not None:
            asked, names = other, {"max_completion_tokens": "max_new_tokens"}
    if asked is not None:
        changes["max_new_tokens"] = asked
    for field, type_name in (
        ("temperature", "a number"), ("top_p", "a number"), ("seed", "an integer"),
        ("top_k", "an integer"), ("min_p", "a number"), ("repetition_penalty", "a number"), ("ignore_eos", "a boolean"),
    ):  # fmt: skip
        value = fields.take(field, type_name)
        if value is not None:
            changes[field] = value
    stop = fields.take("stop")
    if stop is not None:
        changes["stop"] = _stops(stop)
    try:
        return asked, dataclasses.replace(defaults, **changes)
    except UsageError as error:
        own = str(error.where).removeprefix("--").replace("-", "_")
        name = next((api for api, ours in names.items() if ours == own), own)
        raise invalid(name, f"'{name}' cannot be {shown(changes.get(own))}: {error.fix}") from error


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", f"'stop' must be a string or an array of strings, not {shown(value)}")
    if len(stops) > MOST_STOPS or any(not 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in stops):
        raise invalid("stop", f"'stop' may be up to {MOST_STOPS} texts of 1 to {MOST_STOP_CHARACTERS} characters")
    return tuple(stops)


def _messages(value: Sequence[Any]) -> tuple[Message, ...]:
    if not value:
        raise invalid("messages", "'messages' must hold at least one message")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(value))


def _message(value: Any, path: str) -> Message:
    check_kind(path, value, "an object")
    fields = Fields(value, path)
    role = fields.take("role", "a string", required=True)
    if role not in ROLES:
        raise invalid(f"{path}.role", f"'{path}.role' must be one of {', '.join(ROLES)}, not {shown(role)}")
    content = _content(fields.take("content", required=True), f"{path}.content")
    name = fields.take("name", "a string")
    for field in ("tool_calls", "function_call", "audio", "refusal", "annotations", "tool_call_id"):
        fields.refuse_but(field, [])
    fields.refuse_rest()
    # OpenAI's later word for it; templates of open models know the first one only.
    message = {"role": "system" if role == "developer" else role, "content": content}
    return message if name is None else {**message, "name": name}


def _content(value: Any, path: str) -> str:
    """The text of a message, whose parts are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(path, f"'{path}' must be a string or an array of parts, not {shown(value)}")
    texts = []
    for place, part in enumerate(value):
        name = f"{path}[{place}]"
        check_kind(name, part, "an object")
        fields = Fields(part, name)
        kind = fields.take("type", "a string", required=True)
        if kind != "text":
            raise invalid(f"{name}.type", f"'{name}.type' must be 'text': {shown(kind)} is not supported")
        texts.append(fields.take("text", "a string", required=True))
        fields.refuse_rest()
    return "\n".join(texts)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One text, several, the token ids of one prompt, or those of several."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise invalid(
            "prompt", "'prompt' must be a string, or an array of strings, of token ids, or of arrays of those"
        )
    if all(_is_id(one) for one in value):
        return (tuple(value),)
    found: list[str | tuple[int, ...]] = []
    for place, one in enumerate(value):
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, list) and one and all(_is_id(token) for token in one):
            found.append(tuple(one))
        else:
            raise invalid(f"prompt[{place}]", f"'prompt[{place}]' is neither a string nor an array of token ids")
    return tuple(found)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
