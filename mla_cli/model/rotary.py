"""Rotary position embedding: frequencies of every scaling, and the rotation itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_cli.model.spec import RotarySpec


def inverse_frequencies(rotary: RotarySpec, length: Tensor | int = 0) -> Tensor:
    """Angle per position of each rotary pair, float32.

    Args:
        rotary: what rotates and how it is scaled.
        length: tokens in the sequence, an int or one number a sequence `[B]`; only scaling `by_length` looks at it.

    Returns:
        `[dim / 2]`, or `[B, dim / 2]` for scaling by length of a `[B]` length. In radians a position.
    """
    exponent = torch.arange(0, rotary.dim, 2, dtype=torch.int64).float() / rotary.dim  # [n]
    if rotary.kind == "dynamic":
        return 1.0 / (_dynamic_theta(rotary, length) ** exponent)
    plain = 1.0 / (rotary.theta**exponent)
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "llama3":
        return _llama3(rotary, plain)
    if rotary.kind == "yarn":
        return _yarn(rotary, plain)
    if rotary.kind == "longrope":
        return _longrope(rotary, exponent, length)
    return plain


def rotary_tables(rotary: RotarySpec, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotary pair at every position.

    Args:
        rotary: the embedding.
        positions: `[B, T]` int64.
        lengths: `[B]` tokens of each whole sequence so far (for scaling by length).

    Returns:
        Two float32 tensors `[B, T, dim / 2]`, multiplied by the embedding's attention factor.
    """
    if rotary.by_length:
        frequencies = inverse_frequencies(rotary, lengths.cpu()).to(positions.device)[:, None, :]  # [B, 1, n]
    else:
        frequencies = inverse_frequencies(rotary).to(positions.device)  # [n]
    angles = positions[..., None].float() * frequencies  # [B, T, n]
    return angles.cos() * rotary.attention_factor, angles.sin() * rotary.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn each rotary pair of `x` by its angle.

    Args:
        x: `[B, T, ..., d]`; the first `2n` channels turn: pairs `(0, 1), (2, 3), ...` if interleaved, else `(j, j + n)`.
        cos: `[B, T, n]`, like `sin`.

    Returns:
        Same shape and layout as `x`.
    """
    turning = 2 * cos.shape[-1]
    if turning < x.shape[-1]:  # partial rotary embedding
        return torch.cat((rotate(x[..., :turning], cos, sin, interleaved=interleaved), x[..., turning:]), dim=-1)
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if interleaved:
        # As complex numbers, which lie so; part by part it takes several times as long.
        wide = torch.promote_types(x.dtype, torch.float32)
        whole = x.to(wide).contiguous()
        whole = whole.clone() if whole.storage_offset() % 2 else whole  # complex numbers begin at even places
        pairs = torch.view_as_complex(whole.unflatten(-1, (-1, 2)))  # [B, T, ..., n]
        turned = pairs * torch.complex(cos.to(wide), sin.to(wide))
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    real, imag = x.chunk(2, dim=-1)
    return torch.cat((real * cos - imag * sin, imag * cos + real * sin), dim=-1)


def _dynamic_theta(rotary: RotarySpec, length: Tensor | int) -> Tensor:
    # Adaptive NTK scaling: the base grows with the sequence once it is longer than the trained context.
    trained = rotary.original_max_position_embeddings
    tokens = torch.as_tensor(length, dtype=torch.float32).clamp(min=trained)[..., None]
    grown = rotary.factor * tokens / trained - (rotary.factor - 1)
    return rotary.theta * grown ** (rotary.dim / (rotary.dim - 2))


def _longrope(rotary: RotarySpec, exponent: Tensor, length: Tensor | int) -> Tensor:
    # LongRoPE (arXiv 2402.13753): a factor of its own for every frequency, others beyond the original context.
    short = torch.tensor(rotary.short_factor, dtype=torch.float32)
    if not rotary.by_length:
        return 1.0 / (short * rotary.theta**exponent)
    longer = torch.as_tensor(length)[..., None] > rotary.original_max_position_embeddings
    factors = torch.where(longer, torch.tensor(rotary.long_factor, dtype=torch.float32), short)
    return 1.0 / (factors * rotary.theta**exponent)


def _llama3(rotary: RotarySpec, plain: Tensor) -> Tensor:
    # Long waves are slowed by `factor`, short ones kept, those between blended.
    trained = rotary.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    blend = (trained / wavelength - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    blended = (1 - blend) * plain / rotary.factor + blend * plain
    slow = torch.where(wavelength > trained / rotary.low_freq_factor, plain / rotary.factor, plain)
    between = (wavelength <= trained / rotary.low_freq_factor) & (wavelength >= trained / rotary.high_freq_factor)
    return torch.where(between, blended, slow)


def _yarn(rotary: RotarySpec, plain: Tensor) -> Tensor:
    # YaRN (arXiv 2309.00071): a ramp over the pair index from "keep" (fast) to "slow down" (slow waves).
    def pair_that_turns(rotations: float) -> float:
        waves = rotary.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary.dim * math.log(waves) / (2 * math.log(rotary.theta))

    low, high = pair_that_turns(rotary.beta_fast), pair_that_turns(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rotary.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rotary.factor * ramp + plain * (1 - ramp)
