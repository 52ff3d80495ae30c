"""How a checkpoint says that its latents are cached: `config.json`, key `mla_kv_cache`, written by `mla calibrate`.

    {"version": 1, "dtype": "int8"|"fp8", "granularity": "token"|"static", "rope_dtype": "bfloat16",
     "layers": [{"dtype": "int8"|"fp8"|"bf16", "clip": number|null, "amax": number}, ...],
     "samples": sequences, "tokens": tokens, "origin": which text}

There is one range a layer, for the one latent that keys and values share. A scale is `clip / 127` (int8) or `clip / 448`
(fp8); with `token` granularity the latent's own largest value counts where it is below `clip` (null: always). `bf16` layers
are not quantised. Rotary keys stay in bfloat16. A scheme is read whole or refused: a scale that is silently wrong, or missing
and taken for 1, gives fluent nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from mla_cli.console import warn
from mla_cli.errors import InputError, UsageError
from mla_cli.kernels.quantized import CacheDtype, Granularity, LatentQuantizer, normalize_dtype
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec

KEY = "mla_kv_cache"
VERSION = 1
ROPE_DTYPE = "bfloat16"
Quantizers = tuple[LatentQuantizer | None, ...]

_DTYPES = ("int8", "fp8")
_GRANULARITIES = ("token", "static")
_KEYS = {"version", "dtype", "granularity", "rope_dtype", "layers", "samples", "tokens", "origin"}
_LAYER_KEYS = {"dtype", "clip", "amax"}
_LARGEST = 3.4e38  # scales are float32
_AGAIN = "run `mla calibrate` again, or use --kv-dtype bf16"


@dataclass(frozen=True)
class LayerRange:
    """One layer of a scheme: `dtype` is `bf16` where the layer is not quantised, `amax` the largest value seen."""

    dtype: str
    clip: float | None
    amax: float


@dataclass(frozen=True)
class KvScheme:
    """A calibrated scheme, as stored."""

    dtype: CacheDtype
    granularity: Granularity
    layers: tuple[LayerRange, ...]
    samples: int
    tokens: int
    origin: str

    def quantizers(self) -> Quantizers:
        """What the cache takes, one a layer."""
        return tuple(
            None
            if layer.dtype == "bf16"
            else LatentQuantizer(self.dtype, self.granularity, math.inf if layer.clip is None else layer.clip)
            for layer in self.layers
        )


def quantizers_for(config: dict[str, Any], spec: DecoderSpec, kv_dtype: str) -> Quantizers | None:
    """How the latents of a checkpoint are cached.

    Args:
        config: the checkpoint's `config.json`.
        kv_dtype: `auto` as calibrated (not quantised if it never was), `bf16` not quantised, `int8` or `fp8` so: with the
            calibrated ranges where there are some for that type, else with each token's own.

    Returns:
        One a layer (None: not quantised), or None where nothing is quantised, as if it had never been calibrated.

    Raises:
        UsageError: an unknown type, or a model without latents.
        InputError: the checkpoint's scheme is not sound.
    """
    wanted = normalize_dtype(kv_dtype)
    if wanted not in ("auto", "bf16", *_DTYPES):
        raise UsageError(
            f"latents cannot be cached as '{kv_dtype}'", where="--kv-dtype", fix="use auto, bf16, int8 or fp8"
        )
    if not spec.is_latent:
        if wanted in _DTYPES:
            raise UsageError(
                f"only latents are quantised; this {spec.model_type} model caches keys and values",
                where=f"--kv-dtype {kv_dtype}",
                fix="convert it first (`mla convert`), or use --kv-dtype auto",
            )
        return None
    # Not even read: a checkpoint with a damaged scheme still runs unquantised.
    if wanted == "bf16":
        return None
    scheme = read_scheme(config, spec)
    if scheme is not None and wanted in ("auto", scheme.dtype):
        return scheme.quantizers()
    if wanted == "auto":
        return None
    calibrated = "was never calibrated" if scheme is None else f"is calibrated for {scheme.dtype}, not for {wanted}"
    warn(
        f"this checkpoint {calibrated}: {wanted} latents take each token's own range, and what that costs is not measured "
        f"(`mla calibrate CKPT --kv-dtype {wanted}` calibrates and measures)"
    )
    dynamic = LatentQuantizer(cast(CacheDtype, wanted))
    return tuple(dynamic if isinstance(attention, LatentAttentionSpec) else None for attention in spec.attention)


def stored_scheme(scheme: KvScheme) -> dict[str, Any]:
    """The value of `mla_kv_cache` that says this scheme."""
    return {
        "version": VERSION,
        "dtype": scheme.dtype,
        "granularity": scheme.granularity,
        "rope_dtype": ROPE_DTYPE,
        "layers": [asdict(layer) for layer in scheme.layers],
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
    if stored.get("version") != VERSION:
        raise _unsound(
            f"version {stored.get('version')!r} is not {VERSION}", f"{KEY}.version", "update mla, or " + _AGAIN
        )
    _check_keys(stored, _KEYS, KEY)
    _check_choice(stored["dtype"], _DTYPES, f"{KEY}.dtype")
    _check_choice(stored["granularity"], _GRANULARITIES, f"{KEY}.granularity")
    _check_choice(stored["rope_dtype"], (ROPE_DTYPE,), f"{KEY}.rope_dtype")
    for key in ("samples", "tokens"):
        if not _is_whole(stored[key]) or stored[key] < 1:
            raise _unsound(f"{stored[key]!r} is no whole number from 1", f"{KEY}.{key}")
    if not isinstance(stored["origin"], str):
        raise _unsound(f"{stored['origin']!r} is no text", f"{KEY}.origin")
    layers = stored["layers"]
    if not isinstance(layers, list) or len(layers) != spec.num_layers:
        count = len(layers) if isinstance(layers, list) else "no list of"
        raise _unsound(f"{count} layers for a model of {spec.num_layers}", f"{KEY}.layers")
    ranges = tuple(
        _layer_range(entry, stored, isinstance(attention, LatentAttentionSpec), f"{KEY}.layers[{i}]")
        for i, (entry, attention) in enumerate(zip(layers, spec.attention, strict=True))
    )
    return KvScheme(
        stored["dtype"], stored["granularity"], ranges, stored["samples"], stored["tokens"], stored["origin"]
    )


def _layer_range(entry: Any, scheme: dict[str, Any], latent: bool, where: str) -> LayerRange:
    if not isinstance(entry, dict):
        raise _unsound("is no object", where)
    _check_keys(entry, _LAYER_KEYS, where)
    _check_choice(entry["dtype"], (scheme["dtype"], "bf16") if latent else ("bf16",), f"{where}.dtype")
    clip, amax = entry["clip"], entry["amax"]
    if not _is_number(amax) or not 0 <= amax <= _LARGEST:
        raise _unsound(f"{amax!r} is no finite number from 0", f"{where}.amax")
    if clip is None:
        if scheme["granularity"] == "static" and entry["dtype"] != "bf16":
            raise _unsound("static scales need a range for each layer", f"{where}.clip")
    elif not _is_number(clip) or not 0 < clip <= _LARGEST:
        raise _unsound(f"{clip!r} is no finite number above 0", f"{where}.clip")
    return LayerRange(entry["dtype"], None if clip is None else float(clip), float(amax))


def _check_keys(found: dict[str, Any], expected: set[str], where: str) -> None:
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
