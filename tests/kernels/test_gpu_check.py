"""The script for GPU machines: what it says without one, and its checks under the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.interpreter import ROOT, Interpreter


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert "needs a GPU" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    "only",
    [
        "write fp8",
        "decode int8 48+20",
        "decode int4, 4 queries",
        "prefill bf16, own",
        "explicit 128",
        "merge",
        "end to end fp8",
    ],
)
def test_its_checks_pass_where_kernels_are_right(interpreter: Interpreter, only: str) -> None:
    found = interpreter("tests.kernels.kernel_parts.gpu_checks", only)
    assert found
    assert all(right for _, _, right in found), found


def test_its_checks_see_a_wrong_kernel(interpreter: Interpreter) -> None:
    found = interpreter("tests.kernels.kernel_parts.gpu_checks", "decode bf16 48+20", 1.05)
    assert found
    assert not any(right for _, _, right in found), found
