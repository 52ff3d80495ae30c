"""Products with a matrix that is kept narrower than it is computed with, without ever widening all of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers widened at a time: the output head of a large model has half a billion.
AT_ONCE = 1 << 26


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[..., K]` and `[N, K]` to `[..., N]`, in the type of `x`; a gradient reaches `x` alone where `weight` is large."""
    if weight.dtype == x.dtype or weight.numel() <= AT_ONCE:
        return F.linear(x, weight.to(x.dtype), bias)
    out: Tensor = _InParts.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.weight = weight
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        for rows in _parts(weight):
            out[..., rows] = F.linear(x, weight[rows].to(x.dtype))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        weight = ctx.weight
        found = gradient.new_zeros(*gradient.shape[:-1], weight.shape[1])
        for rows in _parts(weight):
            found += gradient[..., rows] @ weight[rows].to(gradient.dtype)
        return found, None


def _parts(weight: Tensor) -> list[slice]:
    step = max(1, AT_ONCE // weight.shape[1])
    return [slice(i, min(i + step, weight.shape[0])) for i in range(0, weight.shape[0], step)]
