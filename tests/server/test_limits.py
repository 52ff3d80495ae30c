"""What clients may not do, and what becomes of the others meanwhile: clients that leave, stall, flood, or are not let in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime.generator import Generator
from mla_cli.server.limits import Limits
from tests.runtime.stand_ins import EOS, VOCAB, ScriptedDecoder, save_byte_tokenizer
from tests.server.support import MODEL, Running, running, wait_until

IMPATIENT = Limits(arrival_s=2.0, stall_s=1.0, pending=50)
CHAT = {"model": MODEL, "max_tokens": 4000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), config={"eos_token_id": EOS})


def scripted(tokenizer: Tokenizer, say: Callable[[list[int]], Any], **more: Any) -> Generator:
    decoder: Any = ScriptedDecoder(say, positions=8192)
    return Generator(decoder, tokenizer, **more)


def slowly(seconds: float = 0.005) -> Callable[[list[int]], int]:
    """Says the same letter for ever, so many seconds a token."""

    def say(tokens: list[int]) -> int:
        time.sleep(seconds)
        return 70

    return say


def begin(server: Running, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request has been sent."""
    found = socket.socket()
    if receive_buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    found.settimeout(60)
    found.connect(("127.0.0.1", server.port))
    content = json.dumps(body).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    found.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return found


def read_until(connection: socket.socket, found: bytes) -> bytes:
    """What comes up to some bytes; all of it if they never come."""
    content = b""
    while found not in content:
        part = connection.recv(65536)
        if not part:
            break
        content += part
    return content


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_its_pages_back(tokenizer: Tokenizer, stream: bool) -> None:
    with running(scripted(tokenizer, slowly(), max_batch=2)) as server:
        clients = [begin(server, {**LONG, "stream": stream, "n": 2}) for _ in range(3)]  # two run, four wait
        wait_until(lambda: server.pages_in_use() > 0)
        for client in clients:
            client.close()
        server.wait_idle()
        assert server.complete("hello", max_tokens=3)["choices"][0]["text"] != ""
        assert server.faults == []


def test_a_client_that_does_not_read_blocks_nobody_and_is_dropped(tokenizer: Tokenizer) -> None:
    with running(scripted(tokenizer, slowly(0.001)), limits=IMPATIENT) as server:
        said = [{"role": "user", "content": "hello"}]
        stalled = begin(server, {**CHAT, "messages": said, "stream": True, "n": 4}, receive_buffer=2048)
        wait_until(lambda: server.pages_in_use() > 0)
        assert server.complete("hello", max_tokens=50)["usage"]["completion_tokens"] == 50
        server.wait_idle()
        assert server.complete("hello", max_tokens=2)["usage"]["completion_tokens"] == 2
        heard = b""
        with contextlib.suppress(ConnectionResetError):  # after what is on its way, the end
            heard = read_until(stalled, b"[DONE]")
        assert b"[DONE]" not in heard
        assert b"client_too_slow" in heard or not heard.endswith(b"0\r\n\r\n"), "the answer must not look whole"
        assert server.faults == []


def test_what_is_over_the_queue_is_told_when_to_come_again(tokenizer: Tokenizer) -> None:
    with running(scripted(tokenizer, slowly(), max_batch=1), limits=Limits(queue=2)) as server:
        clients = [begin(server, {**LONG, "stream": True}) for _ in range(3)]
        for client in clients:
            read_until(client, b"200 OK")
        status, answer, headers = server.post("/v1/completions", LONG)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60
        clients[2].close()
        wait_until(lambda: server.post("/v1/completions", {**LONG, "max_tokens": 0})[0] == 400)  # there is room
        status, answer, _ = server.post("/v1/completions", {**LONG, "n": 2})
        assert status == 429, "two are more than the one that there is room for"
        status, answer, _ = server.post("/v1/completions", {**LONG, "n": 4})
        assert (status, answer["error"]["param"]) == (400, "n"), "there will never be room for so many"
        for client in clients[:2]:
            client.close()
        wait_until(lambda: server.post("/v1/completions", {**LONG, "n": 3, "max_tokens": 2})[0] == 200)


