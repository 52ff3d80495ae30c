"""Send malformed and hostile requests to a server of `mla generate --serve`, and see that it refuses each with a reason.

    python scripts/fuzz_server.py                          # 10,000 requests to a tiny random model, served by this script
    python scripts/fuzz_server.py --url http://127.0.0.1:8000 --model out --requests 2000

Every request must be answered (2xx), refused (4xx, with an object that says why), or, where it is no HTTP, end with its
connection. A 5xx, a hang, a changed answer afterwards, a fault in the log, or the server's end is a failure (exit code 1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PATIENCE_S = 60.0
TEXTS = (
    "", "hello", "\x00", "\ud800", "a\udfffb", "\u2028\u2029", "🙂" * 50, "<s></s><pad>", "{{ 7*7 }}", "{% for x in y %}",
    "../../etc/passwd", "%s%s%n", "x" * 3000, "\r\n\r\ndata: [DONE]\r\n", "'; drop table", "\x1b[31m", "e\u0301" * 99,
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 1.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(10**400), True, False,
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "n", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "presence_penalty", "logit_bias", "tools", "echo",
    "repetition_penalty", "ignore_eos", "suffix", "best_of", "user", "response_format", "functions", "chat_template",
    "__class__", "", "store", "metadata",
)  # fmt: skip


@dataclass
class Outcome:
    """What came of the requests: how many of each status (0: the connection ended), and what must not happen."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def fuzz(host: str, port: int, model: str, count: int, *, seed: int = 0, threads: int = 8) -> Outcome:
    """Send so many requests, some at a time; the same ones for the same seed."""
    outcome, lock = Outcome(), threading.Lock()

    def work(first: int) -> None:
        for number in range(first, count, threads):
            chance = random.Random(f"{seed}/{number}")
            make = chance.choice(MAKERS)
            content, closes = make(chance, model)
            try:
                status, failure = exchange(host, port, content, closes, chance)
            except (OSError, ValueError) as error:
                status, failure = -1, repr(error)
            with lock:
                outcome.statuses[status] += 1
                if failure:
                    outcome.failures.append(f"request {number} ({make.__name__}): {failure}; sent {content[:300]!r}")

    workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcome


def exchange(host: str, port: int, content: bytes, closes: bool, chance: random.Random) -> tuple[int, str | None]:
    """The status of the answer to some bytes, and what is wrong with it.

    Args:
        closes: send no more and say so, as a client that has gone half-way.
    """
    with socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        try:
            for start in range(0, len(content), step := chance.choice((1 << 20, 4096, 700))):
                connection.sendall(content[start : start + step])
            if closes:
                connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            # It has heard enough, and has ended the connection.
        if chance.random() < 0.03:
            return 0, None  # gone before the answer
        return judge(read_answer(connection))


def read_answer(connection: socket.socket) -> bytes:
    """What the server sends, as far as one answer goes."""
    heard = b""
    try:
        while part := connection.recv(65536):
            heard += part
            head, found, body = heard.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if found and lengths and len(body) >= (size := int(lengths[0].split(b":")[1])):
                return head + found + body[:size]
            if found and not lengths and body.endswith(b"0\r\n\r\n"):
                break
    except (ConnectionResetError, BrokenPipeError):
        pass
    return heard


def judge(heard: bytes) -> tuple[int, str | None]:
    """The status of an answer, and what is wrong with it."""
    if not heard:
        return 0, None
    head, _, body = heard.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if status >= 500:
        return status, f"status {status}: {body[:300]!r}"
    if b"Traceback" in heard or b'File "' in heard or b".py" in body:
        return status, f"it shows its inside: {body[:300]!r}"
    if status >= 400 and body and body != b"Invalid HTTP request received.":
        error = json.loads(body)["error"]
        if not (isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)):
            return status, f"it gives no reason: {body[:300]!r}"
        if len(error["message"]) > 1000:
            return status, "it says back too much"
    return status, None


# Each makes the bytes of a request, and whether the client then closes its side.


