"""Scales of an FP8 cache for other engines: vLLM applies them to its latent attention if a checkpoint says them like this.

`config.json` has `quantization_config` (see `QUANTIZATION`: no weight is quantised, the cache is), and each layer the scalars
`model.layers.N.self_attn.k_scale` and `.v_scale`. A value is stored as `cast(value / scale)`.

vLLM keeps latent and rotary key in one row, and takes `k_scale` for all of it, so both are equal here and cover the larger of
the two. It rounds them to the model's type, which powers of two survive; in a floating format a scale that is twice too large
costs nothing but the smallest numbers. What is missing it takes for 1 without an error, hence `check_engine_scales`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_cli.checkpoint.kv_cache import KvScheme
from mla_cli.checkpoint.load import ModelSource
from mla_cli.errors import InputError
from mla_cli.kernels.quantized import AMAX_FLOOR, LIMITS
from mla_cli.model.spec import LatentAttentionSpec

KEY = "quantization_config"
QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}
# The stock form: the one whose reading was tried. vLLM's own DeepSeek class drops the biases that the form needs.
_ARCHITECTURES = ["TransformersForCausalLM"]
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.([kv])_scale")


@dataclass(frozen=True)
class EngineScales:
    """What a calibration adds to a checkpoint for other engines.

    Attributes:
        config: the whole `config.json`, with or without the entry. tensors: scalars by name, none where there is no entry.
        why_none: why a static FP8 cache has none; None where it has, and for other caches.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    why_none: str | None = None


def is_engine_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is one of these scales."""
    return _NAME.fullmatch(name) is not None


def power_of_two_scale(reach: float) -> float:
    """The smallest power of two by which numbers up to `reach` fit FP8-E4M3."""
    mantissa, exponent = math.frexp(max(reach, AMAX_FLOOR) / LIMITS["fp8"])  # mantissa in [1/2, 1)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def rotary_reach(k_rope: Tensor, attention: LatentAttentionSpec) -> float:
    """The largest number that rotary keys `[n, rope]`, not rotated yet, can hold at any position, by their pairs' lengths."""
    if attention.rotary is None or not k_rope.numel():
        return float(k_rope.abs().max()) if k_rope.numel() else 0.0
    real, imag = (
        k_rope.float().unflatten(-1, (-1, 2)).unbind(-1) if attention.interleaved else k_rope.float().chunk(2, dim=-1)
    )  # [n, rope / 2]
    return float(torch.hypot(real, imag).max()) * attention.rotary.attention_factor


def make_engine_scales(config: dict[str, Any], scheme: KvScheme, rotary: Sequence[float]) -> EngineScales:
    """Scales for a static FP8 cache; for any other, a configuration without those of an earlier calibration.

    Args:
        config: a checkpoint's `config.json`. rotary: `rotary_reach` of each layer over the calibration text.
    """
    plain = {key: value for key, value in config.items() if key != KEY or not _is_ours(value)}
    if scheme.dtype != "fp8" or scheme.granularity != "static":
        return EngineScales(plain)
    unquantised = [str(index) for index, layer in enumerate(scheme.layers) if layer.dtype == "bf16"]
    why_none = None
    if config.get("architectures") != _ARCHITECTURES:
        why_none = "only the stock form runs there"
    elif KEY in plain:
        why_none = f"config.json has another {KEY}"
    elif scheme.strength < 1:
        why_none = "vLLM caches whole latents"
    elif unquantised:
        why_none = f"vLLM caches all layers alike, and layer(s) {', '.join(unquantised)} must stay in bfloat16"
    if why_none is not None:
        return EngineScales(plain, why_none=why_none)
    tensors = {}
    for index, (layer, reach) in enumerate(zip(scheme.layers, rotary, strict=True)):
        clip = layer.clip if isinstance(layer.clip, tuple) else (layer.clip or layer.amax,)
        scale = torch.tensor(power_of_two_scale(max(*clip, reach)))
        for kind in "kv":
            tensors[f"model.layers.{index}.self_attn.{kind}_scale"] = scale.clone()
    return EngineScales({**plain, KEY: deepcopy(dict(QUANTIZATION))}, tensors)


def check_engine_scales(model: ModelSource) -> tuple[float, ...] | None:
    """A latent model's scales for other engines, one a layer; None if it says none.

    Raises:
        InputError: they are not all there, not positive numbers, or not the same for keys and values.
    """
    reader = model.source.tensors
    names = {name for name in reader.infos if is_engine_scale(name)}
    if not model.spec.is_latent or not (names or _says_static(model.source.config.get(KEY))):
        return None
    found = []
    for index in range(model.spec.num_layers):
        pair = [f"model.layers.{index}.self_attn.{kind}_scale" for kind in "kv"]
        missing = [name for name in pair if name not in names]
        if missing:
            raise _unsound(f"{missing[0]} is missing (an engine takes it for 1)", model)
        names -= set(pair)
        key, value = (_scalar(reader.read(name), name, model) for name in pair)
        if key != value:
            raise _unsound(f"{pair[0]} is {key:g} and {pair[1]} {value:g}, but both scale the same latent", model)
        found.append(key)
    if names:
        raise _unsound(f"{min(names)} belongs to none of the {model.spec.num_layers} layers", model)
    return tuple(found)


def stale_engine_scales(names: Collection[str], scales: EngineScales) -> list[str]:
    """Tensors of a checkpoint that an earlier calibration left, and that this one does not replace."""
    return sorted(name for name in names if is_engine_scale(name) and name not in scales.tensors)


def _scalar(tensor: Tensor, name: str, model: ModelSource) -> float:
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise _unsound(f"{name} is no single number", model)
    value = float(tensor)
    if not (math.isfinite(value) and value > 0):
        raise _unsound(f"{name} is {value:g}, not a positive number", model)
    return value


def _is_ours(value: Any) -> bool:
    return bool(value == QUANTIZATION)


def _says_static(value: Any) -> bool:
    scheme = value.get("kv_cache_scheme") if isinstance(value, dict) else None
    return isinstance(scheme, dict) and not scheme.get("dynamic", False)


def _unsound(what: str, model: ModelSource) -> InputError:
    return InputError(
        f"the checkpoint's FP8 cache scales cannot be used: {what}",
        where=model.source.name,
        fix="run `mla calibrate` again, or use --kv-dtype bf16",
    )
