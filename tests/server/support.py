"""A server on a tiny model in a thread of the test, with what is inside it at hand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.server.address import bind, parse_address
from mla_cli.server.limits import Limits
from mla_cli.server.run import serve

MODEL = "tiny"


@dataclass
class Running:
    """A server. `faults` is what it has logged."""

    port: int
    generator: Generator
    stop: Callable[[], None]
    faults: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Send a body (bytes, or what is made JSON): status, JSON, headers."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, content, {"content-type": "application/json", **(headers or {})})

    def request(
        self, method: str, path: str, content: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text), {key.lower(): value for key, value in answer.getheaders()}
        finally:
            connection.close()

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, answer, _ = self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **more})
        assert status == 200, answer
        return answer

    def pages_in_use(self) -> int:
        """Pages that requests hold (those that are kept for others aside)."""
        return self.generator._pool.used - self.generator._pool.kept

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until nothing runs."""
        wait_until(lambda: self.pages_in_use() == 0, seconds)


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@contextmanager
def running(
    model: Path | Generator, *, limits: Limits | None = None, api_key: str | None = None, local: bool = True,
    defaults: SamplingParams | None = None, **engine: Any,
) -> Iterator[Running]:  # fmt: skip
    """A server on a model's folder, or on a generator, that has ended when the context is left."""
    generator = model if isinstance(model, Generator) else open_engine(str(model), **engine).generator
    place = bind(parse_address(":0"))
    found: list[Callable[[], None]] = []
    ready = threading.Event()
    faults: list[str] = []

    def started(stop: Callable[[], None]) -> None:
        found.append(stop)
        ready.set()

    def run(sockets: list[socket.socket]) -> None:
        try:
            serve(
                generator, sockets, model=MODEL, defaults=defaults or SamplingParams(), limits=limits or Limits(),
                api_key=api_key, local=local, log=faults.append, started=started,
            )  # fmt: skip
        except BaseException as failure:
            faults.append(repr(failure))

    port = place.getsockname()[1]
    thread = threading.Thread(target=run, args=([place],))
    thread.start()
    assert ready.wait(60), faults
    try:
        yield Running(port, generator, found[0], faults)
    finally:
        found[0]()
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