def wrong_values(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """A request as it should be, but for some fields."""
    kind = chance.choice(("chat", "completions"))
    body = sound_body(chance, kind, model)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(FIELDS)
        if chance.random() < 0.15:
            body.pop(name, None)
        else:
            body[name] = any_value(chance, 3)
    return post(PATHS[kind], json.dumps(body).encode()), False


def wrong_messages(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """A conversation of anything."""
    message: Any = {
        "role": chance.choice(("user", "system", "assistant", "tool", "king")),
        "content": any_value(chance, 2),
    }
    message.update({chance.choice(("name", "tool_calls", "refusal", "weight", "content")): any_value(chance, 2)})
    parts = {
        "role": "user",
        "content": [{"type": chance.choice(("text", "image_url", "")), "text": any_value(chance, 1)}],
    }
    messages = [chance.choice((message, parts, any_value(chance, 2))) for _ in range(chance.randint(0, 4))]
    return post(PATHS["chat"], json.dumps({**sound_body(chance, "chat", model), "messages": messages}).encode()), False


def broken_json(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """Bytes that are nearly JSON."""
    kind = chance.choice(("chat", "completions"))
    body = bytearray(json.dumps(sound_body(chance, kind, model)).encode())
    how = chance.randrange(8)
    if how == 0:
        body = body[: chance.randrange(len(body))]
    elif how == 1:
        for _ in range(chance.randint(1, 5)):
            body[chance.randrange(len(body))] = chance.randrange(256)
    elif how == 2:
        body = bytearray(chance.randbytes(chance.randrange(300)))
    elif how == 3:
        depth = chance.choice((10, 900, 5000, 100_000))
        body = bytearray(b'{"model":' + b"[" * depth + b"]" * depth + b"}")
    elif how == 4:
        body = bytearray(
            b'{"model":"x","temperature":' + chance.choice((b"NaN", b"-Infinity", b"1e999", b"9" * 5000)) + b"}"
        )
    elif how == 5:
        body = bytearray(b"\xef\xbb\xbf") + body
    elif how == 6:
        body += chance.choice((b"{}", b"\x00", b",", b"\xff"))
    else:
        body = bytearray(json.dumps(any_value(chance, 3)).encode())
    return post(PATHS[kind], bytes(body)), False


def wrong_headers(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """HTTP whose parts contradict each other, or are none."""
    body = json.dumps(sound_body(chance, "completions", model)).encode()
    size = f"content-length: {len(body)}\r\n"
    headers = chance.choice((
        "content-length: -5\r\n", "content-length: x\r\n", f"content-length: {10**18}\r\n", f"{size}content-length: 3\r\n",
        f"{size}transfer-encoding: chunked\r\n", "transfer-encoding: chunked\r\n", "transfer-encoding: gzip, chunked\r\n",
        f"{size}content-encoding: gzip\r\n", f"{size}content-type: text/plain\r\n", f"{size}expect: 100-continue\r\n",
        f"{size}upgrade: websocket\r\nconnection: upgrade\r\n", f"{size}x: {'y' * 70_000}\r\n", f"{size}bad header\r\n",
        f"{size}: empty\r\n", f"{size}x: \x00\x01\r\n", f"{size}authorization: Bearer \x7f\r\n", f"{size}host: b\r\n",
        f"{size}host: evil.example\r\n", f"{size}accept-encoding: *;q=zz\r\n", "h: v\r\n" * 500 + size,
    ))  # fmt: skip
    kind = "" if "content-type" in headers else "content-type: application/json\r\n"
    host = "" if "host" in headers else "host: localhost\r\n"
    return f"POST /v1/completions HTTP/1.1\r\n{host}{kind}{headers}\r\n".encode("latin-1") + body, True


def wrong_line(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """Other methods, paths and versions."""
    method = chance.choice(
        ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT", "TRACE", "get", "G\xcbT", "X" * 99)
    )
    path = chance.choice((
        "/", "/v1/models", f"/v1/models/{model}", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e/%00", "/v1/completions?a=b",
        "//v1/completions", "/v1/completions/", "http://evil.example/v1/models", "*", "/" + "a" * 9000, "/%ff%fe", "/v1/\xff",
        "/health", "/metrics", "/openapi.json", "/v1/chat/completions;x", "/v1/models/{{7*7}}", "",
    ))  # fmt: skip
    version = chance.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", "", "http/1.1"))
    return f"{method} {path} {version}\r\nhost: localhost\r\n\r\n".encode("latin-1"), True


def no_http(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """Bytes."""
    return chance.choice((
        chance.randbytes(chance.randrange(2000)), b"\r\n" * 50, b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n",
        b"GET / HTTP/1.1\r\n", b"", b"\x00" * 5000, b"GET" + b" " * 50_000,
    )), True  # fmt: skip


def a_part(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """The beginning of a request."""
    whole = post(PATHS["chat"], json.dumps(sound_body(chance, "chat", model)).encode())
    return whole[: chance.randrange(1, len(whole))], True


def several(chance: random.Random, model: str) -> tuple[bytes, bool]:
    """Requests one after another on a connection, without waiting."""
    bodies = [json.dumps(sound_body(chance, "completions", model)).encode() for _ in range(3)]
    return b"".join(post(PATHS["completions"], body) for body in bodies), False


MAKERS: tuple[Callable[[random.Random, str], tuple[bytes, bool]], ...] = (
    wrong_values, wrong_values, wrong_values, wrong_messages, wrong_messages, broken_json, broken_json, wrong_headers,
    wrong_line, no_http, a_part, several,
)  # fmt: skip


def sound_body(chance: random.Random, kind: str, model: str) -> dict[str, Any]:
    """A request that would be answered."""
    asked = {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "hi"}
    return {"model": model, **asked, "max_tokens": 3, "stream": chance.random() < 0.3}


def any_value(chance: random.Random, depth: int) -> Any:
    """A JSON value of any kind, most of them strange."""
    how = chance.randrange(8 if depth else 5)
    if how == 0:
        return None
    if how <= 2:
        return chance.choice(NUMBERS)
    if how <= 4:
        return chance.choice(TEXTS)
    if how == 5:
        return [any_value(chance, depth - 1) for _ in range(chance.choice((0, 1, 2, 5, 200)))]
    if how == 6:
        return [chance.randrange(-2, 400) for _ in range(chance.choice((1, 5, 2000)))]
    return {chance.choice((*FIELDS, "type", "include_usage", "\ud800")): any_value(chance, depth - 1) for _ in range(3)}


def post(path: str, body: bytes) -> bytes:
    """A request with a JSON body."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer_to(host: str, port: int, model: str) -> Any:
    """What the server says to one request that is sound."""
    body = {"model": model, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    with socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        connection.sendall(post(PATHS["completions"], json.dumps(body).encode()))
        return json.loads(read_answer(connection).partition(b"\r\n\r\n")[2])["choices"]


def serve_tiny(folder: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The program, serving a tiny random model, and its port; what it says goes to `log`."""
    sys.path.insert(0, str(ROOT))
    from tests.runtime.stand_ins import save_tiny_with_tokenizer

    save_tiny_with_tokenizer(folder / "tiny")
    command = [
        sys.executable,
        "-m",
        "mla_cli",
        "generate",
        str(folder / "tiny"),
        "--serve",
        ":0",
        "--max-new-tokens",
        "4",
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end = time.monotonic() + PATIENCE_S
    while "serving tiny" not in (said := log.read_text()):
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server does not start: {said}")
        time.sleep(0.1)
    return process, int(said.split("127.0.0.1:")[1].split("/")[0])


def resident_mib(process: subprocess.Popen[bytes]) -> float:
    """Memory of a process; 0 where the system does not say."""
    status = Path(f"/proc/{process.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def main() -> int:
    """Fuzz, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server that runs (default: this script starts one)")
    parser.add_argument("--model", default="tiny", help="its model's name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        process, log = None, Path(temporary) / "log"
        if options.url is None:
            process, port = serve_tiny(Path(temporary), log)
            host = "127.0.0.1"
        else:
            place = urlsplit(options.url)
            host, port = place.hostname or "127.0.0.1", place.port or 80
        outcome = Outcome()
        try:
            before = answer_to(host, port, options.model)
            warm = fuzz(host, port, options.model, min(500, options.requests), seed=options.seed + 1)
            memory = 0.0 if process is None else resident_mib(process)
            began = time.monotonic()
            outcome = fuzz(host, port, options.model, options.requests, seed=options.seed)
            seconds = time.monotonic() - began
            outcome.failures = warm.failures + outcome.failures
            if answer_to(host, port, options.model) != before:
                outcome.failures.append("the answer to the same request has changed")
            shown = ", ".join(f"{status or 'none'}: {count:,}" for status, count in sorted(outcome.statuses.items()))
            print(f"{options.requests:,} requests in {seconds:.0f} s; statuses {shown}")
            if process is not None:
                print(f"memory {memory:.0f} MiB after the first 500, {resident_mib(process):.0f} MiB at the end")
                said = log.read_text().split("Ctrl-C ends it\n")[1]
                if said or process.poll() is not None:
                    outcome.failures.append(f"the server has ended or reported faults: {said[:2000]}")
        finally:
            if process is not None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER=1 it says where it hangs
                    process.wait()
                    outcome.failures.append(f"the server does not end: {log.read_text()[-4000:]}")
    print(*outcome.failures[:20], f"{len(outcome.failures)} failures", sep="\n")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
