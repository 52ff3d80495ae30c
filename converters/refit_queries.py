"""Queries that give the source's scores against the keys that a latent gives, by linear least squares.

For the inputs `x` that a layer meets behind converted layers, `W` minimises the squared error of the scores over the pairs
that the source looks at, about its mean for each query (softmax does not see a constant), pulled toward what there was:

    sum_ts p_ts (e_ts - sum_u p_tu e_tu)^2 + ridge |K^1/2 (W - W_0) C^1/2|^2,   e_ts = score_ts - (W x_t) . k_s

The normal equations of a head have `(nope + rope) D` unknowns. They are close to a Kronecker product of `K` and `C`, what
keys and inputs vary by: with it as preconditioner, conjugate gradients need few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_cli.converters.statistics import second_moment, with_constant
from mla_cli.kernels.reference import visible_keys
from mla_cli.model.attention import StandardAttention, Step
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.rotary import rotate

STEPS = 4
RIDGE = 0.02
# Of the mean eigenvalue: what keys and inputs hardly vary by is left as it was.
DAMPING = 1e-2


@dataclass(frozen=True)
class Looked:
    """One sequence: the normed inputs of our layer and of the source's, `[1, T, D]`, and its step."""

    ours: Tensor
    theirs: Tensor
    step: Step


@torch.no_grad()
def refit_queries(
    weights: LatentWeights, source: StandardAttention, sequences: Sequence[Looked]
) -> tuple[LatentWeights, tuple[float, float]]:
    """The layer with refitted queries; and the scores' squared error over the source's own variance, before and after."""
    pairs = [_Pairs.of(weights, source, looked) for looked in sequences]
    old = torch.cat((weights.q, weights.q_bias[..., None]), dim=-1).to(pairs[0].x)  # [H, e, D + 1], e = nope + rope
    k = _damped(torch.stack([p.key_moment() for p in pairs]).mean(dim=0))  # [H, e, e]
    c = _damped(sum((second_moment(p.x) for p in pairs), start=torch.zeros((), dtype=torch.float64, device=old.device)))
    k_inverse, c_inverse = torch.linalg.inv(k), torch.linalg.inv(c)

    def normal(w: Tensor) -> Tensor:
        seen = torch.stack([p.back(p.scores_of(w.to(old))) for p in pairs]).sum(dim=0)
        return seen + RIDGE * (k @ w @ c)

    def dot(a: Tensor, b: Tensor) -> Tensor:  # one number a head: heads are systems of their own
        return (a * b).sum(dim=(1, 2), keepdim=True)

    rest = torch.stack([p.back(p.scores - p.scores_of(old)) for p in pairs]).sum(dim=0)  # [H, e, D + 1] float64
    moved = torch.zeros_like(rest)
    turned = k_inverse @ rest @ c_inverse
    direction, size = turned, dot(rest, turned)
    for _ in range(STEPS):
        image = normal(direction)
        length = size / dot(direction, image).clamp(min=1e-300)
        moved, rest = moved + length * direction, rest - length * image
        turned = k_inverse @ rest @ c_inverse
        size, before = dot(rest, turned), size
        direction = turned + size / before.clamp(min=1e-300) * direction
    new = old.double() + moved
    power = sum(p.spread(p.scores) for p in pairs)
    errors = [sum(p.spread(p.scores - p.scores_of(w.to(old))) for p in pairs) / max(power, 1e-300) for w in (old, new)]
    moved = moved.cpu()
    refitted = replace(
        weights,
        spec=replace(weights.spec, q_bias=True),
        q=weights.q + moved[..., :-1],
        q_bias=weights.q_bias + moved[..., -1],
    )
    return refitted.with_needed_biases(), (errors[0], errors[1])


