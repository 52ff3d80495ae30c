"""What every test shares: one thread for torch, the folder of real data, and Triton's interpreter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.interpreter import Interpreter

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Programs that tests start must hear Ctrl-C: a shell's background job has it ignored, and its children too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Tiny matrices gain nothing from threads, and parallel test workers fight over the cores.
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real public data (MLA_DATA, default ../shared/data); tests that need it are skipped without it."""
    folder = Path(os.environ.get("MLA_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set MLA_DATA to the folder that holds text/, lambada/, ...")
    return folder


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Triton's interpreter, one process for all tests: its start costs seconds."""
    pytest.importorskip("triton")
    process = Interpreter()
    yield process
    process.close()
