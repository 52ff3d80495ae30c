"""Pages of a latent cache: where every byte of a token stands, and how to read and write it without a kernel.

A pool is one uint8 buffer `[pages, page_bytes]`. A page keeps 16 consecutive tokens of one layer of one sequence, in runs:

    latents `[16, r]` | rotary keys bf16 `[16, d_R]` | scales float32 `[16]` (int4: bf16 `[16, G]`; bf16 latents: none)

Every run starts at a multiple of 16 bytes and `page_bytes` is a multiple of 128: every load of a kernel is 16 bytes wide,
and no two pages share a line of cache. Token `t` of sequence `b` stands in slot `block_table[b, t // 16] * 16 + t % 16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import PAGE, LatentQuantizer, decode, normalize_dtype

LatentDtype = Literal["bf16", "int8", "fp8", "int4"]
LATENT_DTYPES: tuple[LatentDtype, ...] = ("bf16", "int8", "fp8", "int4")

LINE = 128  # bytes of a line of GPU cache


@dataclass(frozen=True)
class PageLayout:
    """What one page holds, and where. All offsets and sizes are in bytes.

    Attributes:
        dtype: how latents are stored, any spelling (`fp8_e4m3` is `fp8`).
        kv_lora_rank: channels of a latent, `r`, a multiple of 8.
        qk_rope_head_dim: channels of a rotary key, `d_R`, from 0.
    """

    dtype: LatentDtype
    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", normalize_dtype(self.dtype))
        if self.dtype not in LATENT_DTYPES:
            raise MlaError(f"pages cannot hold latents as {self.dtype!r}", fix=f"one of {', '.join(LATENT_DTYPES)}")
        if self.kv_lora_rank < 8 or self.kv_lora_rank % 8:
            raise MlaError(f"pages hold latents of a multiple of 8 channels, not {self.kv_lora_rank}")
        if self.qk_rope_head_dim < 0:
            raise MlaError(f"a rotary key cannot have {self.qk_rope_head_dim} channels")

    @cached_property
    def quantizer(self) -> LatentQuantizer | None:
        """The scale rules of the latents; None: they are bfloat16."""
        return None if self.dtype == "bf16" else LatentQuantizer(self.dtype)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Data type of the latents' codes."""
        return torch.bfloat16 if self.quantizer is None else self.quantizer.storage_dtype

    @property
    def code_width(self) -> int:
        """Codes of a latent in `storage_dtype`: two int4 codes share one."""
        return self.kv_lora_rank // 2 if self.dtype == "int4" else self.kv_lora_rank

    @property
    def scales(self) -> int:
        """Scales of a token: one, or one for each 32 channels."""
        return 0 if self.quantizer is None else self.quantizer.groups(self.kv_lora_rank)

    @property
    def rope_offset(self) -> int:
        """First byte of the rotary keys."""
        return PAGE * self.code_width * self.storage_dtype.itemsize

    @property
    def scale_offset(self) -> int:
        """First byte of the scales."""
        return self.rope_offset + PAGE * self.qk_rope_head_dim * 2

    @property
    def scale_dtype(self) -> torch.dtype:
        """Data type of the scales (bfloat16 latents have none)."""
        return torch.float32 if self.quantizer is None else self.quantizer.scale_dtype

    @property
    def used_bytes(self) -> int:
        """Bytes of a page that hold something."""
        return self.scale_offset + PAGE * self.scales * self.scale_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next."""
        return -(-self.used_bytes // LINE) * LINE

    @property
    def bytes_per_token(self) -> float:
        """What a decode step reads for each token."""
        return self.used_bytes / PAGE

    def pool(self, pages: int, device: torch.device | str = "cpu") -> Tensor:
        """A pool `[pages, page_bytes]` with nothing in it (what stands in unused slots never matters)."""
        return torch.empty(pages, self.page_bytes, dtype=torch.uint8, device=device)

    def latents(self, pool: Tensor) -> Tensor:
        """The codes of every slot, a view `[pages, 16, code_width]`."""
        return _run(pool, 0, self.rope_offset, self.storage_dtype)

    def k_rope(self, pool: Tensor) -> Tensor:
        """The rotary keys of every slot, a view `[pages, 16, d_R]`."""
        return _run(pool, self.rope_offset, self.scale_offset, torch.bfloat16)

    def scale_views(self, pool: Tensor) -> Tensor | None:
        """The scales of every slot, a view `[pages, 16, G]`; None where there are none."""
        if self.quantizer is None:
            return None
        return _run(pool, self.scale_offset, self.used_bytes, self.scale_dtype)

    def flat(self, pool: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Where kernels begin to count: page 0's codes (read as `codes`), rotary keys and scales, each to the pool's end."""
        flat = pool.view(-1)
        scales = flat[self.scale_offset :] if self.scales else flat  # none are read there
        return flat.view(codes), flat[self.rope_offset :].view(torch.bfloat16), scales.view(self.scale_dtype)

    def strides(self, codes: torch.dtype) -> tuple[int, int, int]:
        """Elements from one page to the next in each view of `flat`."""
        rope, scale = torch.bfloat16.itemsize, self.scale_dtype.itemsize
        return self.page_bytes // codes.itemsize, self.page_bytes // rope, self.page_bytes // scale

    def latent_byte(self, slot: Tensor) -> Tensor:
        """First byte in the pool of the latents of slots `[...]`, int64: a pool of more than 2 GiB is the normal case."""
        slot = slot.long()
        return slot // PAGE * self.page_bytes + slot % PAGE * (self.rope_offset // PAGE)


