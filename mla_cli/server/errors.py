"""Refusals in the form of OpenAI's API: a status, and an object that says what is wrong with which parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_SHOWN = 200  # characters of what a client sent that are said back to it

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP; message: what is wrong, for the client; param: the parameter that it is about; code: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that says it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A parameter that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def shown(value: object) -> str:
    """What a client sent, as it is said back to it: short."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