@dataclass(frozen=True)
class _Pairs:
    """All pairs of a query and a key of one sequence."""

    x: Tensor  # [T, D + 1] our normed inputs and a constant 1
    keys: Tensor  # [H, S, e] what our latent gives, rotated
    scores: Tensor  # [H, T, S] the source's, before scale
    looks: Tensor  # [H, T, S] the source's attention
    cos: Tensor | None  # [1, T, rope / 2]
    sin: Tensor | None
    nope: int
    interleaved: bool

    @staticmethod
    def of(weights: LatentWeights, source: StandardAttention, looked: Looked) -> _Pairs:
        s, own, step = weights.spec, source.spec, looked.step
        ours, theirs = looked.ours[0], looked.theirs
        latent = ours @ weights.down.to(ours).T + weights.down_bias.to(ours)  # [T, r + rope]
        keys = torch.einsum("tr,hnr->htn", latent[:, : s.kv_lora_rank], weights.up_k.to(ours))  # [H, T, nope]
        q = source.q_proj(theirs).unflatten(-1, (own.num_heads, own.head_dim))  # [1, T, H, d]
        k = source.k_proj(theirs).unflatten(-1, (own.num_kv_heads, own.head_dim))  # [1, T, G, d]
        cos = sin = None
        if own.rotary is not None:
            cos, sin = step.rotary(own.rotary)  # [1, T, n]
            q, k = rotate(q, cos, sin, interleaved=False), rotate(k, cos, sin, interleaved=False)
            if s.frequencies is not None:
                index = torch.tensor(s.frequencies, device=cos.device, dtype=torch.int64)  # a layer may have none
                cos, sin = cos.index_select(-1, index), sin.index_select(-1, index)
            if s.qk_rope_head_dim:
                shared = rotate(latent[None, :, s.kv_lora_rank :], cos, sin, interleaved=s.interleaved)  # [1, T, rope]
                keys = torch.cat((keys, shared.expand(own.num_heads, -1, -1)), dim=-1)
        k = k.repeat_interleave(own.num_heads // own.num_kv_heads, dim=2)
        scores = torch.einsum("thd,shd->hts", q[0], k[0])
        logits = scores * own.scale
        if own.softcap is not None:
            logits = own.softcap * torch.tanh(logits / own.softcap)
        if own.alibi:
            logits = logits + step.biases(own.alibi, own.window)[0]
        seen = visible_keys(step.positions, len(ours), own.window)[0]  # [T, S]
        looks = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return _Pairs(with_constant(ours), keys, scores, looks, cos, sin, s.qk_nope_head_dim, s.interleaved)

    def scores_of(self, w: Tensor) -> Tensor:
        """`[H, T, S]` scores of queries `W x`, `W` `[H, e, D + 1]`."""
        return self._turned(torch.einsum("td,hed->hte", self.x, w), 1.0) @ self.keys.transpose(1, 2)

    def back(self, errors: Tensor) -> Tensor:
        """`[H, e, D + 1]` float64: half the slope of `spread(errors)` with respect to `W`, downhill."""
        slope = self._turned(self._weighted(errors) @ self.keys, -1.0)  # [H, T, e]
        return torch.einsum("hte,td->hed", slope, self.x).double()

    def spread(self, errors: Tensor) -> float:
        """Sum of squared errors, weighted by attention, about the mean of each query."""
        return float((self._weighted(errors) * errors).sum(dtype=torch.float64))

    def key_moment(self) -> Tensor:
        """`[H, e, e]` float64: what keys vary by, for a query on average; what turns, as it is for no turn at all."""
        looks = self.looks.mean(dim=1)  # [H, S]
        about = self.keys - torch.einsum("hs,hse->he", looks, self.keys)[:, None]
        moment = torch.einsum("hse,hs,hsf->hef", about, looks, about)
        turning = moment[:, self.nope :, self.nope :].diagonal(dim1=1, dim2=2).clone()  # every turn mixes the rest away
        moment[:, self.nope :] = 0
        moment[:, :, self.nope :] = 0
        moment[:, self.nope :, self.nope :] = torch.diag_embed(turning)
        return moment.double()

    def _weighted(self, errors: Tensor) -> Tensor:
        return self.looks * (errors - (self.looks * errors).sum(dim=-1, keepdim=True))

    def _turned(self, q: Tensor, way: float) -> Tensor:
        # [H, T, e], turned by each token's place, or back (the adjoint: an attention factor stays a factor).
        if self.cos is None or self.sin is None or q.shape[-1] == self.nope:
            return q
        rope = rotate(q[..., self.nope :].transpose(0, 1)[None], self.cos, way * self.sin, interleaved=self.interleaved)
        return torch.cat((q[..., : self.nope], rope[0].transpose(0, 1)), dim=-1)


def _damped(moment: Tensor) -> Tensor:
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=1e-30)
    return moment + DAMPING * mean * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
