"""`mla convert` as a user meets it: what it prints, what it writes, and one line for everything that can go wrong."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_cli.app import main
from mla_cli.checkpoint.load import load_decoder, open_model
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer, and text beside it."""
    folder = tmp_path / "source"
    save_tiny(folder, "llama", attention_bias=True, bias=1.0)
    save_tokenizer(folder)
    save_text(tmp_path / "text.txt")
    return folder


def convert(source: Path, *more: object) -> int:
    """Run the command on `source` into the folder `out` beside it."""
    words = [
        source,
        source.parent / "out",
        "--calib",
        source.parent / "text.txt",
        "--samples",
        12,
        "--seq-len",
        32,
        "--heal",
        "none",
        *more,
    ]
    return main(["convert", *map(str, words)])


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of `config.json`; a value of `...` removes the key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weights."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_writes_a_complete_checkpoint_and_says_what_it_cost(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert convert(source, "--ratio", 2, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    out = source.parent / "out"
    assert printed == json.loads((out / "mla_report.json").read_text())
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
             "chat_template.jinja", "README.md", "generate.py",
             "mla_report.json", "mla_report.html", "mla_report.png"}  # fmt: skip
    assert {file.name for file in out.iterdir()} == files
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert printed["cache_bytes_per_token"] == {"source": 2 * 32 * 4, "mla": 2 * 16 * 4}
    assert printed["ratio"] == 2
    assert printed["heldout"]["ppl_final"] > 0
    assert printed["heldout"]["kl_final"] >= 0
    assert [layer["kv_lora_rank"] + layer["qk_rope_head_dim"] for layer in printed["layers"]] == [16, 16]
    cache = load_decoder(open_model(str(out))).make_cache(1, 8)
    assert cache.bytes_per_token() == printed["cache_bytes_per_token"]["mla"]  # what is really allocated
    assert "ratio 2" in (out / "README.md").read_text() or "2 times" in (out / "README.md").read_text()


def test_output_stands_alone_and_is_the_same_twice(source: Path) -> None:
    assert convert(source, "--ratio", 2) == 0
    out = source.parent / "out"
    first = (out / "model.safetensors").read_bytes()
    assert convert(source, "--ratio", 2, "--force") == 0
    assert (out / "model.safetensors").read_bytes() == first
    for file in source.iterdir():
        file.unlink()
    decoder = load_decoder(open_model(str(out)))
    assert torch.isfinite(decoder(random_tokens(1, 9))).all()


