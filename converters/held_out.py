"""What a conversion costs on text that no stage has seen: perplexity of each stage and divergence from the source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches, LayerAt, Tick, steps_in, ticking
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.model.decoder import Decoder
from mla_cli.model.latent_weights import LatentWeights

SCORED_AT_ONCE = 256  # tokens whose logits are held at a time


@dataclass(frozen=True)
class Loss:
    """Mean negative log-likelihood of the next token, and mean KL(source || model) per token, both in nats."""

    nll: float
    kl: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """`exp(nll)`; infinite where that overflows."""
        return math.exp(self.nll) if self.nll < 700 else math.inf


def measure(
    stages: Mapping[str, tuple[Decoder, LayerAt]],
    sequences: Tensor,
    lengths: Tensor,
    batches: Batches,
    *,
    tick: Tick = lambda: None,
) -> dict[str, Loss]:
    """Losses of several stages of one model on the same sequences; the first stage is the source.

    A stage is its frame (embedding, norm, head) and what gives its layers. All stages advance together, layer by layer,
    so that one layer of each is in memory.
    """
    sums: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in stages}
    for chosen in batches.rounds(sequences.shape[0]):
        tokens, counts = sequences[chosen], lengths[chosen]
        frames = {name: frame for name, (frame, _) in stages.items()}
        first = next(iter(frames.values()))
        tokens = tokens[:, : int(counts.max())].to(first.device)
        micros = [
            slice(i, i + batches.sequences_per_micro) for i in range(0, tokens.shape[0], batches.sequences_per_micro)
        ]
        shape = (*tokens.shape, first.spec.hidden_size)
        hidden = {name: batches.workplace.rows(shape, first.device) for name in frames}
        with torch.no_grad():
            for m in micros:
                positions = first.begin_step(tokens[m].shape, lengths=counts[m]).positions
                for name, frame in frames.items():
                    hidden[name][m] = frame.embed(tokens[m], positions)
            for index in range(first.spec.num_layers):
                for name, (frame, layer_at) in stages.items():
                    layer = layer_at(index)
                    for m in micros:
                        step = frame.begin_step(tokens[m].shape, lengths=counts[m])
                        hidden[name][m] = layer(hidden[name][m], step)
                    del layer  # before the next one is read
                tick()
            for row in range(tokens.shape[0]):
                states = {name: rows[row : row + 1][0] for name, rows in hidden.items()}
                _score(frames, states, tokens[row], int(counts[row]), sums)
    return {name: Loss(nll / max(1, n), kl / max(1, n), int(n)) for name, (nll, kl, n) in sums.items()}


def measure_texts(
    description: str, stages: Mapping[str, tuple[Decoder, LayerAt]], texts: CalibrationTexts, batches: Batches
) -> dict[str, Loss]:
    """`measure` with a progress bar."""
    layers = next(iter(stages.values()))[0].spec.num_layers
    with ticking(description, steps_in(batches, len(texts.lengths), layers, backward=False)) as tick:
        return measure(stages, texts.sequences, texts.lengths, batches, tick=tick)


def source_and(bank: LayerBank, variants: Mapping[str, Sequence[LatentWeights]]) -> dict[str, tuple[Decoder, LayerAt]]:
    """Stages: the source, and the source with each of these attentions."""
    attentions = {name: (bank.frame, bank.latent_layers(layers)) for name, layers in variants.items()}
    return {"source": (bank.frame, bank.source_layer), **attentions}


def loss_of(bank: LayerBank, layers: Sequence[LatentWeights], texts: CalibrationTexts, batches: Batches) -> Loss:
    """Held-out loss of the source with these attentions."""
    return measure(source_and(bank, {"ours": layers}), texts.sequences, texts.lengths, batches)["ours"]


def _score(
    frames: dict[str, Decoder],
    hidden: dict[str, Tensor],
    tokens: Tensor,
    count: int,
    sums: dict[str, list[float]],
) -> None:
    for begin in range(0, count - 1, SCORED_AT_ONCE):
        end = min(begin + SCORED_AT_ONCE, count - 1)
        labels = tokens[begin + 1 : end + 1]
        source: Tensor | None = None
        for name, states in hidden.items():
            frame = frames[name]
            scores = F.log_softmax(frame.logits(frame.norm(states[begin:end])).float(), dim=-1)
            source = scores if source is None else source
            sums[name][0] += float(F.nll_loss(scores, labels, reduction="sum"))
            sums[name][1] += float(F.kl_div(scores, source, log_target=True, reduction="sum"))
            sums[name][2] += end - begin
