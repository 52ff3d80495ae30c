"""An answer as it comes: server-sent events, until it is whole, the client has gone, or has stopped to read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mla_cli.server.answers import Shapes
from mla_cli.server.errors import ApiError
from mla_cli.server.limits import Limits
from mla_cli.server.reading import Answer, until_gone

PATIENCE = 15.0  # seconds of silence after which a comment is sent, for proxies that cut silent connections


class EventStream(Response):
    """The chunks of an answer."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, shapes: Shapes, limits: Limits) -> None:
        super().__init__(headers={**answer.headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer, self._shapes, self._stall_s = answer, shapes, limits.stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until there is no more, or nobody who reads."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._answer.cancel()
            writing.cancel()
            leaving.cancel()

    async def _write(self, send: Send) -> None:
        async def put(message: Message) -> None:
            await asyncio.wait_for(send(message), self._stall_s)

        async def events(chunks: Sequence[dict[str, Any]]) -> None:
            if chunks:
                # ASCII: some readers take Unicode's line separators for ends of lines.
                content = "".join(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n" for chunk in chunks)
                await put(_body(content))

        answer, shapes = self._answer, self._shapes
        try:
            await put({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await events(shapes.begin())
            try:
                while not answer.done:
                    parts = await answer.next(PATIENCE)
                    if parts or answer.done:
                        await events(shapes.chunks(parts))
                    else:
                        await put(_body(": still waiting\n\n"))
                await events(shapes.end(answer.choices, answer.job.prompt_tokens))
                await put(_body("data: [DONE]\n\n", more=False))
            except ApiError as error:  # the status has been sent: the error is an event, and the last one
                await events([error.body()])
                await put(_body("", more=False))
        except asyncio.TimeoutError:
            # The client has not read for long. The connection is closed by who sees an answer without an end.
            return


def _body(content: str, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content.encode(), "more_body": more}
