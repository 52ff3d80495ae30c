"""Which text a model is calibrated on, by what it will be used for."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cli.calibration import openings
from mla_cli.calibration.material import Content
from mla_cli.errors import UsageError

PROSE = "Salesforce/wikitext:wikitext-2-raw-v1:train"


@dataclass(frozen=True)
class Mix:
    """Hub datasets with their parts of the whole, and beginnings of texts for the model to go on from without the Hub."""

    hub: tuple[tuple[str, int], ...]
    openings: tuple[Content, ...] = ()


# A quarter of every mix is prose: text unlike the calibration text loses more, and every use has some prose in it.
MIXES = {
    # Small, clean, of many subjects; what others calibrate on, so that figures compare.
    "general": Mix(((PROSE, 1),)),
    # Half as it is asked (word problems with worked answers, of the training part), a quarter as it is written about.
    "math": Mix(
        (("openai/gsm8k:main:train", 2), ("HuggingFaceTB/finemath:finemath-4plus:train", 1), (PROSE, 1)),
        openings.MATH,
    ),
    # Conversations of several turns, through the chat template of the model; without one they cannot be read.
    "chat": Mix((("HuggingFaceH4/ultrachat_200k:default:train_sft", 3), (PROSE, 1)), openings.CHAT),
    # Half whole files, which are Python; a quarter tasks with solutions in many languages.
    "code": Mix(
        (("codeparrot/codeparrot-clean-valid", 2), ("nickrosh/Evol-Instruct-Code-80k-v1", 1), (PROSE, 1)),
        openings.CODE,
    ),
}


def find_mix(preset: str) -> Mix:
    """The mix of a preset.

    Raises:
        UsageError: there is no such preset.
    """
    if preset not in MIXES:
        raise UsageError(f"there is no preset '{preset}'", where="--preset", fix=f"use one of {', '.join(MIXES)}")
    return MIXES[preset]
