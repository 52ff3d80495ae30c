"""Step 2: narrow a latent, weighted by what matters to the model's output.

A wide latent `z = A x` is replaced by `z' = U D x` of rank `r`. The second-order loss of that is, with Kronecker factors
`F = E[g g^T]` (`g` = gradient of the loss with respect to `z`) and `C` = covariance of `x`,

    loss = tr(F (A - U D) C (A - U D)^T),   minimal for   F^{1/2} A C^{1/2} = P S Q^T,  U = F^{-1/2} P_r S_r^{1/2},
                                                          D = S_r^{1/2} Q_r^T C^{-1/2}

The latent's channels come out ordered by importance. `x` is taken about its mean: the mean of the keys is invariant under
softmax, the mean of the values is a constant that goes into the output bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mla_cli.model.latent_weights import LatentWeights

# What errors in the latent are weighed by: the loss; queries and output projection, its stand-in without gradients; keys and
# values alike, as published converters do; nothing at all.
Objective = Literal["fisher", "query-output", "activation", "weight"]

CONSTANT = 1e-10  # share of the input's energy below which its variation is rounding
DAMPING = 1e-4  # of the mean eigenvalue: directions that calibration hardly saw keep a small weight


@dataclass(frozen=True)
class Spectrum:
    """Loss by rank: `energy[i]` is what channel `i` is worth in the objective's unit; dropping it costs that much."""

    energy: Tensor  # [min(2Gd, D)] float64, descending

    def loss(self, rank: int) -> float:
        """What is lost when the first `rank` channels are kept."""
        return float(self.energy[rank:].sum())


def moment_root(moment: Tensor) -> Tensor:
    """Lower triangular `L` with `L L^T` = a symmetric second moment, damped relative to its mean eigenvalue.

    Any root does where singular values and the spaces they span are all that is sought, and this one takes a hundredth of the
    time of the symmetric one. A moment of zeros (a layer without gradient) gives the identity.
    """
    return torch.linalg.cholesky(_damped(moment))


