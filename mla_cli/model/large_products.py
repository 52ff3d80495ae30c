"""Large float32 products by oneDNN on CPUs where PyTorch's own choice, MKL, leaves half of the vector units idle.

MKL computes with 256 bits on processors that are not Intel's; oneDNN with all they have (`F.linear` of 1,024 x 576 with 1,536 x
576 on one core of an AMD EPYC with AVX-512: 100 against 207 GFLOP/s). PyTorch goes to oneDNN where it may round float32 to
bfloat16, and without matrix units (AMX) oneDNN does not make use of that. Whether it does is tried before it is relied on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows from which on oneDNN is faster; a step of a few tokens waits for memory, and MKL has less to prepare.
LEAST_ROWS = 32
# Largest error, over the largest product, that sums of some hundred float32 products may have.
TOLERANCE = 1e-5
_ROWS, _INNER, _OUTPUTS = 64, 320, 192


@contextmanager
def large_products(x: Tensor) -> Iterator[None]:
    """Products with `x` `[..., D]` inside are as exact as before, and faster where this machine allows it."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() < LEAST_ROWS * x.shape[-1] or not _helps():
        yield
        return
    with _allowed():
        yield


@contextmanager
def _allowed() -> Iterator[None]:
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@lru_cache(maxsize=1)
def _helps() -> bool:
    """Whether this PyTorch can be sent to oneDNN, and its float32 products stay what they are."""
    if not hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision"):
        return False
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)() or not torch.cpu._is_avx512_supported():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, _INNER, generator=generator) for n in (_ROWS, _OUTPUTS))
    exact = x.double() @ weight.double().T
    with torch.inference_mode(), _allowed():
        found = F.linear(x, weight)
    return float((found.double() - exact).abs().max() / exact.abs().max()) < TOLERANCE
