"""Rotary embedding as GGUF says it: keys, and tables of divisors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cli.checkpoint.gguf_keys import Keys

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
# Tensors that are read into the configuration.
TABLES = frozenset(("rope_freqs.weight", *_FACTORS))


def rotary_width(keys: Keys) -> int:
    """Dimensions of a head that rotate.

    Raises:
        UnsupportedError: an odd number, or more than the head has.
    """
    head_dim = keys.head_dim()
    width = keys.integer("rope.dimension_count", head_dim)
    if width % 2 or width > head_dim:
        raise keys.unsupported(f"rotating {width} of {head_dim} head dimensions: not supported")
    return width


def whole_head(keys: Keys) -> None:
    """Refuse a file in which only a part of each head rotates."""
    if rotary_width(keys) != keys.head_dim():
        raise keys.unsupported(f"rotating {rotary_width(keys)} of {keys.head_dim()} head dimensions: not supported")


def rotary_share(keys: Keys) -> float:
    """The part of each head that rotates, so that the head's width times it is cut to the right whole number."""
    width, head_dim = rotary_width(keys), keys.head_dim()
    share = width / head_dim
    return share if int(head_dim * share) == width else (width + 0.5) / head_dim


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """`rope_scaling` of a Hugging Face configuration.

    Raises:
        UnsupportedError: a kind, or a table, that is not known.
    """
    linear = keys.get("rope.scale_linear")  # the key of old files
    kind = keys.get("rope.scaling.type") or ("linear" if linear not in (None, 1.0) else "none")
    if keys.has("rope_freqs.weight"):
        if kind != "none":
            raise keys.unsupported(f"rope_freqs.weight with {kind} scaling is not supported")
        return _llama3(keys)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor", linear)}
    if kind != "yarn":
        raise keys.unsupported(f"rope scaling {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": keys.number("rope.scaling.factor")}
    if keys.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if keys.get(f"rope.scaling.{theirs}") is not None:
            scaling[ours] = keys.number(f"rope.scaling.{theirs}")
    return scaling


def long_rope(keys: Keys) -> dict[str, Any] | None:
    """`rope_scaling` of Phi-3, whose two tables of divisors are tensors."""
    if not any(keys.has(name) for name in _FACTORS):
        return None if keys.get("rope.scaling.type") in (None, "none", "longrope") else rope_scaling(keys)
    short, long = (_table(keys, name) for name in _FACTORS)
    longest = keys.integer("context_length")
    trained = keys.integer("rope.scaling.original_context_length", longest)
    scaling = {
        "rope_type": "longrope",
        "short_factor": [float(str(value)) for value in short],
        "long_factor": [float(str(value)) for value in long],
        "original_max_position_embeddings": trained,
    }
    # What follows from the lengths is left to the reader of the configuration; another factor is said.
    follows = math.sqrt(1 + math.log(longest / trained) / math.log(trained)) if longest > trained > 1 else 1.0
    factor = keys.number("rope.scaling.attn_factor", follows)
    return scaling if math.isclose(factor, follows, rel_tol=1e-5) else {**scaling, "attention_factor": factor}


def _llama3(keys: Keys) -> dict[str, Any] | None:
    """Llama 3's scaling is only a table of divisors in GGUF; the parameters are those that give the same table."""
    table, head_dim = _table(keys, "rope_freqs.weight"), keys.head_dim()
    if np.all(table == 1):
        return None
    factor = float(np.round(table.max(), 3))
    theta = keys.number("rope.freq_base", 10000.0)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, trained = _LLAMA3.values()
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-4):
        raise keys.unsupported("rope_freqs.weight is not the table of Llama 3's scaling (low 1, high 4, context 8192)")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _table(keys: Keys, name: str) -> npt.NDArray[np.float32]:
    keys.shape(name)
    return np.concatenate([chunk.ravel() for chunk in keys.file.chunks(name)])
