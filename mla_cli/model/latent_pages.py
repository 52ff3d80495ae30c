"""A layer's latents and rotary keys in the pages that kernels write and read (see `kernels.pages`), 16 tokens each.

A store of a pool has four of them to a page of the pool, so sequences share, give up and take back pages as they do with any
other store. What a step tells the kernels of its sequences is the same for all layers, and made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mla_cli.kernels.dispatch import Backend
from mla_cli.kernels.pages import PageLayout, slots_of
from mla_cli.kernels.quantized import PAGE, LatentQuantizer
from mla_cli.model.cache_store import PAGE_TOKENS, Span, Store
from mla_cli.model.spec import AttentionSpec, LatentAttentionSpec

# Tokens of every sequence up to which the kernel for decoding computes a step: it divides keys among processors.
FEW_TOKENS = 8


def page_layout(attention: AttentionSpec, quantizer: LatentQuantizer | None) -> PageLayout | str:
    """How pages hold what a layer caches; why they cannot, in words that follow "the layer ", if so."""
    if not isinstance(attention, LatentAttentionSpec):
        return "caches keys and values"
    s, rotary = attention, attention.rotary
    if s.qk_norm is not None:
        return "has norms of queries and keys"
    if s.alibi:
        return "has ALiBi"
    if s.gate_chunk is not None:
        return "has latents that pass a gate"
    if s.kv_lora_rank % 8:
        return f"has latents of {s.kv_lora_rank} channels, not a multiple of 8"
    if s.qk_rope_head_dim % 2:
        return f"has rotary keys of {s.qk_rope_head_dim} channels, which are no pairs"
    if rotary is not None and s.qk_rope_head_dim:
        turning = rotary.dim if s.frequencies is None else 2 * len(s.frequencies)
        if turning != s.qk_rope_head_dim:
            return "turns only a part of its rotary keys"
    if quantizer is None:
        return PageLayout("bf16", s.kv_lora_rank, s.qk_rope_head_dim)
    if quantizer.granularity != "token":
        return f"has {quantizer.granularity} scales of latents, not one a token"
    if quantizer.rope is not None and s.qk_rope_head_dim:
        return f"has rotary keys in {quantizer.rope_dtype}"
    return PageLayout(quantizer.dtype, s.kv_lora_rank, s.qk_rope_head_dim)


@dataclass(frozen=True)
class PagedStep:
    """What the kernels are told of a step's `B` sequences, and of its `N` tokens that are no padding.

    Attributes:
        slots: `[N]` int64 where each token goes; block_table: `[B, P]` int32; lengths: `[B]` int32 with the new tokens.
        cu_seqlens: `[B + 1]` int32 where each sequence's tokens begin among the `N`; longest: most of a sequence.
        rows: `[N]` int64 which of the `B * T` places of the step are no padding; None: all.
    """

    slots: Tensor
    block_table: Tensor
    lengths: Tensor
    cu_seqlens: Tensor
    longest: int
    rows: Tensor | None

    def packed(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` as `[N, ...]`."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def padded(self, x: Tensor, batch: int, tokens: int) -> Tensor:
        """`[N, ...]` as `[B, T, ...]`, zeros where there is padding."""
        if self.rows is None:
            return x.view(batch, tokens, *x.shape[1:])
        return x.new_zeros(batch * tokens, *x.shape[1:]).index_copy_(0, self.rows, x).view(batch, tokens, *x.shape[1:])


class LatentPages(Store):
    """Pages of latents (bfloat16, or codes with scales for each token) and of their rotary keys (bfloat16).

    Args:
        layout: of a page; kernels: what writes and reads them; quantizer: the layer's, which may limit ranges.
    """

    parts: ClassVar[dict[str, int]] = {"pages": PAGE}

    def __init__(
        self,
        batch: int,
        room: int,
        layout: PageLayout,
        kernels: Backend,
        quantizer: LatentQuantizer | None,
        device: torch.device | str,
    ) -> None:
        self.layout, self.kernels = layout, kernels
        self.pages = torch.zeros(batch, -(-room // PAGE), layout.page_bytes, dtype=torch.uint8, device=device)
        clip = float("inf") if quantizer is None else quantizer.clip
        self._clip = torch.tensor(clip, device=device) if isinstance(clip, tuple) else clip
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def pool(self) -> Tensor:
        """All pages, `[pages, page_bytes]` uint8."""
        return self.pages.flatten(0, 1)

    def block_table(self) -> Tensor:
        """`[B, P]` int32 pages of each row in turn."""
        if self.table is None:
            batch, columns = self.pages.shape[:2]
            return torch.arange(batch * columns, dtype=torch.int32, device=self.pages.device).view(batch, columns)
        runs = PAGE_TOKENS // PAGE
        return (self.table[..., None] * runs + torch.arange(runs, device=self.table.device)).flatten(1).int()

    def step(self, span: Span) -> PagedStep:
        """A step's tokens in these pages."""
        table, device = self.block_table(), self.pages.device
        exists = torch.arange(span.tokens) < span.counts[:, None]  # [B, T]
        sequences, tokens = exists.nonzero().unbind(dim=1)  # [N]
        places = span.starts[sequences] + tokens
        ends = torch.cat((span.counts.new_zeros(1), span.counts.cumsum(0)))
        return PagedStep(
            slots_of(table, sequences.to(device), places.to(device)),
            table,
            (span.starts + span.counts).int().to(device),
            ends.int().to(device),
            int(span.counts.max()) if len(span.counts) else 0,
            None if bool(exists.all()) else (sequences * span.tokens + tokens).to(device),
        )

    def write(
        self,
        step: PagedStep,
        latent: Tensor,
        k_rope: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        norm: nn.RMSNorm | None,
        interleaved: bool,
    ) -> None:
        """Store a step's latents and rotary keys.

        What is not finite is stored so that whoever reads it gets NaN, which the scores show.

        Args:
            latent: `[B, T, r]` before their norm, if any; k_rope: `[B, T, d_R]` before they are turned.
            tables: cos, sin `[B, T, d_R / 2]`; None: rotary keys are not turned.
        """
        cos, sin = (None, None) if tables is None else (step.packed(table) for table in tables)
        options = {} if norm is None else {"norm_weight": norm.weight, "norm_eps": norm.eps}
        self.kernels.write(
            step.packed(latent),
            step.packed(k_rope) if self.layout.qk_rope_head_dim else None,
            cos,
            sin,
            step.slots,
            self.pool,
            self.layout,
            self._flag,
            interleaved=interleaved,
            clip=self._clip,
            **options,
        )

    def attend(
        self, step: PagedStep, q: Tensor, scale: float, *, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """Absorbed attention of a step's tokens, which are written, over these pages.

        Args:
            q: `[B, T, H, r + d_R]`: `W_UK` absorbed, rotary part turned. Products are of bfloat16 numbers.
            scale: of scores; window: keys visible per query, itself included; softcap: bound of scores.

        Returns:
            `[B, T, H, r]` in the type of `q`, zeros for padding.
        """
        dtype = q.dtype if q.dtype == torch.bfloat16 else torch.float32
        options = {"window": window, "softcap": softcap, "out_dtype": dtype}
        batch, tokens = q.shape[:2]
        narrow = q.to(torch.bfloat16)
        pages = (self.pool, self.layout, step.block_table, step.lengths, scale)
        if step.rows is None and tokens <= FEW_TOKENS:
            out, _ = self.kernels.decode(narrow.contiguous(), *pages, **options)
            return out.to(q.dtype)
        packed = step.packed(narrow).contiguous()
        out, _ = self.kernels.prefill(packed, step.cu_seqlens, *pages, max_queries=step.longest, **options)
        return step.padded(out.to(q.dtype), batch, tokens)
