"""The families that can be read: those that are converted, and the latent ones."""

from __future__ import annotations

import difflib

from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.families.base import Config, Family
from mla_cli.model.families.deepseek import DEEPSEEK
from mla_cli.model.families.multimodal import refuse_multimodal
from mla_cli.model.families.native import NATIVE
from mla_cli.model.families.sources import SOURCES

FAMILIES: tuple[Family, ...] = (*SOURCES, DEEPSEEK, NATIVE)


def family_of(config: Config) -> Family:
    """The family that reads a configuration.

    Raises:
        InputError: no `model_type`. UnsupportedError: a `model_type` nobody reads.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError("config.json has no model_type", where="config.json: model_type", fix="add it, e.g. 'llama'")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    refuse_multimodal(config)
    known = [name for family in FAMILIES for name in family.model_types]
    nearest = difflib.get_close_matches(model_type, known, n=1, cutoff=0.5)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    raise UnsupportedError(
        f"unsupported model_type '{model_type}'{hint}; supported: {', '.join(known)}",
        where="config.json: model_type",
        fix="give a model of a supported type",
    )
