"""Large products in float32: as exact as PyTorch's own, and no setting left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mla_cli.model import large_products as module
from mla_cli.model.large_products import LEAST_ROWS, large_products


def setting() -> Any:
    return getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)


@pytest.mark.parametrize("shape", [(LEAST_ROWS, 576), (7, 300, 64), (1, 1000, 333)])
def test_products_are_as_exact_as_float32_is(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(200, shape[-1]), torch.randn(200)
    with large_products(x):
        found = F.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_settings_are_as_they_were_even_after_an_error() -> None:
    before = setting()
    with pytest.raises(ValueError, match="inside"), large_products(torch.randn(4 * LEAST_ROWS, 8)):
        raise ValueError("inside")
    assert setting() == before


@pytest.mark.parametrize("x", [
    torch.randn(LEAST_ROWS - 1, 8), torch.randn(64, 8).double(), torch.randn(64, 8).bfloat16(), torch.randn(0, 8),
], ids=["few rows", "float64", "bfloat16", "none"])  # fmt: skip
def test_what_gains_nothing_is_left_alone(x: torch.Tensor) -> None:
    before = setting()
    with large_products(x):
        assert setting() == before


def test_rounded_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine whose matrix units would be used.
    monkeypatch.setattr(module, "F", type("Rounded", (), {"linear": staticmethod(rounded)}))
    module._helps.cache_clear()
    try:
        assert not module._helps()
    finally:
        module._helps.cache_clear()


def rounded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ weight.bfloat16().T).float()
