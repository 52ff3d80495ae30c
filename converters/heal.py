"""Step 4: heal a closed form by a short training against the source, layer by layer or end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mla_cli.calibration.layerwise import ticking
from mla_cli.calibration.precision import fast_dtype
from mla_cli.calibration.texts import CalibrationTexts, cut, first
from mla_cli.checkpoint.load import ModelSource, load_decoder
from mla_cli.console import note
from mla_cli.converters.heal_data import Reader
from mla_cli.converters.heal_full import FullHealing
from mla_cli.converters.heal_layers import LayersHealing
from mla_cli.converters.heal_options import CHECK_SEQUENCES, CHECK_TOKENS, HealOptions
from mla_cli.converters.heal_state import HealState
from mla_cli.converters.student import Student
from mla_cli.model.latent_weights import LatentWeights

# Layer by layer: hidden states of so many tokens are held for the source and for the student; twice as many where there is time
# for more than LONG_MINUTES, so that no layer learns its text by heart.
LAYER_TOKENS = 1 << 15
LONG_MINUTES = 8
LAYER_LENGTH = 1024
LAYER_CHECK_SEQUENCES = 2
# Of the time of `full`.
LAYERS_SHARE = 0.25


@dataclass(frozen=True)
class Healed:
    """The layers after healing, and what the report says of it."""

    layers: Sequence[LatentWeights]
    layer_errors: tuple[tuple[float, float], ...] = ()
    record: dict[str, object] = field(default_factory=dict)


def heal(
    model: ModelSource,
    weights: Sequence[LatentWeights],
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    options: HealOptions,
    state: HealState,
    *,
    device: torch.device,
    opening: int | None,
) -> Healed:
    """Heal every layer of a closed form.

    Args:
        fitted: sequences to learn from. unseen: sequences to judge by. opening: token that every sequence starts with.
        state: what an interrupted healing left, and where this one leaves its own.
    """
    dtype = fast_dtype(device)
    note(f"healing computes in {str(dtype).removeprefix('torch.')} and learns in float32")
    decoder = load_decoder(model, dtype=dtype, device=device)
    student = Student(decoder, weights)
    if options.mode == "layers":
        return _layers(student, fitted, unseen, options, state)
    # Layers first: a vector a token teaches a layer faster than a word teaches all of them (docs/decisions/0003).
    shared = replace(options, minutes=LAYERS_SHARE * options.minutes)
    by_layer = _layers(student, fitted, unseen, shared, state)
    rest = replace(options, minutes=(1 - LAYERS_SHARE) * options.minutes)
    healed = _full(Student(decoder, by_layer.layers), fitted, unseen, rest, state, opening)
    return replace(healed, layer_errors=by_layer.layer_errors)


def _layers(
    student: Student, fitted: CalibrationTexts, unseen: CalibrationTexts, options: HealOptions, state: HealState
) -> Healed:
    wanted = LAYER_TOKENS * (2 if options.steps is None and options.minutes >= LONG_MINUTES else 1)
    count = max(1, wanted // min(LAYER_LENGTH, int(fitted.lengths.max())))
    healing = LayersHealing(
        student, _first(fitted, count, LAYER_LENGTH), _first(unseen, LAYER_CHECK_SEQUENCES, LAYER_LENGTH), options
    )
    with ticking("healing", len(student.learning)) as tick:
        healing.run(state.load_layers(student), state.save_layer, tick)
    records = healing.records
    return Healed(
        student.result(),
        tuple((r.before, r.after) for r in records),
        {"mode": "layers", "steps": sum(r.steps for r in records), "gains": [r.gain for r in records]},
    )


def _full(
    student: Student,
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    options: HealOptions,
    state: HealState,
    opening: int | None,
) -> Healed:
    reader = Reader(fitted.sequences, fitted.lengths, opening, options.seed)
    healing = FullHealing(student, reader, _first(unseen, CHECK_SEQUENCES, CHECK_TOKENS), options)
    earlier = state.load_full()
    if earlier is not None:
        healing.restore(earlier)
        note(f"going on from step {healing.progress.step}")
    total, done = 1000, 0
    with ticking("healing", total, unit="‰") as tick:

        def reached(fraction: float, text: str) -> None:
            nonlocal done
            while done < min(total, int(fraction * total)):
                tick(text)
                done += 1

        healing.run(state.save_full, reached)
    p = healing.progress
    note(
        f"healed on {p.tokens:,} tokens in {p.seconds / 60:.1f} minutes: held-out KL {p.curve[0]['heldout_kl']:.4f} to "
        f"{p.best:.4f} ({p.stopped})"
    )
    record: dict[str, object] = {
        "mode": "full", "steps": p.step, "tokens": p.tokens, "minutes": p.seconds / 60, "curve": p.curve,
        "stopped": p.stopped, "rollbacks": p.rollbacks, "gains": _gains(student),
    }  # fmt: skip
    return Healed(student.result(), (), record)


def _gains(student: Student) -> list[float]:
    return [student.layer(i)[1].gain() for i in range(len(student.learning))]


def _first(texts: CalibrationTexts, count: int, tokens: int) -> tuple[Tensor, Tensor]:
    part = cut(first(texts, count), tokens)
    return part.sequences, part.lengths
