"""The kernel families over pages without Triton: in float64 as the formula, or by PyTorch's operators on any device.

Both gather a sequence's pages and hand them to `reference` or `torch_ops`; arguments are those of the Triton launchers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_cli.kernels import reference
from mla_cli.kernels.pages import PageLayout, gather, put

Result = tuple[Tensor, Tensor]


def decode_reference(
    q: Tensor,
    pool: Tensor,
    layout: PageLayout,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Result:
    """`decode.decode` in float64: output `[B, Q, H, r]` and log-sum-exp `[B, Q, H]`."""
    latent, k_rope = gather(pool, layout, block_table, lengths, torch.float64)
    positions = lengths.long()[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)  # [B, Q]
    visible = reference.visible_keys(positions, latent.shape[1], window, lengths)
    q_latent, q_rope = q.split((layout.kv_lora_rank, layout.qk_rope_head_dim), dim=-1)
    return reference.latent_attention(q_latent, q_rope, latent, k_rope, visible, scale, softcap)


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
) -> Result:
    """`decode.decode` by PyTorch's operators in float32; there are no splits, so their number changes nothing."""
    latent, k_rope = gather(pool, layout, block_table, lengths)  # [B, S, r], [B, S, d_R]
    positions = lengths.long()[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)  # [B, Q]
    visible = reference.visible_keys(positions, latent.shape[1], window, lengths)  # [B, Q, S]
    out, lse = _attend(q, latent, k_rope, visible, scale, softcap)
    return out.to(out_dtype), lse


def prefill_reference(
    q: Tensor,
    cu_seqlens: Tensor,
    pool: Tensor,
    layout: PageLayout,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    own: bool = True,
) -> Result:
    """`prefill.prefill` in float64: output `[T, H, r]` and log-sum-exp `[T, H]`."""
    parts = []
    for query, latent, k_rope, visible in _chunks(
        q, cu_seqlens, pool, layout, block_table, lengths, torch.float64, window, own
    ):
        q_latent, q_rope = query.split((layout.kv_lora_rank, layout.qk_rope_head_dim), dim=-1)
        parts.append(reference.latent_attention(q_latent, q_rope, latent, k_rope, visible, scale, softcap))
    return _joined(parts)


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
) -> Result:
    """`prefill.prefill` by PyTorch's operators, a sequence at a time."""
    chunks = _chunks(q, cu_seqlens, pool, layout, block_table, lengths, torch.float32, window, own)
    out, lse = _joined([_attend(*chunk, scale, softcap) for chunk in chunks])
    return out.to(out_dtype), lse


def _chunks(
    q: Tensor,
    cu_seqlens: Tensor,
    pool: Tensor,
    layout: PageLayout,
    block_table: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    window: int | None,
    own: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each sequence its queries `[1, T, H, r+d_R]`, latents `[1, S, r]`, rotary keys and who sees what `[1, T, S]`."""
    for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        latent, k_rope = gather(pool, layout, block_table[b : b + 1], lengths[b : b + 1], dtype)
        tokens, keys = end - begin, latent.shape[1]
        positions = (keys - tokens if own else keys) + torch.arange(tokens, device=q.device)[None]
        yield q[None, begin:end], latent, k_rope, reference.visible_keys(positions, keys, window)


def _joined(parts: Sequence[Result]) -> Result:
    """Results of one sequence each, one after the other without padding."""
    outputs, lses = zip(*parts, strict=True)
    return torch.cat([out[0] for out in outputs]), torch.cat([lse[0] for lse in lses])


def _attend(q: Tensor, latent: Tensor, k_rope: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Result:
    """Output `[B, Q, H, r]` and log-sum-exp `[B, Q, H]` of queries `[B, Q, H, r+d_R]`, float32; `visible` `[B, Q, S]`."""
    (batch, queries, heads, width), keys = q.shape, latent.shape[1]
    rows = q.float().view(batch, queries * heads, width)  # heads are query rows
    scores = torch.bmm(rows, torch.cat((latent, k_rope), dim=-1).transpose(1, 2)) * scale  # [B, Q*H, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, queries, heads, keys).masked_fill(~visible[:, :, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [B, Q, H]
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    out = torch.bmm(weights.view(batch, queries * heads, keys), latent)
    return out.view(batch, queries, heads, latent.shape[-1]), lse


def merge(outputs: Tensor, lses: Tensor, out_dtype: torch.dtype | None = None) -> Result:
    """`merge.merge` by PyTorch's operators. An empty part may hold anything, NaN too."""
    outputs = outputs.masked_fill((lses == float("-inf"))[..., None], 0)
    out, lse = reference.merge(outputs, lses)
    return out.to(out_dtype or outputs.dtype), lse.float()


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
    clip: float | Tensor = float("inf"),
) -> None:
    """`write.write` by PyTorch's operators, which also are its definition; nothing but the norm rounds differently.

    A token that is not finite gets the scale NaN, so that whoever reads it gets NaN, as from bfloat16 latents.
    """
    kept = slots >= 0
    c = latent.float()
    if norm_weight is not None:
        c = F.rms_norm(c, c.shape[-1:], norm_weight.float(), norm_eps)
    c = c.to(latent.dtype).float()
    broken = ~torch.isfinite(c).all(dim=-1)  # [T]
    bits = (broken & kept).any().int()
    rotated = None
    if k_rope is not None and k_rope.shape[-1]:
        rotated = k_rope.float() if cos is None or sin is None else rotate(k_rope.float(), cos, sin, interleaved)
        bits |= (~torch.isfinite(rotated).all(dim=-1) & kept).any().int() * 2
    flag |= bits
    if layout.quantizer is None:
        put(pool, layout, slots, c.to(torch.bfloat16), None, rotated)
        return
    c = c.masked_fill(broken[:, None], 0)
    scales = layout.quantizer.scales(layout.quantizer.amax(c).clamp(max=clip))  # [T, G]
    codes = layout.quantizer.encode(c, scales)
    put(pool, layout, slots, codes, scales.masked_fill(broken[:, None], float("nan")), rotated)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs of `[T, d_R]` by angles `[T, d_R / 2]`; pairs are neighbours if interleaved, else halves."""
    real, imag = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = real * cos - imag * sin, imag * cos + real * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
