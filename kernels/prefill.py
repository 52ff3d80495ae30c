"""Causal attention of a chunk of every sequence, ragged: sequences lie one after the other, without padding.

`prefill` runs absorbed over the paged cache, the chunk's own tokens included or not:

    out = softmax(scale * (q_latent c^T + q_rope k_rope^T)) c

`explicit` is causal attention within the chunks alone, with keys and values rebuilt from the latents:

    out = softmax(scale * q k^T) v

Rebuilt, a pair of tokens costs `d_qk + d_v` multiplications a head where absorbed it costs `2 r + d_R`, but every key must be
rebuilt first: that pays where many queries read a key (the first chunk), not where few do (`absorbed_is_cheaper`). A later
chunk may join both, `prefill(own=False)` over what is in the cache and `explicit` over itself, by `merge`. The float64
reference is `paged.prefill_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_cli.kernels.decode import check_cache, check_queries, paged_arguments
from mla_cli.kernels.launch import Launch, Target, check, target_of
from mla_cli.kernels.pages import PageLayout
from mla_cli.kernels.tile import LN2, LOG2E, attend, load_columns
from mla_cli.kernels.tuning import explicit_tile, next_power_of_2, tile_for


def absorbed_is_cheaper(
    queries: int, context: int, *, kv_lora_rank: int, qk_nope_head_dim: int, v_head_dim: int
) -> bool:
    """Whether absorbed attention of a chunk over earlier tokens takes fewer multiplications a head than rebuilding these.

    Args:
        queries: tokens of the chunk; context: tokens in the cache before it. The rotary part costs the same either way.
    """
    r, n, v = kv_lora_rank, qk_nope_head_dim, v_head_dim
    absorbed = queries * context * 2 * r + queries * r * (n + v)  # queries go to latents, outputs come from them
    rebuilt = queries * context * (n + v) + context * r * (n + v)
    return absorbed <= rebuilt


@triton.jit
def prefill_kernel(
    q_ptr,  # bf16, [T, H, R + D]
    cu_seqlens_ptr,  # int32, [B + 1]
    latent_ptr,  # the pool, seen as codes
    rope_ptr,  # the pool's rotary keys
    scale_ptr,  # the pool's scales
    table_ptr,  # int32, [B, table_stride]
    lengths_ptr,  # int32, [B]
    out_ptr,  # [T, H, R]
    lse_ptr,  # fp32, [T, H]
    table_stride,
    softmax_scale,
    softcap,
    window,
    H: tl.constexpr,
    OWN: tl.constexpr,
    KIND: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    sequence = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first: the last tiles see the most keys
    origin = tl.load(cu_seqlens_ptr + sequence)
    queries = tl.load(cu_seqlens_ptr + sequence + 1) - origin
    rows = queries * H
    if tile * BLOCK_M < rows:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        length = tl.load(lengths_ptr + sequence)
        before = length - queries if OWN else length
        end = tl.minimum(length, before + tl.minimum(rows - 1, tile * BLOCK_M + BLOCK_M - 1) // H + 1)
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(0, before + tile * BLOCK_M // H - window + 1)
        out, lse = attend(
            q_ptr + origin.to(tl.int64) * H * (R + D),
            latent_ptr,
            rope_ptr,
            scale_ptr,
            table_ptr + sequence * table_stride,
            row,
            row < rows,
            before + row // H,
            first,
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
            OWN,
            HAS_WINDOW,
            HAS_SOFTCAP,
            BLOCK_M,
            BLOCK_N,
            BLOCK_R,
            BLOCK_D,
            DOT,
        )
        column = tl.arange(0, BLOCK_R)
        at = origin.to(tl.int64) * H + row
        tl.store(lse_ptr + at, lse, mask=row < rows)
        tl.store(
            out_ptr + at[:, None] * R + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=(row < rows)[:, None] & (column < R)[None, :],
        )


@triton.jit
def explicit_kernel(
    q_ptr,  # bf16, [T, H, K]
    k_ptr,  # bf16, [T, H, K]
    v_ptr,  # bf16, [T, H, V]
    cu_seqlens_ptr,  # int32, [B + 1]
    out_ptr,  # [T, H, V]
    lse_ptr,  # fp32, [T, H]
    softmax_scale,
    softcap,
    window,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT: tl.constexpr,
):
    head = tl.program_id(1)
    origin = tl.load(cu_seqlens_ptr + tl.program_id(2)).to(tl.int64)
    tokens = (tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - origin).to(tl.int32)
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if start_m < tokens:
        token = start_m + tl.arange(0, BLOCK_M)
        k_column, v_column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        at = (origin + token) * H + head
        q = load_columns(q_ptr + at[:, None] * K + k_column[None, :], token < tokens, k_column, K, BLOCK_K).to(DOT)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(0, start_m - window + 1)
        for start in range(begin, tl.minimum(tokens, start_m + BLOCK_M), BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            key_at = (origin + key) * H + head
            k = load_columns(k_ptr + key_at[:, None] * K + k_column[None, :], key < tokens, k_column, K, BLOCK_K)
            v = load_columns(v_ptr + key_at[:, None] * V + v_column[None, :], key < tokens, v_column, V, BLOCK_V)
            scores = tl.dot(q, tl.trans(k.to(DOT)))
            if HAS_SOFTCAP:
                scores = scores * (softmax_scale / softcap)
                scores = (1 - 2 / (1 + tl.exp2(scores * (2 * LOG2E)))) * (softcap * LOG2E)
            else:
                scores = scores * (softmax_scale * LOG2E)
            visible = (key[None, :] <= token[:, None]) & (key < tokens)[None, :]
            if HAS_WINDOW:
                visible = visible & (key[None, :] > token[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            highest = tl.maximum(largest, tl.max(scores, 1))
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            p = tl.exp2(scores - anchor[:, None])
            fade = tl.exp2(largest - anchor)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(DOT), v.to(DOT), acc * fade[:, None])
            largest = highest
        divisor = tl.where(total == 0, 1.0, total)
        tl.store(lse_ptr + at, (largest + tl.log2(divisor)) * LN2, mask=token < tokens)
        tl.store(
            out_ptr + at[:, None] * V + v_column[None, :],
            (acc / divisor[:, None]).to(out_ptr.dtype.element_ty),
            mask=(token < tokens)[:, None] & (v_column < V)[None, :],
        )


def plan(
    q: Tensor,
    cu_seqlens: Tensor,
    pool: Tensor,
    layout: PageLayout,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    target: Target,
    max_queries: int,
    window: int | None,
    softcap: float | None,
    own: bool,
    out: Tensor,
    lse: Tensor,
) -> Launch:
    """The launch of `prefill`."""
    heads = q.shape[1]
    tile = tile_for(target, layout, max_queries * heads, masked=True)
    return Launch(
        prefill_kernel,
        (triton.cdiv(max_queries * heads, tile.rows), len(lengths)),
        {
            "q_ptr": q,
            "cu_seqlens_ptr": cu_seqlens,
            "table_ptr": block_table,
            "lengths_ptr": lengths,
            "out_ptr": out,
            "lse_ptr": lse,
            "table_stride": block_table.shape[1],
            "softmax_scale": scale,
            "H": heads,
            "OWN": own,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            **paged_arguments(pool, layout, target, window, softcap),
        },
        tile.num_warps,
        tile.num_stages,
    )


def plan_explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    target: Target,
    max_queries: int,
    window: int | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor,
) -> Launch:
    """The launch of `explicit`."""
    _, heads, width = q.shape
    blocks = {name: max(16, next_power_of_2(n)) for name, n in (("BLOCK_K", width), ("BLOCK_V", v.shape[-1]))}
    tile = explicit_tile(target, max(blocks.values()))
    return Launch(
        explicit_kernel,
        (triton.cdiv(max_queries, tile.rows), heads, len(cu_seqlens) - 1),
        {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "cu_seqlens_ptr": cu_seqlens,
            "out_ptr": out,
            "lse_ptr": lse,
            "softmax_scale": scale,
            "softcap": 1.0 if softcap is None else softcap,
            "window": 0 if window is None else window,
            "H": heads,
            "K": width,
            "V": v.shape[-1],
            "HAS_WINDOW": window is not None,
            "HAS_SOFTCAP": softcap is not None,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            **blocks,
            "DOT": tl.float32 if target.backend == "interpreter" else tl.bfloat16,
        },
        tile.num_warps,
        tile.num_stages,
    )


def prefill(
    q: Tensor,
    cu_seqlens: Tensor,
    pool: Tensor,
    layout: PageLayout,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    max_queries: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    own: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention of a chunk of every sequence over its pages.

    Args:
        q: `[T, H, r + d_R]` bfloat16, the chunks one after the other: `W_UK` absorbed, rotary part rotated.
        cu_seqlens: `[B + 1]` int32, where each chunk begins, and `T`; chunks may be empty.
        pool: `[pages, page_bytes]` uint8; block_table: `[B, P]` int32.
        lengths: `[B]` int32 tokens of each sequence in the cache.
        scale: of the scores; window: most keys a query sees, itself included; softcap: bound of the scores.
        max_queries: a bound of the longest chunk; None: `T`, which starts programs in vain.
        own: the chunks are in the cache, as the last of `lengths`; otherwise only what is before them is.
        out_dtype: bfloat16 or float32.

    Returns:
        Output `[T, H, r]`, and log-sum-exp `[T, H]` float32; zeros and minus infinity for a query that sees no key.
    """
    target = target_of(q.device)
    tokens, heads, _ = check_queries("prefill", q, 3, layout)
    check("prefill", "cu_seqlens", cu_seqlens, (None,), (torch.int32,), q.device)
    check_cache("prefill", pool, layout, block_table, lengths, len(cu_seqlens) - 1, q.device)
    out = torch.empty(tokens, heads, layout.kv_lora_rank, dtype=out_dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    most = tokens if max_queries is None else max_queries
    args = (q, cu_seqlens, pool, layout, block_table, lengths, scale, target, most, window, softcap, own, out, lse)
    plan(*args).run(q.device)
    return out, lse


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    max_queries: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Causal attention within every chunk, over keys and values of its own.

    Args:
        q, k: `[T, H, nope + d_R]` bfloat16; v: `[T, H, d_v]` bfloat16, the chunks one after the other.
        cu_seqlens, max_queries, window, softcap, out_dtype: as in `prefill`.

    Returns:
        Output `[T, H, d_v]`, and log-sum-exp `[T, H]` float32.
    """
    target = target_of(q.device)
    check("explicit", "q", q, (None, None, None), (torch.bfloat16,))
    check("explicit", "k", k, tuple(q.shape), (torch.bfloat16,), q.device)
    check("explicit", "v", v, (*q.shape[:2], None), (torch.bfloat16,), q.device)
    check("explicit", "cu_seqlens", cu_seqlens, (None,), (torch.int32,), q.device)
    out = torch.empty(v.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    most = q.shape[0] if max_queries is None else max_queries
    plan_explicit(q, k, v, cu_seqlens, scale, target, most, window, softcap, out, lse).run(q.device)
    return out, lse
