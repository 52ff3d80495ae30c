"""One attention result from `n` partial ones over disjoint keys, by log-sum-exp.

    lse = log sum_i exp(lse_i);   out = sum_i exp(lse_i - lse) out_i

For two parts that is the gate `sigmoid(lse_prev - lse_curr)`. A part without keys has the log-sum-exp -inf and weighs exactly
nothing, whatever its output holds; a single part with keys comes back as it is, bit for bit. The float64 reference is
`reference.merge`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_cli.kernels.launch import Launch, Target, check, target_of

BLOCK_R = 512  # channels of a program


@triton.jit
def merge_kernel(
    parts_ptr,  # float, [n, rows, R]
    lses_ptr,  # fp32, [n, rows]
    out_ptr,  # float, [rows, R]
    lse_ptr,  # fp32, [rows]
    rows,
    n,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.arange(0, BLOCK_N)
    lses = tl.load(lses_ptr + part.to(tl.int64) * rows + row, mask=part < n, other=float("-inf"))
    highest = tl.max(lses, 0)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(lses - anchor), 0)
    divisor = tl.where(total == 0, 1.0, total)
    acc = tl.zeros([BLOCK_R], tl.float32)
    at = row
    for _ in range(n):
        weight = tl.exp(tl.load(lses_ptr + at) - anchor) / divisor
        # What an empty part holds is never read; NaN is not equal to 0 and shows.
        read = column < tl.where(weight != 0, R, 0)
        acc += weight * tl.load(parts_ptr + at * R + column, mask=read, other=0.0).to(tl.float32)
        at += rows
    tl.store(out_ptr + row * R + column, acc.to(out_ptr.dtype.element_ty), mask=column < R)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row, tl.where(total == 0, float("-inf"), anchor + tl.log(total)))


def plan(outputs: Tensor, lses: Tensor, target: Target, out: Tensor, lse: Tensor) -> Launch:
    """The launch that merges `[n, ..., r]` and `[n, ...]` into `[..., r]` and `[...]`."""
    n, width = outputs.shape[0], outputs.shape[-1]
    rows = lses[0].numel()
    block = min(BLOCK_R, triton.next_power_of_2(width))
    return Launch(
        merge_kernel,
        (rows, triton.cdiv(width, block)),
        {
            "parts_ptr": outputs,
            "lses_ptr": lses,
            "out_ptr": out,
            "lse_ptr": lse,
            "rows": rows,
            "n": n,
            "R": width,
            "BLOCK_N": max(2, triton.next_power_of_2(n)),
            "BLOCK_R": block,
        },
        num_warps=max(1, block // (4 * target.warp_size)),  # four channels a lane are one load of 16 bytes
    )


def merge(outputs: Tensor, lses: Tensor, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """One attention result from `n` partial ones.

    Args:
        outputs: `[n, ..., r]` normalised partial outputs, float32 or bfloat16; lses: `[n, ...]` float32, natural logarithm.
        out_dtype: of the output; None: that of `outputs`.

    Returns:
        Output `[..., r]` and log-sum-exp `[...]`; zeros and minus infinity where no part has keys.
    """
    target = target_of(outputs.device)
    floats = (torch.float32, torch.bfloat16)
    check("merge", "outputs", outputs, (None,) * outputs.dim(), floats)
    check("merge", "lses", lses, tuple(outputs.shape[:-1]), (torch.float32,), outputs.device)
    out = torch.empty(outputs.shape[1:], dtype=out_dtype or outputs.dtype, device=outputs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outputs.device)
    if outputs.shape[0] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    plan(outputs, lses, target, out, lse).run(outputs.device)
    return out, lse
