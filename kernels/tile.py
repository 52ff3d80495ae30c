"""What one program of decode and prefill does: a tile of query rows against a run of paged keys.

A row is one head of one query. With latents `c` stored as codes `x` and a scale `s` a token, `c = s x`,

    score = scale * (s (q x^T) + q_R k_R^T);   out = sum_t (p_t s_t) x_t / sum_t p_t

so that both products run on the codes and nothing is widened in memory: the scale meets scores and probabilities. Int4 has a
scale for each 32 channels, which therefore meets the codes; its even and odd channels are two products, because they share
bytes. Softmax is online (FlashAttention, arXiv 2205.14135), in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

BF16, INT8, FP8, FP8_BITS, INT4 = (tl.constexpr(n) for n in range(5))
PAGE = tl.constexpr(16)
GROUP = tl.constexpr(32)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

KINDS = {"bf16": 0, "int8": 1, "fp8": 2, "fp8_bits": 3, "int4": 4}


@triton.jit
def _scores(q, k, DOT: tl.constexpr, base):
    """`q k^T`, on top of `base`."""
    return tl.dot(q.to(DOT), tl.trans(k.to(DOT)), base)


@triton.jit
def _from_bits(bits, DOT: tl.constexpr):
    """FP8-E4M3 bits as numbers: the exponent, moved to its place in a float32, is too small by 120."""
    wide = bits.to(tl.int32)
    moved = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DOT)


@triton.jit
def load_columns(pointers, rows, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile; zeros in rows that do not exist and in columns beyond `WIDTH`."""
    if WIDTH == BLOCK:
        tile = tl.load(pointers, mask=rows[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=rows[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def attend(
    q_ptr,  # bf16, row 0 of the sequence's queries, rows of R + D
    latent_ptr,  # codes of page 0
    rope_ptr,  # bf16, rotary keys of page 0
    scale_ptr,  # scales of page 0
    table_ptr,  # int32, the sequence's row of the block table
    row,  # [BLOCK_M] rows of the tile
    row_exists,  # [BLOCK_M]
    position,  # [BLOCK_M] place of each row's query in its sequence
    begin,  # first key of the run
    end,  # one past the last key of the run
    softmax_scale,
    softcap,
    window,
    KIND: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,  # elements from one page to the next, in each view
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
    """Output `[BLOCK_M, BLOCK_R]` and log-sum-exp `[BLOCK_M]` of the run, float32; zeros and -inf for rows that see nothing."""
    PACKED: tl.constexpr = KIND == INT4
    SCALED: tl.constexpr = KIND != BF16 and KIND != INT4  # by one number a token
    C: tl.constexpr = R // 2 if PACKED else R  # codes of a latent
    BLOCK_C: tl.constexpr = BLOCK_R // 2 if PACKED else BLOCK_R
    G: tl.constexpr = (R + 31) // 32
    BLOCK_G: tl.constexpr = BLOCK_R // 32

    column = tl.arange(0, BLOCK_C)
    offset_n = tl.arange(0, BLOCK_N)
    q_row = q_ptr + row.to(tl.int64)[:, None] * (R + D)
    if PACKED:
        q = load_columns(q_row + 2 * column[None, :], row_exists, column, C, BLOCK_C)
        q_odd = load_columns(q_row + 2 * column[None, :] + 1, row_exists, column, C, BLOCK_C)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        group = tl.arange(0, BLOCK_G)
    else:
        q = load_columns(q_row + column[None, :], row_exists, column, C, BLOCK_C)
    if D > 0:
        rope_column = tl.arange(0, BLOCK_D)
        q_rope = load_columns(q_row + R + rope_column[None, :], row_exists, rope_column, D, BLOCK_D)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)

    for start in range(begin, end, BLOCK_N):
        key = start + offset_n
        exists = key < end
        # A page's number times its size is beyond 2^31 in any large pool.
        page = tl.load(table_ptr + key // PAGE, mask=exists, other=0).to(tl.int64)
        slot = key % PAGE

        latent_row = latent_ptr + (page * LATENT_STRIDE + slot * C)[:, None]
        codes = load_columns(latent_row + column[None, :], exists, column, C, BLOCK_C)  # [BLOCK_N, BLOCK_C]
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if PACKED:
            groups = scale_ptr + (page * SCALE_STRIDE + slot * G)[:, None] + group[None, :]
            scales = load_columns(groups, exists, group, G, BLOCK_G).to(tl.float32)  # [BLOCK_N, BLOCK_G]
            spread = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_G, GROUP // 2))
            spread = tl.reshape(spread, (BLOCK_N, BLOCK_C))
            signed = codes.to(tl.int8, bitcast=True)
            x = (((signed << 4) >> 4).to(tl.float32) * spread).to(DOT)  # shifting right carries the sign along
            x_odd = ((signed >> 4).to(tl.float32) * spread).to(DOT)
            scores = _scores(q, x, DOT, zero)
            scores = _scores(q_odd, x_odd, DOT, scores)
        elif KIND == FP8_BITS:
            x = _from_bits(codes, DOT)
            scores = _scores(q, x, DOT, zero)
        else:
            x = codes.to(DOT)  # exact: int8 and FP8-E4M3 numbers are bfloat16 numbers
            scores = _scores(q, x, DOT, zero)
        if SCALED:
            token_scale = tl.load(scale_ptr + page * SCALE_STRIDE + slot, mask=exists, other=0.0)  # [BLOCK_N]
            scores = scores * token_scale[None, :]
        if D > 0:
            rope_row = rope_ptr + (page * ROPE_STRIDE + slot * D)[:, None]
            k_rope = load_columns(rope_row + rope_column[None, :], exists, rope_column, D, BLOCK_D)
            scores = _scores(q_rope, k_rope, DOT, scores)

        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)); an infinite exp gives 1.
            scores = scores * (softmax_scale / softcap)
            scores = (1 - 2 / (1 + tl.exp2(scores * (2 * LOG2E)))) * (softcap * LOG2E)
        else:
            scores = scores * (softmax_scale * LOG2E)
        visible = exists[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

        highest = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf would be NaN
        p = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(largest - anchor)
        total = total * fade + tl.sum(p, 1)
        if SCALED:
            p = p * token_scale[None, :]
        acc = tl.dot(p.to(DOT), x, acc * fade[:, None])
        if PACKED:
            acc_odd = tl.dot(p.to(DOT), x_odd, acc_odd * fade[:, None])
        largest = highest

    divisor = tl.where(total == 0, 1.0, total)[:, None]  # NaN stays NaN
    if PACKED:
        out = tl.interleave(acc / divisor, acc_odd / divisor)
    else:
        out = acc / divisor
    lse = tl.where(total == 0, float("-inf"), (largest + tl.log2(total)) * LN2)
    return out, lse
