"""Which kernels run: Triton's on a GPU, PyTorch's operators elsewhere, or the float64 formula.

All three take the same arguments (see `decode.decode`, `prefill.prefill`, `merge.merge`, `write.write`) and give (output, lse).
Triton is imported only once it is chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.kernels import paged
from mla_cli.kernels.launch import target_of
from mla_cli.kernels.pages import PageLayout, gather

BackendName = Literal["auto", "triton", "cpu", "reference"]

# Most that Triton's results may differ from the formula's, by largest output: products take bfloat16 numbers.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Backend:
    """One way to run the kernel families."""

    name: str
    decode: Callable[..., tuple[Tensor, Tensor]]
    prefill: Callable[..., tuple[Tensor, Tensor]]
    merge: Callable[..., tuple[Tensor, Tensor]]
    write: Callable[..., None]


def choose(name: BackendName, device: torch.device | str, layout: PageLayout, heads: int) -> Backend:
    """The kernels for a model's cache on a device.

    Triton's are tried on a tiny input first. If they fail there, or give something else than the formula, PyTorch's operators
    run instead, and one warning a process says so.

    Args:
        name: `auto` (Triton on a GPU), or one by name.
        layout, heads: of the model's layers.

    Raises:
        MlaError: `triton` was asked for by name on a device where it cannot run.
    """
    device = torch.device(device)
    if name == "reference":
        return Backend(name, _decode_reference, _prefill_reference, paged.merge, paged.write)
    if name == "triton":
        target_of(device)
    elif name not in ("auto", "cpu"):
        raise MlaError(f"there is no backend {name!r}", fix="one of auto, triton, cpu, reference")
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        found = triton_or_why_not(device, layout, heads)
        if isinstance(found, Backend):
            return found
        _warn(found)
    return Backend("cpu", paged.decode, paged.prefill, paged.merge, paged.write)


def triton_or_why_not(
    device: torch.device,
    layout: PageLayout,
    heads: int,
    window: int | None = None,
    softcap: float | None = None,
) -> Backend | str:
    """Triton's kernels, tried on a tiny input (see `self_check`); what is wrong with them here, if anything is."""
    failure = _failure(device, layout, heads, window, softcap)
    return _triton() if failure is None else failure


@cache
def _triton() -> Backend:
    modules = [import_module(f"mla_cli.kernels.{family}") for family in ("decode", "prefill", "merge", "write")]
    decode, prefill, merge, write = modules
    return Backend("triton", decode.decode, prefill.prefill, merge.merge, write.write)


@cache
def _failure(
    device: torch.device, layout: PageLayout, heads: int, window: int | None, softcap: float | None
) -> str | None:
    """What is wrong with Triton's kernels here; None: nothing."""
    try:
        worst = self_check(_triton(), device, layout, heads, window, softcap)
    except Exception as error:  # whatever a compiler or a driver raises, there is another way to run
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    # NaN is not within any tolerance.
    return None if worst <= TOLERANCE else f"results differ from the formula by {worst:.2g} of the largest"


def self_check(
    backend: Backend,
    device: torch.device,
    layout: PageLayout,
    heads: int,
    window: int | None = None,
    softcap: float | None = None,
) -> float:
    """Write two short sequences and attend to them: the largest difference to the formula, relative to the largest output.

    Every form that a model's steps take is run, since each is compiled for itself: one query, several, a prompt.

    Args:
        window, softcap: of the layers; a window is narrowed to what these sequences show.
    """
    g = torch.Generator().manual_seed(0)
    r, d, lengths = layout.kv_lora_rank, layout.qk_rope_head_dim, [37, 2]
    latent, k_rope = torch.randn(39, r, generator=g), torch.randn(39, d, generator=g)
    q = torch.randn(39, heads, r + d, generator=g).to(device, torch.bfloat16)
    table = torch.tensor([[2, 0, 4], [3, 0, 0]], dtype=torch.int32, device=device)
    place = torch.arange(37)
    slots = torch.cat(((table.cpu()[0].long()[place // 16] * 16 + place % 16), 3 * 16 + torch.arange(2)))
    pool = torch.full((5, layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    rope = k_rope.to(device, torch.bfloat16) if d else None
    backend.write(latent.to(device, torch.bfloat16), rope, None, None, slots.to(device), pool, layout, flag)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    stored, _ = gather(pool.cpu(), layout, table.cpu(), sizes.cpu())
    coarse = {"bf16": 0.01, "int8": 0.02, "fp8": 0.05, "int4": 0.2}[layout.dtype]
    written = float((stored[0, :37] - latent[:37].bfloat16().float()).abs().max() / latent.abs().max())
    if written > coarse or int(flag):
        return float("inf")
    limits: dict[str, Any] = {"window": None if window is None else min(window, 20), "softcap": softcap}
    cache, there = (pool, layout, table, sizes, (r + d) ** -0.5), (pool.cpu(), layout, table.cpu(), sizes.cpu())
    cu_seqlens = torch.tensor([0, 37, 39], dtype=torch.int32, device=device)
    whole, _ = paged.prefill_reference(q.cpu(), cu_seqlens.cpu(), *there, cache[-1], **limits)
    found, _ = backend.prefill(q, cu_seqlens, *cache, max_queries=37, **limits)
    differences = [_difference(found, whole)]
    for queries in (1, 2):
        last = [token for end in (37, 39) for token in range(end - queries, end)]
        found, _ = backend.decode(q[last].view(2, queries, heads, r + d), *cache, num_splits=2, **limits)
        differences.append(_difference(found.flatten(0, 1), whole[last]))
    return max(differences)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest error, relative to the largest number; infinite for NaN."""
    error = float((found.cpu().double() - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


@cache
def _warn(failure: str) -> None:
    message = f"Triton's kernels do not work here ({failure}); PyTorch's operators run instead, which are slower"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _decode_reference(
    *args: Any, num_splits: int | None = None, out_dtype: torch.dtype = torch.bfloat16, **kwargs: Any
) -> Any:
    out, lse = paged.decode_reference(*args, **kwargs)
    return out.to(out_dtype), lse.float()


def _prefill_reference(
    *args: Any, max_queries: int | None = None, out_dtype: torch.dtype = torch.bfloat16, **kwargs: Any
) -> Any:
    out, lse = paged.prefill_reference(*args, **kwargs)
    return out.to(out_dtype), lse.float()
