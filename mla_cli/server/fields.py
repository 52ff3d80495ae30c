"""The JSON object of a request: read whole, then taken apart field by field, each of the type it must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mla_cli.server.errors import ApiError, invalid, shown

_KINDS: dict[str, tuple[type, ...]] = {
    "a boolean": (bool,),
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "an array": (list,),
    "an object": (dict,),
}


def read_object(body: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        ApiError: it is not UTF-8, not JSON, no object, or holds text that is not Unicode.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not valid UTF-8 at byte {error.start}") from error
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise invalid(None, f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
        raise invalid(None, f"the body is not valid JSON: {why}") from error
    if not isinstance(value, dict):
        raise invalid(None, "the body is not a JSON object")
    _check_text(value)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _check_text(value: dict[str, Any]) -> None:
    """Refuse lone surrogates, by the path to them."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, found = waiting.pop()
        if isinstance(found, dict):
            for key, inner in found.items():
                if not _is_unicode(key):
                    raise invalid(path or None, "the name of a field holds a lone surrogate")
                waiting.append((f"{path}.{key}" if path else key, inner))
        elif isinstance(found, list):
            waiting += [(f"{path}[{place}]", inner) for place, inner in enumerate(found)]
        elif isinstance(found, str) and not _is_unicode(found):
            raise invalid(path[:200], f"{path[:200]} is not valid Unicode: it holds a lone surrogate")


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """The fields of an object, each taken once; `null` is as if it were not there.

    Args:
        path: of the object in the request, for messages.
    """

    def __init__(self, value: Mapping[str, Any], path: str = "") -> None:
        self._value, self._path = value, path
        self._left = set(value)

    def name(self, field: str) -> str:
        """How a field is called in messages."""
        return f"{self._path}.{field}" if self._path else field

    def take(self, field: str, kind: str | None = None, *, required: bool = False) -> Any:
        """A field's value, of a kind (a key of the table above); None where it is absent.

        Raises:
            ApiError: it has another type, or is absent and required.
        """
        self._left.discard(field)
        value = self._value.get(field)
        if value is None:
            if required:
                raise invalid(self.name(field), f"the parameter '{self.name(field)}' is required")
            return None
        if kind is not None:
            check_kind(self.name(field), value, kind)
        return value

    def ignore(self, *fields: str) -> None:
        """Fields that change no answer, whatever they say."""
        self._left.difference_update(fields)

    def refuse_but(self, field: str, *allowed: object) -> None:
        """A field that asks for what does not exist here, unless it says one of the values that ask for nothing.

        Raises:
            ApiError: it says something else.
        """
        value = self.take(field)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise invalid(
                self.name(field), f"the parameter '{self.name(field)}' is not supported", code="unsupported_parameter"
            )

    def refuse_rest(self) -> None:
        """Refuse fields that nobody took.

        Raises:
            ApiError: there are some; it names the first.
        """
        if self._left:
            name = self.name(min(self._left))[:200]
            raise ApiError(400, f"the parameter '{name}' is unknown", param=name, code="unknown_parameter")


def check_kind(name: str, value: Any, kind: str) -> None:
    """Refuse a value of another JSON type."""
    wanted = _KINDS[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise invalid(name, f"'{name}' must be {kind}, not {shown(value)}")
