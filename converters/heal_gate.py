"""The chunk gate as the last part of healing (`--gate`): learned layer by layer, kept only where it helps.

A gate (`mla_cli.model.latent_gate`) mixes the last latent of the chunk before into the latents of a chunk. Nothing else of the
layer moves: the MLP learns to bring the hidden state after attention nearer to the source's, over short chunks first. A layer
keeps its gate where the error on held-out text falls, and the model keeps its gates where its divergence from the source does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mla_cli.calibration.layerwise import ticking
from mla_cli.calibration.precision import fast_dtype
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import ModelSource, load_decoder
from mla_cli.console import note
from mla_cli.converters.heal_full import heldout_divergence
from mla_cli.converters.heal_layers import States, attention_error, mean_error
from mla_cli.converters.heal_options import CLIP_NORM, GATE_SHARE, HealOptions, chunks_within
from mla_cli.converters.heal_state import HealState
from mla_cli.converters.student import Student
from mla_cli.model.latent_gate import LatentGate
from mla_cli.model.latent_weights import LatentWeights

# The gate of the source articles: mostly shut to begin with, Adam with L2.
FIRST_BIAS = -1.0
RATE = 1e-4
L2 = 1e-4
# Tokens whose hidden states are held for learning, and sequences that judge layers, and as many that judge the model.
TOKENS = 1 << 15
CHECK_SEQUENCES = 4


@dataclass(frozen=True)
class Gated:
    """The layers with the gates that were kept, and what the report says (`healing.gate`)."""

    layers: Sequence[LatentWeights]
    record: dict[str, Any]


def shared_with_gate(options: HealOptions) -> tuple[HealOptions, HealOptions]:
    """Options of healing and of the gates after it: both together take the time, or each the steps, that were asked for."""
    if not options.gate:
        return options, options
    minutes = GATE_SHARE * options.minutes
    return replace(options, minutes=options.minutes - minutes), replace(options, minutes=minutes)


def learn_gates(
    model: ModelSource,
    layers: Sequence[LatentWeights],
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    options: HealOptions,
    state: HealState,
    *,
    device: torch.device,
) -> Gated:
    """Try a gate in every layer.

    Args:
        layers: healed layers. fitted: sequences to learn from. unseen: sequences to judge by; both have some that are longer
            than the longest chunk.
        options: `gate` and `minutes` or `steps` (a layer). state: what an interrupted run left.
    """
    chunks = chunks_within(options, model.spec.max_position_embeddings)
    student = Student(load_decoder(model, dtype=fast_dtype(device), device=device), layers)
    sequences, lengths = _long(unseen, chunks[-1], 2 * CHECK_SEQUENCES)
    # Layers are chosen by some sequences and the model is judged by others: a choice flatters the text that it was made on.
    by_layer = sequences[::2], lengths[::2]
    check = (sequences[1::2], lengths[1::2]) if len(lengths) > 1 else by_layer
    without = heldout_divergence(student, *check)
    longest = min(int(fitted.lengths.max()), 2 * chunks[-1])
    learn = States(student, *_long(fitted, chunks[-1], max(1, TOKENS // longest)))
    judge = States(student, *by_layer)
    records: list[dict[str, Any]] = []
    gated: list[LatentWeights] = []
    with ticking("learning gates", len(layers)) as tick:
        for index, plain in enumerate(layers):
            earlier = state.load_gate(index)
            if earlier is None:
                trial = _Trial(student, index, plain, learn, judge, options, chunks)
                earlier = trial.run(60 * options.minutes / len(layers))
                state.save_gate(index, *earlier)
            gate, record = earlier
            records.append(record)
            gated.append(plain.with_gate(chunks[-1], gate) if gate else plain)
            student.load_layer(index, gated[index])
            for states in (learn, judge):
                states.advance(index)
            tick()
    found = heldout_divergence(student, *check) if any(entry["kept"] for entry in records) else None
    if found is not None and not found < without:
        gated, records = list(layers), [{**entry, "kept": False} for entry in records]
    record = {"chunks": list(chunks), "layers": records, "kl_without": without, "kl_with": found}
    note(gate_line(record))
    return Gated(tuple(gated), record)


def gate_line(record: Mapping[str, Any]) -> str:
    """What came of the gates, in one line for the report."""
    kept = sum(entry["kept"] for entry in record["layers"])
    told = f"gates over chunks of {record['chunks'][-1]} tokens"
    if record["kl_with"] is None:
        return f"{told} helped in none of {len(record['layers'])} layers, and were not kept"
    divergence = f"held-out KL {record['kl_with']:.4f} with them, {record['kl_without']:.4f} without"
    if not kept:
        return f"{told} helped layers but not the model, and were not kept: {divergence}"
    return f"{told} were kept in {kept} of {len(record['layers'])} layers: {divergence}"


class _Trial:
    """One layer's gate: learned, and judged by the error after the layer's attention."""

    def __init__(
        self, student: Student, index: int, plain: LatentWeights, learn: States, judge: States,
        options: HealOptions, chunks: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.student, self.index, self.plain, self.chunks = student, index, plain, chunks
        self.learn, self.judge, self.options = learn, judge, options

    def run(self, seconds: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The gate's tensors (none where it does not help), and its record."""
        before = mean_error(self.student, self.index, self.judge)
        seed = self.options.seed * 1_000_003 + self.index
        gate = fresh_gate(self.plain.spec.kv_lora_rank, seed)
        generator = torch.Generator().manual_seed(seed)
        begun, step = time.monotonic(), 0
        for number, chunk in enumerate(self.chunks, start=1):
            parameters = self._open(chunk, gate)
            adam = torch.optim.Adam(parameters, lr=RATE, weight_decay=L2, fused=True)
            while self._fraction(step, time.monotonic() - begun, seconds) < number / len(self.chunks):
                row = torch.randint(len(self.learn.lengths), (1,), generator=generator)
                attention_error(self.student, self.index, self.learn, row).backward()
                if not bool(torch.isfinite(nn.utils.clip_grad_norm_(parameters, CLIP_NORM))):
                    break  # what was learned so far is judged
                adam.step()
                adam.zero_grad()
                step += 1
            gate = self._gate()
        after = mean_error(self.student, self.index, self.judge)
        kept = after < before
        return gate if kept else {}, {"before": before, "after": after, "kept": kept, "steps": step}

    def _fraction(self, step: int, spent: float, seconds: float) -> float:
        return spent / seconds if self.options.steps is None else step / self.options.steps

    def _open(self, chunk: int, gate: Mapping[str, Tensor]) -> list[nn.Parameter]:
        """Put the gate into the student's layer, and give what learns."""
        self.student.load_layer(self.index, self.plain.with_gate(chunk, gate))
        _, learning = self.student.layer(self.index)
        learning.requires_grad_(False)
        return list(learning.attention.latent_gate.requires_grad_(True).parameters())

    def _gate(self) -> dict[str, Tensor]:
        _, learning = self.student.layer(self.index)
        return {name: tensor.detach().clone() for name, tensor in learning.attention.latent_gate.state_dict().items()}


def fresh_gate(channels: int, seed: int) -> dict[str, Tensor]:
    """A gate that has learned nothing: mostly shut."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gate = LatentGate(channels)
    nn.init.constant_(gate.get_parameter("2.bias"), FIRST_BIAS)
    return {name: tensor.detach() for name, tensor in gate.state_dict().items()}


def _long(texts: CalibrationTexts, chunk: int, count: int) -> tuple[Tensor, Tensor]:
    """The first sequences of more than a chunk, at most two chunks of each."""
    rows = (texts.lengths > chunk).nonzero()[:count, 0]
    lengths = texts.lengths[rows].clamp(max=2 * chunk)
    return texts.sequences[rows, : int(lengths.max())], lengths
