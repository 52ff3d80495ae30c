"""Healing end to end: the student's matrices follow the divergence of its next-token distribution from the source's.

Only the matrices of attention learn (knowledge distillation, arXiv 1503.02531; Adam, arXiv 1412.6980). Each matrix moves in
proportion to its own output: what counts is how far a step moves `W x`, and inputs differ in size by orders of magnitude.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mla_cli.console import note
from mla_cli.converters.distill import divergence
from mla_cli.converters.heal_data import Reader, piece_at
from mla_cli.converters.heal_options import (
    CHECKS,
    CLIP_NORM,
    EPOCHS,
    FINAL_RATE,
    PATIENCE,
    ROLLBACKS,
    SAVE_SECONDS,
    SNAPSHOT_STEPS,
    WARM_UP_STEPS,
    HealOptions,
)  # fmt: skip
from mla_cli.converters.nested import strength_at
from mla_cli.converters.student import Student

# Bytes of what a step keeps for its backward pass beyond which layers are run a second time instead.
KEEP_BYTES = 6 << 30
# Numbers that a layer keeps per token and unit of width, roughly (measured on gated MLPs): inputs, products, activations.
KEPT_PER_TOKEN = 24

Save = Callable[[dict[str, Any]], None]


@dataclass
class Progress:
    """Where a healing stands, and everything its report says.

    Attributes:
        curve: one point a check: minutes, tokens, train and held-out divergence in nats a token.
        stopped: why it ended.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rate: float = 1.0
    rollbacks: int = 0
    best: float = math.inf
    stale: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    stopped: str = ""


