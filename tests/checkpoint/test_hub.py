"""Hub models: what is fetched, what every failure says, and that a token is never printed. No network is used."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import save, save_file

from mla_cli.checkpoint import hub
from mla_cli.errors import InputError, MlaError, NetworkError, OutputError

SMALL = ["config.json", "generation_config.json", "tokenizer.json", "LICENSE", "chat_template.jinja"]
NOISE = ["README.md", "onnx/model.onnx", "original/consolidated.00.pth", "training_args.bin", "x/model.safetensors"]


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def fake_hub(monkeypatch: pytest.MonkeyPatch, names: list[str], result: Any, cached: Any = None) -> list[Any]:
    """Answer with `names`, and let downloads return or raise `result`; record what was to be downloaded."""
    patterns: list[Any] = []

    def snapshot(repo: str, *, revision: Any, allow_patterns: Any = None, local_files_only: bool = False) -> str:
        outcome = cached if local_files_only else result
        if local_files_only and outcome is None:
            outcome = errors.LocalEntryNotFoundError("not here")
        if not local_files_only:
            patterns.extend(allow_patterns)
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    def info(repo: str, *, revision: Any) -> Any:
        if isinstance(result, Exception) and not names:
            raise result
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "model_info", info)
    return patterns


def http_error(
    kind: type[errors.HfHubHTTPError], status: int = 401, text: str = "boom", server: str | None = None
) -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=status)
    return kind(text, response=response, server_message=server)


def refusal(kind: type[MlaError], repo: str = "org/model", revision: str | None = None, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        hub.fetch_model(repo, revision, **options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        (["model.safetensors", "pytorch_model.bin", "consolidated.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (
            ["model.safetensors.index.json", "a-1.safetensors", "a-2.safetensors", "pytorch_model.bin"],
            ["model.safetensors.index.json", "a-1.safetensors", "a-2.safetensors"],
        ),
        (["pytorch_model.bin", "optimizer.bin"], ["pytorch_model.bin"]),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
        ),
    ],
)
def test_one_copy_of_the_weights_is_fetched(weights: list[str], taken: list[str]) -> None:
    assert sorted(hub.wanted_files("org/model", SMALL + NOISE + weights)) == sorted(SMALL + taken)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.Q4.gguf"], ".gguf file"),
        (["config.json", "model.Q4.gguf"], ".gguf file"),
        (["config.json", "consolidated.safetensors"], "neither safetensors nor pytorch_model.bin"),
        (["README.md"], "no config.json"),
    ],
)
def test_a_repository_without_a_model_is_refused_before_the_download(names: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        hub.wanted_files("org/model", names)


def test_adapters_and_original_formats_are_fetched_small() -> None:
    assert hub.wanted_files("o/m", ["adapter_config.json", "adapter_model.safetensors"]) == ["adapter_config.json"]
    assert hub.wanted_files("o/m", ["params.json", "consolidated.00.pth"]) == ["params.json"]


def test_companions() -> None:
    names = [
        "tokenizer.model",
        "spiece.model",
        "vocab.json",
        "merges.txt",
        "LICENSE.md",
        "NOTICE",
        "chat_template.json",
    ]
    names += ["additional_chat_templates/tool.jinja", "special_tokens_map.json", "added_tokens.json"]
    assert all(hub.is_companion(name) for name in names)
    assert not any(hub.is_companion(n) for n in ["config.json", "model.safetensors", "x/tokenizer.json", "README.md"])


def test_exact_names_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patterns = fake_hub(monkeypatch, [*SMALL, "model.safetensors", "tokenizer[1].json"], tmp_path)
    assert hub.fetch_model("org/model", None) == tmp_path
    assert "tokenizer[[]1].json" in patterns
    assert "model.safetensors" in patterns


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (http_error(errors.GatedRepoError, 403), InputError, "https://huggingface.co/org/model"),
        (http_error(errors.RepositoryNotFoundError), hub.NotOnHubError, "no model org/model, or it is private"),
        (http_error(errors.RevisionNotFoundError, 404), InputError, "no revision 'v9'"),
        (http_error(errors.DisabledRepoError, 403), InputError, "disabled"),
        (errors.HFValidationError("bad id\nmore"), InputError, "no valid Hub id"),
        (http_error(errors.HfHubHTTPError, 401), hub.NotOnHubError, "no model org/model"),
        (http_error(errors.HfHubHTTPError, 401, server="Invalid credentials"), NetworkError, "access token"),
        (http_error(errors.HfHubHTTPError, 403), NetworkError, "access token"),
        (http_error(errors.HfHubHTTPError, 503, "503 down\nlong"), NetworkError, "503 down"),
        (ConnectionError("Name or service not known\nmore"), NetworkError, "Name or service not known"),
        (TimeoutError("slow"), NetworkError, "TimeoutError: slow"),
        (RuntimeError(""), NetworkError, "RuntimeError"),
        (OSError(errno.ENOSPC, "full"), OutputError, "disk is full"),
        (PermissionError(errno.EACCES, "no"), OutputError, "cannot be written"),
    ],
)
@pytest.mark.parametrize("names", [[], [*SMALL, "model.safetensors"]])
def test_every_failure_is_one_line_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[MlaError], words: str, names: list[str]
) -> None:
    fake_hub(monkeypatch, names, error)
    assert words in refusal(kind, revision="v9")


def test_offline_with_nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, [], AssertionError("network used"))
    assert "org/model@v9 is not in the local cache" in refusal(NetworkError, revision="v9", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the local cache" in refusal(NetworkError)


def test_offline_uses_the_cache_even_if_partial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_hub(monkeypatch, [], AssertionError("network used"), cached=tmp_path)
    assert hub.fetch_model("org/model", None, offline=True) == tmp_path
    partial = errors.LocalEntryNotFoundError("partial")
    partial.snapshot_path = str(tmp_path)  # type: ignore[attr-defined]
    fake_hub(monkeypatch, [], AssertionError("network used"), cached=partial)
    assert hub.fetch_model("org/model", None, offline=True) == tmp_path


def test_network_down_falls_back_to_a_complete_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub(monkeypatch, [], ConnectionError("down"), cached=tmp_path)
    assert "down" in refusal(NetworkError)
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert hub.fetch_model("org/model", None) == tmp_path
    assert "using the copy in the local cache" in capsys.readouterr().err


@pytest.mark.parametrize("secret", ["hf_SECRETSECRET", "hf_SECRETSECRET\n", "my-own-secret"])
def test_a_token_is_never_printed(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("HF_TOKEN", secret)
    texts = [f"Illegal header value b'Bearer {secret}'", f"token {secret}", f"http://user:{secret.strip()}@proxy"]
    for text in texts:
        fake_hub(monkeypatch, [], ValueError(text))
        with pytest.raises(NetworkError) as caught:
            hub.fetch_model("org/model", None)
        assert secret.strip() not in str(caught.value)
        assert caught.value.__suppress_context__


# The real library against a local server: the answers of the Hub as they look on the wire.

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": save({"a": torch.ones(2)}),
    "pytorch_model.bin": b"not wanted",
    "README.md": b"not wanted",
    "additional_chat_templates/tool.jinja": b"hi",
}


class Hub(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/api/models/org/gated"):
            self.answer(403, b"{}", X_Error_Code="GatedRepo")
        elif path.startswith("/api/models/org/absent"):
            self.answer(401, b"{}", X_Error_Message="Invalid username or password.")
        elif path.startswith("/api/models/org/token"):
            self.answer(401, b"{}", X_Error_Message="Invalid credentials in Authorization header")
        elif path.endswith("/revision/nope"):
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        elif path.startswith(f"/api/models/org/model/tree/{COMMIT}"):
            tree = [
                {"type": "file", "oid": f"{i:040x}", "size": len(d), "path": n}
                for i, (n, d) in enumerate(FILES.items())
            ]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/org/model"):
            body = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
        elif path.startswith("/org/model/resolve/"):
            name = path.split("/", 5)[5]
            self.answer(200, FILES[name], ETag=f'"{list(FILES).index(name):040x}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(404, b"{}")

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ASK = """
import sys
from mla_cli.checkpoint.hub import fetch_model
from mla_cli.errors import MlaError
for text in sys.argv[1:]:
    repo, _, revision = text.partition("@")
    try:
        folder = fetch_model(repo, revision or None)
        print("ok", folder.name, sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()))
    except MlaError as error:
        print(type(error).__name__, error)
"""


def ask(endpoint: str, cache: Path, *names: str) -> list[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_TOKEN": "hf_SECRETSECRET"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "SECRET" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_real_library_against_a_local_hub(endpoint: str, tmp_path: Path) -> None:
    names = ("org/model", "org/gated", "org/absent", "org/model@nope", "org/token")
    found, gated, absent, revision, token = ask(endpoint, tmp_path, *names)
    wanted = "['additional_chat_templates/tool.jinja', 'config.json', 'model.safetensors']"
    assert found == f"ok {COMMIT} {wanted}"
    assert gated.startswith("InputError org/gated on the Hub is gated")
    assert absent.startswith("NotOnHubError the Hub has no model org/absent")
    assert revision.startswith("InputError org/model on the Hub has no revision 'nope'")
    assert token.startswith("NetworkError the Hub refuses the access token")
    # With the network gone, the copy of the first run is used, and nothing else is invented.
    again, other = ask("http://127.0.0.1:9", tmp_path, "org/model", "org/other")
    assert again == f"ok {COMMIT} {wanted}"
    assert other.startswith("NetworkError the Hub cannot be reached for org/other")
