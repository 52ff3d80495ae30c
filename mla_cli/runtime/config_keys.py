"""The keys of `mla.yaml`: what each may be, and which option of `mla generate` it sets.

`latent_attention`, `precision` and `safety` are named as in the articles that describe such a runtime; the others are ours.
A key whose mechanism does not exist takes the one value that says so, and is refused with any other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_cli.errors import MlaError
from mla_cli.runtime import choices
from mla_cli.runtime.prompt_text import is_message
from mla_cli.runtime.sampling_params import SamplingParams

Check = Callable[[Any], Any]


class NotAllowedError(ValueError):
    """A value that a key cannot have.

    Args:
        what: is wrong with it; fix: what may be given.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class Key:
    """A key of the file.

    Attributes:
        path: with the sections that it is in, joined by points.
        check: gives the value as it counts, or raises `NotAllowedError`.
        option: parameter of `mla generate` that it sets, under that name; None: none does.
    """

    path: str
    check: Check
    option: str | None = None


def _shown(value: Any) -> str:
    """A value in a message; a list is not written out: through aliases it may be longer than any memory."""
    if isinstance(value, (list, tuple, dict, set)):
        return "a section" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def whole(least: int, most: int | None = None, *, multiple: int = 1) -> Check:
    """A whole number within bounds."""
    span = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    span += "" if multiple == 1 else f", a multiple of {multiple}"

    def check(value: Any) -> int:
        sound = isinstance(value, int) and not isinstance(value, bool) and value >= least and value % multiple == 0
        if not sound or (most is not None and value > most):
            raise NotAllowedError(f"it cannot be {_shown(value)}", f"give {span}")
        return int(value)

    return check


def share(*, above_zero: bool = False) -> Check:
    """A number from 0 to 1."""

    def check(value: Any) -> float:
        sound = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
        if not sound or (above_zero and value == 0):
            raise NotAllowedError(
                f"it cannot be {_shown(value)}", f"give a number {'above' if above_zero else 'from'} 0, at most 1"
            )
        return float(value)

    return check


def positive(least: float) -> Check:
    """A number from `least`, which is above 0."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 1e30:
            raise NotAllowedError(f"it cannot be {_shown(value)}", f"give a number from {least:g}")
        return float(value)

    return check


def threshold(value: Any) -> float:
    """A number from 0; infinity, where there shall be no alert."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise NotAllowedError(f"it cannot be {_shown(value)}", "give a number from 0, or .inf for no alert")
    return float(value)


def one_of(*names: str, aliases: dict[str, str] | None = None) -> Check:
    """One of some names, or what stands for one."""

    def check(value: Any) -> str:
        found = (aliases or {}).get(value.lower(), value.lower()) if isinstance(value, str) else value
        if found not in names:
            raise NotAllowedError(f"it cannot be {_shown(value)}", f"give one of {', '.join(names)}")
        return str(found)

    return check


