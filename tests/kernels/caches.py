"""Random paged caches whose unused bytes are all ones: NaN as bfloat16, float32 and FP8, and a page id far outside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.kernels.pages import PageLayout, put, slots_of
from mla_cli.kernels.quantized import PAGE

POISON = 0xFF


@dataclass(frozen=True)
class PagedCache:
    """A pool with the tokens of `lengths` in it, pages in random order."""

    layout: PageLayout
    pool: Tensor
    block_table: Tensor
    lengths: Tensor


def paged_cache(layout: PageLayout, lengths: list[int], seed: int = 0, size: float = 1.0, spare: int = 3) -> PagedCache:
    """Random tokens, `size` their standard deviation; pages nobody owns and slots past the end are poisoned."""
    g = torch.Generator().manual_seed(seed)
    columns = max(1, max(-(-n // PAGE) for n in lengths))
    pages = len(lengths) * columns + spare
    pool = torch.full((pages, layout.page_bytes), POISON, dtype=torch.uint8)
    block_table = torch.full((len(lengths), columns), 2**31 - 1, dtype=torch.int32)
    order = torch.randperm(pages, generator=g).int()
    for b, n in enumerate(lengths):
        used = -(-n // PAGE)
        block_table[b, :used] = order[b * columns : b * columns + used]
        latent = torch.randn(n, layout.kv_lora_rank, generator=g).bfloat16() * size
        k_rope = torch.randn(n, layout.qk_rope_head_dim, generator=g).bfloat16() * size
        slots = slots_of(block_table, torch.full((n,), b), torch.arange(n))
        if layout.quantizer is None:
            put(pool, layout, slots, latent, None, k_rope)
        else:
            put(pool, layout, slots, *layout.quantizer.quantize(latent), k_rope)
    return PagedCache(layout, pool, block_table, torch.tensor(lengths, dtype=torch.int32))


def random_queries(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal bfloat16 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).bfloat16()
