"""What a user may type as a model: opened, or refused in one line that says what is wrong with it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mla_cli.checkpoint import hub, sources
from mla_cli.checkpoint.sources import Source, open_source, parse_hub_id
from mla_cli.errors import InputError, MlaError, NetworkError

Q_PROJ = "model.layers.0.self_attn.q_proj"


def make_model(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    save_file(tensors or {f"{Q_PROJ}.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in an empty folder; the Hub answers that nothing exists; one built-in model and a GGUF unpacker."""

    def fetch_builtin(name: str) -> Path:
        return make_model(tmp_path / "cache" / name)

    def materialise_gguf(path: Path) -> Path:
        return make_model(tmp_path / "cache" / path.stem)

    def fetch_model(repo: str, revision: str | None, *, offline: bool) -> Path:
        raise hub.NotOnHubError(f"the Hub has no model {repo}, or it is private", fix="check the spelling")

    builtin = SimpleNamespace(BUILTIN={"smollm2-135m": None}, fetch_builtin=fetch_builtin)
    monkeypatch.setitem(sys.modules, "mla_cli.checkpoint.builtin", builtin)
    monkeypatch.setitem(sys.modules, "mla_cli.checkpoint.gguf", SimpleNamespace(materialise_gguf=materialise_gguf))
    monkeypatch.setattr(sources, "fetch_model", fetch_model)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_model(*_: Any, **__: Any) -> Path:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(sources, "fetch_model", fetch_model)


def refusal(text: str | Path, kind: type[MlaError] = InputError) -> str:
    with pytest.raises(kind) as caught:
        open_source(str(text))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_opened(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    source = open_source(str(folder))
    assert (source.name, source.folder, source.revision) == (str(folder), folder, None)
    assert source.config == {"model_type": "llama"}
    assert source.generation_config == {"temperature": 0.5}
    assert source.tensors.read(f"{Q_PROJ}.weight").sum() == 16


@pytest.mark.parametrize("text", ["sub/m", "./sub/m", "sub/m/", "sub/../sub/m", "~/sub/m", "with space", "[v2]/m"])
def test_spellings_of_a_folder(text: str, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    make_model(Path.cwd() / text.removeprefix("~/"))
    source = open_source(text)
    assert source.name == text
    assert source.folder.is_absolute()


def test_config_with_a_byte_order_mark(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + b'{"model_type": "llama"}')
    assert open_source(str(folder)).config["model_type"] == "llama"


# CL-07, CL-04: mistyped paths


@pytest.mark.parametrize(
    "text",
    ["./does/not/exist", "does/not/exist", "../x", "/data/[v2]/m", "/data/[/v2]/m", "~/nope", "a b", "org/name/",
     "name/", "sub\\m", "C:\\models\\m", "models/tiny", ".", "..x", "-x", "x--y", "org/na me", "org/name@", "ü",
     "a\x00b", "x" * 5000],
)  # fmt: skip
def test_path_like_text_never_reaches_the_network(text: str, no_network: None) -> None:
    (Path.cwd() / "models").mkdir()
    message = refusal(text)
    assert "no such folder" in message or "no config.json" in message
    if "\x00" not in text:
        assert text == "." or text[:300] in message  # long ones are cut


@pytest.mark.parametrize("text", ["model.gguf", "dir/m.safetensors", "pytorch_model.bin"])
def test_absent_files(text: str, no_network: None) -> None:
    assert f"no such file: {text}" in refusal(text)


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_text(text: str, no_network: None) -> None:
    assert "no model is named" in refusal(text)


def test_a_link_to_the_hub_names_the_id(no_network: None) -> None:
    assert "write a Hub model as org/name" in refusal("https://huggingface.co/org/name/tree/main")


def test_a_typo_gets_one_message_for_all_it_could_be() -> None:
    message = refusal("baze")
    assert message.startswith("no such folder: baze; built-in: smollm2-135m; the Hub has no model baze")


def test_a_typo_without_a_network_keeps_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_model(*_: Any, **__: Any) -> Path:
        raise NetworkError("the Hub cannot be reached for baze: ConnectError: down")

    monkeypatch.setattr(sources, "fetch_model", fetch_model)
    message = refusal("baze", NetworkError)
    assert "no such folder: baze" in message
    assert "ConnectError" in message
    assert "no such folder" not in refusal("org/name", NetworkError)


def test_an_absent_hub_model_could_have_been_a_path() -> None:
    assert refusal("mdels/tiny").startswith("no such folder: mdels/tiny; and the Hub has no model mdels/tiny")


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt"])
def test_a_file_in_place_of_a_folder(name: str, tmp_path: Path) -> None:
    file = make_model(tmp_path / "m") / name
    file.touch()
    assert f"give its folder: {file.parent}" in refusal(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None)),
        ("name", ("name", None)),
        ("org/name@main", ("org/name", "main")),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
        ("Qwen/Qwen2.5-0.5B", ("Qwen/Qwen2.5-0.5B", None)),
        ("org/name@", None),
        ("org/name@../x", None),
        ("org/name@-x", None),
        ("org/na me", None),
        ("org/-name", None),
        ("org/name.", None),
        ("a/b/c", None),
        ("a--b", None),
        ("a..b", None),
        ("a.git", None),
        ("x" * 97, None),
        ("name\n", None),
        ("", None),
    ],
)
def test_hub_ids(text: str, expected: tuple[str, str | None] | None) -> None:
    assert parse_hub_id(text) == expected


