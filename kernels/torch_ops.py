"""Attention through PyTorch's own operators, on CPU and CUDA alike: the path where no Triton kernel is used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None = None,
    *,
    factors: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Absorbed attention over a latent cache, as `reference.latent_attention`, in the type of `q_latent`.

    Args:
        q_latent: `[B, T, H, r]`; q_rope: `[B, T, H, d_R]`.
        latent: `[B, S, r]`; k_rope: `[B, S, d_R]`; finite everywhere.
        visible: `[B, T, S]` bool with at least one key a query; None: every query sees every key.
        factors: `[B, S, H]` that each key's scores are multiplied by. bias: `[B, H, T, S]` added to scores.

    Returns:
        `[B, T, H, r]`.
    """
    b, t, h, r = q_latent.shape
    query = torch.cat((q_latent, q_rope), dim=-1).reshape(b, t * h, -1)  # [B, T*H, r+rope]: heads are query rows
    key = torch.cat((latent, k_rope), dim=-1)  # [B, S, r+rope]
    scores = torch.baddbmm(
        query.new_zeros(()).expand(b, t * h, key.shape[1]), query, key.transpose(1, 2), beta=0, alpha=scale
    )  # [B, T*H, S]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if factors is not None:
        scores = (scores.view(b, t, h, -1) * factors.transpose(1, 2)[:, None]).view_as(scores)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = (scores.view(b, t, h, -1) + bias.transpose(1, 2)).view_as(scores)
    if visible is not None:
        scores = scores.view(b, t, h, -1).masked_fill(~visible[:, :, None, :], float("-inf")).view_as(scores)
    weights = scores.softmax(dim=-1).to(latent.dtype)
    return torch.bmm(weights, latent).view(b, t, h, r)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention with explicit keys and values (standard attention; the chunk of a latent prefill).

    Args:
        query: `[B, T, H, d]`; key: `[B, S, G, d]`; value: `[B, S, G, d_v]`, `H` a multiple of `G`.
        visible: `[B, T, S]` bool; None: plain causal, `T == S`.

    Returns:
        `[B, T, H, d_v]`.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, heads, tokens, d]
    if softcap is not None:
        return _softcapped(q, k, v, visible, scale, softcap).transpose(1, 2)
    wide = q.shape[-1] - v.shape[-1]
    if wide > 0:
        v = F.pad(v, (0, wide))  # fused attention wants one width
    mask = None if visible is None else visible[:, None]  # [B, 1, T, S]
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and mask is not None and q.shape[2] == 1:
        # One new token: the heads of a group are query rows over the same keys, which are then read once.
        q = q.reshape(q.shape[0], k.shape[1], groups, -1)  # [B, G, H/G, d]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.reshape(q.shape[0], 1, -1, v.shape[-1])  # [B, 1, H, d]
        return out[..., : value.shape[-1]]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.transpose(1, 2)[..., : value.shape[-1]]


def biased_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention with `bias` `[B, H, T, S]` added to the scores, minus infinity for what is hidden; else as `attention`."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, heads, tokens, d]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale + bias
    return (scores.softmax(dim=-1).to(v.dtype) @ v).transpose(1, 2)


def causal_attention_by_products(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Plain causal attention as two batched matrix products, for training on a CPU; arguments as in `attention`.

    Through bfloat16 products and back it is two to three times faster than PyTorch's fused CPU attention at up to a thousand
    tokens (its backward pass above all), at the price of scores rounded to the type of `query` and of `T^2` numbers kept.
    """
    b, t, h, d = query.shape
    groups = h // key.shape[2]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    q = query.transpose(1, 2).reshape(b * h, t, d)
    k = key.permute(0, 2, 3, 1).reshape(b * h, d, t)
    v = value.transpose(1, 2).reshape(b * h, t, -1)
    later = torch.full((t, t), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(later.expand(b * h, t, t), q, k, alpha=scale)  # [B*H, T, T]
    return torch.bmm(scores.softmax(dim=-1), v).view(b, h, t, -1).transpose(1, 2)  # [B, T, H, d_v]


def _softcapped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        visible = torch.ones(q.shape[0], q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1).to(v.dtype) @ v
