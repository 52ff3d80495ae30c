"""How healing goes about it, with every default and its reason in this one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mla_cli.errors import UsageError

Heal = Literal["none", "layers", "full"]

# Of a matrix's own output, per step at the most, as Adam sees it: larger rates made the divergence rise in the first steps
# (SmolLM2-135M: 0.01 rose from 0.21 to 0.31; 0.0005 and 0.0003 fell steadily).
LEARNING_RATE = 3e-4
# Adam's first steps move every number by the full rate, noise and all: the rate rises over so many steps, until the means
# that it divides have settled (with one step, the divergence rose by a quarter before it fell). Then it falls as a cosine.
WARM_UP_STEPS = 30
FINAL_RATE = 0.05
CLIP_NORM = 1.0
# Tokens of a step: fewer waste the machine on moving weights, more waste text that one step could have learned from (on
# the same 46,000 tokens the held-out divergence went from 0.0986 to 0.0871 with 1,024 a step and to 0.0857 with 256).
BATCH_TOKENS = 512
# From this share of the time on, sequences of at most so many tokens. Short ones cost less attention, but teach nothing of what
# is read from far: healed mostly on them, a model lost three times as much after the first 512 tokens of a text as before 256.
CURRICULUM = ((0.0, 256), (0.1, 512), (0.3, 1024))
# Held-out divergence is taken so often over the whole time, and healing stops when it has not fallen so many times in a row.
CHECKS = 12
# It also stops when the text was read so often.
EPOCHS = 8
PATIENCE = 4
# Sequences a held-out check reads.
CHECK_SEQUENCES = 4
CHECK_TOKENS = 512  # of each
# A step whose loss or gradient is not a number rolls back to the last good one and halves the rate, so many times.
ROLLBACKS = 3
SNAPSHOT_STEPS = 20
SAVE_SECONDS = 120.0
# More sequences than statistics need: every one is read once before any is read again.
HEAL_SAMPLES = 4096
# Healing sees sequences of so many times `--seq-len`: a model should not meet its first long context in use.
HEAL_LENGTHS = 2
# The chunk gate is tried over these, one after the other; the last is what it is kept at.
GATE_CHUNKS = (512, 768, 1024)
# Of the time of healing, with a gate.
GATE_SHARE = 0.3


@dataclass(frozen=True)
class HealOptions:
    """What `mla convert` asks of healing. Either time or steps bound it; with `steps` the result does not depend on speed.

    `gate`: chunks of tokens, short to long, over which a gate on the latents is tried afterwards; none: no gate.
    `nested`: some steps run on a part of each latent (see `nested`).
    """

    mode: Heal = "none"
    minutes: float = 30.0
    steps: int | None = None
    learning_rate: float = LEARNING_RATE
    batch_tokens: int = BATCH_TOKENS
    seed: int = 0
    gate: tuple[int, ...] = ()
    nested: bool = False

    def divided(self, share: float, times: int = 1) -> tuple[HealOptions, HealOptions]:
        """What each of some parts gets of the time or of the steps, and what is left after so many of them."""
        minutes = share * self.minutes
        steps = left = None
        if self.steps is not None:
            steps = max(1, round(share * self.steps))
            left = max(1, self.steps - times * steps)
        return (
            replace(self, minutes=minutes, steps=steps),
            replace(self, minutes=self.minutes - times * minutes, steps=left),
        )


def chunks_within(options: HealOptions, context: int) -> tuple[int, ...]:
    """The gate's chunks of which two fit a model's context: the first chunk of a sequence is not gated."""
    return tuple(chunk for chunk in options.gate if 2 * chunk <= context)


def check_gate(options: HealOptions, form: str, context: int) -> None:
    """Refuse a gate that could not be learned or not be written.

    Raises:
        UsageError: the stock form, no healing, or a context of less than two chunks.
    """
    if not options.gate:
        return
    if form == "deepseek":
        raise UsageError(
            "the stock DeepSeek form cannot express a gate on the latent", where="--gate", fix="add --format native"
        )
    if options.mode == "none":
        raise UsageError("a gate is learned after healing, and there is none", where="--gate", fix="add --heal layers")
    if not chunks_within(options, context):
        raise UsageError(
            f"a gate works between chunks of at least {options.gate[0]} tokens, and the model's context of {context} "
            "does not hold two",
            where="--gate",
            fix="leave the option out",
        )
