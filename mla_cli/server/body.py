"""The body of a request, read as far as it may go."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from mla_cli.server.errors import ApiError
from mla_cli.server.limits import Limits

_CLOSE = {"connection": "close"}  # what a client still sends is not read


async def read_body(request: Request, limits: Limits) -> bytes:
    """The bytes of a JSON body.

    Raises:
        ApiError: it is none (415), too large (413), or does not arrive (408).
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps web pages out: what they may send without asking first is of other types.
        raise ApiError(415, "the content type must be application/json", headers=_CLOSE)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "encoded bodies are not supported: send it without content-encoding", headers=_CLOSE)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.body:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_read(request, limits), limits.arrival_s)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not arrive in {limits.arrival_s:g} seconds", headers=_CLOSE) from error


async def _read(request: Request, limits: Limits) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limits.body:
            raise _too_large(limits)
        parts.append(part)
    return b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body:,} bytes", code="body_too_large", headers=_CLOSE)
