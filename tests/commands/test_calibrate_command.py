"""`mla calibrate` through the program: options, table, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.app import Command, main
from mla_cli.commands.calibrate import calibrate
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from tests.tiny import save_text, save_tiny, save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (Command("calibrate", calibrate),)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    save_tiny(folder / "source", initializer_range=0.15)
    save_tokenizer(folder / "source")
    text = save_text(folder / "text.txt")
    options = ConvertOptions(calib=str(text), samples=8, seq_len=32, kv_lora_rank=24, qk_rope_head_dim=8)
    convert(str(folder / "source"), folder / "mla", options, device=torch.device("cpu"), command="mla convert")
    return folder / "mla"


def run(checkpoint: Path, *arguments: str) -> int:
    text = ["--calib", str(checkpoint.parent / "text.txt"), "--samples", "24", "--seq-len", "32"]
    return main(["calibrate", str(checkpoint), *text, *arguments], commands=COMMANDS)


def stored(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["mla_kv_cache"]


def test_a_table_on_stdout_and_nothing_else(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(checkpoint) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "cached", "as", "largest", "range", "clipped", "latents", "attention"]
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "int8"], ["1", "int8"]]
    assert any("bytes a token instead of" in line for line in lines)
    assert any("perplexity" in line and "held-out" in line for line in lines)
    assert stored(checkpoint)["dtype"] == "int8"


def test_json_is_the_report(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "copy"
    assert run(checkpoint, "--json", "--kv-dtype", "FP8_E4M3", "--scales", "static", "--out", str(out)) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["kv_dtype"], report["scales"], report["checkpoint"]) == ("fp8", "static", str(out))
    assert stored(out)["dtype"] == "fp8"
    assert [layer["clip"] for layer in stored(out)["layers"]] == [layer["clip"] for layer in report["layers"]]
    told = json.loads((out / "mla_report.json").read_text())["calibration_kv"]
    assert report == {**told, "checkpoint": str(out), "seconds": report["seconds"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv-dtype", "int2"], "int8, fp8, int4"),
        (["--kv-dtype", "bf16"], "int8, fp8, int4"),
        (["--scales", "group"], "token, page, static"),
        (["--rotation", "random"], "auto, none, hadamard, learned"),
        (["--rope-dtype", "int4"], "bfloat16, int8, fp8"),
        (["--max-loss", "-1"], "max-loss"),
        (["--max-loss", "inf"], "no percentage"),
        (["--max-loss", "1e39"], "no percentage"),
        (["--budget-bytes", "0"], "budget-bytes"),
        (["--every", "0", "--scales", "static"], "every"),
        (["--every", "10"], "only static scales are derived anew"),
        (["--every", "10", "--scales", "page"], "only static scales are derived anew"),
        (["--max-loss", "1", "--budget-bytes", "90"], "give one of the two"),
        (["--samples", "0"], "samples"),
        (["--seq-len", "1"], "seq-len"),
    ],
)
def test_an_unknown_choice_costs_no_work(
    checkpoint: Path, arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, *arguments) == 2
    assert said in capfd.readouterr().err


def test_a_source_is_to_be_converted_first(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(checkpoint.parent / "source"), "--calib", "self"], commands=COMMANDS) == 2
    assert "convert it first" in capfd.readouterr().err


def test_an_output_that_exists_is_kept(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    assert run(checkpoint, "--out", str(tmp_path)) == 1
    assert "not empty" in capfd.readouterr().err
    assert run(checkpoint, "--out", str(tmp_path), "--force") == 1
    assert (tmp_path / "diary.txt").read_text() == "mine"


def test_help_shows_examples_and_groups(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--help"], commands=COMMANDS) == 0
    text = capfd.readouterr().out
    assert "mla calibrate out --kv-dtype fp8" in text
    assert all(f"\n{group}:" in text for group in ("Input", "Method", "Budget", "Output", "Runtime"))


def test_the_commands_file_loads_nothing_heavy() -> None:
    code = "import sys; import mla_cli.commands.calibrate; print({'torch', 'numpy', 'tokenizers'} & set(sys.modules) or 'none')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True).stdout == b"none\n"
