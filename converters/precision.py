"""Which number type long computations run fastest in on this machine, by measurement."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

# A matrix product of bfloat16 must be at least this much faster than one of float32 to be worth its rounding.
WORTH = 1.3


@lru_cache
def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where this machine multiplies it faster than float32 (a few milliseconds to find out), else float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.ones(1024, 1024, dtype=dtype, device=device)
        best = float("inf")
        for _ in range(4):  # the first round also warms up; the best of the others is what the machine can do
            begun = time.perf_counter()
            torch.nn.functional.linear(left, left)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begun)
        seconds[dtype] = best
    return torch.bfloat16 if seconds[torch.float32] > WORTH * seconds[torch.bfloat16] else torch.float32


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Matrix products inside run in `dtype`; what they are fed and weights keep their type."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
