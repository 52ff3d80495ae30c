"""Functions inside kernels, on their own (imported where Triton interprets)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import triton
import triton.language as tl

from mla_cli.kernels import decode, dispatch, prefill
from mla_cli.kernels.pages import PageLayout
from mla_cli.kernels.tile import _from_bits
from mla_cli.kernels.write import _fp8_bits, write
from scripts import gpu_correctness


@triton.jit
def _from_bits_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, _from_bits(tl.load(source + at), tl.float32))


@triton.jit
def _to_bits_kernel(source, target, BLOCK: tl.constexpr):
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


def write_slices(projected: torch.Tensor, inputs: list[Any]) -> torch.Tensor:
    """The pool after writing latents and rotary keys that are slices of one tensor (sent alone, they would be copied)."""
    layout = inputs[6]
    latent, k_rope = projected.split((layout.kv_lora_rank, layout.qk_rope_head_dim), dim=-1)
    write(latent, k_rope, *inputs[2:])
    return inputs[5]  # type: ignore[no-any-return]


def choose_with_broken_decode(how: str) -> tuple[list[str], list[str]]:
    """Backends chosen while Triton's decode raises or is wrong, and the warnings."""
    found, device = [], torch.device("cpu")
    whole = decode.decode

    def broken(*args: Any, **kwargs: Any) -> Any:
        if how == "raises":
            raise RuntimeError("out of resource: shared memory\nRequired: 102400, Hardware limit: 101376")
        out, lse = whole(*args, **kwargs)
        return (out * float("nan") if how == "nan" else out * 1.1), lse

    dispatch._triton.cache_clear()
    dispatch._failure.cache_clear()
    dispatch._warn.cache_clear()
    decode.decode = broken
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for layout in (PageLayout("bf16", 32, 8), PageLayout("bf16", 32, 8)):
                found.append(dispatch.choose("triton", device, layout, 4).name)
    finally:
        decode.decode = whole
        dispatch._triton.cache_clear()
        dispatch._failure.cache_clear()
    return found, [
        str(w.message) for w in caught if issubclass(w.category, RuntimeWarning) and "Triton" in str(w.message)
    ]


def chosen(name: Any, dtype: Any, r: int, d: int, heads: int) -> str:
    """The backend chosen where Triton can run."""
    return dispatch.choose(name, torch.device("cpu"), PageLayout(dtype, r, d), heads).name


def gpu_checks(only: str, factor: float = 1.0) -> list[tuple[str, float, bool]]:
    """The checks of scripts/gpu_correctness.py whose name begins so, small and on the CPU: name, error, whether it may be.

    Decode's output is multiplied by `factor`.
    """
    whole = decode.decode

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out, lse = whole(*args, **kwargs)
        return out * factor, lse

    decode.decode = scaled
    try:
        checks = [(name, error_of) for name, error_of in gpu_correctness.checks(torch.device("cpu"), small=True)]
        found = [(name, error_of()) for name, error_of in checks if name.startswith(only)]
    finally:
        decode.decode = whole
    return [(name, error, gpu_correctness.right(name, error)) for name, error in found]


def attend_far_away(dtype: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Write, decode and prefill in the first pages of a pool, and in pages whose bytes 32 bits cannot count.

    Returns:
        The outputs of both, and the byte at which the far pages begin. The pool is never filled, so it takes no memory.
    """
    layout = PageLayout(dtype, 64, 8)
    first = 2**31 // layout.page_bytes + 1
    pool = layout.pool(first + 3)
    g = torch.Generator().manual_seed(0)
    latent, k_rope = torch.randn(40, 64, generator=g).bfloat16(), torch.randn(40, 8, generator=g).bfloat16()
    q = torch.randn(1, 1, 4, 72, generator=g).bfloat16()
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
    flag, length = torch.zeros(1, dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    results = []
    for page in (0, first):
        slots = page * 16 + torch.arange(40)
        write(latent, k_rope, None, None, slots, pool, layout, flag)
        table = page + torch.arange(3, dtype=torch.int32)[None]
        options = {"out_dtype": torch.float32}
        decoded, _ = decode.decode(q, pool, layout, table, length, 0.2, **options)
        read, _ = prefill.prefill(q[0], cu_seqlens, pool, layout, table, length, 0.2, **options)
        results.append([decoded, read])
    return results[0], results[1], first * layout.page_bytes