def matching(pattern: str, shown: str) -> Check:
    """A text of some form."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise NotAllowedError(f"it cannot be {_shown(value)}", f"give {shown}")
        return value

    return check


def texts(value: Any) -> list[str]:
    """A list of texts that are not empty."""
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise NotAllowedError("it is no list of texts", 'give e.g. ["one", "two"]')
    return list(value)


def warmup(value: Any) -> list[Any]:
    """A list of texts, and of conversations: `{messages: [{role: system, content: ...}]}`."""
    fix = 'give a list of texts and of {messages: [{role: system, content: "..."}]}'
    if not isinstance(value, list):
        raise NotAllowedError("it is no list of beginnings", fix)
    if len(value) > choices.MOST_WARMUPS:
        raise NotAllowedError(f"it lists {len(value)} beginnings", f"give at most {choices.MOST_WARMUPS}")
    for number, entry in enumerate(value, start=1):
        said = entry.get("messages") if isinstance(entry, dict) and set(entry) == {"messages"} else None
        sound = isinstance(said, list) and said and all(is_message(message) for message in said)
        if not sound and not (isinstance(entry, str) and entry):
            raise NotAllowedError(f"its entry {number} is neither a text nor a conversation", fix)
    return list(value)


def enabled(value: Any) -> bool:
    """True or false, or `auto`: as the checkpoint is, which is what nothing says."""
    if value == "auto":
        raise LeftOut
    if not isinstance(value, bool):
        raise NotAllowedError(f"it cannot be {_shown(value)}", "give true, false, or auto: as the checkpoint is")
    return value


def boolean(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise NotAllowedError(f"it cannot be {_shown(value)}", "give true or false")
    return value


class LeftOut(Exception):  # noqa: N818 (no error: the value is as good as none)
    """A value that says what leaving the key out says."""


def only(allowed: Any, why: str) -> Check:
    """The one value that is true; `why` no other is."""
    shown = str(allowed).lower() if isinstance(allowed, bool) else allowed

    def check(value: Any) -> Any:
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise NotAllowedError(why, f"set it to {shown}, or leave it out")
        return allowed

    return check


def never(why: str) -> Check:
    """No value at all; `why`."""

    def check(value: Any) -> Any:
        raise NotAllowedError(why, "leave it out")

    return check


def _sampling(name: str) -> Check:
    def check(value: Any) -> Any:
        if name == "stop":
            return texts(value)
        if isinstance(value, (list, dict, set)):  # never shown to who would write it out
            raise NotAllowedError(f"it cannot be {_shown(value)}", "give a single value")
        given: dict[str, Any] = {name: value}
        try:
            SamplingParams(**given)
        except MlaError as error:
            raise NotAllowedError(f"it cannot be {_shown(value)}", error.fix or "see `mla generate --help`") from error
        return value

    return check


FLOATS = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FLOAT_ALIASES = {long: short for short, long in FLOATS.items()}
_float = one_of(*FLOATS, aliases=_FLOAT_ALIASES)

KEYS: tuple[Key, ...] = (
    Key("profile", one_of(*choices.PROFILES)),
    Key("latent_attention.enabled", enabled),
    Key("latent_attention.latent_dim", whole(1)),
    Key("latent_attention.chunk_size", whole(choices.PAGE_TOKENS, multiple=choices.PAGE_TOKENS)),
    Key("latent_attention.prefetch.enabled", boolean),
    Key("latent_attention.prefetch.lookahead", whole(1)),
    Key("latent_attention.prefetch.threshold", share()),
    Key("latent_attention.fallback.threshold", share()),
    Key("latent_attention.fallback.min_chunk", never("nothing falls back to another kind of attention")),
    Key("latent_attention.fallback.cool_down", whole(0)),
    Key("latent_attention.memory.pool_size", whole(1), "pool_size"),
    Key(
        "latent_attention.memory.defrag_interval",
        only(0, "pages are of one size, and any free one will do: there is nothing to compact"),
    ),
    Key("latent_attention.tiers.host_size", whole(0)),
    Key("latent_attention.tiers.file", matching(r"[^\0]+", "the path of a file")),
    Key("latent_attention.tiers.file_size", whole(1)),
    Key("latent_attention.tiers.keep_file", boolean),
    Key("precision.projection", one_of(*FLOATS, "int8", aliases=_FLOAT_ALIASES)),
    Key("precision.attention", _float),
    Key("precision.cache", one_of(*choices.KV_DTYPES, aliases=choices.KV_DTYPE_ALIASES), "kv_dtype"),
    Key("safety.grad_clip", never("generating computes no gradients; the healing of `mla convert` always clips them")),
    Key("safety.nan_check", only(True, "scores that hold NaN are always refused, at no cost")),
    Key("runtime.device", matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"), "device"),
    Key("runtime.threads", whole(1), "threads"),
    Key("runtime.backend", one_of(*choices.BACKENDS), "backend"),
    Key("runtime.latent_strength", share(above_zero=True), "latent_strength"),
    Key("runtime.max_batch", whole(1), "max_batch"),
    Key("runtime.max_context", whole(2), "max_context"),
    *(
        Key(f"sampling.{field.name}", _sampling(field.name), field.name)
        for field in dataclasses.fields(SamplingParams)
        if field.name != "seed"
    ),
    Key("sampling.seed", whole(0, 2**32 - 1), "seed"),
    Key("warmup", warmup),
    Key("metrics.to", matching(r"(?s).+", "a file, or [HOST]:PORT"), "metrics"),
    *(
        Key(f"metrics.alerts.{name}", threshold)
        for name in ("ttft_p99_ms", "cache_use", "fragmentation", "ratio_drift", "fallback_rate")
    ),
    Key("server.max_queue", whole(0), "max_queue"),
    Key("server.max_seconds", positive(1), "max_seconds"),
)
BY_PATH = {key.path: key for key in KEYS}
SECTIONS = frozenset(
    ".".join(key.path.split(".")[:depth]) for key in KEYS for depth in range(1, key.path.count(".") + 1)
)
