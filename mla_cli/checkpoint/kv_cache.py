"""How a checkpoint says that its latents are cached: `config.json`, key `mla_kv_cache`, written by `mla calibrate`.

    {"version": 2, "dtype": "int8"|"fp8"|"int4", "granularity": "token"|"page"|"static", "group": 32|null,
     "rope_dtype": "bfloat16"|"int8"|"fp8", "rotation": "none"|"hadamard"|"learned", "every": steps|null,
     "strength": number in (0, 1], "max_loss": percent|null,
     "layers": [{"dtype": the scheme's|"bf16", "clip": number|[numbers]|null, "amax": number, "token_amax": number|null}, ...],
     "samples": sequences, "tokens": tokens, "origin": which text}

Keys and values share one latent, so there is one range a layer, or one a group of channels. A scale is `clip / 127` (int8),
`/ 448` (fp8) or `/ 7` (int4); with `token` and `page` granularity the latents' own largest value counts where it is below
`clip` (null: always). `bf16` layers are not quantised. The rotary key has scales of its own. The rotation is in the weights
already. `strength` is the share of each latent's channels that is cached at all. Every `every` steps a generator derives static
ranges anew, from how far nine in ten tokens reach now and how far they did (`token_amax`).

Version 1 had no INT4, no pages and no turns, and kept the whole of a latent beside a rotary key in bfloat16; it is still read.

A scheme is read whole or refused: a scale that is silently wrong, or missing and taken for 1, gives fluent nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from mla_cli.checkpoint.deepseek_form import free_rank
from mla_cli.checkpoint.latent_strength import kept_channels
from mla_cli.console import warn
from mla_cli.errors import InputError, UsageError
from mla_cli.kernels.quantized import (
    GRANULARITIES,
    LIMITS,
    ROPE_DTYPES,
    CacheDtype,
    Granularity,
    LatentQuantizer,
    RopeDtype,
    group_of,
    normalize_dtype,
)
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec

KEY = "mla_kv_cache"
VERSION = 2
Rotation = Literal["none", "hadamard", "learned"]
Quantizers = tuple[LatentQuantizer | None, ...]

# How far so many of the tokens reach says how far latents reach: beyond are tokens with huge latents of their own (the first of
# a text, line ends), whose share says more about the text than about ranges.
REACH_QUANTILE = 0.9
_DTYPES = tuple(LIMITS)
LARGEST = 3.4e38  # of any stored number: scales are float32
_AGAIN = "run `mla calibrate` again, or use --kv-dtype bf16"


@dataclass(frozen=True)
class _Version:
    keys: frozenset[str]
    layer_keys: frozenset[str]
    dtypes: tuple[str, ...]
    granularities: tuple[str, ...]
    rope_dtypes: tuple[str, ...]


_FIRST = frozenset("version dtype granularity rope_dtype layers samples tokens origin".split())
_VERSIONS = {
    1: _Version(_FIRST, frozenset({"dtype", "clip", "amax"}), ("int8", "fp8"), ("token", "static"), ("bfloat16",)),
    2: _Version(
        _FIRST | {"group", "rotation", "every", "strength", "max_loss"},
        frozenset({"dtype", "clip", "amax", "token_amax"}),
        _DTYPES,
        GRANULARITIES,
        ROPE_DTYPES,
    ),
}


@dataclass(frozen=True)
class LayerRange:
    """One layer of a scheme.

    Attributes:
        dtype: the scheme's, or `bf16` where the layer is not quantised.
        clip: most that its range may reach, or that of each group; None: the values alone decide.
        amax: the largest value seen; token_amax: what nine in ten tokens' largest values are below
            (None: not known).
    """

    dtype: str
    clip: float | tuple[float, ...] | None
    amax: float
    token_amax: float | None = None


@dataclass(frozen=True)
class KvScheme:
    """A calibrated scheme, as stored.

    Attributes:
        rotation: what the latents have been turned by, in the weights. every: steps between two looks at static ranges.
        strength: share of each latent's channels, the first ones, that is cached. max_loss: percent that it was kept below.
    """

    dtype: CacheDtype
    granularity: Granularity
    layers: tuple[LayerRange, ...]
    samples: int
    tokens: int
    origin: str
    rope_dtype: RopeDtype = "bfloat16"
    rotation: Rotation = "none"
    every: int | None = None
    strength: float = 1.0
    max_loss: float | None = None

    @property
    def group(self) -> int | None:
        """Channels that share a scale; None: all of a latent."""
        return group_of(self.dtype)

    def quantizers(self) -> Quantizers:
        """What the cache takes, one a layer."""
        return tuple(
            None
            if layer.dtype == "bf16"
            else LatentQuantizer(
                self.dtype, self.granularity, math.inf if layer.clip is None else layer.clip, self.rope_dtype
            )
            for layer in self.layers
        )


@dataclass(frozen=True)
class CachePlan:
    """How a checkpoint is to be run.

    Attributes:
        quantizers: one a layer; None: nothing is quantised.
        strength: share of each latent's channels, the first ones, that is cached and used.
        scheme: the calibrated scheme, where it is what is used.
    """

    quantizers: Quantizers | None
    strength: float = 1.0
    scheme: KvScheme | None = None


def cache_plan(config: dict[str, Any], spec: DecoderSpec, kv_dtype: str, latent_strength: float = 1.0) -> CachePlan:
    """How the latents of a checkpoint are cached, and how much of them.

    A scheme for a part of each latent says which part; a smaller one may still be asked for.

    Args:
        config: the checkpoint's `config.json`.
        kv_dtype: `auto` as calibrated (not quantised if it never was), `bf16` not quantised and whole, else so: as calibrated
            if that is for this type, else with each token's own ranges.
        latent_strength: most of each latent's channels that is wanted.

    Raises:
        UsageError: an unknown type, or a model without latents.
        InputError: the checkpoint's scheme is not sound.
    """
    quantizers, scheme = _quantizers_and_scheme(config, spec, kv_dtype)
    strength = latent_strength if scheme is None else min(scheme.strength, latent_strength)
    if quantizers is not None and strength < 1:
        quantizers = tuple(
            quantizer.narrowed(_cached_channels(attention, strength))
            if quantizer is not None and isinstance(attention, LatentAttentionSpec)
            else quantizer
            for quantizer, attention in zip(quantizers, spec.attention, strict=True)
        )
    return CachePlan(quantizers, strength, scheme)


def _quantizers_and_scheme(
    config: dict[str, Any], spec: DecoderSpec, kv_dtype: str
) -> tuple[Quantizers | None, KvScheme | None]:
    wanted = normalize_dtype(kv_dtype)
    if wanted not in ("auto", "bf16", *_DTYPES):
        raise UsageError(
            f"latents cannot be cached as '{kv_dtype}'", where="--kv-dtype", fix="use auto, bf16, int8, fp8 or int4"
        )
    if not spec.is_latent:
        if wanted in _DTYPES:
            raise UsageError(
                f"only latents are quantised; this {spec.model_type} model caches keys and values",
                where=f"--kv-dtype {kv_dtype}",
                fix="convert it first (`mla convert`), or use --kv-dtype auto",
            )
        return None, None
    # Not even read: a checkpoint with a damaged scheme still runs unquantised.
    if wanted == "bf16":
        return None, None
    scheme = read_scheme(config, spec)
    if scheme is not None and wanted in ("auto", scheme.dtype):
        return scheme.quantizers(), scheme
    if wanted == "auto":
        return None, None
    calibrated = "was never calibrated" if scheme is None else f"is calibrated for {scheme.dtype}, not for {wanted}"
    warn(
        f"this checkpoint {calibrated}: {wanted} latents take each token's own range, and what that costs is not measured "
        f"(`mla calibrate CKPT --kv-dtype {wanted}` calibrates and measures)"
    )
    dynamic = LatentQuantizer(cast(CacheDtype, wanted))
    return tuple(dynamic if isinstance(a, LatentAttentionSpec) else None for a in spec.attention), None


def stored_scheme(scheme: KvScheme) -> dict[str, Any]:
    """The value of `mla_kv_cache` that says this scheme."""
    return {
        "version": VERSION,
        "dtype": scheme.dtype,
        "granularity": scheme.granularity,
        "group": scheme.group,
        "rope_dtype": scheme.rope_dtype,
        "rotation": scheme.rotation,
        "every": scheme.every,
        "strength": scheme.strength,
        "max_loss": scheme.max_loss,
        "layers": [
            {**asdict(layer), "clip": list(layer.clip) if isinstance(layer.clip, tuple) else layer.clip}
            for layer in scheme.layers
        ],
        "samples": scheme.samples,
        "tokens": scheme.tokens,
        "origin": scheme.origin,
    }


def read_scheme(config: dict[str, Any], spec: DecoderSpec) -> KvScheme | None:
    """The scheme of a `config.json`, every entry checked; None if there is none.

    Raises:
        InputError: an entry is missing, unknown, of the wrong type or out of range.
    """
    stored = config.get(KEY)
    if stored is None:
        return None
    if not isinstance(stored, dict):
        raise _unsound("is no object", KEY)
    version = stored.get("version")
    if not _is_whole(version) or version not in _VERSIONS:
        known = " or ".join(map(str, _VERSIONS))
        raise _unsound(f"version {version!r} is not {known}", f"{KEY}.version", "update mla, or " + _AGAIN)
    rules = _VERSIONS[version]
    _check_keys(stored, rules.keys, KEY)
    _check_choice(stored["dtype"], rules.dtypes, f"{KEY}.dtype")
    _check_choice(stored["granularity"], rules.granularities, f"{KEY}.granularity")
    _check_choice(stored["rope_dtype"], rules.rope_dtypes, f"{KEY}.rope_dtype")
    for key in ("samples", "tokens"):
        if not _is_whole(stored[key]) or stored[key] < 1:
            raise _unsound(f"{stored[key]!r} is no whole number from 1", f"{KEY}.{key}")
    if not isinstance(stored["origin"], str):
        raise _unsound(f"{stored['origin']!r} is no text", f"{KEY}.origin")
    later: dict[str, Any] = {} if version == 1 else _later_entries(stored)
    layers = stored["layers"]
    if not isinstance(layers, list) or len(layers) != spec.num_layers:
        count = len(layers) if isinstance(layers, list) else "no list of"
        raise _unsound(f"{count} layers for a model of {spec.num_layers}", f"{KEY}.layers")
    ranges = []
    for index, (entry, attention) in enumerate(zip(layers, spec.attention, strict=True)):
        channels = None
        if isinstance(attention, LatentAttentionSpec):
            channels = _cached_channels(attention, later.get("strength", 1.0))
        ranges.append(_layer_range(entry, stored, rules, channels, f"{KEY}.layers[{index}]"))
    return KvScheme(
        stored["dtype"], stored["granularity"], tuple(ranges), stored["samples"], stored["tokens"], stored["origin"],
        **later,
    )  # fmt: skip


def _later_entries(stored: dict[str, Any]) -> dict[str, Any]:
    """What version 1 did not have."""
    group, every, strength, most = (stored[key] for key in ("group", "every", "strength", "max_loss"))
    expected = group_of(stored["dtype"])
    if group != expected or isinstance(group, bool):
        raise _unsound(f"{group!r} is not {expected} as {stored['dtype']} has it", f"{KEY}.group")
    _check_choice(stored["rotation"], get_args(Rotation), f"{KEY}.rotation")
    if every is not None and (stored["granularity"] != "static" or not _is_whole(every) or every < 1):
        raise _unsound(f"{every!r} is no number of steps from 1, which static scales alone have", f"{KEY}.every")
    if not _is_number(strength) or not 0 < strength <= 1:
        raise _unsound(f"{strength!r} is no share of a latent", f"{KEY}.strength")
    if most is not None and (not _is_number(most) or not 0 <= most <= LARGEST):
        raise _unsound(f"{most!r} is no percentage", f"{KEY}.max_loss")
    return {
        "rope_dtype": stored["rope_dtype"],
        "rotation": stored["rotation"],
        "every": every,
        "strength": float(strength),
        "max_loss": None if most is None else float(most),
    }


def _cached_channels(attention: LatentAttentionSpec, strength: float) -> int:
    """Latent channels that are cached: of a part of a latent, the constant ones of the stock form are none."""
    rank = attention.kv_lora_rank
    return rank if strength == 1 else kept_channels(rank if attention.norm_eps is None else free_rank(rank), strength)


def _layer_range(entry: Any, scheme: dict[str, Any], rules: _Version, channels: int | None, where: str) -> LayerRange:
    if not isinstance(entry, dict):
        raise _unsound("is no object", where)
    _check_keys(entry, rules.layer_keys, where)
    _check_choice(entry["dtype"], ("bf16",) if channels is None else (scheme["dtype"], "bf16"), f"{where}.dtype")
    quantised = entry["dtype"] != "bf16"
    amax, usual = entry["amax"], entry.get("token_amax")
    for key, value in (("amax", amax), ("token_amax", 0 if usual is None else usual)):
        if not _is_number(value) or not 0 <= value <= LARGEST:
            raise _unsound(f"{value!r} is no finite number from 0", f"{where}.{key}")
    if entry["clip"] is None and scheme["granularity"] == "static" and quantised:
        raise _unsound("static scales need a range for each layer", f"{where}.clip")
    return LayerRange(
        entry["dtype"],
        _clip(entry["clip"], scheme["dtype"], channels, f"{where}.clip"),
        float(amax),
        None if usual is None else float(usual),
    )


def _clip(stored: Any, dtype: CacheDtype, channels: int | None, where: str) -> float | tuple[float, ...] | None:
    if stored is None:
        return None
    clips = stored if isinstance(stored, list) else [stored]
    if isinstance(stored, list):
        groups = LatentQuantizer(dtype).groups(channels or 0) if dtype == "int4" else 0
        if not groups or len(clips) != groups:
            wanted = f"for {groups} groups of channels" if groups else f"where {dtype} latents have one"
            raise _unsound(f"{len(clips)} ranges {wanted}", where)
    for value in clips:
        if not _is_number(value) or not 0 < value <= LARGEST:
            raise _unsound(f"{value!r} is no finite number above 0", where)
    return tuple(map(float, clips)) if isinstance(stored, list) else float(stored)


def _check_keys(found: dict[str, Any], expected: frozenset[str], where: str) -> None:
    missing, unknown = sorted(expected - set(found)), sorted(set(found) - expected)
    if missing:
        raise _unsound(f"lacks '{missing[0]}'", where)
    if unknown:
        raise _unsound(f"has the unknown key '{unknown[0]}'", f"{where}.{unknown[0]}", "update mla, or " + _AGAIN)


def _check_choice(value: Any, choices: Sequence[str], where: str) -> None:
    if value not in choices:
        raise _unsound(f"{value!r} is not {' or '.join(choices)}", where)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _unsound(what: str, where: str, fix: str = _AGAIN) -> InputError:
    return InputError(f"the checkpoint's cache scheme cannot be used: {what}", where=f"config.json: {where}", fix=fix)
