"""Step 1: turn `G` rotary keys into one shared rotary key and a remainder that is read without rotation.

RoPE multiplies the complex number `k_j = k[j] + i k[j + n]` of frequency `j` by `exp(i theta_j t)`, so any complex mixing of
the `G` key heads at one frequency commutes with it. Per frequency, the complex principal components of the keys, weighted
by the energy of the queries that read them, become slots of the shared rotary key; their coefficients go into the queries.

The result is a *wide* latent layer: its latent is `[k_remainder; v]` of all groups, `2 G d` numbers, and nothing is lost
yet but the rotation of the remainder. What follows (`factorize.py`) narrows that latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mla_cli.model.attention import StandardAttention
from mla_cli.model.latent_weights import LatentWeights, bias_or_zeros
from mla_cli.model.norms import OffsetRMSNorm
from mla_cli.model.spec import LatentAttentionSpec, StandardAttentionSpec

Mixing = Literal["complex", "real"]


def default_slots(frequencies: int, qk_rope_head_dim: int, groups: int) -> tuple[int, ...]:
    """Frequency of each rotary pair: every `frequencies / pairs`-th one, or all of them one or more times.

    The first `frequencies` pairs always run over the frequencies in order, as the stock form needs it.
    """
    pairs = qk_rope_head_dim // 2
    if pairs <= frequencies:
        return tuple(i * frequencies // pairs for i in range(pairs))
    return tuple(i % frequencies for i in range(pairs))[: frequencies * groups]


def split_rotary(
    attention: StandardAttention,
    input_moment: Tensor,
    query_energy: Tensor,
    slots: Sequence[int],
    *,
    turn: Tensor | None = None,
    mixing: Mixing = "complex",
) -> LatentWeights:
    """The wide latent layer of a standard attention layer.

    Args:
        attention: the source layer.
        input_moment: `[D + 1, D + 1]` second moment of its normed input with a constant 1 appended.
        query_energy: `[H, n]` what an error of the keys weighs, per head and frequency (`SourceStatistics.query_energy`).
        slots: frequency index of each rotary pair; a frequency may appear up to `G` times, or never.
        turn: `[H, n]` complex, what the rotation amounts to on average (`distances.mean_turn`): the remainder is read with
            it; None: as if it were never turned.
        mixing: `real` restricts the mixing of heads to one real rotation for both halves of a pair (what published
            converters do; for comparison).

    Returns:
        Weights in float64 on the CPU, where the moments are, with `r = 2 G d` and `qk_rope_head_dim = 2 len(slots)`.
    """
    s, hidden = attention.spec, attention.q_proj.in_features
    groups, per_group, d = s.num_kv_heads, s.num_heads // s.num_kv_heads, s.head_dim
    n = s.rotary.dim // 2 if s.rotary is not None else 0
    attention_factor = s.rotary.attention_factor if s.rotary is not None else 1.0

    w_q = query_rows(attention)  # [H, d, D+1], or [H, d, d+1] of normed queries
    w_k = key_rows(attention)  # [G, d, D+1]
    w_v = _augmented(attention.v_proj)  # [G*d, D+1]
    keys = torch.complex(w_k[:, :n], w_k[:, n : 2 * n])  # [G, n, D+1]
    queries = torch.complex(w_q[:, :n], w_q[:, n : 2 * n])  # [H, n, D+1]
    group_energy = query_energy.view(groups, per_group, n).sum(dim=1).clamp(min=1e-30)  # [G, n]

    seen = torch.complex(w_k[:, :n] @ input_moment, w_k[:, n : 2 * n] @ input_moment)  # [G, n, D+1]

    remainder = keys.clone()
    rope_rows: list[Tensor] = []
    rope_queries: list[Tensor] = []
    wanted = {j: slots.count(j) for j in set(slots)}
    components: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for j, count in wanted.items():
        weight = group_energy[:, j].sqrt().to(keys.dtype)  # [G]
        weight = weight / weight.abs().mean()
        if count == groups:  # every head keeps its own key: rather exact to the last bit than mixed
            components[j] = [(torch.eye(groups, dtype=keys.dtype)[g], keys[g, j].clone()) for g in range(groups)]
            remainder[:, j] = 0
            continue
        weighted = weight[:, None] * keys[:, j]  # [G, D+1]
        covariance = weight[:, None] * seen[:, j] @ weighted.conj().T  # [G, G]
        if mixing == "real":
            covariance = covariance.real.to(keys.dtype)
        _, vectors = torch.linalg.eigh(covariance)
        components[j] = []
        for u in vectors.flip(-1).T[:count]:
            row = u.conj() @ weighted  # [D+1] complex: the slot's shared key
            coefficient = u / weight  # [G]
            remainder[:, j] -= coefficient[:, None] * row
            components[j].append((coefficient, row))
    for j in slots:
        coefficient, row = components[j].pop(0)
        rope_rows += [row.real, row.imag]
        shared = queries[:, j] * coefficient.conj().repeat_interleave(per_group)[:, None]  # [H, D+1]
        rope_queries += [shared.real, shared.imag]

    # cos and sin carry the attention factor into rotated scores only; the remainder needs it by hand.
    read = queries if turn is None else queries * turn.conj()[..., None]  # [H, n, D+1]
    q_nope = torch.cat((read.real, read.imag, w_q[:, 2 * n :]), dim=1)  # [H, d, D+1]
    q_nope[:, : 2 * n] *= attention_factor**2
    k_nope = torch.cat((remainder.real, remainder.imag, w_k[:, 2 * n :]), dim=1)  # [G, d, D+1]
    rope = torch.stack(rope_rows) if rope_rows else w_v.new_zeros(0, hidden + 1)  # [rope, D+1]
    down = torch.cat((k_nope.flatten(0, 1), w_v, rope))  # [2*G*d + rope, D+1]
    q = torch.cat((q_nope, torch.stack(rope_queries, dim=1)), dim=1) if rope_queries else q_nope

    width = groups * d
    eye = (
        torch.eye(width, dtype=torch.float64).view(groups, d, width).repeat_interleave(per_group, dim=0)
    )  # [H, d, G*d]
    nothing = torch.zeros_like(eye)
    spec = latent_spec(s, 2 * width, tuple(slots))
    return LatentWeights(
        spec,
        q[..., :-1],
        q[..., -1],
        down[:, :hidden],
        down[:, hidden],
        torch.cat((eye, nothing), dim=-1),
        torch.cat((nothing, eye), dim=-1),
        attention.o_proj.weight.detach().cpu().double(),
        bias_or_zeros(attention.o_proj),
        normed=_norm_projections(attention),
    ).with_needed_biases()


def query_rows(attention: StandardAttention) -> Tensor:
    """What queries are of the layer's input with a constant 1 appended, `[H, d, D + 1]`; with norms of queries, what they are
    of each head's query over its rms: the norm's weight, `[H, d, d + 1]`."""
    s = attention.spec
    if s.qk_norm is None:
        return _augmented(attention.q_proj).view(s.num_heads, s.head_dim, -1)
    weights = torch.diag_embed(_norm_weight(attention.q_norm, s.num_heads, s.head_dim))  # [H, d, d]
    return torch.cat((weights, weights.new_zeros(*weights.shape[:2], 1)), dim=-1)


def key_rows(attention: StandardAttention) -> Tensor:
    """What keys are of the layer's input with a constant 1 appended, `[G, d, D + 1]`; with norms of keys, before `1 / rms`."""
    s = attention.spec
    rows = _augmented(attention.k_proj).view(s.num_kv_heads, s.head_dim, -1)
    if s.qk_norm is None:
        return rows
    return rows * _norm_weight(attention.k_norm, s.num_kv_heads, s.head_dim)[..., None]


