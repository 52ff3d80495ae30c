"""How healing goes about it, with every default and its reason in this one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Heal = Literal["none", "layers", "full"]

# Of a matrix's own output, per step at the most, as Adam sees it: larger rates made the divergence rise in the first steps
# (SmolLM2-135M: 0.01 rose from 0.21 to 0.31; 0.0005 and 0.0003 fell steadily).
LEARNING_RATE = 3e-4
# Adam's first steps move every number by the full rate, noise and all: the rate rises over so many steps, until the means
# that it divides have settled (with one step, the divergence rose by a quarter before it fell). Then it falls as a cosine.
WARM_UP_STEPS = 30
FINAL_RATE = 0.05
CLIP_NORM = 1.0
# Tokens of a step: fewer waste the machine on moving weights, more waste text that one step could have learned from.
BATCH_TOKENS = 1024
# From this share of the time on, sequences of at most so many tokens. Short ones cost less attention; long ones come last.
CURRICULUM = ((0.0, 256), (0.6, 512), (0.85, 1024))
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


@dataclass(frozen=True)
class HealOptions:
    """What `mla convert` asks of healing. Either time or steps bound it; with `steps` the result does not depend on speed.

    `nested`: some steps run on a part of each latent (see `nested`).
    """

    mode: Heal = "none"
    minutes: float = 30.0
    steps: int | None = None
    learning_rate: float = LEARNING_RATE
    batch_tokens: int = BATCH_TOKENS
    seed: int = 0
    nested: bool = False
