"""Absorbed decode over a paged latent cache, cut into splits of the keys (flash decoding).

    out = softmax(scale * (q_latent c^T + q_rope k_rope^T)) c       for Q new tokens of each sequence and all its heads

(DeepSeek-V2, arXiv 2405.04434.) All heads read one latent, so a head of a query is a row of one matrix product and the cache
is read once a tile of rows. A program takes a tile of rows and one split of the keys; `merge` joins the splits. The float64
reference is `paged.decode_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.kernels import merge
from mla_cli.kernels.launch import Launch, Target, check, check_pool, target_of
from mla_cli.kernels.pages import PageLayout
from mla_cli.kernels.quantized import PAGE
from mla_cli.kernels.tile import KINDS, attend
from mla_cli.kernels.tuning import Tile, next_power_of_2, splits_for, tile_for


@triton.jit
def decode_kernel(
    q_ptr,  # bf16, [B, Q, H, R + D]
    latent_ptr,  # the pool, seen as codes
    rope_ptr,  # the pool's rotary keys
    scale_ptr,  # the pool's scales
    table_ptr,  # int32, [B, table_stride]
    lengths_ptr,  # int32, [B]
    out_ptr,  # [splits, B * Q * H, R]
    lse_ptr,  # fp32, [splits, B * Q * H]
    table_stride,
    queries,
    softmax_scale,
    softcap,
    window,
    H: tl.constexpr,
    KIND: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split, splits = tl.program_id(1), tl.num_programs(1)
    sequence = tl.program_id(2).to(tl.int64)
    rows = queries * H
    length = tl.load(lengths_ptr + sequence)
    before = length - queries  # the new tokens are the last of the sequence, in the cache already

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, before + tl.program_id(0) * BLOCK_M // H - window + 1)
    # Where splits begin depends on the sequence alone, not on its neighbours.
    share = tl.cdiv(tl.cdiv(length - first, splits), BLOCK_N) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    out, lse = attend(
        q_ptr + sequence * rows * (R + D),
        latent_ptr,
        rope_ptr,
        scale_ptr,
        table_ptr + sequence * table_stride,
        row,
        row < rows,
        before + row // H,
        begin,
        end,
        softmax_scale,
        softcap,
        window,
        KIND,
        R,
        D,
        LATENT_STRIDE,
        ROPE_STRIDE,
        SCALE_STRIDE,
        CAUSAL,
        HAS_WINDOW,
        HAS_SOFTCAP,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
        BLOCK_D,
        DOT,
    )
    column = tl.arange(0, BLOCK_R)
    at = (split * tl.num_programs(2) + sequence) * rows + row
    tl.store(lse_ptr + at, lse, mask=row < rows)
    # The merge does not read what an empty split leaves unwritten.
    written = row < tl.where((begin < end) | (splits == 1), rows, 0)
    tl.store(
        out_ptr + at[:, None] * R + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=written[:, None] & (column < R)[None, :],
    )


def paged_arguments(
    pool: Tensor, layout: PageLayout, target: Target, window: int | None, softcap: float | None
) -> dict[str, Any]:
    """What every attention kernel over pages is told alike about the pool, the mask and the scores."""
    kind = "fp8_bits" if layout.dtype == "fp8" and not target.fp8 else layout.dtype
    codes = torch.uint8 if kind == "fp8_bits" else layout.storage_dtype
    latents, ropes, scales = layout.flat(pool, codes)
    latent_stride, rope_stride, scale_stride = layout.strides(codes)
    return {
        "latent_ptr": latents,
        "rope_ptr": ropes,
        "scale_ptr": scales,
        "softcap": 1.0 if softcap is None else softcap,
        "window": 0 if window is None else window,
        "KIND": KINDS[kind],
        "R": layout.kv_lora_rank,
        "D": layout.qk_rope_head_dim,
        "LATENT_STRIDE": latent_stride,
        "ROPE_STRIDE": rope_stride,
        "SCALE_STRIDE": scale_stride,
        "HAS_WINDOW": window is not None,
        "HAS_SOFTCAP": softcap is not None,
        # The interpreter's numbers are numpy's, which has no bfloat16.
        "DOT": tl.float32 if target.backend == "interpreter" else tl.bfloat16,
        # Products of tensor cores are 16 wide.
        "BLOCK_R": max(32, next_power_of_2(layout.kv_lora_rank)),
        "BLOCK_D": max(16, next_power_of_2(layout.qk_rope_head_dim)),
    }


def decode_tile(q: Tensor, layout: PageLayout, target: Target, window: int | None, softcap: float | None) -> Tile:
    """The tile for queries `[B, Q, H, ...]`."""
    masked = q.shape[1] > 1 or window is not None or softcap is not None
    return tile_for(target, layout, q.shape[1] * q.shape[2], masked)


def plan(
    q: Tensor,
    pool: Tensor,
    layout: PageLayout,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    target: Target,
    window: int | None,
    softcap: float | None,
    splits: int,
    out: Tensor,
    lse: Tensor,
) -> Launch:
    """The launch of all splits, into `out` `[splits, B*Q*H, r]` and `lse` `[splits, B*Q*H]`."""
    batch, queries, heads, _ = q.shape
    tile = decode_tile(q, layout, target, window, softcap)
    return Launch(
        decode_kernel,
        (triton.cdiv(queries * heads, tile.rows), splits, batch),
        {
            "q_ptr": q,
            "table_ptr": block_table,
            "lengths_ptr": lengths,
            "out_ptr": out,
            "lse_ptr": lse,
            "table_stride": block_table.shape[1],
            "queries": queries,
            "softmax_scale": scale,
            "H": heads,
            "CAUSAL": queries > 1,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            **paged_arguments(pool, layout, target, window, softcap),
        },
        tile.num_warps,
        tile.num_stages,
    )


def decode(
    q: Tensor,
    pool: Tensor,
    layout: PageLayout,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Attention of the last `Q` tokens of every sequence over its pages.

    Args:
        q: `[B, Q, H, r + d_R]` bfloat16: `W_UK` absorbed, rotary part rotated. Query `i` stands at `lengths - Q + i`, sees
            itself and what is before. One that would stand before the sequence sees nothing.
        pool: `[pages, page_bytes]` uint8, the new tokens written.
        block_table: `[B, P]` int32; lengths: `[B]` int32 tokens of each sequence, the new ones included, from 0.
        scale: of the scores; window: most keys a query sees, itself included; softcap: bound of the scores.
        num_splits: None: as many as fill the machine, which depends on the batch. With a number, a sequence's result does not
            depend on its neighbours, to the last bit.
        out_dtype: bfloat16 or float32.

    Returns:
        Output `[B, Q, H, r]`, and log-sum-exp `[B, Q, H]` float32; zeros and minus infinity for a query that sees no key.
    """
    target = target_of(q.device)
    batch, queries, heads, _ = check_queries("decode", q, 4, layout)
    check_cache("decode", pool, layout, block_table, lengths, batch, q.device)
    splits = num_splits
    if splits is None:
        rows = triton.cdiv(queries * heads, decode_tile(q, layout, target, window, softcap).rows)
        splits = splits_for(target, rows * batch, block_table.shape[1] * PAGE)
    if splits < 1:
        raise MlaError(f"num_splits is {splits}, not at least 1", where="decode")
    rows = batch * queries * heads
    parts_dtype = out_dtype if splits == 1 else torch.float32
    parts = torch.empty(splits, rows, layout.kv_lora_rank, dtype=parts_dtype, device=q.device)
    lses = torch.empty(splits, rows, dtype=torch.float32, device=q.device)
    plan(q, pool, layout, block_table, lengths, scale, target, window, softcap, splits, parts, lses).run(q.device)
    out, lse = (parts[0], lses[0]) if splits == 1 else merge.merge(parts, lses, out_dtype)
    return out.view(batch, queries, heads, -1), lse.view(batch, queries, heads)


def check_queries(where: str, q: Tensor, dims: int, layout: PageLayout) -> torch.Size:
    """Refuse queries that are not `[..., H, r + d_R]` bfloat16, by name; their shape."""
    width = layout.kv_lora_rank + layout.qk_rope_head_dim
    check(where, "q", q, (*(None,) * (dims - 1), width), (torch.bfloat16,))
    return q.shape


def check_cache(
    where: str, pool: Tensor, layout: PageLayout, block_table: Tensor, lengths: Tensor, batch: int, device: torch.device
) -> None:
    """Refuse a cache that the kernels would misread, by name."""
    check_pool(where, pool, layout.page_bytes, device)
    check(where, "block_table", block_table, (batch, None), (torch.int32,), device)
    check(where, "lengths", lengths, (batch,), (torch.int32,), device)
