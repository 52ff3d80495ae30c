"""What a folder's permissions do to an output, as the user that a program mostly is: not root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mla_cli.checkpoint import writer
from mla_cli.checkpoint.writer import CheckpointWriter, check_output
from mla_cli.errors import OutputError

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a user without privileges, whose rights the test has; pytest's own lies in one of root's alone."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        if root:
            os.chown(name, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(os.path.realpath(name))
        finally:
            if root:
                os.seteuid(0)


def write(out: Path, name: str) -> None:
    with CheckpointWriter(out, force=True) as checkpoint:
        checkpoint.write_json("config.json", {"model_type": "llama"})
        checkpoint.write_text("deep/er/note.txt", "")
        checkpoint.add(name, torch.ones(1))


def test_force_replaces_a_folder_that_is_read_only(folder: Path) -> None:
    out = folder / "out"
    write(out, "first")
    for path in (out / "deep/er", out / "deep", out):
        path.chmod(0o555)
    write(out, "second")
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert b"second" in (out / "model.safetensors").read_bytes()


def test_what_cannot_be_deleted_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    write(out, "first")
    monkeypatch.setattr(writer, "remove", lambda path: None)  # as if the files were somebody else's
    write(out, "second")
    aside = next(path for path in folder.iterdir() if ".old-" in path.name)
    assert f"could not be deleted: it is in {aside}" in capsys.readouterr().err


def test_a_folder_that_takes_no_files_is_refused_and_left_alone(folder: Path) -> None:
    folder.chmod(0o555)
    with pytest.raises(OutputError, match="cannot be written to"):
        check_output(folder / "new" / "out", False)
    assert list(folder.iterdir()) == []


def test_nor_can_root_write_everywhere() -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc, where root has every permission and can create nothing")
    with pytest.raises(OutputError, match="cannot be written to"):
        check_output(Path("/proc/out"), False)
