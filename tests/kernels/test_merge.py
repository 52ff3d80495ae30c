"""Triton's merge against the float64 one: what is empty weighs nothing, even if it holds NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.kernels import paged, reference
from tests.kernels.interpreter import Interpreter

MERGE = "mla_cli.kernels.merge.merge"


def parts(n: int, *shape: int, seed: int = 0, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=g), torch.randn(n, *shape[:-1], generator=g) * spread


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 9),
    rows=st.sampled_from([(1,), (3, 2), (2, 1, 3)]),
    r=st.sampled_from([8, 40, 520]),
    spread=st.sampled_from([1.0, 1e4]),
    empty=st.floats(0, 1),
)
def test_parts_are_weighed_as_in_the_formula(
    interpreter: Interpreter, seed: int, n: int, rows: Any, r: int, spread: float, empty: float
) -> None:
    outputs, lses = parts(n, *rows, r, seed=seed, spread=spread)
    lses[torch.rand(lses.shape, generator=torch.Generator().manual_seed(seed)) < empty] = float("-inf")
    expected, expected_lse = reference.merge(outputs, lses)
    poisoned = outputs.masked_fill((lses == float("-inf"))[..., None], float("nan"))
    for out, lse in (interpreter(MERGE, poisoned, lses), paged.merge(poisoned, lses)):
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)


def test_a_single_part_with_keys_comes_back_bit_for_bit(interpreter: Interpreter) -> None:
    outputs, lses = parts(5, 4, 24)
    lses[torch.arange(5) != 3] = float("-inf")
    out, lse = interpreter(MERGE, outputs, lses)
    assert torch.equal(out, outputs[3])
    assert torch.equal(lse, lses[3])


def test_nothing_gives_nothing(interpreter: Interpreter) -> None:
    for n in (0, 1, 3):
        out, lse = interpreter(MERGE, torch.full((n, 2, 8), float("nan")), torch.full((n, 2), float("-inf")))
        assert torch.equal(out, torch.zeros(2, 8))
        assert bool((lse == float("-inf")).all())


def test_two_parts_are_a_gate(interpreter: Interpreter) -> None:
    outputs, lses = parts(2, 6, 16)
    gate = torch.sigmoid(lses[0] - lses[1])[:, None]
    out, _ = interpreter(MERGE, outputs, lses)
    torch.testing.assert_close(out, gate * outputs[0] + (1 - gate) * outputs[1], atol=1e-6, rtol=1e-5)


def test_a_broken_part_shows(interpreter: Interpreter) -> None:
    outputs, lses = parts(3, 2, 8)
    lses[1, 0] = float("nan")
    out, lse = interpreter(MERGE, outputs, lses)
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan())
    assert bool(out[1].isfinite().all())


def test_arguments_are_refused_by_name(interpreter: Interpreter) -> None:
    outputs, lses = parts(3, 2, 8)
    for mine, theirs, said in (
        (outputs.double(), lses, "outputs is float64"),
        (outputs.transpose(0, 1), lses, "outputs has the strides"),
        (outputs, lses[:2], "lses has the shape"),
        (outputs, lses.bfloat16(), "lses is bfloat16"),
    ):
        with pytest.raises(MlaError, match=said):
            interpreter(MERGE, mine, theirs)
