"""Chat templates: untrusted Jinja programs that come with a model, found in its folder and run in a sandbox."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mla_cli.errors import InputError

SECONDS = 5.0  # a template of real models takes milliseconds
MAX_CHARACTERS = 8_000_000  # some million tokens: more than any context
MAX_PRODUCT = 1_000_000_000
_WIDE_FORMAT = re.compile(r"\d{7}|:[^}]*\{|%[^a-zA-Z%]*\*")  # a field's width of many digits, or taken from an argument


class _RefusedError(BaseException):
    """A template asked for too much. Not an Exception, because Jinja's own code swallows some of those."""


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The default chat template of a model folder: `chat_template.jinja`, then the configuration, then the old JSON.

    Raises:
        InputError: a template file cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    template = _default(tokenizer_config.get("chat_template"))
    old = folder / "chat_template.json"
    if template is None and old.is_file():
        try:
            content = json.loads(_read(old))
        except ValueError as error:
            raise InputError(f"{old.name} is not valid JSON", where=old, fix="restore the original file") from error
        template = _default(content.get("chat_template") if isinstance(content, dict) else None)
    return template


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    where: object,
) -> str:
    """Run a template over a conversation as transformers does.

    Raises:
        InputError: the messages are malformed, or the template fails, refuses them, or asks for too much.
    """
    chat = [_message(message, i) for i, message in enumerate(messages)]
    if not chat:
        raise InputError("the conversation is empty", fix="give at least one message with 'role' and 'content'")
    variables: dict[str, Any] = {
        **special_tokens,
        "messages": chat,
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        program = _compiled(template)
        with _watched(SECONDS):
            parts, size = [], 0
            for part in program.generate(variables):
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise _RefusedError(f"it writes more than {MAX_CHARACTERS:,} characters")
                parts.append(part)
            return "".join(parts)
    # A template is a program by somebody else: it can raise anything, and nothing it raises is a fault of ours.
    except (Exception, _RefusedError) as error:
        reason = str(error) or type(error).__name__
        raise InputError(
            f"the chat template fails: {reason[:500]}", where=where, fix="check the messages, or give a plain prompt"
        ) from error


def _default(template: Any) -> str | None:
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default") or (next(iter(template.values())) if len(template) == 1 else None)
    return template if isinstance(template, str) and template else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(f"cannot read {path.name}: {why}", where=path, fix="restore the original file") from error


def _message(message: Any, i: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"message {i} must be an object with 'role' and 'content'",
            where=f"messages[{i}]",
            fix="give every message a 'role' and a 'content' of plain text",
        )
    # Keys with null are dropped: templates write "None" for them, but handle a missing key. Through JSON the
    # template sees plain data only, never an object with methods that the sandbox does not know.
    try:
        plain = json.loads(json.dumps({key: value for key, value in message.items() if value is not None}))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"message {i} holds something that is not JSON: {error}",
            where=f"messages[{i}]",
            fix="give every message a 'role' and a 'content' of plain text",
        ) from error
    assert isinstance(plain, dict)
    return plain


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses single operations that take all memory: no line ends during those."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, (int, float)) and _digits(left) * abs(right) <= 10_000):
            raise _RefusedError("it raises to a large power")
        if operator == "%":
            _check_format(left)
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_CHARACTERS:
                raise _RefusedError("it repeats a value too often")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # str.format comes wrapped by the sandbox.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            if getattr(function, "__name__", "") in ("format", "format_map"):
                _check_format(owner)
            _check_sizes(owner, *args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)


def _digits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise _RefusedError("it formats to an excessive width")


def _check_sizes(*values: Any) -> None:
    """Refuse arguments whose result could be huge: a width, or what is replaced or joined times what it is put in."""
    lengths = sorted(len(value) for value in values if isinstance(value, (str, list, tuple)))
    if any(isinstance(value, int) and value > MAX_CHARACTERS for value in values):
        raise _RefusedError("it asks for an excessive width")
    if len(lengths) > 1 and lengths[-1] * lengths[-2] > MAX_PRODUCT:
        raise _RefusedError("it builds up too long a value")


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_sizes(*args, *kwargs.values())
        return function(*args, **kwargs)

    return checked


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return str(value) % (kwargs or args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without the underscored names that lead into Python, and without unbounded text."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        if isinstance(value, (str, list)) and len(value) > MAX_CHARACTERS:
            raise _RefusedError("it builds up too long a value")
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    # Not optimized: the optimizer runs constant expressions while it compiles, where nothing watches them.
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters.update({name: _guarded(function) for name, function in environment.filters.items()})
    environment.filters["tojson"] = _tojson
    environment.filters["format"] = _format
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt does not want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Stop Python code that runs too long or builds up too long a text, by looking at each line it executes.

    Jinja bounds one `range`, but not loops in loops, nor text that doubles in each call of a macro. Neither a signal
    (main thread and Unix only) nor a thread can stop them; a trace function can.
    """
    deadline = time.monotonic() + seconds

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if time.monotonic() > deadline:
            raise _RefusedError(f"it runs longer than {seconds:g} seconds")
        if event == "line" and frame.f_code.co_filename == "<template>":
            for value in frame.f_locals.values():
                if type(value) in (str, list) and len(value) > MAX_CHARACTERS:
                    raise _RefusedError("it builds up too long a value")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
