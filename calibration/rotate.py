"""Orthogonal turns of a latent, which spread what a few channels hold over all: no scale is taken by one outlier then.

    c' = Q c,   W_down' = Q W_down,   W_up' = W_up Q^T

`hadamard`: all entries alike in size, the usual choice where nothing is known (QuaRot, arXiv 2404.00456). Sylvester's doubling
of Paley's matrices gives most multiples of four; any other width is cut into such blocks, the largest first.

`learned`: fitted to a layer. A group of `n` channels with one scale gets errors of about `amax^2` in each channel, and `amax^2`
of a Gaussian is `k_n tr(C_g) / n`, so what quantisation costs is

    J(Q) = sum_g  tr(F_g) tr(C_g) k_n / n,   C_g = Q_g C Q_g^T,   F_g = Q_g F Q_g^T

with `C` the second moment of the latent and `F` that of the loss's gradient. What matters and what is large should not share a
group. Steepest descent over the orthogonal matrices from several starts finds the groups' spaces; within each, eigenvectors
of `C_g` times a Hadamard matrix give all channels the same variance, which is the least `amax`.
"""

from __future__ import annotations

import math
from functools import cache
from random import Random

import torch
from torch import Tensor

from mla_cli.checkpoint.kv_cache import Rotation
from mla_cli.kernels.quantized import GROUP

DAMPING = 1e-6  # of the mean eigenvalue: moments of few tokens are singular
TRIAL_STEPS, STEPS = 20, 100  # from each start, and on from the best
ALIKE = 1e-3  # relative difference of costs that is none
UNEVEN = 1.02  # times the `amax^2` of level channels: below, levelling them is not worth it


def rotation(
    width: int,
    kind: Rotation,
    *,
    moment: Tensor | None = None,
    fisher: Tensor | None = None,
    group: int | None = GROUP,
) -> Tensor:
    """An orthogonal matrix, `[width, width]` float64.

    Args:
        width: channels of the latent.
        moment, fisher: `[width, width]` second moments of latent and gradient; `learned` needs both.
        group: channels that share a scale; None: all.
    """
    if kind == "none":
        return torch.eye(width, dtype=torch.float64)
    if kind == "hadamard":
        return _hadamard_turn(width)
    if moment is None or fisher is None:
        raise ValueError("a learned rotation is learned from second moments")
    return _learned_turn(moment, fisher, group or width)


# --- Hadamard ------------------------------------------------------------------------------------------------------------


