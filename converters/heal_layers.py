"""Healing layer by layer: each layer learns to bring the hidden state after its attention to where the source has it.

The target is the source's attention output and what the healed layers before have left wrong: of that, a part can be told
from the hidden state itself, and is put right on the way. A layer is small and its target is a vector a token, so that a few
thousand tokens say as much as millions do end to end. Hidden states of the source and of the healed prefix advance together;
one layer of each is in use at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mla_cli.converters.heal_full import output_scales, schedule
from mla_cli.converters.heal_options import CLIP_NORM, HealOptions
from mla_cli.converters.nested import strength_at
from mla_cli.converters.student import Student, layer_output
from mla_cli.errors import MlaError
from mla_cli.model.attention import Step
from mla_cli.model.latent_weights import LatentWeights

# Adam's rate as a share of a matrix's own output (see `heal_full.step_scales`): a layer's target is less noisy than a word.
LAYER_RATE = 2e-3
# A layer ends when it has read its text so often, whatever time is left: more would learn the text by heart.
LAYER_EPOCHS = 32


@dataclass
class LayerHealing:
    """What one layer's healing did: squared error of the hidden state after its attention, over the power of what the source's
    attention adds there, on held-out sequences, before and after. `gain` was learned on the latent, and is in the weights.
    """

    before: float
    after: float
    steps: int
    gain: float


HealedLayer = tuple[LatentWeights, LayerHealing]


class LayersHealing:
    """Heals the layers of a student one after the other; `done` layers can be given back after an interruption."""

    def __init__(
        self, student: Student, fitted: tuple[Tensor, Tensor], unseen: tuple[Tensor, Tensor], options: HealOptions
    ) -> None:
        """Args: fitted: sequences `[N, T]` and lengths `[N]` to learn from; unseen: the same, to judge by."""
        self.student, self.options = student, options
        self.fitted, self.unseen = States(student, *fitted), States(student, *unseen)
        self.records: list[LayerHealing] = []

    def run(
        self,
        healed: Sequence[HealedLayer],
        save: Callable[[int, HealedLayer], None],
        tick: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Heal every layer; those of `healed`, from an interrupted run, are taken as they are, with their records."""
        count = len(self.student.learning)
        begun, moving = time.monotonic(), 0.0
        for index, (weights, record) in enumerate(healed):
            self.student.load_layer(index, weights)
            self.records.append(record)
        for index in range(count):
            # An equal share of the time that is left, less what it takes to move on to the next layer.
            share = (60 * self.options.minutes * (count - len(healed)) / count - (time.monotonic() - begun)) / (
                count - index
            )
            seconds = max(share - moving, share / 2)
            if index >= len(healed):
                self.records.append(self._heal(index, seconds))
                result = self.student.layer(index)[1].result()
                save(index, (result, self.records[-1]))
                # What goes on is what was saved, rounded alike: a resumed run meets the same numbers.
                self.student.load_layer(index, result)
            moved = time.monotonic()
            for states in (self.fitted, self.unseen):
                states.advance(index)
            moving = time.monotonic() - moved
            if index >= len(healed):
                tick(f"layer {index}: {self.records[-1].before:.2%} to {self.records[-1].after:.2%}")

    def _heal(self, index: int, seconds: float) -> LayerHealing:
        _, learning = self.student.layer(index)
        masters = dict(learning.named_parameters())
        first = {name: master.detach().clone() for name, master in masters.items()}
        before = mean_error(self.student, index, self.unseen)
        scales = self._scales(index)
        groups = [{"params": [p], "lr": 0.0, "scale": scales[name]} for name, p in masters.items()]
        adam = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-12, fused=True)
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + index)
        rows_per_step = max(1, self.options.batch_tokens // self.fitted.tokens.shape[1])
        most = LAYER_EPOCHS * math.ceil(len(self.fitted.lengths) / rows_per_step)
        begun, step, order = time.monotonic(), 0, torch.empty(0, dtype=torch.int64)
        while True:
            steps = self.options.steps
            spent = (time.monotonic() - begun) / seconds
            fraction = step / steps if steps is not None else max(spent, step / most)
            if fraction >= 1:
                break
            if len(order) < rows_per_step:
                order = torch.randperm(len(self.fitted.lengths), generator=generator)
            rows, order = order[:rows_per_step], order[rows_per_step:]
            strength = strength_at(step, nested=self.options.nested)
            loss = attention_error(self.student, index, self.fitted, rows, strength)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(list(masters.values()), CLIP_NORM)
            if not bool(torch.isfinite(norm)):
                raise MlaError(
                    f"healing layer {index} met a number that is not finite", fix="try --dtype float32 or --heal none"
                )
            for group in adam.param_groups:
                group["lr"] = LAYER_RATE * schedule(fraction, step) * group["scale"]
            adam.step()
            adam.zero_grad()
            step += 1
        after = mean_error(self.student, index, self.unseen)
        if not after < before:  # never worse than the closed form
            with torch.no_grad():
                for name, master in masters.items():
                    master.copy_(first[name])
            after = before
        return LayerHealing(before, after, step, learning.gain())

    def _scales(self, index: int) -> dict[str, float]:
        _, learning = self.student.layer(index)
        given, _, _, _, step = self.fitted.attention(index, torch.tensor([0]))
        return output_scales(learning, lambda: learning(given, step, working=learning.working(given.dtype)))


def attention_error(student: Student, index: int, states: States, rows: Tensor, strength: float = 1.0) -> Tensor:
    """Squared error of the hidden state after a layer's attention over the power of the source's attention output.

    Args:
        rows: which sequences of `states`. strength: share of the latent that works.
    """
    given, target, behind, valid, step = states.attention(index, rows)
    _, learning = student.layer(index)
    found = learning(given, step, working=learning.working(given.dtype, strength))  # [B, T, D]
    error = (found.float() - target - behind)[valid].square().sum()
    return error / target[valid].square().sum().clamp(min=1e-12)


@torch.no_grad()
def mean_error(student: Student, index: int, states: States) -> float:
    """`attention_error`, each sequence by itself, on average."""
    count = len(states.lengths)
    return sum(float(attention_error(student, index, states, torch.tensor([row]))) for row in range(count)) / count


class States:
    """Sequences, and the hidden states before one layer that they have in the source and in the healed prefix."""

    def __init__(self, student: Student, tokens: Tensor, lengths: Tensor) -> None:
        self.student, self.lengths = student, lengths
        self.tokens = tokens[:, : int(lengths.max())].to(student.decoder.device)
        step = self._step(torch.arange(len(lengths)))
        with torch.no_grad():
            self.source = student.decoder.embed(self.tokens, step.positions).float()  # [N, T, D]
        self.ours = self.source.clone()
        self._index = -1
        self._targets = torch.empty(0)

    def _step(self, rows: Tensor) -> Step:
        shape = torch.Size((len(rows), self.tokens.shape[1]))
        return self.student.decoder.begin_step(shape, lengths=self.lengths[rows], backend="training")

    def attention(self, index: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Step]:
        """Normed input of the layer `[B, T, D]`, the source's attention output, what attention would have to give besides to
        bring our hidden state before the layer to the source's, which tokens count, the step."""
        layer, _ = self.student.layer(index)
        dtype = self.student.decoder.dtype
        if index != self._index:
            self._index, self._targets = index, torch.empty_like(self.source)
            with torch.no_grad():
                for row in range(len(self.lengths)):
                    one = torch.tensor([row])
                    normed = layer.input_layernorm(self.source[one].to(dtype))
                    self._targets[one] = layer.self_attn(normed, self._step(one)).float()
        given = layer.input_layernorm(self.ours[rows].to(dtype))
        valid = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[rows, None].to(
            self.tokens.device
        )
        behind = layer.correction(self.source[rows] - self.ours[rows])
        return given, self._targets[rows], behind, valid, self._step(rows)

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Past layer `index`."""
        layer, learning = self.student.layer(index)
        matrices = learning.working(self.student.decoder.dtype)
        ours = partial(learning, working=matrices)
        for row in range(len(self.lengths)):
            one = torch.tensor([row])
            step = self._step(one)
            self.source[one] = layer_output(layer, layer.self_attn, self.source[one], step)
            self.ours[one] = layer_output(layer, ours, self.ours[one], step)
