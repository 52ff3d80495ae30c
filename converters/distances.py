"""How far attention looks: what the rotation of a key amounts to on average, for keys that are read without rotation.

RoPE turns the score of a frequency by `exp(-i theta delta)`, `delta` the distance between query and key. The part of a key
that no rotary slot carries is not turned; the constant that stands in for the turning at the least squared error is its mean
over distances. It is one complex number a head and frequency, folded into the query.

A score `s_j` moves the output `o` of its head by `p_j (v_j - o)`, so distances are weighted by `p_j^2 |v_j - o|^2`: a name that
is copied from far away counts for what it brings, not for how seldom that happens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_cli.kernels.reference import visible_keys
from mla_cli.model.attention import Record, Step
from mla_cli.model.rotary import inverse_frequencies, rotate
from mla_cli.model.spec import RotarySpec, StandardAttentionSpec

# Sequences whose attention is looked at: distances are averages over every pair of tokens, so a few sequences settle them.
SEQUENCES = 8


def influence_by_distance(record: Record, step: Step, spec: StandardAttentionSpec, valid: Tensor) -> Tensor:
    """Sum of `p^2 |v - o|^2` at each distance, `[H, T]` float64, over the sequences of a micro-batch.

    The first token is left out: what heads put there is what they do not want to put anywhere (an attention sink).

    Args:
        record: `q` `[B, T, H, d]`, `k`, `v` `[B, T, G, d]` before rotation, `heads` `[B, T, H, d]`.
        valid: `[B, T]` queries that count.
    """
    assert spec.rotary is not None
    cos, sin = step.rotary(spec.rotary)
    per_group = spec.num_heads // spec.num_kv_heads
    q = rotate(record["q"], cos, sin, interleaved=False)  # [B, T, H, d]
    k = rotate(record["k"], cos, sin, interleaved=False).repeat_interleave(per_group, dim=2)
    tokens = q.shape[1]
    seen = visible_keys(step.positions, tokens, spec.window)[:, None]  # [B, 1, T, S]
    place = torch.arange(tokens, device=q.device)
    distance = (place[:, None] - place).clamp(min=0)[:, 1:].flatten()  # [T * (S - 1)]
    sums = torch.zeros(spec.num_heads, tokens, dtype=torch.float64, device=q.device)
    for row in range(q.shape[0]):  # one sequence at a time: the scores of a batch would be large
        scores = torch.einsum("thd,shd->hts", q[row], k[row]).float() * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        weights = scores.masked_fill(~seen[row], float("-inf")).softmax(dim=-1)  # [H, T, S]
        v = record["v"][row].float().transpose(0, 1).repeat_interleave(per_group, dim=0)  # [H, S, d]
        out = record["heads"][row].float().transpose(0, 1)  # [H, T, d]
        apart = torch.cdist(out, v).square()  # [H, T, S]
        moved = weights.square() * apart * valid[row, None, :, None]
        sums.scatter_add_(1, distance.expand(spec.num_heads, -1), moved[:, :, 1:].flatten(1).double())
    return sums


def mean_turn(rotary: RotarySpec, weights: Tensor) -> Tensor:
    """Mean of `exp(-i theta_j delta)` under weights by distance.

    Args:
        weights: `[H, T]`, see `influence_by_distance`.

    Returns:
        `[H, n]` complex128; 1 for a head that looked at nothing but the first token.
    """
    frequencies = inverse_frequencies(rotary).double().cpu()  # [n]
    angle = frequencies[:, None] * torch.arange(weights.shape[1], dtype=torch.float64)  # [n, T]
    total = weights.sum(dim=1, keepdim=True)  # [H, 1]
    mean = torch.einsum("ht,nt->hn", weights.to(torch.complex128), torch.polar(torch.ones_like(angle), -angle))
    return torch.where(total > 0, mean / total.clamp(min=1e-300), torch.ones_like(mean))
