"""What every request passes before any route: whom it is for, who sends it, and that no fault ends in silence."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from secrets import token_hex

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_cli.errors import internal_error
from mla_cli.server.errors import ApiError

OPEN_PATHS = ("/health",)  # for those who watch over the server, without a key


class Guard:
    """An application behind its checks.

    Args:
        api_key: that a client must have; None: any may come.
        local: requests must be for this machine by name. A page in a browser can reach the server under a name of its own.
        header: most bytes of it. log: is told of faults, a line each.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, local: bool, header: int, log: Callable[[str], None]
    ) -> None:
        self._app, self._local, self._header, self._log = app, local, header, log
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, watched)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as failure:
            name = token_hex(12)
            self._log(f"fault {name}: {internal_error(failure)}")
            if not begun:
                refusal = ApiError(500, f"internal error (fault {name})", code="internal_error")
                await JSONResponse(refusal.body(), 500)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        # What comes in one packet can be longer than what the parser lets wait.
        if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > self._header:
            raise ApiError(431, f"the header is longer than {self._header:,} bytes", headers={"connection": "close"})
        headers = Headers(scope=scope)
        if self._local and not _is_local(headers.get("host")):
            raise ApiError(403, "this server answers requests for localhost only", code="host_not_allowed")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared in a time that does not tell how much of it is right.
        right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key)
        if scheme.lower() != "bearer" or not right:
            close = {"www-authenticate": "Bearer", "connection": "close"}
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=close)


def _is_local(host: str | None) -> bool:
    if host is None:  # no browser
        return True
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
