"""Which kernels run where, and that all of them give the same."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from mla_cli.errors import MlaError
from mla_cli.kernels.dispatch import TOLERANCE, choose, self_check
from mla_cli.kernels.pages import LATENT_DTYPES, PageLayout
from tests.kernels.interpreter import ROOT, Interpreter

PARTS = "tests.kernels.kernel_parts."
CPU = torch.device("cpu")


def test_a_cpu_gets_pytorchs_operators_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    layout = PageLayout("bf16", 64, 8)
    assert choose("auto", "cpu", layout, 4).name == "cpu"
    assert choose("reference", "cpu", layout, 4).name == "reference"
    assert not recwarn.list


def test_triton_by_name_on_a_cpu_is_an_error() -> None:
    """KN-07: a forced kernel on a CPU."""
    with pytest.raises(MlaError, match="not on 'cpu' -> use --backend auto"):
        choose("triton", "cpu", PageLayout("bf16", 64, 8), 4)
    with pytest.raises(MlaError, match="no backend 'tritn'"):
        choose("tritn", "cpu", PageLayout("bf16", 64, 8), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_every_backend_passes_the_self_check(name: Any, dtype: Any) -> None:
    layout = PageLayout(dtype, 40, 6)
    assert self_check(choose(name, "cpu", layout, 3), CPU, layout, 3) <= TOLERANCE


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize(("r", "d", "heads"), [(64, 8, 9), (48, 0, 4), (8, 20, 1)])
def test_triton_is_chosen_where_it_passes(interpreter: Interpreter, dtype: Any, r: int, d: int, heads: int) -> None:
    assert interpreter(PARTS + "chosen", "triton", dtype, r, d, heads) == "triton"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "RuntimeError: out of resource: shared memory"),
        ("wrong", "differ from the formula"),
        ("nan", "differ"),
    ],
)
def test_a_failing_kernel_is_replaced_with_one_warning(interpreter: Interpreter, how: str, said: str) -> None:
    """KN-07: too little shared memory, or wrong results."""
    names, warned = interpreter(PARTS + "choose_with_broken_decode", how)
    assert names == ["cpu", "cpu"]
    assert len(warned) == 1
    assert said in warned[0]


def test_what_triton_cannot_hold_is_replaced_before_the_first_token(interpreter: Interpreter) -> None:
    """KN-02: a rank beyond the registers of a program."""
    assert interpreter(PARTS + "chosen", "triton", "bf16", 2048, 8, 1) == "cpu"


def test_triton_is_not_loaded_for_a_cpu() -> None:
    code = """
import sys
sys.modules["triton"] = None  # as where it is not installed
from mla_cli.kernels.dispatch import choose
from mla_cli.kernels.pages import PageLayout
print(choose("auto", "cpu", PageLayout("int8", 64, 8), 4).name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "cpu", done.stderr
