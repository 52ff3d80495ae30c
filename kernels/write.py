"""What follows the projection of a new token, in one pass: norm if any, scale, codes, and the write into its page.

    c = RMSNorm(latent);   scale = max(min(amax(c), clip), floor) / limit;   code = cast(clamp(c / scale, -limit, limit))
    k_R = rotate(k_rope)

The rules are those of `quantized`, codes and scales equal to the last bit; the reference is `paged.write`. NaN or infinity sets
a bit of `flag` (1: latent, 2: rotary key) and gives the token the scale NaN; no cast wraps it into a number.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.kernels.launch import Launch, Target, check, check_pool, target_of
from mla_cli.kernels.pages import PageLayout
from mla_cli.kernels.quantized import AMAX_FLOOR
from mla_cli.kernels.tile import BF16, GROUP, INT4, INT8, KINDS, PAGE
from mla_cli.kernels.tuning import next_power_of_2

BROKEN_LATENT, BROKEN_ROPE = 1, 2  # bits of the flag

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _round(x):
    """To the nearest integer, half to even, for numbers below 2^22: added, 1.5 * 2^23 leaves no place for fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _fp8_bits(x):
    """Bits of the nearest FP8-E4M3 number, half to even, for numbers up to 448 in size."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # From 2^-6 on: drop 20 of 23 mantissa bits, and move the exponent from the bias 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below, steps of 2^-9; the eighth is the first normal number.
    small = _round(tl.abs(x) * 512.0).to(tl.int32)
    return (tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _finite(x):
    return (x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def _clamped_steps(c, scale, LIMIT: tl.constexpr):
    return tl.minimum(tl.maximum(tl.div_rn(c, scale), -LIMIT), LIMIT)


@triton.jit
def write_kernel(
    latent_ptr,  # float, [T, R]
    rope_in_ptr,  # float, [T, D]
    cos_ptr,  # fp32, [T, D / 2]
    sin_ptr,  # fp32, [T, D / 2]
    norm_ptr,  # float, [R]
    clips_ptr,  # fp32, [G]
    slots_ptr,  # int64, [T]
    codes_ptr,  # the pool, seen as codes
    rope_ptr,  # the pool's rotary keys
    scale_ptr,  # the pool's scales
    flag_ptr,  # int32, [1]
    latent_stride,
    rope_in_stride,
    eps,
    clip,
    floor,
    KIND: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    CODE_STRIDE: tl.constexpr,  # elements from one page to the next, in each view
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CLIPS: tl.constexpr,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,  # of half a rotary key
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        page, place = slot // PAGE, slot % PAGE
        column = tl.arange(0, BLOCK_R)
        loaded = tl.load(latent_ptr + token * latent_stride + column, mask=column < R, other=0.0)
        c = loaded.to(tl.float32)
        if HAS_NORM:
            weight = tl.load(norm_ptr + column, mask=column < R, other=0.0).to(tl.float32)
            c = c * tl.rsqrt(tl.sum(c * c, 0) / R + eps) * weight
            c = c.to(loaded.dtype).to(tl.float32)  # the model's latent has the model's type
        broken = tl.max(_finite(c).to(tl.int32) ^ 1, 0)
        status = broken  # BROKEN_LATENT

        code_row = codes_ptr + page * CODE_STRIDE
        if KIND == BF16:
            tl.store(code_row + place * R + column, c.to(tl.bfloat16), mask=column < R)
        else:
            c = tl.where(broken != 0, 0.0, c)
            lost = tl.where(broken != 0, float("nan"), 0.0)
            if KIND == INT4:
                groups: tl.constexpr = (R + 31) // 32
                blocks: tl.constexpr = BLOCK_R // 32
                grouped = tl.reshape(c, [blocks, GROUP])
                amax = tl.max(tl.abs(grouped), 1)
                group = tl.arange(0, blocks)
                reach = clip
                if HAS_CLIPS:
                    reach = tl.load(clips_ptr + group, mask=group < groups, other=0.0)
                exact = tl.div_rn(tl.maximum(tl.minimum(amax, reach), floor), LIMIT)
                # Rounded up to bfloat16, so that the rounding itself clips nothing.
                rounded = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
                scale = rounded.to(tl.float32, bitcast=True)
                steps = _round(_clamped_steps(grouped, scale[:, None], LIMIT)).to(tl.int32)
                low, high = tl.split(tl.reshape(steps, [BLOCK_R // 2, 2]))
                pair = tl.arange(0, BLOCK_R // 2)
                packed = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
                tl.store(code_row + place * (R // 2) + pair, packed, mask=pair < R // 2)
                at = scale_ptr + page * SCALE_STRIDE + place * groups + group
                tl.store(at, (scale + lost).to(tl.bfloat16), mask=group < groups)
            else:
                amax = tl.max(tl.abs(c), 0)
                scale = tl.div_rn(tl.maximum(tl.minimum(amax, clip), floor), LIMIT)
                steps = _clamped_steps(c, scale, LIMIT)
                if KIND == INT8:
                    codes = _round(steps).to(tl.int8)
                else:
                    codes = _fp8_bits(steps)
                tl.store(code_row + place * R + column, codes, mask=column < R)
                tl.store(scale_ptr + page * SCALE_STRIDE + place, scale + lost)

        if D > 0:
            pair = tl.arange(0, BLOCK_D)
            half: tl.constexpr = D // 2
            real_at = 2 * pair if INTERLEAVED else pair
            imag_at = real_at + (1 if INTERLEAVED else half)
            source = rope_in_ptr + token * rope_in_stride
            real = tl.load(source + real_at, mask=pair < half, other=0.0).to(tl.float32)
            imag = tl.load(source + imag_at, mask=pair < half, other=0.0).to(tl.float32)
            if ROTATES:
                cos = tl.load(cos_ptr + token * half + pair, mask=pair < half, other=0.0)
                sin = tl.load(sin_ptr + token * half + pair, mask=pair < half, other=0.0)
                turned = real * cos - imag * sin
                imag = imag * cos + real * sin
                real = turned
            finite = _finite(real) & _finite(imag)
            status = status | (tl.max(finite.to(tl.int32) ^ 1, 0) << 1)  # BROKEN_ROPE
            target = rope_ptr + page * ROPE_STRIDE + place * D
            tl.store(target + real_at, real.to(tl.bfloat16), mask=pair < half)
            tl.store(target + imag_at, imag.to(tl.bfloat16), mask=pair < half)
        if status != 0:
            tl.atomic_or(flag_ptr, status)


def plan(
    latent: Tensor,
    k_rope: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    pool: Tensor,
    layout: PageLayout,
    flag: Tensor,
    target: Target,
    norm_weight: Tensor | None,
    norm_eps: float,
    interleaved: bool,
    clip: float | Tensor,
) -> Launch:
    """The launch of `write`; an argument that a configuration does not read is stood in for by one it does."""
    codes = torch.uint8 if layout.dtype == "fp8" else layout.storage_dtype
    stored, ropes, scales = layout.flat(pool, codes)
    code_stride, rope_stride, scale_stride = layout.strides(codes)
    block = max(32, next_power_of_2(layout.kv_lora_rank))
    return Launch(
        write_kernel,
        (latent.shape[0],),
        {
            "latent_ptr": latent,
            "rope_in_ptr": latent if k_rope is None else k_rope,
            "cos_ptr": flag if cos is None else cos,
            "sin_ptr": flag if sin is None else sin,
            "norm_ptr": latent if norm_weight is None else norm_weight,
            "clips_ptr": clip if isinstance(clip, Tensor) else flag,
            "slots_ptr": slots,
            "codes_ptr": stored,
            "rope_ptr": ropes,
            "scale_ptr": scales,
            "flag_ptr": flag,
            "latent_stride": latent.stride(0),
            "rope_in_stride": 0 if k_rope is None else k_rope.stride(0),
            "eps": norm_eps,
            "clip": math.inf if isinstance(clip, Tensor) else clip,
            "floor": AMAX_FLOOR,
            "KIND": KINDS[layout.dtype],
            "R": layout.kv_lora_rank,
            "D": layout.qk_rope_head_dim,
            "CODE_STRIDE": code_stride,
            "ROPE_STRIDE": rope_stride,
            "SCALE_STRIDE": scale_stride,
            "LIMIT": 1.0 if layout.quantizer is None else layout.quantizer.limit,
            "HAS_NORM": norm_weight is not None,
            "HAS_CLIPS": isinstance(clip, Tensor),
            "ROTATES": cos is not None,
            "INTERLEAVED": interleaved,
            "BLOCK_R": block,
            "BLOCK_D": next_power_of_2(max(1, layout.qk_rope_head_dim // 2)),
        },
        num_warps=max(1, block // (8 * target.warp_size)),  # eight channels a lane are one load of 16 bytes
    )


def write(
    latent: Tensor,
    k_rope: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    pool: Tensor,
    layout: PageLayout,
    flag: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    interleaved: bool = False,
    clip: float | Tensor = math.inf,
) -> None:
    """Store new tokens in their pages.

    Args:
        latent: `[T, r]` as projected, bfloat16, float16 or float32; rows may be slices of the projection's output.
        k_rope: `[T, d_R]` before rotation, the same type; None where `d_R` is 0.
        cos, sin: `[T, d_R / 2]` float32; None: `k_rope` is not rotated.
        slots: `[T]` int64, `page * 16 + place`; a negative one is padding.
        pool: `[pages, page_bytes]` uint8, written in place.
        flag: `[1]` int32, to which 1 (latent) and 2 (rotary key) are added if anything is NaN or infinite.
        norm_weight: `[r]` of an RMS norm of the latent; norm_eps: its epsilon; None: no norm.
        interleaved: rotary pairs are neighbours, otherwise halves.
        clip: most that a range may reach; of int4 latents also `[G]` float32, each group's.
    """
    device, tokens = latent.device, latent.shape[0]
    target = target_of(device)
    _check_rows("latent", latent, (tokens, layout.kv_lora_rank), FLOATS, device)
    if layout.qk_rope_head_dim:
        if k_rope is None:
            raise MlaError(f"k_rope is missing, of {layout.qk_rope_head_dim} channels", where="write")
        if layout.qk_rope_head_dim % 2:
            raise MlaError(f"k_rope has {layout.qk_rope_head_dim} channels, which are no pairs", where="write")
        _check_rows("k_rope", k_rope, (tokens, layout.qk_rope_head_dim), FLOATS, device)
    if (cos is None) != (sin is None):
        raise MlaError("cos and sin come together or not at all", where="write")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            check("write", name, table, (tokens, layout.qk_rope_head_dim // 2), (torch.float32,), device)
    check("write", "slots", slots, (tokens,), (torch.int64,), device)
    check("write", "flag", flag, (1,), (torch.int32,), device)
    if norm_weight is not None:
        check("write", "norm_weight", norm_weight, (layout.kv_lora_rank,), FLOATS, device)
    if isinstance(clip, Tensor):
        if layout.dtype != "int4":
            raise MlaError(f"{layout.dtype} latents have no groups with ranges of their own", where="write")
        check("write", "clip", clip, (layout.scales,), (torch.float32,), device)
    check_pool("write", pool, layout.page_bytes, device)
    args = (latent, k_rope, cos, sin, slots, pool, layout, flag, target, norm_weight, norm_eps, interleaved, clip)
    plan(*args).run(device)


def _check_rows(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """As `check`, but rows may stand further apart than they are long."""
    if tensor.dim() == 2 and tensor.shape[0] and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]:
        check("write", name, tensor[:1], (1, shape[1]), dtypes, device)
    else:
        check("write", name, tensor, shape, dtypes, device)
    if tensor.shape[0] != shape[0]:
        raise MlaError(f"{name} has {tensor.shape[0]} rows, not {shape[0]}", where="write")
