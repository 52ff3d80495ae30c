"""`mla eval` through the program: gates, exit codes, and what an interrupted run leaves (EV-11, EV-12, EV-13, CL-09)."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_cli.app import Command, main
from mla_cli.commands import eval as eval_command
from tests.evaluation.small_model import save_data, save_model
from tests.runtime.stand_ins import save_tiny_deepseek

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (Command("eval", eval_command.command),)
PROGRAM = (
    "import sys; from mla_cli.app import Command, main; from mla_cli.commands import eval as e; "
    "sys.exit(main(commands=(Command('eval', e.command),)))"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, the same slightly and thoroughly disturbed, a latent model, and data."""
    root = tmp_path_factory.mktemp("eval")
    found = {name: str(root / name) for name in ("source", "near", "far", "latent", "data")}
    for name, noise in (("source", 0.0), ("near", 1e-5), ("far", 0.1)):
        save_model(root / name)
        file = root / name / "model.safetensors"
        weights = load_file(file)
        torch.manual_seed(1)
        disturbed = {key: value + noise * torch.randn_like(value) for key, value in weights.items()}
        save_file(disturbed, file, {"format": "pt"})
    save_tiny_deepseek(root / "latent")
    save_data(root / "data", items=6)
    return found


@pytest.fixture
def mla(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `mla eval ...`: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["eval", *arguments], commands=COMMANDS)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def lambada(folders: dict[str, str]) -> tuple[str, ...]:
    pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'mla-cli[eval]'")
    return ("--data", folders["data"], "--tasks", "lambada, hellaswag")


