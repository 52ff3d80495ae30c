"""Step 3: refit what reads and what writes in each layer, so that a layer corrects what those before it lost.

Layers are refitted in order. The hidden states of the source and of the refitted layers advance together, so that a layer
meets the inputs it will have. Both fits are linear least squares, pulled toward what the factorisation gave (ridge):

- the queries, to the source's scores against the keys that the latent now gives (`refit_queries.py`);
- the output projection with its bias, from the heads' outputs to what brings the hidden state back to the source's.

The keys' mean needs no refit: softmax does not see it. The values' mean is in the output bias already (`factorize.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank, StoredLayers
from mla_cli.calibration.layerwise import Batches, Tick
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.converters.refit_queries import Looked, refit_queries
from mla_cli.converters.statistics import with_constant
from mla_cli.model.attention import LatentAttention, Record, StandardAttention, Step
from mla_cli.model.decoder import DecoderLayer
from mla_cli.model.latent_weights import LatentWeights

# What outputs are fitted to: the source's hidden state after the layer's attention, or the source's attention output alone.
Toward = Literal["stream", "output"]

# Tokens that outputs are fitted to: their hidden states are held for one layer.
TOKENS = 1 << 14
# Sequences that queries are fitted to, and tokens of each: every pair of tokens counts, so that a few say much; the scores
# of all pairs are held.
QUERY_SEQUENCES, QUERY_LENGTH = 8, 512
# Of the mean eigenvalue of the heads' second moment: directions in which heads hardly vary keep what they had.
RIDGE = 1e-2


@dataclass(frozen=True)
class Compensated:
    """The layers after the refit, and what each fit did.

    Attributes:
        score_errors, output_errors: of each layer, before and after: squared error over the power of what is asked for
            (of scores: their variance for each query).
    """

    layers: Sequence[LatentWeights]
    score_errors: tuple[tuple[float, float], ...]
    output_errors: tuple[tuple[float, float], ...]


@torch.no_grad()
def compensate(
    bank: LayerBank,
    layers: Sequence[LatentWeights],
    texts: CalibrationTexts,
    batches: Batches,
    *,
    queries: bool = True,
    toward: Toward | None = "stream",
    tick: Tick = lambda: None,
) -> Compensated:
    """Refit every layer on the first sequences of these texts, one layer of the source and one of ours in memory at a time.

    Args:
        layers: what the factorisation gave, one a layer. queries: refit them. toward: what to fit outputs to; None: do not.
    """
    states = _States(bank, texts, batches)
    refitted, scores, outputs = StoredLayers(batches.workplace.series()), [], []
    for index in range(len(layers)):
        weights = layers[index]
        layer = bank.source_layer(index)
        attention = layer.self_attn
        assert isinstance(attention, StandardAttention)
        if queries and attention.spec.qk_norm is None:  # a norm stands between inputs and queries
            weights, error = refit_queries(weights, attention, states.looked(layer))
            scores.append(error)
        weights, error = states.refit_output(layer, weights, weights.module(index, device=bank.device), toward)
        outputs.append(error)
        refitted.append(weights)
        del layer, attention  # before the next ones are read
        tick()
    return Compensated(refitted, tuple(scores), tuple(outputs))


class _States:
    """Hidden states before one layer, in the source and behind the refitted layers, `[N, T, D]` each."""

    def __init__(self, bank: LayerBank, texts: CalibrationTexts, batches: Batches) -> None:
        count = max(1, int((texts.lengths.cumsum(0) <= TOKENS).sum()))
        self.frame, self.device, self.lengths = bank.frame, bank.device, texts.lengths[:count]
        tokens = texts.sequences[:count, : int(self.lengths.max())].to(bank.device)
        size = batches.sequences_per_micro
        self.micros = [slice(i, i + size) for i in range(0, count, size)]
        self.workplace = batches.workplace
        self.shape = (*tokens.shape, bank.model.spec.hidden_size)
        self.source, self.ours = (self.workplace.rows(self.shape, bank.device) for _ in range(2))  # [N, T, D]
        for m in self.micros:
            self.source[m] = self.ours[m] = bank.frame.embed(tokens[m], self._step(m).positions)

    def looked(self, layer: DecoderLayer) -> list[Looked]:
        """What the queries are fitted to."""
        found = []
        for i, length in enumerate(self.lengths[:QUERY_SEQUENCES].clamp(max=QUERY_LENGTH).tolist()):
            ours, theirs = (layer.input_layernorm(x[i : i + 1][:, :length]) for x in (self.ours, self.source))
            found.append(Looked(ours, theirs, self._step(slice(i, i + 1), length)))
        return found

    def refit_output(
        self, layer: DecoderLayer, weights: LatentWeights, attention: LatentAttention, toward: Toward | None
    ) -> tuple[LatentWeights, tuple[float, float]]:
        """Refit the output projection, and advance both hidden states past the layer.

        A token weighs less the larger what is asked of it is: the first one, whose states may be hundreds of times larger
        than others', counts as one of many.
        """
        width = attention.o_proj.in_features + 1
        heads, targets = (self.workplace.rows((*self.shape[:2], w), self.device) for w in (width, self.shape[2]))
        powers = []  # of each token, by micro-batch
        for m in self.micros:
            step = self._step(m)
            output = layer.self_attn(layer.input_layernorm(self.source[m]), step)  # [B, T, D]
            record: Record = {}
            attention(layer.input_layernorm(self.ours[m]), step, record)
            target = output if toward == "output" else output + layer.correction(self.source[m] - self.ours[m])
            self.source[m] = layer.complete(self.source[m], output, output.dtype)
            heads[m] = with_constant(record["heads"].flatten(2).flatten(0, 1)).unflatten(0, output.shape[:2])
            targets[m] = target
            powers.append(target.square().sum(dim=-1)[self._valid(m)])
        usual = torch.cat(powers).median().clamp(min=1e-30)

        old = torch.cat((weights.out, weights.out_bias[:, None]), dim=1).to(record["heads"])  # [D, H*v + 1]
        moment = cross = torch.zeros((), dtype=torch.float64, device=self.device)
        total = before = 0.0
        for m, power in zip(self.micros, powers, strict=True):
            weight = (1 / (1 + power / usual)).double()[:, None]
            h, rest = (x[self._valid(m)].double() for x in (heads[m], targets[m] - heads[m] @ old.T))
            moment, cross = moment + (h * weight).T @ h, cross + (rest * weight).T @ h
            before += float((rest.square() * weight).sum())
            total += float((power.double() * weight[:, 0]).sum())
        moved = torch.zeros_like(cross) if toward is None else ridge_shift(moment, cross, RIDGE)  # [D, H*v + 1]
        gained = float((moved * (2 * cross - moved @ moment)).sum())

        new = (old.double() + moved).to(old)
        for m in self.micros:
            self.ours[m] = layer.complete(self.ours[m], heads[m] @ new.T, new.dtype)
        shift = moved.cpu()
        refitted = replace(
            weights,
            spec=replace(weights.spec, o_bias=True),
            out=weights.out + shift[:, :-1],
            out_bias=weights.out_bias + shift[:, -1],
        )
        total = max(total, 1e-300)
        return refitted.with_needed_biases(), (before / total, (before - gained) / total)

    def _valid(self, rows: slice) -> Tensor:
        tokens = torch.arange(self.shape[1], device=self.device)
        return tokens < self.lengths[rows, None].to(self.device)  # [B, T]

    def _step(self, rows: slice, tokens: int | None = None) -> Step:
        lengths = self.lengths[rows]
        shape = torch.Size((len(lengths), tokens or int(self.lengths.max())))
        return self.frame.begin_step(shape, lengths=lengths)


def ridge_shift(moment: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """What least squares adds to a linear map, pulled toward adding nothing.

    Args:
        moment: `[n, n]` second moment of the inputs, a constant 1 as the last; the constant's weight (a bias) is not pulled.
        cross: `[m, n]` moment of what is left to explain with the inputs. ridge: share of the mean eigenvalue of `moment`.

    Returns:
        `[m, n]`.
    """
    pull = ridge * moment.diagonal()[:-1].mean().clamp(min=1e-30)
    pulls = torch.full_like(moment.diagonal(), float(pull))
    pulls[-1] = 0
    return torch.linalg.solve(moment + pulls.diag(), cross.T).T  # symmetric, positive definite