def slots_of(block_table: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
    """Slots `[T]` int64 of tokens.

    Args:
        block_table: `[B, P]` pages of each sequence in order.
        sequences: `[T]` whose token it is; places: `[T]` its place in the sequence.
    """
    return block_table[sequences, places // PAGE].long() * PAGE + places % PAGE


def put(
    pool: Tensor, layout: PageLayout, slots: Tensor, codes: Tensor, scales: Tensor | None, k_rope: Tensor | None
) -> None:
    """Write tokens that are already codes.

    Args:
        pool: `[pages, page_bytes]`, written in place.
        slots: `[T]`; a negative one is left out.
        codes: `[T, code_width]`; scales: `[T, G]` or None; k_rope: `[T, d_R]` or None.
    """
    kept = slots >= 0
    page, place = slots[kept] // PAGE, slots[kept] % PAGE
    # Indexed writes exist for integers of one byte, but not for every 8-bit float.
    layout.latents(pool).view(_plain(layout.storage_dtype))[page, place] = codes[kept].view(_plain(codes.dtype))
    stored = layout.scale_views(pool)
    if stored is not None and scales is not None:
        stored[page, place] = scales[kept]
    if layout.qk_rope_head_dim and k_rope is not None:
        layout.k_rope(pool)[page, place] = k_rope[kept].to(torch.bfloat16)


def gather(
    pool: Tensor, layout: PageLayout, block_table: Tensor, lengths: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The tokens of every sequence, one after the other.

    Args:
        block_table: `[B, P]`; lengths: `[B]` tokens in each sequence.

    Returns:
        Latents `[B, S, r]` and rotary keys `[B, S, d_R]` in `dtype`, `S` the longest; zeros from a sequence's end on.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    places = torch.arange(longest, device=pool.device)
    exists = places < lengths.to(pool.device)[:, None]  # [B, S]
    page = block_table[:, places // PAGE].long().where(exists, torch.zeros((), dtype=torch.int64, device=pool.device))
    place = (places % PAGE).expand_as(page)
    codes = layout.latents(pool).view(_plain(layout.storage_dtype))[page, place].view(layout.storage_dtype)
    stored = layout.scale_views(pool)
    if stored is None:
        latent = codes.to(dtype)
    else:
        latent = decode(codes, stored[page, place], layout.kv_lora_rank, dtype)
    empty = ~exists[..., None]
    return latent.masked_fill(empty, 0), layout.k_rope(pool)[page, place].to(dtype).masked_fill(empty, 0)


def _run(pool: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes `[begin, end)` of every page as 16 rows of `dtype`, without copying."""
    pages, width = pool.shape[0], (end - begin) // PAGE // dtype.itemsize
    if width == 0:
        return torch.empty(pages, PAGE, 0, dtype=dtype, device=pool.device)
    return pool[:, begin:end].view(dtype).unflatten(1, (PAGE, width))


def _plain(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype.itemsize == 1 else dtype
