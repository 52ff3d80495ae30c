"""Functions inside kernels, on their own (imported where Triton interprets)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mla_cli.kernels.tile import _from_bits
from mla_cli.kernels.write import _fp8_bits


@triton.jit
def _from_bits_kernel(source, target, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(target + at, _from_bits(tl.load(source + at), tl.float32))


@triton.jit
def _to_bits_kernel(source, target, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(target + at, _fp8_bits(tl.load(source + at)))


def fp8_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """uint8 `[n]` to float32."""
    padded = torch.zeros(triton.next_power_of_2(len(bits)), dtype=torch.uint8)
    padded[: len(bits)] = bits
    out = torch.empty(len(padded))
    _from_bits_kernel[(1,)](padded, out, len(padded))
    return out[: len(bits)]


def fp8_to_bits(numbers: torch.Tensor) -> torch.Tensor:
    """float32 `[n]` to uint8."""
    padded = torch.zeros(triton.next_power_of_2(len(numbers)))
    padded[: len(numbers)] = numbers
    out = torch.empty(len(padded), dtype=torch.uint8)
    _to_bits_kernel[(1,)](padded, out, len(padded))
    return out[: len(numbers)]
