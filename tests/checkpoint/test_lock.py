"""Two runs on one output: the second is refused, and a lock of a dead process is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mla_cli.app import main
from mla_cli.checkpoint.lock import locked
from mla_cli.errors import OutputError
from tests.tiny import run_convert, save_text, save_tiny, save_tokenizer

HOLD = """
import sys, time
from pathlib import Path
from mla_cli.checkpoint.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""


def test_the_second_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with locked(out), pytest.raises(OutputError, match=rf"another run \(process {os.getpid()}\)"), locked(out):
        pass
    with locked(out), locked(out.with_name("other")):
        pass
    assert list(tmp_path.iterdir()) == []  # no lock, and no folder that was made for one


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_commands_are_refused_meanwhile_and_take_over_from_the_dead(
    tmp_path: Path, end: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny(source)
    save_tokenizer(source)
    text = save_text(tmp_path / "text.txt")
    quick = ("--heal", "none", "--ratio", 2)
    calibrate = ["calibrate", str(out), "--calib", str(text), "--samples", "4", "--seq-len", "32", "--max-loss", "1000"]
    with subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        for command in (lambda: run_convert(source, *quick), lambda: main(calibrate)):
            assert command() in (1, 2)
            said = capsys.readouterr().err.strip().splitlines()[-1]
            assert f"process {process.pid}" in said or "no such folder" in said
        assert not out.exists()
        process.send_signal(end)
    assert run_convert(source, *quick) == 0
    with locked(out):
        assert main(calibrate) == 1
        assert f"process {os.getpid()}" in capsys.readouterr().err
    assert main(calibrate) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "source", "text.txt"]