def best_factors(
    a: Tensor, rank: int, input_moment: Tensor | None, output_moment: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`U` and `D` of rank `rank` that minimise `tr(F (A - U D) C (A - U D)^T)`, and the loss that each channel saves.

    With `F = L L^T` and `C = R R^T`, `M = L^T A R = P S Q^T`: the products `U D` of the leading channels are
    `L^-T P_r P_r^T L^T A` and `A R Q_r Q_r^T R^-1`, so that the vectors of one side, eigenvectors of `M M^T` or `M^T M`,
    are enough, and at full rank nothing is lost whatever they are. The smaller of the two is taken.

    Args:
        a: `[n, m]`. input_moment: `[m, m]` (`C`); output_moment: `[n, n]` (`F`); None: the identity.

    Returns:
        `[n, k]`, `[k, m]` and `[min(n, m)]` descending, `k = min(rank, n, m)`.
    """
    rows, columns = a.shape
    f_root = None if output_moment is None else moment_root(output_moment)
    if rows <= columns:
        left = a if f_root is None else f_root.T @ a  # L^T A
        seen = left if input_moment is None else left @ _damped(input_moment)
        energy, vectors = _leading(seen @ left.T)
        kept = vectors[:, :rank]
        up = kept if f_root is None else torch.linalg.solve_triangular(f_root.T, kept, upper=True)
        down = kept.T @ left
    else:
        c_root = None if input_moment is None else moment_root(input_moment)
        right = a if c_root is None else a @ c_root  # A R
        seen = right if output_moment is None else _damped(output_moment) @ right
        energy, vectors = _leading(right.T @ seen)
        kept = vectors[:, :rank]
        up = right @ kept
        down = kept.T if c_root is None else torch.linalg.solve_triangular(c_root.T, kept, upper=True).T
    # Each channel's importance goes half to what writes it and half to what reads it, as in a singular value decomposition.
    size = energy[: kept.shape[1]].clamp(min=1e-30 * float(energy[:1].sum()) + 1e-300).pow(0.25)
    if rows <= columns:
        return up * size, down / size[:, None], energy
    return up / size, down * size[:, None], energy


def _damped(moment: Tensor) -> Tensor:
    """What `moment_root` is a root of."""
    mean = float(moment.diagonal().mean())
    eye = torch.eye(moment.shape[0], dtype=moment.dtype)
    return eye if mean <= 0 else (moment + moment.T) / 2 + DAMPING * mean * eye


def _leading(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending and none below 0, and eigenvectors of a symmetric matrix."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    return values.flip(0).clamp(min=0), vectors.flip(1)


def covariance(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance `[D, D]` and mean `[D]` from the second moment `[D + 1, D + 1]` of `x` with a constant 1 appended."""
    mean = moment[:-1, -1]
    return moment[:-1, :-1] - torch.outer(mean, mean), mean


def output_weight(weights: LatentWeights, query_moment: Tensor) -> Tensor:
    """The stand-in for the Fisher information where no gradients are taken: block-diagonal by keys and values.

    Keys weigh by the queries that read them, values by the output projection: `sum_h U_k^T E[q q^T] U_k` and
    `sum_h U_v^T W_o^T W_o U_v`, each scaled to equal trace per unit of its own output so that neither part is favoured.

    Args:
        query_moment: `[H, nope, nope]` second moments of the non-rotary queries.
    """
    s = weights.spec
    keys = torch.einsum("hnr,hnm,hms->rs", weights.up_k, query_moment, weights.up_k) * s.scale**2
    out = weights.out.view(-1, s.num_heads, s.v_head_dim)  # [D, H, v]
    values = torch.einsum("hvr,dhv,dhw,hws->rs", weights.up_v, out, out, weights.up_v)
    return keys / keys.trace().clamp(min=1e-30) + values / values.trace().clamp(min=1e-30)


def activation_weight(weights: LatentWeights, input_moment: Tensor) -> Tensor:
    """Errors of keys and values count as they are, each part scaled to equal energy (as TransMLA, arXiv 2502.07864, does).

    Args:
        input_moment: `[D + 1, D + 1]`, see `covariance`.

    Returns:
        `[r, r]`.
    """
    cov, _ = covariance(input_moment)
    down = weights.down[: weights.spec.kv_lora_rank]  # [r, D]
    latent = down @ cov @ down.T  # [r, r]
    parts = [torch.einsum("hnr,hns->rs", up, up) for up in (weights.up_k, weights.up_v)]
    return sum((part / (part * latent).sum().clamp(min=1e-30) for part in parts), torch.zeros_like(latent))


def factorize(
    weights: LatentWeights,
    rank: int,
    input_moment: Tensor,
    output_moment: Tensor | None,
    *,
    weigh_input: bool = True,
    reorder: bool = False,
) -> tuple[LatentWeights, Spectrum]:
    """The layer with its latent narrowed to `rank` channels, and the spectrum of what each channel is worth.

    Args:
        weights: a latent layer, wide or already narrow.
        rank: channels to keep; may exceed the rank of the layer (then nothing is lost).
        input_moment: `[D + 1, D + 1]`, see `covariance`.
        output_moment: `[r, r]` weight of errors in the latent (`F`); None: all equal.
        weigh_input: False ignores the covariance (plain SVD of the weights).
        reorder: order the channels even where none is dropped; the layer computes the same then, up to rounding.
    """
    s = weights.spec
    wide, hidden = s.kv_lora_rank, weights.down.shape[1]
    if rank == wide and not reorder:  # nothing to drop: rather exact to the last bit than ordered by importance
        return weights, Spectrum(torch.zeros(wide, dtype=torch.float64))
    if s.softcap is not None or s.key_factors:
        return _factorize_whole(weights, rank, input_moment, output_moment, weigh_input=weigh_input)
    cov, mean = covariance(input_moment)
    power = float(input_moment.diagonal()[:-1].mean())
    if float(cov.diagonal().mean()) <= CONSTANT * power:
        # No gradient reached the layer, or every token was the same: what is left is rounding, and dividing by its root
        # would blow up every other input.
        cov = torch.eye(len(mean), dtype=cov.dtype) * (power or 1.0)
    a, rope = weights.down[:wide], weights.down[wide:]
    up, down, energy = best_factors(a, rank, cov if weigh_input else None, output_moment)
    kept = down.shape[0]
    # One common factor makes the latent's mean square 1, so that casts and quantisation meet well-scaled numbers.
    size = ((down @ cov) * down).sum(dim=1).mean().clamp(min=1e-60).sqrt()
    down, up = down / size, up * size
    if kept < rank:
        down = torch.cat((down, down.new_zeros(rank - kept, hidden)))
        up = torch.cat((up, up.new_zeros(wide, rank - kept)), dim=1)

    # Constant part of the wide latent: for keys it is invariant under softmax; for values it is an output bias.
    constant = a @ mean + weights.down_bias[:wide]  # [wide]
    value_constant = torch.einsum("hvr,r->hv", weights.up_v, constant).flatten()  # [H*v]
    narrowed = replace(
        weights,
        spec=replace(s, kv_lora_rank=rank),
        down=torch.cat((down, rope)),
        down_bias=torch.cat((-down @ mean, weights.down_bias[wide:])),
        up_k=weights.up_k @ up,
        up_v=weights.up_v @ up,
        out_bias=weights.out_bias + weights.out @ value_constant,
    )
    return narrowed.with_needed_biases(), Spectrum(energy)


def _factorize_whole(
    weights: LatentWeights, rank: int, input_moment: Tensor, output_moment: Tensor | None, *, weigh_input: bool
) -> tuple[LatentWeights, Spectrum]:
    """`factorize` where softmax does see the mean of the keys: a soft-cap bends it, a norm of the keys scales it.

    `x` is taken as it is, with its constant 1, about which no channel is lost for nothing.
    """
    s = weights.spec
    wide = s.kv_lora_rank
    a = torch.cat((weights.down[:wide], weights.down_bias[:wide, None]), dim=1)  # [wide, D + 1]
    found, read, energy = best_factors(a, rank, input_moment if weigh_input else None, output_moment)
    kept = read.shape[0]
    down, up = a.new_zeros(rank, a.shape[1]), a.new_zeros(wide, rank)
    down[:kept], up[:, :kept] = read, found
    power = ((down @ input_moment) * down).sum(dim=1)[:kept].mean().clamp(min=1e-60).sqrt()
    down, up = down / power, up * power
    narrowed = replace(
        weights,
        spec=replace(s, kv_lora_rank=rank),
        down=torch.cat((down[:, :-1], weights.down[wide:])),
        down_bias=torch.cat((down[:, -1], weights.down_bias[wide:])),
        up_k=weights.up_k @ up,
        up_v=weights.up_v @ up,
    )
    return narrowed.with_needed_biases(), Spectrum(energy)
