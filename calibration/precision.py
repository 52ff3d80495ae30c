"""What makes long computations fast on this machine: the number type, by measurement, and memory that is kept."""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

# A matrix product of bfloat16 must be at least this much faster than one of float32 to be worth its rounding.
WORTH = 1.3
# glibc's M_TRIM_THRESHOLD (-1: never), M_MMAP_MAX (0: none) and M_ARENA_MAX.
_MALLOC = ((-1, -1), (-4, 0), (-8, 1))


_settled: dict[str, torch.dtype] = {}


def settle(device: torch.device, dtype: torch.dtype) -> None:
    """Have `fast_dtype` answer this: what an interrupted run, or another process of this one, has measured."""
    _settled[str(device)] = dtype


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where this machine multiplies it faster than float32 (a few milliseconds to find out), else float32."""
    return _settled.get(str(device)) or _measured(device)


@lru_cache
def _measured(device: torch.device) -> torch.dtype:
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


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed instead of giving it back: the next sequence asks for the same large blocks again.

    Fresh pages cost the kernel a fault and a cleared page each: thirty times two tensors of 64 MiB, written and freed, took
    15.4 s of a busy machine without this and 4.0 s with it. Does nothing where the C library is not glibc.
    """
    try:
        adjust = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for parameter, value in _MALLOC:
        adjust(parameter, value)
