"""The script that trains a multi-head model to convert: its files, its sameness, and the chain that its docstring promises."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_cli.app import main as mla
from mla_cli.checkpoint.load import open_model
from mla_cli.model.tokenizer import load_tokenizer
from scripts import train_mha
from tests.evaluation.small_model import sentence

FAMILIES = ("llama", "gpt2")
TINY = "--layers 2 --hidden 32 --heads 8 --context 64 --batch 4 --check-steps 3 --dtype float32".split()
STEPS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two texts of lines."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text/calibration").mkdir(parents=True)
    rng = random.Random(0)
    for name in ("a", "b"):
        lines = "".join(f"{sentence(rng, 12)}.\n" for _ in range(200))
        (folder / f"text/calibration/{name}.txt").write_text(lines, encoding="utf-8")
    return folder


def train(run: Path, data: Path, *more: object) -> int:
    """Run the script on tiny settings."""
    return train_mha.main([str(word) for word in (run, "--data", data, *TINY, *more)])


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of each family."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    assert train(folder, data, "--family", request.param, "--steps", STEPS, "--rate", 0.01) == 0
    return folder


def figures(printed: str) -> list[float]:
    """Bits a byte of every check that was printed."""
    return [float(bits) for bits in re.findall(r"held out ([\d.]+) bits", printed)]


def test_held_out_text_is_the_end_of_every_file_and_never_trained_on(run: Path, data: Path) -> None:
    held_out = (run / "held-out.txt").read_text(encoding="utf-8")
    rests = []
    for file in sorted((data / "text/calibration").iterdir()):
        whole, kept = file.read_text(encoding="utf-8"), (run / "train" / file.name).read_text(encoding="utf-8")
        assert whole.startswith(kept)
        assert kept.endswith("\n")
        assert 0.9 <= len(kept) / len(whole) < 0.92
        rests.append(whole[len(kept) :])
    assert held_out == "\n".join(rests)
    assert sorted(file.name for file in (run / "train").iterdir()) == ["a.txt", "b.txt"]


def test_the_model_is_multi_head_over_bytes(run: Path) -> None:
    model = open_model(str(run / "model"))
    assert {(layer.num_heads, layer.num_kv_heads) for layer in model.spec.attention} == {(8, 8)}  # type: ignore[union-attr]
    assert model.spec.vocab_size == 256
    tokenizer, text = load_tokenizer(run / "model"), "Naïve café:\n\t€ 12, 𝄞 \x00 don't  stop"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len({tokenizer.encode(chr(code))[-1] for code in range(128)}) == 128


def test_other_programs_read_the_same_tokens(run: Path) -> None:
    import transformers

    text = "Question: naïve?\n  12"
    theirs = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert theirs(text)["input_ids"] == load_tokenizer(run / "model").encode(text)


def test_the_chain_of_the_docstring_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, model = run.parent / "out", run / "model"
    words = ["convert", model, out, "--ratio", 8, "--calib", run / "train", "--heal", "full", "--heal-steps", 2,
             "--samples", 24, "--seq-len", 64, "--fisher-samples", 8, "--json"]  # fmt: skip
    assert mla([str(word) for word in words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ratio"] == 8
    if open_model(str(model)).spec.model_type == "gpt2":
        assert {layer["qk_rope_head_dim"] for layer in report["layers"]} == {0}
    words = ["eval", out, "--baseline", model, "--tasks", "ppl,kl", "--text", run / "held-out.txt",
             "--max-drop", 1e6, "--json"]  # fmt: skip
    assert mla([str(word) for word in words]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]["ppl"]
    assert found["loss"]["value"] > found["loss"]["baseline"]
    assert 0 < found["acc"]["baseline"] < 1


def test_training_learns_and_prints_what_the_evaluation_finds(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", data, "--steps", 80, "--rate", 0.02) == 0
    printed = capsys.readouterr().out
    bits = figures(printed)
    assert len(bits) == 80 // 3 + 2  # before the first step, after every third and after the last
    assert bits[0] == pytest.approx(8, abs=0.3)  # as good as guessing
    assert bits[-1] < 4.5
    text = str(tmp_path / "run/held-out.txt")
    assert mla(["eval", str(tmp_path / "run/model"), "--tasks", "ppl", "--text", text, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]["ppl"]
    assert found["loss"]["value"] / torch.tensor(2.0).log().item() == pytest.approx(min(bits), rel=0.01)
    right = [float(share) for share in re.findall(r"([\d.]+) % right", printed)]
    assert found["acc"]["value"] == pytest.approx(right[bits.index(min(bits))] / 100, abs=0.01)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_an_interrupted_run_ends_where_a_whole_one_does(
    data: Path, tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--optimizer", optimizer, "--steps", 6)
    assert train(tmp_path / "whole", data, *options) == 0
    real, calls = train_mha.batch_at, []

    def interrupted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train_mha, "batch_at", interrupted)
        assert train(tmp_path / "run", data, *options) == 130
    assert len(calls) == 4
    assert (tmp_path / "run/model/model.safetensors").is_file()
    capsys.readouterr()
    assert train(tmp_path / "run", data, *options, "--resume") == 0
    assert "step     0" not in capsys.readouterr().out
    weights(tmp_path / "run", equal_to=tmp_path / "whole")


def test_time_that_is_over_is_gone_on_from_with_more_of_it(data: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", data, "--steps", 4, "--minutes", 1e-6) == 0
    assert train(tmp_path / "run", data, "--steps", 4, "--minutes", 9, "--resume") == 0
    assert train(tmp_path / "whole", data, "--steps", 4) == 0
    weights(tmp_path / "run", equal_to=tmp_path / "whole")
    assert train(tmp_path / "other", data, "--steps", 4, "--seed", 1) == 0
    with pytest.raises(AssertionError):
        weights(tmp_path / "other", equal_to=tmp_path / "whole")


def weights(run: Path, *, equal_to: Path) -> None:
    """Hold the weights of two runs against each other, bit for bit."""
    ours, theirs = (load_file(folder / "model/model.safetensors") for folder in (run, equal_to))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_flat_loss_stops_the_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--steps", 1000, "--flat-checks", 2, "--flat-gain", 100)
    assert train(tmp_path / "run", data, *words) == 0
    assert "flat after 6 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bits", "flat"),
    [
        ([2.0, 1.5, 1.2, 1.0], False),
        ([2.0, 1.0, 0.999, 0.998], True),
        ([1.0, 1.1, 1.05], True),  # worse than the best before them
        ([1.0, 1.1, 0.5], False),
        ([1.0, 1.0], False),  # too few to say
    ],
)
def test_flat_is_no_gain_over_the_best_before(bits: Sequence[float], flat: bool) -> None:
    assert train_mha.is_flat(bits, 2, 0.01) is flat


def test_the_rate_rises_and_falls() -> None:
    rise = [train_mha.rate_share(step, 0.0) for step in range(60)]
    assert rise[0] > 0
    assert rise[:50] == sorted(rise[:50])
    assert rise[49:] == [1.0] * 11
    assert train_mha.rate_share(100, 0.5) == pytest.approx(0.5)
    assert train_mha.rate_share(100, 1.2) == 0


def test_an_epoch_reads_no_byte_twice_and_the_next_reads_other_windows() -> None:
    tokens = torch.arange(1000)
    epochs = [torch.cat([train_mha.batch_at(tokens, s, 4, 50, 0) for s in range(start, start + 4)]) for start in (0, 4)]
    for windows in epochs:
        assert windows.shape == (16, 50)
        assert windows.unique().numel() == windows.numel()
        assert bool((windows.diff(dim=1) == 1).all())  # windows of the text as it runs
    assert not torch.equal(*epochs)


def test_options_that_cannot_be_used_are_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(run: str, *more: object) -> str:
        assert train(tmp_path / run, data, *more) == 2
        return capsys.readouterr().err

    assert "leave out --resume" in refused("new", "--resume")
    assert train(tmp_path / "old", data, "--steps", 1) == 0
    assert "go on with --resume" in refused("old", "--steps", 1)
    assert "give --seed 0" in refused("old", "--steps", 1, "--seed", 1, "--resume")
    assert "do not divide" in refused("odd", "--heads", 5)
    assert "too short" in refused("long", "--context", 4096)
    assert "no text files" in refused("none", "--data", tmp_path)
    with pytest.raises(SystemExit):
        train(tmp_path / "new", data, "--minutes", 0)


def test_a_loss_that_is_not_finite_ends_the_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", data, "--optimizer", "adamw", "--steps", 500, "--rate", 1e30) == 1
    assert "lower --rate" in capsys.readouterr().err
