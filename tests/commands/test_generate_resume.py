"""`mla generate --prompts --out --resume`: an interruption loses no answer, and the file is the one of an unbroken run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from mla_cli.app import Command, main
from mla_cli.commands.generate import generate
from tests.commands.test_generate import process, prompt_file
from tests.runtime.stand_ins import save_tiny_with_tokenizer

COUNT = 30
OPTIONS = ("--max-new-tokens", "120", "--ignore-eos", "--temperature", "1", "--max-batch", "2", "--quiet")


def left(out: Path) -> Path:
    return out.with_name(f".{out.name}.mla-resume")


def answered(out: Path) -> list[int]:
    """Indices of what a run has kept so far."""
    if not left(out).exists():
        return []
    lines = left(out).read_bytes().split(b"\n")[1:-1]
    return [json.loads(line)["index"] for line in lines]


def interrupt(run: subprocess.Popen[bytes], out: Path, least: int, number: int) -> int:
    """End a run once it has so many answers; its exit code."""
    until = time.monotonic() + 60
    while len(answered(out)) < least:
        assert run.poll() is None, "the run ended too early to be interrupted"
        assert time.monotonic() < until
        time.sleep(0.005)
    run.send_signal(number)
    run.wait(timeout=60)
    return run.returncode


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, bytes]:
    """A model, a file of prompts, and what an unbroken run makes of it."""
    folder = tmp_path_factory.mktemp("resume")
    save_tiny_with_tokenizer(folder / "model", num_hidden_layers=4)
    lines: list[Any] = [{"prompt": f"number {i}", "seed": i, "id": f"é{i}"} for i in range(COUNT)]
    # Some end long after those that follow, one cannot be answered, and two are no requests.
    lines[0]["max_new_tokens"] = 200
    lines[5], lines[20] = "{broken", {"prompt": "x" * 300, "seed": 1}
    prompts = prompt_file(folder, *lines)
    out = folder / "whole.jsonl"
    code = main(
        ["generate", str(folder / "model"), "--prompts", prompts, "--out", str(out), *OPTIONS],
        commands=(Command("generate", generate),),
    )
    assert code == 1
    assert not left(out).exists()
    return str(folder / "model"), prompts, out.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_cut_short_goes_on_to_the_same_file(
    work: tuple[str, str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    model, prompts, expected = work
    out = tmp_path / "out.jsonl"
    command = (model, "--prompts", prompts, "--out", str(out), *OPTIONS)
    code = interrupt(process(*command), out, 3, number)
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    assert not out.exists()
    first = answered(out)
    assert 3 <= len(first) < COUNT - 2
    if number == signal.SIGKILL:  # in the middle of a line
        with open(left(out), "ab") as stream:
            stream.write(b'{"index": 29, "line": 30, "text": "cut of')
    interrupt(process(*command, "--resume"), out, len(first) + 3, number)
    second = answered(out)
    assert second[: len(first)] == first
    assert len(set(second)) == len(second)
    # The rest, with more at a time: nothing that changes the answers.
    capfd.readouterr()
    again = [*command, "--resume", "--max-batch", "5", "--threads", "1"]
    assert main(["generate", *again], commands=(Command("generate", generate),)) == 1
    assert out.read_bytes() == expected
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
    err = capfd.readouterr().err
    assert "prompts.jsonl:6: not valid JSON" in err
    assert "prompts.jsonl:21: the prompt has 301 tokens, the context is limited to 256" in err
    assert "2 of 30 prompts" in err


def test_the_answers_are_those_of_the_lines(work: tuple[str, str, bytes]) -> None:
    answers = [json.loads(line) for line in work[2].splitlines()]
    assert [a["index"] for a in answers] == list(range(COUNT))
    assert [a["index"] for a in answers if "error" in a] == [5, 20]
    assert all(a["completion_tokens"] == 120 for a in answers[1:] if "error" not in a)
    assert len({a["text"] for a in answers if "text" in a}) == COUNT - 2


@pytest.fixture(scope="module")
def broken_off(work: tuple[str, str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output whose run was interrupted."""
    out = tmp_path_factory.mktemp("broken") / "out.jsonl"
    interrupt(process(work[0], "--prompts", work[1], "--out", str(out), *OPTIONS), out, 2, signal.SIGINT)
    return out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--seed", "3"], None),  # each line has its own
        (["--temperature", "0.5"], "file of prompts, or other sampling options"),
        (["--max-context", "100"], "set of options"),
        (["--dtype", "bfloat16"], "set of options"),
        (["--chat"], "set of options"),
        (["--prompts"], "file of prompts"),
        (["--model"], "model"),
    ],
)
def test_only_the_same_work_is_gone_on_with(
    work: tuple[str, str, bytes], broken_off: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    change: list[str], named: str | None,
) -> None:  # fmt: skip
    model, prompts, _ = work
    if change == ["--prompts"]:
        change, prompts = [], prompt_file(tmp_path, *[{"prompt": "another"}] * COUNT)
    elif change == ["--model"]:
        change, model = [], str(tmp_path / "model")
        save_tiny_with_tokenizer(tmp_path / "model", num_hidden_layers=4, rms_norm_eps=1e-4)
    before = left(broken_off).read_bytes()
    out = tmp_path / broken_off.name
    left(out).write_bytes(before)
    capfd.readouterr()
    arguments = ["generate", model, "--prompts", prompts, "--out", str(out), *OPTIONS, *change, "--resume"]
    code = main(arguments, commands=(Command("generate", generate),))
    err = capfd.readouterr().err
    if named is None:
        assert (code, out.exists()) == (1, True)
        return
    assert (code, out.exists(), left(out).read_bytes()) == (2, False, before)
    assert f"the interrupted run had another {named}" in err
    assert "Traceback" not in err