def test_an_answer_has_so_much_time(tokenizer: Tokenizer) -> None:
    with running(scripted(tokenizer, slowly()), limits=Limits(seconds=0.5)) as server:
        status, answer, _ = server.post("/v1/completions", LONG)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert "0.5" in answer["error"]["message"]
        heard = read_until(begin(server, {**LONG, "stream": True}), b'"timeout"')
        assert b"200 OK" in heard
        assert b"0.5 seconds" in heard
        server.wait_idle()


def test_a_long_silence_is_filled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_cli.server.stream.PATIENCE", 0.1)
    with running(scripted(tokenizer, slowly(), max_batch=1)) as server:
        first = begin(server, {**LONG, "stream": True})
        read_until(first, b"data: ")
        second = begin(server, {**LONG, "max_tokens": 2, "stream": True})
        read_until(second, b": still waiting\n\n")
        first.close()
        assert b"data: [DONE]" in read_until(second, b"[DONE]")


def test_broken_scores_fail_their_own_request(tokenizer: Tokenizer) -> None:
    """A fault of the model is a 500 with a name that the log has, too."""

    def say(tokens: list[int]) -> Any:
        return torch.full((VOCAB,), torch.nan) if 9 in tokens else 70

    with running(scripted(tokenizer, say)) as server:
        good = server.complete("hello", max_tokens=5)
        status, answer, headers = server.post("/v1/completions", {"model": MODEL, "prompt": [5, 9], "n": 2})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "NaN" in answer["error"]["message"]
        name = headers["x-request-id"]
        assert name in answer["error"]["message"]
        assert any(name in fault and "\n" not in fault for fault in server.faults)
        assert server.complete("hello", max_tokens=5)["choices"] == good["choices"]
        server.wait_idle()


def test_a_fault_of_ours_is_one_line_and_the_server_goes_on(tokenizer: Tokenizer) -> None:
    def say(tokens: list[int]) -> int:
        if 9 in tokens:
            raise RuntimeError("a secret\nof two lines")
        return 70

    with running(scripted(tokenizer, say)) as server:
        status, answer, _ = server.post("/v1/completions", {"model": MODEL, "prompt": [5, 9]})
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(answer)
        assert "Traceback" not in json.dumps(answer)
        assert len(server.faults) == 1
        assert "\n" not in server.faults[0]
        assert server.complete("hello", max_tokens=2)["usage"]["completion_tokens"] == 2
        server.wait_idle()


