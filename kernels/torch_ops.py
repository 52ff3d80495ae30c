"""Attention through PyTorch's own operators, on CPU and CUDA alike: the path where no Triton kernel is used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores of a block of tokens (4 MiB in bfloat16), and its least tokens.
BLOCK_SCORES, LEAST_BLOCK = 1 << 21, 32


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Absorbed attention over a latent cache, as `reference.latent_attention`, in the type of `q_latent`.

    Args:
        q_latent: `[B, T, H, r]`; q_rope: `[B, T, H, d_R]`.
        latent: `[B, S, r]`; k_rope: `[B, S, d_R]`; finite everywhere.
        visible: `[B, T, S]` bool with at least one key a query; None: every query sees every key.

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
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
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


def attention_in_blocks(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Attention of many tokens in bfloat16 on a CPU, by products over as many tokens as keep their scores in its caches.

    Keys that none of them sees are left out; scores are rounded to the type of `query`. Arguments as in `attention`. PyTorch's
    fused attention takes three times as long: it computes with an eighth of what its matrix products reach.
    """
    b, t, h, d = query.shape
    s, groups = key.shape[1], key.shape[2]
    each = h // groups
    size = max(LEAST_BLOCK, BLOCK_SCORES // (each * s))
    query = (query * scale).view(b, t, groups, each, d)
    out = query.new_empty(b, t, groups, each, value.shape[-1])
    if visible is None:
        visible = torch.ones(t, s, dtype=torch.bool, device=query.device).tril()[None]
    for row in range(b):
        seen = visible[row if len(visible) > 1 else 0]  # [T, S]
        blocks = []
        for start in range(0, t, size):
            block = slice(start, min(t, start + size))
            places = seen[block].any(dim=0).nonzero()
            keys = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 1)
            later = torch.zeros(seen[block, keys].shape, dtype=query.dtype, device=query.device)
            blocks.append((block, keys, later.masked_fill_(~seen[block, keys], float("-inf"))[:, None]))
        for group in range(groups):
            k, v = key[row, :, group].t(), value[row, :, group]  # [d, S], [S, d_v]
            for block, keys, later in blocks:
                q = query[row, block, group].reshape(-1, d)  # [n*H/G, d]
                scores = torch.mm(q, k[:, keys]).view(-1, each, later.shape[-1]).add_(later)
                weights = scores.softmax(dim=-1).view(len(q), -1)
                out[row, block, group] = torch.mm(weights, v[keys]).view(-1, each, v.shape[-1])
    return out.flatten(2, 3)


def masked_attention_by_products(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of a few tokens on what came before, as two batched products; arguments as in `attention`.

    The heads of a group are query rows over the same keys, which are not repeated. On a CPU PyTorch's fused attention takes
    several times as long for tens of tokens over some hundred keys.
    """
    b, t, h, d = query.shape
    s, g = key.shape[1], key.shape[2]
    q = query.view(b, t, g, h // g, d).permute(0, 2, 3, 1, 4).reshape(b * g, -1, d)  # [B*G, H/G*T, d]
    k = key.permute(0, 2, 3, 1).reshape(b * g, d, s)
    v = value.transpose(1, 2).reshape(b * g, s, -1)
    hidden = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
    scores = torch.bmm(q, k).mul_(scale).view(b, h, t, s).add_(hidden[:, None])
    out = torch.bmm(scores.softmax(dim=-1).view(b * g, -1, s), v)  # [B*G, H/G*T, d_v]
    return out.view(b, h, t, -1).transpose(1, 2)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        visible = torch.ones(q.shape[0], q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1).to(v.dtype) @ v
