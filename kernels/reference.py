"""Attention over a latent cache in float64, written as the formula: the oracle of every other backend."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(positions: Tensor, keys: int, window: int | None, lengths: Tensor | None = None) -> Tensor:
    """Which key each query may read: `[B, T, S]` bool. Key `j` holds position `j`; a query sees itself and what is before.

    Args:
        positions: `[B, T]` positions of the queries.
        keys: number of key places `S`.
        window: most keys a query sees, itself included; None: all before it.
        lengths: `[B]` keys that exist; places from there on are never read.
    """
    place = torch.arange(keys, device=positions.device)  # [S]
    visible = place <= positions[..., None]
    if window is not None:
        visible &= place > positions[..., None] - window
    if lengths is not None:
        visible &= place < lengths[:, None, None]
    return visible


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    factors: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention: `softmax(scale * (q_latent c^T + q_rope k_rope^T)) c` (DeepSeek-V2, arXiv 2405.04434).

    Args:
        q_latent: `[B, T, H, r]` queries with `W_UK` absorbed; q_rope: `[B, T, H, d_R]` rotated queries.
        latent: `[B, S, r]`; k_rope: `[B, S, d_R]` rotated keys.
        visible: `[B, T, S]` bool.
        factors: `[B, S, H]` that each key's scores are multiplied by. bias: `[B, H, T, S]` added to scores.

    Returns:
        Output `[B, T, H, r]` and log-sum-exp of the scores `[B, T, H]`, float64. A query that sees no key gives zeros and
        minus infinity; what stands in places nobody sees (even NaN) does not matter.
    """
    anyone = visible.any(dim=1)[..., None]  # [B, S, 1]
    c = latent.double().where(anyone, torch.zeros((), dtype=torch.float64))
    k = k_rope.double().where(anyone, torch.zeros((), dtype=torch.float64))
    scores = torch.einsum("bthr,bsr->bths", q_latent.double(), c)
    scores = (scores + torch.einsum("bthd,bsd->bths", q_rope.double(), k)) * scale
    if factors is not None:
        scores = scores * factors.double().transpose(1, 2)[:, None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double().transpose(1, 2)
    scores = scores.masked_fill(~visible[:, :, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [B, T, H]
    weights = torch.exp(scores - lse[..., None].where(torch.isfinite(lse[..., None]), torch.zeros((), dtype=lse.dtype)))
    return torch.einsum("bths,bsr->bthr", weights, c), lse


def merge(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """One attention result from `n` partial ones over disjoint keys.

    The weight of a part is `exp(lse_i - lse)`; for two parts that is the gate `sigmoid(lse_prev - lse_curr)`.

    Args:
        outputs: `[n, ..., r]` normalised partial outputs; lses: `[n, ...]`.

    Returns:
        Output `[..., r]` and log-sum-exp `[...]`, float64; parts with minus infinity (no keys) weigh nothing.
    """
    lses = lses.double()
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.where(torch.isfinite(lse), torch.zeros((), dtype=lse.dtype)))
    return (weights[..., None] * outputs.double()).sum(dim=0), lse