def test_without_resume_a_run_starts_again(
    work: tuple[str, str, bytes], broken_off: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, prompts, expected = work
    out = tmp_path / "out.jsonl"
    left(out).write_bytes(left(broken_off).read_bytes().replace(b'"text"', b'"changed"'))
    arguments = ["generate", model, "--prompts", prompts, "--out", str(out), *OPTIONS]
    assert main(arguments, commands=(Command("generate", generate),)) == 1
    assert out.read_bytes() == expected
    assert not left(out).exists()


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]\n", b"\xff\n"])
def test_nothing_to_resume(
    work: tuple[str, str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    out = tmp_path / "out.jsonl"
    if content is not None:
        left(out).write_bytes(content)
    capfd.readouterr()
    arguments = ["generate", work[0], "--prompts", work[1], "--out", str(out), "--resume", "--quiet"]
    assert main(arguments, commands=(Command("generate", generate),)) == 2
    err = capfd.readouterr().err
    assert "leave out --resume" in err
    assert err.count("\n") == 1
    code = main(["generate", *arguments[1:4], "--resume", "--quiet"], commands=(Command("generate", generate),))
    assert code == 2
    assert "--out" in capfd.readouterr().err


def test_a_reader_of_the_results_that_stops_ends_the_run_quietly(work: tuple[str, str, bytes]) -> None:
    run = process(work[0], "--prompts", work[1], *OPTIONS)
    assert run.stdout is not None
    assert run.stderr is not None
    assert run.stdout.readline()
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait(timeout=60) == 141
    assert b"Traceback" not in err
    assert all(b"prompts.jsonl:" in line for line in err.splitlines())  # of lines that cannot be answered


@pytest.mark.parametrize("place", [0.3, 0.6, 0.999, 1.0])
def test_a_journal_that_ends_anywhere_is_gone_on_with(
    work: tuple[str, str, bytes], broken_off: Path, tmp_path: Path, place: float
) -> None:
    model, prompts, expected = work
    whole = left(broken_off).read_bytes()
    header = whole.index(b"\n") + 1
    out = tmp_path / "out.jsonl"
    left(out).write_bytes(whole[: header + round(place * (len(whole) - header))])
    arguments = ["generate", model, "--prompts", prompts, "--out", str(out), *OPTIONS, "--resume"]
    assert main(arguments, commands=(Command("generate", generate),)) == 1
    assert out.read_bytes() == expected
    assert not left(out).exists()