def test_a_hub_model_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def fetch_model(repo: str, revision: str | None, *, offline: bool) -> Path:
        asked.append((repo, revision, offline))
        return make_model(tmp_path / "snapshots" / "abc123")

    monkeypatch.setattr(sources, "fetch_model", fetch_model)
    source = open_source("org/name@v1", offline=True)
    assert asked == [("org/name", "v1", True)]
    assert (source.name, source.revision) == ("org/name@v1", "abc123")


def test_a_gguf_file_is_unpacked(no_network: None) -> None:
    for name in ("tiny.gguf", "TINY.GGUF", "tiny.q8"):
        Path(name).write_bytes(b"GGUF")
        source = open_source(name)
        assert source.name == name
        assert source.config


def test_builtin_names_win_unless_the_folder_is_written_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert open_source("smollm2-135m").folder.parent.name == "cache"
    assert capsys.readouterr().err == ""
    mine = make_model(Path.cwd() / "smollm2-135m")
    assert open_source("smollm2-135m").folder.parent.name == "cache"
    assert "./smollm2-135m" in capsys.readouterr().err
    assert open_source("./smollm2-135m").folder == mine


# CV-18 and other folders that are no model


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    save_file({"lora_A": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    message = refusal(tmp_path)
    assert "LoRA adapter" in message
    assert "merge it with base org/base first" in message
    (tmp_path / "config.json").write_text("{}")
    assert "LoRA adapter" in refusal(tmp_path)


def test_a_full_model_with_an_adapter_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "adapter_config.json").write_text("{}")
    open_source(str(folder))
    assert "the adapter is not applied" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
def test_the_original_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    assert "original format" in refusal(tmp_path)


def test_no_config_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert "it is empty" in refusal(tmp_path / "a")
    for number in range(12):
        (tmp_path / "a" / f"file{number:02}").touch()
    message = refusal(tmp_path / "a")
    assert "file00" in message
    assert "and 4 more" in message
    (tmp_path / "a" / "x.gguf").touch()
    assert str(tmp_path / "a" / "x.gguf") in refusal(tmp_path / "a")
    inner = make_model(tmp_path / "b" / "checkpoint-10")
    assert f"did you mean {inner}?" in refusal(tmp_path / "b")
    snapshot = make_model(tmp_path / "models--o--n" / "snapshots" / "abc")
    assert f"did you mean {snapshot}?" in refusal(tmp_path / "models--o--n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"a": 1,\n}', "line 3"),
        ("[]", "no JSON object"),
        ("", "line 1"),
        ("version https://git-lfs.github.com/spec/v1\nsize 3\n", "git-LFS"),
        ("<!doctype html>", "web page"),
        ("\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path: Path, text: str, words: str, name: str) -> None:
    folder = make_model(tmp_path / "m")
    (folder / name).write_text(text, encoding="latin-1")
    message = refusal(folder)
    assert words in message
    assert str(folder / name) in message


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "cannot be read" in refusal(tmp_path)


def test_the_interrupted_download_is_seen_on_opening(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


# CV-17: quantised sources

FP8 = torch.ones(4, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"load_in_4bit": True}}, "unnamed method"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
                                  "kv_cache_scheme": {"num_bits": 8}}}, "modelopt"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization of an unnamed method"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": [1]}, "no JSON object"),
    ],
)  # fmt: skip
def test_quantised_by_config(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    message = refusal(make_model(tmp_path / "m", config=config))
    assert words in message
    assert "dequantise" in message or "JSON" in message


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{Q_PROJ}.weight": FP8, f"{Q_PROJ}.weight_scale_inv": torch.ones(1)},
        {f"{Q_PROJ}.weight": FP8, f"{Q_PROJ}.scale_weight": torch.ones(1)},
        {f"{Q_PROJ}.qweight": torch.ones(4, 4, dtype=torch.int32)},
        {f"{Q_PROJ}.qzeros": torch.ones(4, 4, dtype=torch.int32)},
        {f"{Q_PROJ}.weight": torch.ones(8, 1, dtype=torch.uint8), f"{Q_PROJ}.weight.absmax": torch.ones(1)},
        {f"{Q_PROJ}.weight": torch.ones(4, 4, dtype=torch.int8), f"{Q_PROJ}.SCB": torch.ones(4)},
        {f"{Q_PROJ}.weight": torch.ones(4, 4, dtype=torch.int32)},
    ],
)
def test_quantised_by_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    message = refusal(make_model(tmp_path / "m", tensors))
    assert "already quantised" in message
    assert Q_PROJ in message