def test_quality_falls_with_the_rank_and_full_rank_loses_nothing(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for rank, rope in ((32, 16), (12, 8), (1, 2)):
        shape = ("--kv-lora-rank", rank, "--qk-rope-head-dim", rope)
        assert convert(source, "--format", "native", *shape, "--force", "--json") == 0
        losses.append(json.loads(capsys.readouterr().out)["heldout"]["kl_final"])
    assert losses[0] < 1e-6 < losses[1] < losses[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_follows_the_stored_type(tmp_path: Path, dtype: torch.dtype) -> None:
    source = tmp_path / "source"
    save_tiny(source, "llama", dtype=dtype)
    save_tokenizer(source)
    save_text(tmp_path / "text.txt")
    edit_config(source, dtype="float32", torch_dtype=...)  # the file, not the configuration, says what is stored
    assert convert(source, "--ratio", 2) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    # float16 cannot hold the constant channels of the stock form exactly
    expected = torch.bfloat16 if dtype == torch.float16 else dtype
    assert {tensor.dtype for tensor in written.values()} == {expected}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


def test_dry_run_touches_nothing(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(source.parent.rglob("*"))
    assert convert(source, "--ratio", 2, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["plans"][0]["cached_per_token"] == {"source": 64, "mla": 32}
    assert plan["estimate"]["seconds"] > 0
    assert convert(source, "--ratio", 2, "--dry-run") == 0
    assert "nothing was written" in capsys.readouterr().out
    assert sorted(source.parent.rglob("*")) == before


def test_warns_of_a_cache_that_is_no_smaller(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    larger = ("--format", "native", "--kv-lora-rank", 32, "--qk-rope-head-dim", 16)
    told = "no smaller than the source's: 96 numbers a token instead of 64"
    assert convert(source, *larger, "--dry-run", "--json", "--quiet") == 0
    said = capsys.readouterr()
    assert told in said.err
    assert told in json.loads(said.out)["notes"][0]
    assert convert(source, *larger, "--json", "--quiet") == 0
    said = capsys.readouterr()
    assert told in said.err
    assert any(told in note for note in json.loads(said.out)["notes"])
    assert convert(source, "--ratio", 1.1, "--dry-run") == 0
    assert "no smaller" not in capsys.readouterr().err


def test_says_that_sequences_are_cut_to_the_model_s_positions(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--dry-run",), ()):
        assert convert(source, "--ratio", 2, "--seq-len", 300, *more, "--json") == 0
        said = capsys.readouterr()
        assert "--seq-len 300: the model has 256 positions" in said.err
        assert "256 positions" in json.loads(said.out)["notes"][0]
    assert convert(source, "--ratio", 2, "--seq-len", 256, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_a_log_tells_the_phases(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, "--ratio", 2, "--qk-rope-head-dim", 8) == 0
    lines = capsys.readouterr().err.splitlines()
    phases = ["reading activations", "measuring what matters", "factorising", "writing",
              "checking the file on held-out text"]  # fmt: skip
    places = [lines.index(phase) for phase in phases]
    assert places == sorted(places)
    assert convert(source, "--ratio", 2, "--force", "--quiet") == 0
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("warning: the model diverges") for line in said)  # random weights lose much


def test_zero_and_repeated_rows_are_fine(source: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"].zero_()
        tensors["model.layers.0.self_attn.k_proj.bias"].zero_()
        tensors["model.layers.1.self_attn.k_proj.weight"][:] = tensors["model.layers.1.self_attn.k_proj.weight"][:1]

    edit_tensors(source, change)
    assert convert(source, "--ratio", 2) == 0
    out = source.parent / "out"
    report = json.loads((out / "mla_report.json").read_text())
    assert report["layers"][0]["rope_split_error"] == 0  # no keys, so nothing of them was lost
    assert 0 <= report["layers"][1]["rope_split_error"] < 1
    assert torch.isfinite(load_decoder(open_model(str(out)))(random_tokens(2, 50))).all()


def test_says_when_a_source_of_several_types_is_written_in_one(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def mix(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "self_attn" in name:
                tensors[name] = tensors[name].bfloat16()

    edit_tensors(source, mix)
    assert convert(source, "--ratio", 2, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dtype"] == "float32"  # most numbers are, and bfloat16 fits in it
    assert any("bfloat16" in note and "float32" in note for note in report["notes"])


def test_the_card_names_transformers_only_where_it_reads_the_form(source: Path) -> None:
    card = source.parent / "out" / "README.md"
    assert convert(source, "--ratio", 2) == 0
    assert "library_name: transformers" in card.read_text()
    assert convert(source, "--ratio", 2, "--format", "native", "--force") == 0
    assert "transformers" not in card.read_text()


LLAMA3_WITHOUT_FACTOR = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 32,
}
BROKEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown rope type": ({"rope_parameters": {"rope_type": "banana", "rope_theta": 1e4}}, ("banana", "llama3")),
    "rope key missing": ({"rope_parameters": LLAMA3_WITHOUT_FACTOR}, ("'factor'",)),
    "unknown model_type": ({"model_type": "mllama"}, ("mllama", "supported")),
    "no model_type": ({"model_type": ...}, ("model_type",)),
    "uneven heads": ({"num_key_value_heads": 4}, ("6", "4")),
    "soft-capping": ({"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping",)),
    "own scale": ({"attention_multiplier": 0.05}, ("attention_multiplier",)),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    "bias not declared": ({"attention_bias": False}, ("unused", "bias")),
    "wrong size": ({"hidden_size": 64}, ("shape",)),
    "a text for a number": ({"num_hidden_layers": "two"}, ("num_hidden_layers",)),
    "unknown activation": ({"hidden_act": "mish"}, ("mish",)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refuses_configurations_in_one_line(source: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    changes, words = BROKEN[case]
    edit_config(source, **changes)
    assert convert(source) == 2
    check_one_line(capsys, *words)
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize("nothing", [None, ...])
def test_null_and_absent_keys_mean_their_defaults(tmp_path: Path, nothing: Any) -> None:
    source = tmp_path / "source"
    save_tiny(source, "llama", num_attention_heads=6, num_key_value_heads=6)
    save_tokenizer(source)
    save_text(tmp_path / "text.txt")
    edit_config(source, num_key_value_heads=nothing, head_dim=nothing)
    assert convert(source, "--ratio", 2) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-lora-rank", "0"), ("1", "32")),
        (("--kv-lora-rank", "-1"), ("1", "32")),
        (("--kv-lora-rank", "999"), ("1", "32")),
        (("--qk-rope-head-dim", "3"), ("even", "16")),
        (("--qk-rope-head-dim", "18"), ("even", "16")),
        (("--ratio", "1"), ("above 1",)),
        (("--ratio", "nan"), ("above 1",)),
        (("--ratio", "2", "--kv-lora-rank", "8"), ("--ratio", "--kv-lora-rank")),
        (("--ratio", "1000"), ("ratio",)),
        (("--format", "gguf"), ("native",)),
        (("--samples", "0"), ("samples",)),
        (("--samples", "1"), ("samples", "held out", "2 or more")),
        (("--max-shard-size", "big"), ("big",)),
        (("--objective", "luck"), ("fisher",)),
        (("--dtype", "float16"), ("constant channels", "native")),
        (("--device", "tpu"), ("cuda",)),
        (("--calib", "./missing.txt"), ("missing.txt",)),
    ],
)
def test_refuses_flags_with_their_range(
    source: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert convert(source, *flags) == 2
    check_one_line(capsys, *words)
    assert not (source.parent / "out").exists()


def test_refuses_damaged_sources(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(tmp_path / "nowhere" / "model") == 2
    check_one_line(capsys, "nowhere")
    (tmp_path / "empty").mkdir()
    assert convert(tmp_path / "empty") == 2
    check_one_line(capsys, "config.json")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    edit_tensors(source, drop)
    assert convert(source) == 2
    check_one_line(capsys, "model.layers.1.mlp.up_proj.weight")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert convert(source) == 2
    check_one_line(capsys, "model.safetensors")


def test_names_the_tensor_that_is_not_finite(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")

    edit_tensors(source, spoil)
    assert convert(source) == 2
    check_one_line(capsys, "model.layers.1.self_attn.k_proj.weight", "NaN")
    assert not (source.parent / "out").exists()


def test_refuses_an_existing_output(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source.parent / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    assert convert(source) == 1
    check_one_line(capsys, "choose another folder")  # not a checkpoint: force does not delete it, so it is not advised
    assert convert(source, "--force") == 1
    assert (out / "mine.txt").read_text() == "precious"


def test_a_full_disk_leaves_nothing(source: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    words = [
        "convert",
        source,
        source.parent / "out",
        "--calib",
        source.parent / "text.txt",
        "--samples",
        "8",
        "--ratio",
        "2",
        "--heal",
        "none",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "mla_cli", *map(str, words)],
        preexec_fn=limit, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert sorted(file.name for file in source.parent.iterdir()) == ["source", "text.txt"]


def test_a_latent_source_is_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, "--ratio", 2) == 0
    capsys.readouterr()
    out = source.parent / "out"
    again = main(["convert", str(out), str(source.parent / "again"), "--calib", str(source.parent / "text.txt")])
    assert again == 2
    check_one_line(capsys, "already has latent attention")


def check_one_line(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """The last thing said is one error line with these words, and no traceback."""
    said = capsys.readouterr().err
    assert "Traceback" not in said
    line = said.strip().splitlines()[-1]
    for word in words:
        assert word in line, said