def test_a_model_against_itself_passes_and_reports(mla: Any, folders: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, shown, notes = mla(
        folders["source"], *lambada(folders), "--baseline", folders["source"], "--json", "--out", str(out)
    )
    assert code == 0, notes
    report = json.loads(shown)
    assert report == json.loads((out / "mla_eval.json").read_text(encoding="utf-8"))
    assert (out / "mla_eval.md").read_text(encoding="utf-8").startswith("# Evaluation")
    assert list(report["tasks"]) == ["lambada", "hellaswag"]
    assert report["passed"] is True
    for metrics in report["tasks"].values():
        for metric in metrics.values():
            assert metric["value"] == metric["baseline"]
            assert metric["diff"] in (0, None)
            assert metric["ci95"] in ([0, 0], None)
    assert report["samples_per_task"] == {"lambada": 6, "hellaswag": 6}
    assert report["checkpoint"]["adds_bos"] is True
    assert report["checkpoint"]["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert "lambada_openai" in report["variants"]["lambada"]
    assert report["versions"]["lm_eval"]


def test_a_worse_model_misses_the_gate_after_its_table(mla: Any, folders: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, shown, notes = mla(
        folders["far"],
        "--baseline",
        folders["source"],
        "--data",
        folders["data"],
        "--tasks",
        "ppl,kl",
        "--out",
        str(out),
    )
    assert code == 3
    assert "MISSED" in shown
    assert "top_token_agreement" in shown
    assert "ppl ppl" in notes
    assert (out / "mla_eval.json").exists()
    report = json.loads((out / "mla_eval.json").read_text())
    assert report["tasks"]["ppl"]["ppl"]["relative_drop_percent"] > 2.3
    assert report["tasks"]["kl"]["kl"]["value"] > 0.01
    assert report["tasks"]["kl"]["kl"]["passed"] is None


def test_perplexity_beside_the_divergence_is_the_same_perplexity(mla: Any, folders: dict[str, str]) -> None:
    common = (folders["near"], "--baseline", folders["source"], "--data", folders["data"], "--json")
    alone, beside = (json.loads(mla(*common, "--tasks", tasks)[1])["tasks"] for tasks in ("ppl", "kl,ppl"))
    assert list(beside) == ["kl", "ppl"]
    assert list(alone["ppl"]) == list(beside["ppl"]) == ["ppl", "loss", "acc"]
    for metric, numbers in alone["ppl"].items():
        for number in ("value", "baseline"):
            assert beside["ppl"][metric][number] == pytest.approx(numbers[number], rel=1e-5)


def test_loss_and_accuracy_stand_beside_the_perplexity(mla: Any, folders: dict[str, str]) -> None:
    options = ("--baseline", folders["source"], "--tasks", "ppl", "--data", folders["data"], "--json")
    found = json.loads(mla(folders["far"], *options)[1])["tasks"]["ppl"]
    loss, acc = found["loss"], found["acc"]
    assert math.exp(loss["value"]) == pytest.approx(found["ppl"]["value"])
    assert loss["relative_drop_percent"] == pytest.approx(100 * (loss["value"] / loss["baseline"] - 1))
    assert loss["passed"] is None  # the perplexity has the gate
    assert 0 < acc["value"] < 1
    assert acc["relative_drop_percent"] == pytest.approx(100 * (1 - acc["value"] / acc["baseline"]))
    assert acc["passed"] is (acc["relative_drop_percent"] <= 2.3)
    assert acc["ci95"][0] <= acc["diff"] <= acc["ci95"][1]


def test_models_that_split_the_text_differently_are_not_compared(mla: Any, folders: dict[str, str]) -> None:
    options = ("--baseline", folders["latent"], "--tasks", "kl", "--data", folders["data"])
    code, _, notes = mla(folders["source"], *options)
    assert code == 2
    assert "one vocabulary" in notes


def test_a_near_model_passes_and_a_loose_gate_forgives(mla: Any, folders: dict[str, str]) -> None:
    ppl = ("--baseline", folders["source"], "--tasks", "ppl", "--data", folders["data"])
    assert mla(folders["near"], *ppl)[0] == 0
    assert mla(folders["far"], *ppl, "--max-drop", "1e9")[0] == 0


def test_latents_are_measured_through_the_cache_that_is_asked_for(
    mla: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the man walks under the large house and sings. " * 20)
    common = (folders["latent"], "--tasks", "ppl", "--text", str(text), "--json")
    plain = json.loads(mla(*common)[1])
    quantised = json.loads(mla(*common, "--kv-dtype", "int8")[1])
    assert plain["checkpoint"]["kv_dtype"] == "float32"
    assert quantised["checkpoint"]["kv_dtype"] == "int8"
    assert quantised["checkpoint"]["cache_bytes_per_token"] == 2 * (16 + 2 * 4 + 4)  # codes, bf16 rotary key, scale
    smaller = json.loads(mla(*common, "--kv-dtype", "int4")[1])
    assert smaller["checkpoint"]["kv_dtype"] == "int4"
    assert smaller["checkpoint"]["cache_bytes_per_token"] == 2 * (16 // 2 + 2 * 4 + 2)
    losses = [report["tasks"]["ppl"]["ppl"]["value"] for report in (plain, quantised, smaller)]
    assert abs(losses[1] - losses[0]) < abs(losses[2] - losses[0])
    assert losses[1] != losses[0]
    for kind in ("int8", "int4"):
        code, _, notes = mla(folders["source"], "--tasks", "ppl", "--text", str(text), "--kv-dtype", kind)
        assert code == 2
        assert "keys and values" in notes


def unfit(folders: dict[str, str], tmp_path: Path) -> tuple[str, ...]:
    """Data whose second item of one task has an answer that is longer than the models' positions."""
    pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'mla-cli[eval]'")
    data = save_data(tmp_path / "data", items=3)
    file = data / "hellaswag/validation.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    item = json.loads(lines[1])
    item["endings"][2] = "the house " * 600
    file.write_text("\n".join([lines[0], json.dumps(item), lines[2]]) + "\n", encoding="utf-8")
    return ("--data", str(data), "--tasks", "hellaswag,lambada,ppl", "--out", str(tmp_path / "out"))


def test_a_task_that_does_not_fit_is_named_and_the_others_are_reported(
    mla: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    options = unfit(folders, tmp_path)
    code, shown, notes = mla(folders["source"], *options)
    assert code == 1
    error = notes.splitlines()[-1]
    assert error.startswith("mla: error: task 'hellaswag' could not be evaluated: a continuation of")
    assert "[item 2] -> " in error
    assert "hellaswag: failed: " in shown
    assert [line.split()[0] for line in shown.splitlines() if " acc " in line] == ["lambada", "ppl"]
    report = json.loads((tmp_path / "out/mla_eval.json").read_text())
    assert list(report["tasks"]) == ["lambada", "ppl"]
    assert list(report["failed"]) == ["hellaswag"]
    code, shown, notes = mla(folders["source"], *options, "--tasks", "hellaswag")
    assert (code, shown) == (1, "")  # nothing to report
    assert "[item 2]" in notes


def test_a_task_that_one_of_two_models_fails_on_has_no_verdict(
    mla: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    common = ("--data", folders["data"], "--tasks", "lambada,hellaswag,ppl", "--json")
    pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'mla-cli[eval]'")
    save_model(tmp_path / "short", max_position_embeddings=4)  # fewer than an answer may have
    for ours, theirs in (("source", "short"), ("short", "source")):
        both = {"source": folders["source"], "short": str(tmp_path / "short")}
        code, shown, notes = mla(both[ours], "--baseline", both[theirs], *common, "--max-drop", "1e9")
        assert code == 1
        assert "task 'hellaswag' could not be evaluated" in notes
        report = json.loads(shown)
        assert "hellaswag" not in report["tasks"]
        assert report["tasks"]["ppl"]["ppl"]["baseline"] > 0
        assert report["passed"] is None


def test_a_failure_that_nobody_foresaw_keeps_what_is_finished(
    mla: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_cli.evaluation import run

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(run, "perplexity", fail)
    code, shown, notes = mla(folders["source"], "--data", folders["data"], "--tasks", "lambada,ppl", "--json")
    assert code == 1
    assert list(json.loads(shown)["tasks"]) == ["lambada"]
    assert "task 'ppl' could not be evaluated: out of memory: " in notes
    assert "--batch-size" in notes


def test_one_item_gives_valid_json(mla: Any, folders: dict[str, str]) -> None:
    code, shown, _ = mla(folders["source"], *lambada(folders), "--limit", "1", "--json")
    assert code == 0
    assert json.loads(shown)["tasks"]["lambada"]["acc"]["stderr"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "0"), "--limit"),
        (("--batch-size", "many"), "neither auto nor a whole number"),
        (("--max-drop", "nan"), "--max-drop"),
        (("--tasks", ","), "no task is named"),
        (("--tasks", "kl"), "needs a model to compare with"),
        (("--text", "missing.txt"), "no such file"),
        (("--data", "missing"), "no such folder"),
        (("--kv-dtype", "int3"), "int3"),
    ],
)
def test_a_mistake_costs_no_work(mla: Any, arguments: tuple[str, ...], message: str) -> None:
    # The model does not exist: it is never looked for.
    code, shown, notes = mla("no-such-model-folder/x/y", "--tasks", "ppl", *arguments)
    assert code == 2
    assert shown == ""
    assert message in notes


@pytest.mark.parametrize("blocked", ["/proc/out", "out"])
def test_an_output_that_cannot_be_written_costs_no_work(mla: Any, tmp_path: Path, blocked: str) -> None:
    (tmp_path / "out" / "mla_eval.json").mkdir(parents=True)
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc, where nobody can create anything, root neither")
    code, shown, notes = mla("no-such-model-folder/x/y", "--tasks", "ppl", "--out", str(tmp_path / blocked))
    assert (code, shown) == (1, "")
    assert blocked in notes
    assert "--out" in notes or "another folder" in notes


def test_a_checkpoint_that_gives_nan_is_never_scored(mla: Any, folders: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    save_model(broken)
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"].fill_(3e38)  # finite, but no logit of it is
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    code, shown, notes = mla(str(broken), *lambada(folders), "--json", "--out", str(tmp_path / "out"))
    assert code == 1
    assert shown == ""
    assert "NaN or infinity" in notes
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_not_utf8_is_named_by_its_byte(mla: Any, folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"abc\xff")
    code, shown, notes = mla(folders["source"], "--tasks", "ppl", "--text", str(tmp_path / "text.txt"))
    assert (code, shown) == (2, "")
    assert "not UTF-8: byte 3" in notes


def test_an_interrupt_leaves_nothing_that_looks_complete(folders: dict[str, str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the man walks under the large house and sings. " * 200_000)
    out = tmp_path / "out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    arguments = [folders["source"], "--tasks", "ppl", "--text", str(text), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "eval", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "evaluating" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown == ""
    assert not out.exists()
    assert list(tmp_path.glob("mla-eval-*")) == []


def test_the_window_that_is_reported_is_the_one_that_was_used(
    mla: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the man walks " * 400)
    code, out, _ = mla(folders["source"], "--tasks", "ppl", "--text", str(text), "--json")
    assert code == 0
    report = json.loads(out)
    assert report["window"] == min(1024, report["checkpoint"]["max_length"]) < 1024