def test_packed_dtypes_are_refused_by_their_method(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", {"a": torch.ones(4, dtype=torch.uint32)}, {"quantization": {"bits": 4}})
    assert "already quantised" in refusal(folder)
    (folder / "config.json").write_text("{}")
    assert "dequantise" in refusal(folder)


def test_calibrated_cache_scales_are_not_quantised_weights(tmp_path: Path) -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"], "kv_cache_scheme": {"num_bits": 8}}
    tensors = {f"{Q_PROJ}.weight": torch.ones(4, 4), "model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    assert open_source(str(make_model(tmp_path / "m", tensors, {"quantization_config": scheme})))


def test_a_leftover_config_of_bitsandbytes_is_harmless(tmp_path: Path) -> None:
    scheme = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    assert open_source(str(make_model(tmp_path / "m", config={"quantization_config": scheme})))


def test_float8_without_scales_is_plain_numbers(tmp_path: Path) -> None:
    assert open_source(str(make_model(tmp_path / "m", {f"{Q_PROJ}.weight": FP8})))


def test_old_rotary_buffers_are_no_obstacle(tmp_path: Path) -> None:
    # CV-16: the family decides to ignore it; opening must not choke.
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert open_source(str(make_model(tmp_path / "m", inv_freq)))


# what an output needs from its source


def test_digest_is_of_names_and_bytes(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return open_source(str(folder)).sha256()

    first = make_model(tmp_path / "a")
    second = make_model(tmp_path / "b")
    assert digest(first) == digest(second)
    assert len(digest(first)) == 64
    other = make_model(tmp_path / "c", {f"{Q_PROJ}.weight": torch.zeros(4, 4)})
    assert digest(other) != digest(first)
    (second / "model.safetensors").rename(second / "weights.safetensors")
    assert digest(second) != digest(first)
    source = open_source(str(first))
    before = source.sha256()
    shutil.rmtree(first)
    assert source.sha256() == before


def test_companions_are_found(tmp_path: Path) -> None:
    # FM-13: whatever an output needs to work alone.
    folder = make_model(tmp_path / "m")
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json"]
    names += ["generation_config.json", "merges.txt", "tokenizer.model", "added_tokens.json", "LICENSE", "NOTICE.txt"]
    for name in [*names, "README.md", "optimizer.pt"]:
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").touch()
    source: Source = open_source(str(folder))
    assert {f.name for f in source.companion_files()} == {*names, "additional_chat_templates"}
