"""A conversion that is killed at any moment, and again, and goes on with `--resume` to the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What holds times, and what is told of this very run.
# Calls into the package that a kill may come at; a conversion makes more.
MOST_CALLS = 20_000
TELLING = ("mla_report.json", "mla_report.html", "mla_report.png", "README.md")
# A program that counts a conversion's steps and kills itself at one of them: moments that a clock would never hit alike.
STEPPED = """
import os, signal, sys
from mla_cli import app
left = int(sys.argv[1])
def trace(frame, event, arg):
    global left
    if frame.f_globals.get("__name__", "").startswith("mla_cli.") and event == "call":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
if left > 0:
    sys.setprofile(trace)
code = app.main(sys.argv[2:])
print("steps", -left, file=sys.stderr)
sys.exit(code)
"""
ALL = ("--format", "native", "--preset", "chat", "--ratio", 4, "--heal", "layers", "--heal-steps", 5, "--nested")


def run(source: Path, out: str, *more: object, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    words = [source, source.parent / out, "--calib", source.parent / "text.txt", "--samples", 8, "--seq-len", 24, *ALL]
    command = [sys.executable, "-c", STEPPED, str(kill_at), "convert", *map(str, [*words, *more])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in TELLING}


def kill_and_resume(source: Path, out: str, moments: list[int]) -> None:
    """Kill a conversion, then those that go on from it, at these numbers of calls into the package; then let it end."""
    for number, moment in enumerate(moments):
        done = run(source, out, *(["--resume"] if number else []), kill_at=moment)
        if done.returncode == 0:  # it took fewer calls
            return
        assert done.returncode == -signal.SIGKILL, done.stderr
    done = run(source, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in source.parent.glob(".*")) == []


def test_a_conversion_killed_in_its_parts_gives_the_same_bytes(source: Path) -> None:
    whole = run(source, "whole", kill_at=-1)
    assert whole.returncode == 0, whole.stderr
    kill_and_resume(source, "out", [5_000])
    assert contents(source.parent / "out") == contents(source.parent / "whole")


@pytest.mark.slow
def test_a_conversion_killed_at_random_moments_gives_the_same_bytes(source: Path) -> None:
    whole = run(source, "whole")
    assert whole.returncode == 0, whole.stderr
    expected = contents(source.parent / "whole")
    rng = random.Random(int(os.environ.get("MLA_KILL_SEED", "0")))
    for attempt in range(12):
        moments = [rng.randrange(1, MOST_CALLS) for _ in range(rng.randrange(1, 5))]
        kill_and_resume(source, f"out{attempt}", moments)
        assert contents(source.parent / f"out{attempt}") == expected, moments