def _norm_weight(norm: torch.nn.Module, heads: int, head_dim: int) -> Tensor:
    weight = norm.weight.detach().cpu().double() + (1.0 if isinstance(norm, OffsetRMSNorm) else 0.0)  # type: ignore[operator]
    return weight.view(-1, head_dim).expand(heads, head_dim)


def _norm_projections(attention: StandardAttention) -> dict[str, Tensor] | None:
    if attention.spec.qk_norm is None:
        return None
    return {
        f"{name}_norm_proj.{part}": tensor.detach().cpu().double()
        for name, projection in (("q", attention.q_proj), ("k", attention.k_proj))
        for part, tensor in projection.named_parameters()
    }


def latent_spec(source: StandardAttentionSpec, kv_lora_rank: int, slots: tuple[int, ...]) -> LatentAttentionSpec:
    """The latent attention that stands in for `source` with this rank and these rotary slots; every bias is there."""
    return LatentAttentionSpec(
        num_heads=source.num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=source.head_dim,
        qk_rope_head_dim=2 * len(slots),
        v_head_dim=source.head_dim,
        scale=source.scale,
        rotary=source.rotary,
        frequencies=slots if source.rotary is not None else None,
        q_bias=True,
        kv_a_bias=True,
        o_bias=True,
        window=source.window,
        softcap=source.softcap,
        qk_norm=source.qk_norm,
        num_kv_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        alibi=source.alibi,
    )


def component_energies(attention: StandardAttention, input_moment: Tensor, query_energy: Tensor) -> Tensor:
    """Energy of each principal component of the keys at each frequency, weighted by the queries' `[H, n]` energy.

    Returns:
        `[n, G]` float64, descending along `G`.
    """
    s = attention.spec
    assert s.rotary is not None
    n = s.rotary.dim // 2
    w_k = key_rows(attention)
    keys = torch.complex(w_k[:, :n], w_k[:, n : 2 * n])  # [G, n, D+1]
    weight = query_energy.view(s.num_kv_heads, -1, n).sum(dim=1).clamp(min=0).sqrt()  # [G, n]
    seen = torch.complex(w_k[:, :n] @ input_moment, w_k[:, n : 2 * n] @ input_moment)
    weighted, seen = ((weight[..., None] * rows).transpose(0, 1) for rows in (keys, seen))  # [n, G, D+1]
    covariance = seen @ weighted.mH  # [n, G, G]
    return torch.linalg.eigvalsh(covariance).flip(-1)


def split_error(
    attention: StandardAttention, split: LatentWeights, input_moment: Tensor, query_energy: Tensor
) -> float:
    """Share of the rotary keys' energy, weighted by query energy, that stays in the remainder (0: nothing is lost)."""
    s = attention.spec
    if s.rotary is None:
        return 0.0
    n, hidden = s.rotary.dim // 2, attention.q_proj.in_features
    energy = query_energy.view(s.num_kv_heads, -1, n).sum(dim=1)  # [G, n]

    def weighted(rows: Tensor) -> float:
        power = ((rows @ input_moment) * rows).sum(dim=-1).view(s.num_kv_heads, s.head_dim)  # [G, d]
        return float(((power[:, :n] + power[:, n : 2 * n]) * energy).sum())

    remainder = torch.cat((split.down, split.down_bias[:, None]), dim=1)[: s.num_kv_heads * s.head_dim]
    total = weighted(key_rows(attention).reshape(-1, hidden + 1))
    return weighted(remainder) / total if total > 0 else 0.0


def _augmented(linear: torch.nn.Linear) -> Tensor:
    # [out, in + 1]: the bias is what a constant input of 1 contributes.
    return torch.cat((linear.weight.detach().cpu().double(), bias_or_zeros(linear)[:, None]), dim=1)