def test_a_server_that_is_broken_says_so_and_ends(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def say(tokens: list[int]) -> int:
        raise RuntimeError("broken")

    generator = scripted(tokenizer, say)
    with running(generator) as server:
        monkeypatch.setattr(generator._pool, "release", None)  # what was held cannot be given back
        status, answer, _ = server.post("/v1/completions", LONG)
        assert (status, answer["error"]["code"]) == (503, "broken")
        wait_until(lambda: any("MlaError" in fault for fault in server.faults))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_has_a_largest_size(server: Running, chunked: bool) -> None:
    content = json.dumps({"model": MODEL, "prompt": "x" * 2_000_000}).encode()
    parts: Any = (content[i : i + 65536] for i in range(0, len(content), 65536)) if chunked else content
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", "/v1/completions", parts, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 413
    assert b"1,048,576" in answer.read()
    connection.close()


def test_a_large_body_within_the_limit_is_read(server: Running) -> None:
    status, answer, _ = server.post("/v1/completions", {"model": MODEL, "prompt": "x" * 1_000_000})
    assert status == 400
    assert "1000001 tokens" in answer["error"]["message"]
    assert "1024" in answer["error"]["message"]


@pytest.mark.parametrize("headers", [b"x: " + b"y" * 100_000, b"\r\n".join(b"x%d: y" % i for i in range(5000))])
@pytest.mark.parametrize("at_once", [True, False])
def test_headers_have_a_largest_size(server: Running, headers: bytes, at_once: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be refused before all is sent
            for start in range(0, len(headers), size := 1_000_000 if at_once else 10_000):
                connection.sendall(headers[start : start + size])
                time.sleep(0.01)
            connection.sendall(b"\r\n\r\n")
        status = connection.recv(1000).split(b"\r\n")[0]
    assert status in (b"HTTP/1.1 400 Bad Request", b"HTTP/1.1 431 Request Header Fields Too Large")


def test_a_request_must_arrive(tokenizer: Tokenizer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    body = b'content-type: application/json\r\ncontent-length: 99\r\n\r\n{"model":'
    with running(scripted(tokenizer, slowly()), limits=IMPATIENT) as server:
        for sent, expected in ((b"", b""), (head, b""), (head + body, b"408 ")):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(sent)
                try:
                    heard = connection.recv(1000)
                except ConnectionResetError:
                    heard = b""
                assert expected in heard
                assert bool(expected) == bool(heard)
        assert server.complete("hello", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_key_is_wanted(model: Path) -> None:
    with running(model, api_key="sesame", local=False) as server:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
        for given in (None, "sesame", "Bearer", "Bearer sesam", "Bearer sesame2", "Basic sesame", "Bearer \xfe\xff"):
            status, answer, headers = server.post("/v1/completions", body, {"authorization": given} if given else {})
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
            assert "sesame" not in json.dumps(answer)
        assert server.request("GET", "/v1/models")[0] == 401
        assert server.request("GET", "/health")[0] == 200
        assert server.post("/v1/completions", body, {"authorization": "bearer sesame"})[0] == 200
        import openai

        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url, api_key="open", max_retries=0).models.list()
        assert openai.OpenAI(base_url=server.url, api_key="sesame").models.list().data


def test_pages_of_browsers_are_kept_out(server: Running) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    for host in ("evil.example", "localhost.evil.example:80", "1.2.3.4", "[::2]:80", "", "127.0.0.1.evil.example"):
        assert server.post("/v1/completions", body, {"host": host})[0] == 403
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:80", "127.1.2.3"):
        assert server.post("/v1/completions", body, {"host": host})[0] == 200
    simple = {"content-type": "text/plain", "origin": "http://evil.example"}  # sent without a question before
    status, _, headers = server.post("/v1/completions", body, simple)
    assert status == 415
    status, _, more = server.request("OPTIONS", "/v1/completions", None, {"origin": "http://evil.example"})
    assert status == 405
    assert not any(name.startswith("access-control") for name in [*headers, *more])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("GET", "/v1/../../etc/passwd", 404), ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/v1/models/%2e%2e%2f", 404), ("GET", "/v1/completions", 405), ("PUT", "/v1/models", 405),
        ("POST", "/v1/completions/", 404), ("GET", "/docs", 404), ("GET", "/v1/files", 404),
    ],
)  # fmt: skip
def test_other_paths_and_methods(server: Running, method: str, path: str, status: int) -> None:
    found, answer, _ = server.request(method, path)
    assert found == status
    assert answer["error"]["type"] == "invalid_request_error"


def test_requests_that_come_together_are_each_answered_as_alone(model: Path, server: Running) -> None:
    """Two hundred streams at a time, and nothing lost."""
    import openai

    count = 200
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)
    prompts = [f"number {i}" for i in range(count)]
    asked = [{"model": MODEL, "max_tokens": 10 + i % 20, "temperature": float(i % 2), "seed": i} for i in range(count)]

    async def one(i: int) -> tuple[str, int]:
        text, tokens = "", 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.completions.create(prompt=prompts[i], **asked[i], **options):  # type: ignore
            text += "".join(choice.text for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    async def all_of_them() -> list[tuple[str, int]]:
        async with client:
            return await asyncio.gather(*(one(i) for i in range(count)))

    found = asyncio.run(all_of_them())
    for i in range(0, count, 9):
        alone = server.complete(prompts[i], **{k: v for k, v in asked[i].items() if k != "model"})
        assert found[i] == (alone["choices"][0]["text"], alone["usage"]["completion_tokens"])
    assert all(tokens > 0 for _, tokens in found)
    server.wait_idle()


def test_threads_of_clients_that_come_and_go(tokenizer: Tokenizer) -> None:
    """Clients that leave at any moment, beside others that stay: those are all answered, and no page is lost."""
    with running(scripted(tokenizer, slowly(0.0005), max_batch=4, pool_tokens=8192)) as server:
        answers: list[int] = []

        def stay() -> None:
            answers.append(server.complete("hello", max_tokens=30)["usage"]["completion_tokens"])

        def leave(delay: float) -> None:
            client = begin(server, {**LONG, "stream": delay > 0.05})
            time.sleep(delay)
            client.close()

        threads = [threading.Thread(target=stay) for _ in range(20)]
        threads += [threading.Thread(target=leave, args=(i * 0.004,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [30] * 20
        server.wait_idle()
        assert server.faults == []
