"""Run calibration sequences through a decoder layer by layer, forward and backward, with one layer in memory at a time.

Sequences go in rounds: a round keeps the hidden states between all layers (what the backward pass needs), so a round is as
large as the memory given to it. Padding and what follows a sequence's end never reach an observer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mla_cli.calibration.offload import ROUND_IN_MEMORY, Rows, Workplace
from mla_cli.calibration.precision import computing_in
from mla_cli.console import progress_bar
from mla_cli.errors import MlaError
from mla_cli.model.attention import Record
from mla_cli.model.decoder import Decoder, DecoderLayer

LayerAt = Callable[[int], DecoderLayer]
# Sees one micro-batch of one layer: layer index, recorded tensors `[B, T, ...]`, which tokens count `[B, T]`.
ForwardObserver = Callable[[int, Record, Tensor], None]
# The same with the gradient of the loss with respect to the latent, `[B, T, r]`.
GradientObserver = Callable[[int, Record, Tensor, Tensor], None]
Tick = Callable[[], None]


class ToldTick(Protocol):
    """A tick that may say how things stand."""

    def __call__(self, text: str = "") -> None: ...


# Tokens that run at once: more gain nothing, and, in a wide model, take more memory than a layer.
MICRO_TOKENS = 4096
MICRO_NUMBERS = 1 << 22
# Scores over the vocabulary that are held at a time.
SCORES_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Batches:
    """How sequences are cut: `rounds` share a pass over the layers, `micro` sequences run at once; and where states lie."""

    sequences_per_round: int
    sequences_per_micro: int
    workplace: Workplace = field(default_factory=Workplace)

    @staticmethod
    def fit(
        sequence_length: int,
        hidden: int,
        layers: int,
        *,
        memory: int = ROUND_IN_MEMORY,
        workplace: Workplace | None = None,
    ) -> Batches:
        """The largest round whose hidden states between layers (float32) stay within `memory` bytes, or the workplace's.

        How it is cut into rounds changes no number; which sequences run at once does, by rounding, and goes by shapes alone.
        """
        workplace = workplace or Workplace()
        if workplace.folder is not None:
            memory = workplace.round_bytes
        per_sequence = sequence_length * hidden * 4 * (layers + 1)
        micro = max(1, min(MICRO_TOKENS, MICRO_NUMBERS // hidden) // sequence_length)
        return Batches(max(micro, memory // per_sequence // micro * micro), micro, workplace)

    def rounds(self, sequences: int) -> list[slice]:
        """Slices of the sequences, one a round."""
        step = self.sequences_per_round
        return [slice(i, min(i + step, sequences)) for i in range(0, sequences, step)]


@contextmanager
def ticking(description: str, total: int, unit: str = "layer") -> Iterator[ToldTick]:
    """A progress bar that a computation advances by calling what it is given."""
    with progress_bar(description, total, unit) as bar:

        def tick(text: str = "") -> None:
            if text:
                bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield tick


def steps_in(batches: Batches, sequences: int, layers: int, *, backward: bool) -> int:
    """How often a pass ticks (for progress)."""
    return len(batches.rounds(sequences)) * layers * (2 if backward else 1)


def run(
    frame: Decoder,
    layer_at: LayerAt,
    sequences: Tensor,
    lengths: Tensor,
    batches: Batches,
    *,
    observe: ForwardObserver | None = None,
    observe_gradient: GradientObserver | None = None,
    seed: int = 0,
    compute: torch.dtype = torch.float32,
    tick: Tick = lambda: None,
) -> None:
    """Pass all sequences through all layers, and back where gradients are asked for.

    The loss is the model's own: next tokens are sampled from its distribution, so that the second moment of the gradients
    is the Fisher information. Labels depend on the seed and the sequence's index only.

    Args:
        frame: the decoder's embedding, norm and head. layer_at: gives layer `i`, frozen, ready to run.
        sequences: `[N, T]` int64; lengths: `[N]`.
        observe: called in the forward pass. observe_gradient: called in the backward pass.
        compute: type of the matrix products inside layers; hidden states between layers stay in float32.
    """
    layers = frame.spec.num_layers
    for chosen in batches.rounds(sequences.shape[0]):
        tokens, counts = sequences[chosen], lengths[chosen]
        longest = int(counts.max())
        tokens = tokens[:, :longest].to(frame.device)
        valid = torch.arange(longest, device=frame.device) < counts.to(frame.device)[:, None]  # [N, T]
        micros = [
            slice(i, i + batches.sequences_per_micro) for i in range(0, tokens.shape[0], batches.sequences_per_micro)
        ]
        shape = (*tokens.shape, frame.spec.hidden_size)
        hidden = batches.workplace.rows(shape, frame.device)  # [N, T, D]
        with torch.no_grad():
            for m in micros:
                step = frame.begin_step(tokens[m].shape, lengths=counts[m])
                hidden[m] = frame.embed(tokens[m], step.positions)
        between: list[Rows] = [hidden]
        for index in range(layers):
            layer = layer_at(index)
            hidden = batches.workplace.rows(shape, frame.device)
            with torch.no_grad(), computing_in(compute, frame.device):
                for m in micros:
                    record: Record = {}
                    micro_step = frame.begin_step(tokens[m].shape, lengths=counts[m])
                    out = layer(between[-1][m], micro_step, record)
                    if observe is not None:
                        observe(index, record, valid[m])
                    _check_finite(out, valid[m], index)
                    hidden[m] = out
            between = [*between, hidden] if observe_gradient is not None else [hidden]
            del layer  # before the next one is read
            tick()
        if observe_gradient is None:
            continue
        first = chosen.start or 0
        gradient = batches.workplace.rows(shape, frame.device)
        for i in range(shape[0]):
            row = slice(i, i + 1)
            gradient[row] = _head_gradient(frame, hidden[row][0], valid[i], seed, first + i)
        for index in reversed(range(layers)):
            layer = layer_at(index)
            between.pop()
            for m in micros:
                record = {}
                x = between[-1][m].detach().requires_grad_(True)
                micro_step = frame.begin_step(tokens[m].shape, lengths=counts[m])
                with torch.enable_grad(), computing_in(compute, frame.device):
                    out = layer(x, micro_step, record)
                    # The first layer's input gradient is not needed by anyone, but costs little.
                    sought = [x, *([record["latent"]] if "latent" in record else [])]
                    gradient[m], *to_latent = torch.autograd.grad(out, sought, gradient[m].to(out.dtype))
                if to_latent:  # a layer without latents is passed by
                    observe_gradient(index, {k: v.detach() for k, v in record.items()}, to_latent[0], valid[m])
            del layer
            tick()


def _head_gradient(frame: Decoder, hidden: Tensor, valid: Tensor, seed: int, sequence: int) -> Tensor:
    # Gradient of the summed cross-entropy to sampled labels, of one sequence, with respect to the last hidden state.
    generator = torch.Generator(device=hidden.device).manual_seed(seed * 1_000_003 + sequence)
    at_once = max(1, SCORES_AT_ONCE // frame.spec.vocab_size)
    gradients = []
    for states, counts in zip(hidden.detach().split(at_once), valid.split(at_once), strict=True):
        x = states.requires_grad_(True)  # [T, D]
        with torch.enable_grad():
            logits = frame.logits(frame.norm(x))  # [T, V]
        with torch.no_grad():
            probabilities = torch.softmax(logits.float(), dim=-1)
            labels = torch.multinomial(probabilities, 1, generator=generator)  # [T, 1]
            # d loss / d logits = p - onehot(label)
            slope = probabilities.scatter_add_(1, labels, labels.new_full(labels.shape, -1, dtype=probabilities.dtype))
            slope = slope * counts[:, None]
        gradients += torch.autograd.grad(logits, x, slope.to(logits.dtype))
    return torch.cat(gradients)[None]


def _check_finite(hidden: Tensor, valid: Tensor, layer: int) -> None:
    if not bool(torch.isfinite(hidden[valid]).all()):
        raise MlaError(
            f"layer {layer} gives NaN or infinity on calibration text",
            fix="the weights are damaged or overflow: try --dtype float32, or check the source with `mla inspect`",
        )
