"""What a conversion can be asked for, with every default and its reason in this one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mla_cli.converters.closed_form import Ranks
from mla_cli.converters.factorize import Objective
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.presets import DEFAULT_PRESET
from mla_cli.converters.rotary_split import Mixing

# Forward statistics are cheap; 512 sequences of 512 tokens cover a text well.
SAMPLES = 512
SEQ_LEN = 512
# The rotary split needs moments of a few numbers a frequency, which settle at once; only these objectives fit the latent itself
# to the same statistics and so take all sequences.
SPLIT_SAMPLES = 64
FORWARD_OBJECTIVES: tuple[Objective, ...] = ("query-output", "activation")
# The Fisher information costs four forward passes a token and settles early: more sequences change little.
FISHER_SAMPLES = 128
# Held-out sequences for the report: enough that stages differ by more than noise, few enough to cost seconds.
HELD_OUT = 16
# For the choice of the rotary width: a rough closed form is enough to tell widths apart.
PILOT_SAMPLES = 16
PILOT_HELD_OUT = 8


# Options that say where and how a conversion runs, and change nothing in what it gives.
INDIFFERENT = ("force", "resume", "max_memory", "offload")


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `mla convert`, in the terms of its help."""

    ratio: float | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None  # None: chosen by measured loss
    calib: str = "auto"
    samples: int = SAMPLES
    seq_len: int = SEQ_LEN
    fisher_samples: int = FISHER_SAMPLES
    objective: Objective = "fisher"
    compare_objectives: bool = False
    mixing: Mixing = "complex"
    compensate: bool = True  # kept only where held-out text agrees
    ranks: Ranks = "global"  # in the native form; the stock form has one rank
    preset: str = DEFAULT_PRESET
    format: Literal["auto", "deepseek", "native"] = "auto"
    dtype: str = "auto"
    max_shard_bytes: int = 5 * 10**9
    force: bool = False
    seed: int = 0
    heal: HealOptions = field(default_factory=HealOptions)
    progressive: bool = False  # heal at a milder rank first, then cut to the plan's and heal again
    resume: bool = False
    max_memory: int | None = None  # bytes; None: half of what is free
    offload: Path | None = None  # folder for what does not fit; None: beside the output, where it does not

    @property
    def refits(self) -> bool:
        """Whether queries and outputs are refitted; a progressive conversion goes on from milder ranks, which have no refit."""
        return self.compensate and not self.progressive