@cache
def hadamard(size: int) -> Tensor | None:
    """A matrix `[size, size]` of ±1 with orthogonal rows, by Sylvester's and Paley's constructions; None if they give none."""
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    half = hadamard(size // 2) if size % 2 == 0 else None
    if half is not None:
        return torch.cat((torch.cat((half, half), dim=1), torch.cat((half, -half), dim=1)))
    if size % 4:
        return None
    if _is_prime(size - 1):  # size - 1 = 3 mod 4
        skew = _bordered(size - 1, sign=-1.0)
        return torch.eye(size, dtype=torch.float64) + skew
    other = size // 2 - 1
    if other % 4 == 1 and _is_prime(other):
        symmetric, eye = _bordered(other, sign=1.0), torch.eye(size // 2, dtype=torch.float64)
        pair, diagonal = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(symmetric, pair.double()) + torch.kron(eye, diagonal.double())
    return None


def _bordered(prime: int, sign: float) -> Tensor:
    """Paley's conference matrix `[prime + 1, prime + 1]`: quadratic residues, bordered by ones."""
    squares = {i * i % prime for i in range(1, prime)}
    row = [0.0, *(1.0 if i in squares else -1.0 for i in range(1, prime))]
    index = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 1:] = torch.tensor(row, dtype=torch.float64)[(index[:, None] - index) % prime]
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def hadamard_blocks(width: int) -> tuple[int, ...]:
    """Sizes of the Hadamard matrices that a width is cut into, largest first."""
    blocks: list[int] = []
    while width:
        size = next(size for size in range(width, 0, -1) if size <= 2 or (size % 4 == 0 and hadamard(size) is not None))
        blocks.append(size)
        width -= size
    return tuple(blocks)


def _hadamard_turn(width: int) -> Tensor:
    # Random signs: latents that all lie to one side, the rows of a Hadamard matrix among them, would become one outlier.
    rng = Random(width)
    signs = torch.tensor([rng.choice((1.0, -1.0)) for _ in range(width)], dtype=torch.float64)
    return _flat(width) * signs


def _flat(width: int) -> Tensor:
    blocks = [hadamard(size) for size in hadamard_blocks(width)]
    return torch.block_diag(*(block / math.sqrt(len(block)) for block in blocks if block is not None))


# --- learned -------------------------------------------------------------------------------------------------------------


def expected_cost(turn: Tensor, moment: Tensor, fisher: Tensor, group: int | None = GROUP) -> float:
    """`J` of a turn, up to a factor that depends on the number format alone."""
    return float(_cost(turn, moment, fisher, _sections(len(turn), group or len(turn))))


def _sections(width: int, group: int) -> list[slice]:
    return [slice(start, min(start + group, width)) for start in range(0, width, group)]


@cache
def _peak(count: int) -> float:
    """`E[max x^2]` of `count` independent standard normal numbers."""
    at = torch.linspace(0, 60, 6001, dtype=torch.float64)
    return float(torch.trapezoid(1 - torch.erf((at / 2).sqrt()) ** count, at))


def _cost(turn: Tensor, moment: Tensor, fisher: Tensor, sections: list[slice]) -> Tensor:
    large, matters = ((turn @ m * turn).sum(dim=1) for m in (moment, fisher))  # [r] diagonals
    parts = [large[s].sum() * matters[s].sum() * (_peak(s.stop - s.start) / (s.stop - s.start)) for s in sections]
    return torch.stack(parts).sum()


def _slope(turn: Tensor, moment: Tensor, fisher: Tensor, sections: list[slice]) -> Tensor:
    """Derivative of `_cost` by the turn, `[r, r]`."""
    to_moment, to_fisher = turn @ moment, turn @ fisher
    slope = torch.empty_like(turn)
    for s in sections:
        large, matters = (to_moment[s] * turn[s]).sum(), (to_fisher[s] * turn[s]).sum()
        slope[s] = (to_moment[s] * matters + to_fisher[s] * large) * (2 * _peak(s.stop - s.start) / (s.stop - s.start))
    return slope


def _learned_turn(moment: Tensor, fisher: Tensor, group: int) -> Tensor:
    width = len(moment)
    moment, fisher = _normalised(moment), _normalised(fisher)
    sections = _sections(width, group)
    found = [_descend(start, moment, fisher, sections, TRIAL_STEPS) for start in _starts(moment, fisher)]
    # The earlier start where they are alike, whatever the last bits say.
    cost, turn = found[0]
    for other, candidate in found[1:]:
        if other < cost * (1 - ALIKE):
            cost, turn = other, candidate
    _, turn = _descend(turn, moment, fisher, sections, STEPS)
    return torch.cat([_levelled(turn[s], moment) for s in sections])


def _normalised(moment: Tensor) -> Tensor:
    """A second moment of mean eigenvalue 1, damped; that of a silent layer is the identity."""
    moment, eye = (moment + moment.T).double() / 2, torch.eye(len(moment), dtype=torch.float64)
    mean = float(moment.diagonal().mean())
    return eye if mean <= 0 else moment / mean + DAMPING * eye


def _starts(moment: Tensor, fisher: Tensor) -> list[Tensor]:
    """Everything mixed; as it is; what is large apart from what matters."""
    opposed = _eigenvectors(moment - fisher)
    return [_hadamard_turn(len(moment)), torch.eye(len(moment), dtype=torch.float64), opposed]


def _eigenvectors(symmetric: Tensor) -> Tensor:
    """Rows, by descending eigenvalue, each with its largest entry positive."""
    rows = torch.linalg.eigh((symmetric + symmetric.T) / 2).eigenvectors.T.flip(0)
    signs = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True)).sign()
    return rows * signs


def _descend(turn: Tensor, moment: Tensor, fisher: Tensor, sections: list[slice], steps: int) -> tuple[float, Tensor]:
    """Steepest descent with Cayley's transform, which keeps the turn orthogonal: the cost reached, and the turn."""
    eye = torch.eye(len(turn), dtype=torch.float64)
    costs, step = [float(_cost(turn, moment, fisher, sections))], 1.0
    for _ in range(steps if len(sections) > 1 else 0):  # one group: every turn costs the same so far
        slope = _slope(turn, moment, fisher, sections)
        skew = slope @ turn.T - turn @ slope.T
        steepness = float(skew.square().sum())
        while steepness * step > 1e-9 * costs[-1]:
            candidate = torch.linalg.solve(eye + step / 2 * skew, turn - step / 2 * (skew @ turn))
            cost = float(_cost(candidate, moment, fisher, sections))
            if cost <= costs[-1] - 0.05 * step * steepness:
                break
            step /= 2
        else:
            break
        turn, step = candidate, 2 * step
        costs.append(cost)
        if len(costs) > 10 and costs[-10] - cost < ALIKE * cost:
            break
    return costs[-1], turn


def _levelled(rows: Tensor, moment: Tensor) -> Tensor:
    """Other orthonormal rows `[n, r]` of the same space, all of the same variance; the same ones where they almost are."""
    variances = (rows @ moment * rows).sum(dim=1)
    at = torch.linspace(0, 60, 2001, dtype=torch.float64)[:, None] * variances.mean()
    largest = torch.trapezoid(1 - torch.erf((at / (2 * variances)).sqrt()).prod(dim=1), at[:, 0])  # E[amax^2]
    if float(largest) < UNEVEN * _peak(len(rows)) * float(variances.mean()):
        return rows
    return _flat(len(rows)) @ _eigenvectors(rows @ moment @ rows.T) @ rows
