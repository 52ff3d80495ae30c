"""`mla generate --serve` through the program: what is refused before the model is read, and how a server ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mla_cli.app import main
from mla_cli.errors import InputError, UsageError
from mla_cli.server import address
from mla_cli.server.address import parse_address, read_key
from tests.runtime.stand_ins import save_tiny_with_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_with_tokenizer(folder)
    return str(folder)


@contextmanager
def serving(model: str, *more: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program as it serves, and its URL."""
    command = [sys.executable, "-m", "mla_cli", "generate", model, "--serve", ":0", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving tiny at " in line)
        yield process, line.split(" at ")[1].split("/v1")[0]
    finally:
        process.kill()
        process.wait()


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """What is started meanwhile ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ask(url: str, body: dict[str, Any], **headers: str) -> Iterator[bytes]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        yield from answer


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--serve", "8000"], "8000"), (["--serve", ":99999"], ":99999"), (["--serve", "::1:80"], "::1:80"),
        (["--serve", "a b:80"], "a b:80"), (["--serve", ":-1"], ":-1"), (["--serve", ""], "--serve"),
        (["hi", "--serve", ":0"], "--serve"), (["--chat", "--serve", ":0"], "--serve"),
        (["--json", "--serve", ":0"], "--serve"), (["--max-queue", "-1", "--serve", ":0"], "--max-queue"),
        (["--max-seconds", "0", "--serve", ":0"], "--max-seconds"),
        (["--serve", ":0", "--api-key-file", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_usage_error(
    capfd: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["generate", "no-such-model", *arguments]) == 2  # before the model is looked for
    error = capfd.readouterr().err
    assert error.startswith("mla: error: ")
    assert error.count("\n") == 1
    assert named in error


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f":{other.getsockname()[1]}"
        assert main(["generate", "no-such-model", "--serve", place]) == 1
    error = capfd.readouterr().err
    assert place in error
    assert error.count("\n") == 1


def test_missing_packages_are_named_with_the_extra(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address.importlib.util, "find_spec", lambda name: None)
    assert main(["generate", "no-such-model", "--serve", ":0"]) == 2
    error = capfd.readouterr().err
    assert "mla-cli[serve]" in error
    assert "uvicorn" in error


def test_addresses() -> None:
    assert parse_address(":80") == address.Address("127.0.0.1", 80)
    assert parse_address("0.0.0.0:0") == address.Address("0.0.0.0", 0)
    assert parse_address("[::1]:8000") == address.Address("::1", 8000)
    assert [parse_address(a).is_local for a in (":1", "localhost:1", "[::1]:1", "0.0.0.0:1", "example.org:1")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    with pytest.raises(UsageError):
        parse_address("8000")


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", "schlüssel".encode(), b"\xff"])
def test_a_key_that_cannot_be_sent_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(InputError):
        read_key(file)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(address.KEY_VARIABLE, raising=False)
    assert read_key(None) is None
    monkeypatch.setenv(address.KEY_VARIABLE, " ")
    assert read_key(None) is None
    monkeypatch.setenv(address.KEY_VARIABLE, "abc")
    assert read_key(None) == "abc"
    (tmp_path / "key").write_text("def\n")
    assert read_key(tmp_path / "key") == "def"


def test_the_answer_is_that_of_the_command(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0.8", "--top-k", "20", "--max-new-tokens", "12", "--seed", "4", "--quiet"]
    assert main(["generate", model, "Once", *options]) == 0
    expected = capfd.readouterr().out
    with serving(model, *options[:-3], MLA_API_KEY="secret") as (process, url):
        body = {"model": "tiny", "prompt": "Once", "seed": 4}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            next(ask(url, body))
        answer = json.loads(next(ask(url, body, authorization="Bearer secret")))
        assert answer["choices"][0]["text"] == expected
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/metrics", timeout=60)
        asked = urllib.request.Request(f"{url}/metrics", headers={"authorization": "Bearer secret"})
        with urllib.request.urlopen(asked, timeout=60) as metrics:
            assert metrics.headers["content-type"].startswith("text/plain; version=")
            said = metrics.read().decode()
        assert 'mla_requests_total{outcome="completed"} 1.0' in said
        assert "mla_generated_tokens_total 12.0" in said
        assert "mla_requests_running 0.0" in said
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "mla: interrupted\n"


def test_a_signal_that_is_ignored_stays_so(model: str) -> None:
    """As in the background of a script, where Ctrl-C is for who is in front."""
    with ignoring_interrupts(), serving(model) as (process, url):
        process.send_signal(signal.SIGINT)
        assert next(ask(url, {"model": "tiny", "prompt": "Once", "max_tokens": 2}))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


def test_an_end_in_the_middle_of_answers_is_told_to_the_client(model: str) -> None:
    with serving(model, "--max-batch", "1") as (process, url):
        body = {"model": "tiny", "prompt": ["x"] * 100, "max_tokens": 250, "ignore_eos": True, "stream": True}
        lines = ask(url, body)
        assert next(lines).startswith(b"data: {")
        process.send_signal(signal.SIGTERM)
        heard = list(lines)
        assert process.wait(60) == 143
        assert any(b"shutting down" in line for line in heard)
        assert not any(b"[DONE]" in line for line in heard)
        assert process.stderr is not None
        assert process.stderr.read() == "mla: interrupted\n"