class FullHealing:
    """One end-to-end healing. `run` goes to the end; `state` and `restore` carry it over an interruption."""

    def __init__(self, student: Student, reader: Reader, unseen: tuple[Tensor, Tensor], options: HealOptions) -> None:
        """Args: unseen: sequences `[N, T]` and lengths `[N]` that no stage learns from."""
        self.student, self.reader, self.options = student, reader, options
        self.unseen, self.progress = unseen, Progress()
        self.masters = student.masters()
        scales = step_scales(student, *reader.batch(piece_at(0.0), options.batch_tokens))
        reader.restore({"piece": 0, "epoch": 0, "place": 0})
        groups = [{"params": [p], "lr": 0.0, "scale": scales[name]} for name, p in self.masters.items()]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.99), eps=1e-12, fused=True)
        self.best = self._copy()
        self._recent: list[float] = []

    def run(self, save: Save, tick: Callable[[float, str], None] = lambda fraction, text: None) -> None:
        """Heal until time or steps are over, or held-out text says stop; the best matrices found are left in the student."""
        p = self.progress
        begun, saved = time.monotonic() - p.seconds, time.monotonic()
        if not p.curve:
            self._check()
        snapshot = self._snapshot()
        while not p.stopped:
            fraction = self._fraction()
            if fraction >= 1:
                p.stopped = "time" if self.options.steps is None else "steps"
            elif fraction * CHECKS >= len(p.curve):
                self._check()
            if p.stopped:
                break
            whole = self._strength() == 1
            kl = self._step(fraction)
            if kl is None:
                self._roll_back(snapshot)
                continue
            if whole or not self._recent:
                self._recent = [*self._recent[-19:], kl]
            if p.step % SNAPSHOT_STEPS == 0:
                snapshot = self._snapshot()
            p.seconds = time.monotonic() - begun
            tick(self._fraction(), f"KL {sum(self._recent) / len(self._recent):.4f}, held out {p.best:.4f}")
            if time.monotonic() - saved > SAVE_SECONDS:
                save(self.state())
                saved = time.monotonic()
        if p.stopped in ("time", "steps"):
            self._check()
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(self.best[name])

    def state(self) -> dict[str, Any]:
        """Everything `restore` needs; tensors, numbers and text only."""
        return {**self._snapshot(), "best": self.best, "progress": dict(vars(self.progress))}

    def restore(self, state: dict[str, Any]) -> None:
        """Stand where `state` was taken."""
        self._load(state)
        self.best, self.progress = state["best"], Progress(**state["progress"])

    def _fraction(self) -> float:
        p, o = self.progress, self.options
        if o.steps is not None:
            return p.step / o.steps
        return max(p.seconds / (60 * o.minutes), p.tokens / (EPOCHS * int(self.reader.lengths.sum())))

    def _strength(self) -> float:
        return strength_at(self.progress.step, nested=self.options.nested)

    def _step(self, fraction: float) -> float | None:
        """One step; its divergence in nats a token, or None where a number was not finite (nothing has moved then)."""
        tokens, lengths = self.reader.batch(piece_at(fraction), self.options.batch_tokens)
        loss, slope, last = self._forward(tokens, lengths, self._strength())
        if not math.isfinite(loss):
            return None
        last.backward(slope)
        norm = nn.utils.clip_grad_norm_(list(self.masters.values()), CLIP_NORM)
        if not bool(torch.isfinite(norm)):
            self.adam.zero_grad()
            return None
        rate = self.options.learning_rate * self.progress.rate * schedule(fraction, self.progress.step)
        for group in self.adam.param_groups:
            group["lr"] = rate * group["scale"]
        self.adam.step()
        self.adam.zero_grad()
        self.progress.step += 1
        self.progress.tokens += int(lengths.sum())
        return loss

    def _forward(self, tokens: Tensor, lengths: Tensor, strength: float) -> tuple[float, Tensor, Tensor]:
        device, spec = self.student.decoder.device, self.student.decoder.spec
        tokens = tokens.to(device)
        valid = torch.arange(tokens.shape[1], device=device) < lengths.to(device)[:, None]  # [B, T]
        target = self.student.source(tokens, lengths)[-1]  # [B, T, D]
        kept = tokens.numel() * spec.hidden_size * spec.num_layers * KEPT_PER_TOKEN * 2
        last = self.student(tokens, lengths, self.student.working(strength), recompute=kept > KEEP_BYTES)[-1]
        total, slope = divergence(self.student.decoder, last.detach()[valid], target[valid], gradient=True)
        count = int(lengths.sum())
        whole = torch.zeros_like(last)
        if slope is not None:
            whole[valid] = slope / count
        return total / count, whole, last

    @torch.no_grad()
    def _check(self) -> None:
        p = self.progress
        found = heldout_divergence(self.student, *self.unseen)
        recent = sum(self._recent) / len(self._recent) if self._recent else found
        p.curve.append({"minutes": p.seconds / 60, "tokens": float(p.tokens), "train_kl": recent, "heldout_kl": found})
        if found < p.best:
            p.best, p.stale, self.best = found, 0, self._copy()
        elif p.step > WARM_UP_STEPS:
            p.stale += 1
            if p.stale >= PATIENCE:
                p.stopped = "no gain on held-out text"

    def _roll_back(self, snapshot: dict[str, Any]) -> None:
        p = self.progress
        p.rollbacks += 1
        if p.rollbacks > ROLLBACKS:
            p.stopped = "numbers were not finite"
            return
        place = self.reader.state()
        self._load(snapshot)
        self.reader.restore(place)  # on with other text
        p.rate /= 2
        note(f"healing: a step was not finite; back to step {snapshot['at']} at half the rate")

    def _copy(self) -> dict[str, Tensor]:
        return {name: master.detach().clone() for name, master in self.masters.items()}

    def _snapshot(self) -> dict[str, Any]:
        moments = self.adam.state_dict()["state"]
        copied = {i: {k: v.clone() for k, v in entry.items()} for i, entry in moments.items()}
        return {
            "at": self.progress.step, "masters": self._copy(), "adam": copied, "reader": self.reader.state(),
        }  # fmt: skip

    def _load(self, snapshot: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(snapshot["masters"][name])
        state = self.adam.state_dict()
        state["state"] = {i: {k: v.clone() for k, v in entry.items()} for i, entry in snapshot["adam"].items()}
        self.adam.load_state_dict(state)
        self.reader.restore(snapshot["reader"])
        self.progress.step = snapshot["at"]


def schedule(fraction: float, step: int) -> float:
    """Share of the learning rate at a step, after this share of the healing: a rise over some steps, and a cosine."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    return rise * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))))


@torch.no_grad()
def heldout_divergence(student: Student, sequences: Tensor, lengths: Tensor) -> float:
    """Mean `KL(source || student)` a token over sequences `[N, T]`."""
    total, working = 0.0, student.working()
    for row in range(len(lengths)):
        count = int(lengths[row])
        tokens = sequences[row : row + 1, :count].to(student.decoder.device)
        target = student.source(tokens, lengths[row : row + 1])[-1][0]
        last = student(tokens, lengths[row : row + 1], working)[-1][0]
        total += divergence(student.decoder, last, target, gradient=False)[0]
    return total / int(lengths.sum())


def step_scales(student: Student, tokens: Tensor, lengths: Tensor) -> dict[str, float]:
    """`output_scales` of everything that learns in a student."""
    return output_scales(
        student.learning, lambda: student(tokens.to(student.decoder.device), lengths, student.working())
    )


@torch.no_grad()
def output_scales(learning: nn.Module, run: Callable[[], object]) -> dict[str, float]:
    """For each learning tensor, the size of an entry that makes its output about as large as it is: `rms(W x) / |x|`.

    A bias counts as a share of the output it is added to; a gain as 1.

    Args:
        learning: holds the linear layers. run: passes some tokens through them.
    """
    seen: dict[str, tuple[float, float]] = {}
    hooks = []
    for name, module in learning.named_modules():
        if isinstance(module, nn.Linear):

            def look(_: nn.Module, given: tuple[Tensor, ...], out: Tensor, key: str = name) -> None:
                power = float(given[0].float().square().sum(dim=-1).mean())
                seen[key] = (power, float(out.float().square().mean()))

            hooks.append(module.register_forward_hook(look))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    scales = {}
    for name, master in learning.named_parameters():
        power, out = seen.get(name.rpartition(".")[0], (1.0, 1.0))
        size = 0.3 * math.sqrt(out) if master.dim() == 1 else math.sqrt(out / max(power, 1e-12))
        scales[name] = 1.0 if master.dim() == 0 else size
    return scales
