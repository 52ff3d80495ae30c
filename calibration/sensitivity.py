"""How much the loss minds errors in the latents: the Fisher information, from a backward pass over a part of the text.

A latent that is off by `e` costs `1/2 e^T F e` nats, with `F = E[g g^T]` and `g` the gradient of the loss to labels that the
model itself draws. The sequences of that part are chosen by their content, so their order does not matter, and everything
that is summed is summed in float64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches, run, steps_in, ticking
from mla_cli.calibration.observers import LatentRange, grouped_amax, results_by_layer
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import ModelSource
from mla_cli.errors import MlaError
from mla_cli.model.attention import Record

# Sequences of the backward pass, which costs several forward passes. Second moments settle soon; 16,000 tokens are plenty.
SEQUENCES = 32
KEPT_TOKENS = 48  # of a sequence, beside its first: what the weight of a token is told by size from
# A size that few tokens have is weighed as if this many tokens of mean weight had it too.
PRIOR_TOKENS = 16.0


@dataclass(frozen=True)
class Sensitivity:
    """One layer's latents and their gradients.

    Attributes:
        moment, fisher: `[r, r]` float64 second moments of latents and gradients over all tokens.
        latents, gradients: `[m, r]` float32 of some tokens; shares: `[m]` how many tokens each stands for.
    """

    tokens: int
    moment: Tensor
    fisher: Tensor
    latents: Tensor
    gradients: Tensor
    shares: Tensor

    def turned(self, turn: Tensor, norm_shares: Tensor | None = None) -> Sensitivity:
        """The same of the layer whose first `k` latents a turn `[k, k]` mixes.

        Args:
            norm_shares: `[n]` what the turn moves from the latent's norm into what reads it (see `rotate_model`).
        """
        rank, k = len(self.moment), len(turn)
        matrix = torch.eye(rank, dtype=torch.float64)
        matrix[:k, :k] = turn
        shares = torch.ones(rank, dtype=torch.float64)
        if norm_shares is not None:
            shares[: len(norm_shares)] = norm_shares
        forward = matrix / torch.where(shares == 0, torch.inf, shares)  # of latents; a channel without weight has none
        backward = matrix * shares  # of gradients
        return replace(
            self,
            moment=forward @ self.moment @ forward.T,
            fisher=backward @ self.fisher @ backward.T,
            latents=(self.latents.double() @ forward.T).float(),
            gradients=(self.gradients.double() @ backward.T).float(),
        )

    def narrowed(self, channels: int) -> Sensitivity:
        """The same of the layer that has the first channels of its latent alone."""
        c = channels
        return replace(
            self,
            moment=self.moment[:c, :c],
            fisher=self.fisher[:c, :c],
            latents=self.latents[:, :c],
            gradients=self.gradients[:, :c],
        )

    def weights(self, seen: LatentRange, group: int | None, *, by_size: bool = True) -> Tensor:
        """Mean squared gradient, a value, for each row of what an observer saw of groups of `group` channels: `[R]`.

        Args:
            by_size: tell tokens by how large they are; False: all of a group weigh the same.
        """
        rank = len(self.fisher)
        sizes = grouped_amax(self.latents, group)  # [m, G]
        power = self.gradients.double().square()  # [m, r]
        result = torch.empty(len(seen.rows), dtype=torch.float64)
        for index in range(sizes.shape[1]):
            channels = slice(index * (group or rank), min(rank, (index + 1) * (group or rank)))
            mean = float(self.fisher.diagonal()[channels].mean())
            own = power[:, channels].mean(dim=1)  # [m]
            kept_mean = float((own * self.shares).sum() / self.shares.sum())
            rows = seen.groups == index
            if not by_size or kept_mean <= 0:
                result[rows] = mean
                continue
            share = _by_octave(sizes[:, index], own, self.shares, kept_mean, seen.rows[rows])
            result[rows] = mean * share / kept_mean
        return result


def _by_octave(sizes: Tensor, power: Tensor, shares: Tensor, mean: float, at: Tensor) -> Tensor:
    """Mean `power` of tokens about as large as `at` `[R]`, drawn to `mean` where few are."""
    known, wanted = (size.double().clamp(min=1e-30).log2().floor().long() for size in (sizes, at))
    low = int(torch.minimum(known.min(), wanted.min()))
    width = int(torch.maximum(known.max(), wanted.max())) - low + 1
    empty = torch.zeros(width, dtype=torch.float64)
    totals = empty.index_add(0, known - low, power.double() * shares) + PRIOR_TOKENS * mean
    counts = empty.index_add(0, known - low, shares) + PRIOR_TOKENS
    return (totals / counts)[wanted - low]


def by_content(texts: CalibrationTexts) -> CalibrationTexts:
    """The same sequences, in an order that depends on nothing but what they hold."""

    def key(row: int) -> bytes:
        tokens = texts.sequences[row, : int(texts.lengths[row])].contiguous()
        return hashlib.sha256(tokens.numpy().tobytes()).digest()

    order = sorted(range(len(texts.lengths)), key=key)
    return CalibrationTexts(
        texts.sequences[order], texts.lengths[order], texts.origin, texts.skipped, texts.requested
    )  # fmt: skip


def measure_sensitivity(
    model: ModelSource, texts: CalibrationTexts, *, compute: torch.dtype, device: torch.device, seed: int
) -> list[Sensitivity | None]:
    """Run text forward and backward; one result a layer, None for layers without a latent.

    Args:
        compute: type of the matrix products inside layers.

    Raises:
        MlaError: a layer did not show its latents, or they are not finite.
    """
    bank = LayerBank(model, device)
    watchers = [_Watcher(layer) for layer in range(model.spec.num_layers)]

    def observe(layer: int, record: Record, gradient: Tensor, valid: Tensor) -> None:
        watchers[layer].add(record["latent"], gradient, valid)

    count, longest = texts.sequences.shape
    batches = Batches.fit(longest, model.spec.hidden_size, model.spec.num_layers)
    steps = steps_in(batches, count, model.spec.num_layers, backward=True)
    with ticking("weighing errors", steps) as tick:
        run(
            bank.frame, bank.source_layer, texts.sequences, texts.lengths, batches,
            observe_gradient=observe, seed=seed, compute=compute, tick=tick,
        )  # fmt: skip
    return results_by_layer(watchers, model.spec, texts.tokens)


class _Watcher:
    """Sums of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer, self.tokens = layer, 0
        self.moment: Tensor | None = None
        self.fisher: Tensor | None = None
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, latent: Tensor, gradient: Tensor, valid: Tensor) -> None:
        """Latents and gradients `[B, T, r]`, of which `valid` `[B, T]` count."""
        latent, gradient = latent.double(), gradient.double()
        moment, fisher = (x[valid].T @ x[valid] for x in (latent, gradient))
        if not bool(torch.isfinite(moment).all() & torch.isfinite(fisher).all()):
            raise MlaError(
                f"the latents of layer {self.layer} or their gradients hold NaN or infinity",
                fix="the weights are damaged or overflow: try --dtype float32, or check with `mla inspect`",
            )
        self.tokens += int(valid.sum())
        self.moment = moment if self.moment is None else self.moment + moment
        self.fisher = fisher if self.fisher is None else self.fisher + fisher
        for row, length in enumerate(valid.sum(dim=1).tolist()):
            places, shares = _kept_places(length)
            self.kept.append((latent[row, places].cpu().float(), gradient[row, places].cpu().float(), shares))

    def result(self) -> Sensitivity:
        assert self.moment is not None
        assert self.fisher is not None
        latents, gradients, shares = (torch.cat(parts) for parts in zip(*self.kept, strict=True))
        return Sensitivity(
            self.tokens, self.moment.cpu() / self.tokens, self.fisher.cpu() / self.tokens, latents, gradients, shares
        )  # fmt: skip


def _kept_places(length: int) -> tuple[Tensor, Tensor]:
    """The first token of a sequence, and others spread evenly; and how many tokens each stands for."""
    count = min(KEPT_TOKENS, length - 1)
    if count < 1:
        return torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    spread = 1 + ((torch.arange(count) + 0.5) * (length - 1) / count).long()
    shares = torch.full((count + 1,), (length - 1) / count, dtype=torch.float64)
    shares[0] = 1.0
    return torch.cat((torch.zeros(1, dtype=torch.int64), spread)), shares
