"""The server from its start to its end: one thread computes, the loop speaks with clients, a signal ends both."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mla_cli.errors import MlaError
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.server.app import Service, create_app
from mla_cli.server.guard import Guard
from mla_cli.server.job import Failed
from mla_cli.server.limits import Limits, body_limit
from mla_cli.server.worker import Worker

READERS = 2


def serve(
    generator: Generator,
    sockets: list[socket.socket],
    *,
    model: str,
    defaults: SamplingParams,
    limits: Limits,
    api_key: str | None,
    local: bool,
    log: Callable[[str], None],
    metrics: Callable[[], tuple[bytes, str]] | None = None,
    started: Callable[[Callable[[], None]], None] = lambda _: None,
) -> None:
    """Answer requests until the process is told to end.

    Args:
        sockets: bound. model: the name that clients know it by. defaults: what a request does not say.
        local: see `Guard`. log: is told of faults, a line each.
        metrics: what `/metrics` answers now, and its content type.
        started: is called when clients may come, with a function that ends the server; any thread may call that.

    Raises:
        MlaError: the worker has broken.
    """
    limits = replace(limits, body=max(limits.body, body_limit(generator.context)))

    async def run() -> Worker:
        worker = Worker(generator, asyncio.get_running_loop(), queue=limits.queue, log=log)
        with ThreadPoolExecutor(READERS, thread_name_prefix="mla-reader") as readers:
            app = Guard(
                create_app(Service(worker, model, defaults, limits, readers, metrics)), api_key=api_key, local=local,
                header=limits.header, log=log,
            )  # fmt: skip
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what clients do wrong is no news
            config = uvicorn.Config(
                app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
                server_header=False, limit_concurrency=limits.connections, h11_max_incomplete_event_size=limits.header,
                timeout_graceful_shutdown=round(limits.drain_s) + 1,
            )  # fmt: skip
            worker.start()
            try:
                await Server(config, worker, limits, started).serve(sockets)
            finally:
                await asyncio.get_running_loop().run_in_executor(None, worker.stop)
        return worker

    if asyncio.run(run()).broken:
        raise MlaError("the server is broken: see above", fix="start it again, and report what it said")


class _Protocol(H11Protocol):
    """A connection that knows since when it has been waiting for its client."""

    waiting_since: float | None = None

    def check(self, now: float, limits: Limits) -> None:
        """End it where its client keeps it waiting: for a request, or in reading the end of an answer."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and not self.transport.is_closing():
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now
        elif now - self.waiting_since > limits.arrival_s:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, which also looks after silent connections, and tells clients when it ends."""

    def __init__(
        self, config: uvicorn.Config, worker: Worker, limits: Limits, started: Callable[[Callable[[], None]], None]
    ) -> None:
        super().__init__(config)
        self._worker, self._limits, self._say_started = worker, limits, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._say_started(self.stop)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal that is ignored stays so: a script's background job is not to end by Ctrl-C."""
        main = threading.current_thread() is threading.main_thread()
        ignored = [s for s in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(s) == signal.SIG_IGN]
        with super().capture_signals():
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            yield

    def stop(self) -> None:
        """End, as a signal would have it."""
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, _Protocol):
                    connection.check(now, self._limits)
        return await super().on_tick(counter) or self._worker.broken

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end for a while, then cancel them."""

        def give_up() -> None:
            self._worker.fail_all(Failed(503, "the server is shutting down", "shutting_down"))

        timer: Any = asyncio.get_running_loop().call_later(self._limits.drain_s, give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
