"""Quantised latents: symmetric INT8 and FP8-E4M3 codes with a dynamic range.

    scale = max(min(amax(c), clip), floor) / limit;  code = cast(clamp(c / scale, -limit, limit))

One scale covers one token's latent (`granularity="token"`) or every token of a layer (`"static"`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mla_cli.errors import MlaError

CacheDtype = Literal["int8", "fp8"]
Granularity = Literal["token", "static"]

# Largest code of each type. FP8 is E4M3 without infinities: 448 is its largest finite number.
LIMITS: dict[str, float] = {"int8": 127.0, "fp8": 448.0}
STORAGE: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

# Below this a latent counts as zero: far under any real range, far above float32's subnormals, so that 1 / scale is finite.
AMAX_FLOOR = 1e-20

# E5M2 is another format, and no alias of ours.
_ALIASES = {
    "fp8_e4m3": "fp8",
    "fp8_e4m3fn": "fp8",
    "float8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "e4m3": "fp8",
    "e4m3fn": "fp8",
    "i8": "int8",
    "bfloat16": "bf16",
}


def normalize_dtype(name: str) -> str:
    """One spelling for each cache type, whatever alias it was given by (`fp8_e4m3` is `fp8`)."""
    lowered = name.strip().lower().replace("-", "_").removeprefix("torch.")
    return _ALIASES.get(lowered, lowered)


@dataclass(frozen=True)
class LatentQuantizer:
    """How one layer's latents are stored.

    Attributes:
        dtype: `int8` or `fp8`.
        granularity: `token` derives the scale from each latent, `static` uses the calibrated one.
        clip: most that the range may reach (calibrated); infinite: the token's own largest value decides.
    """

    dtype: CacheDtype
    granularity: Granularity = "token"
    clip: float = float("inf")

    def __post_init__(self) -> None:
        if self.dtype not in LIMITS or self.granularity not in ("token", "static"):
            raise MlaError(f"latents cannot be stored as {self.dtype!r} with {self.granularity!r} scales")
        if not self.clip > 0 or (self.granularity == "static" and math.isinf(self.clip)):
            raise MlaError(f"a range of {self.clip} gives no scale for {self.granularity} {self.dtype} latents")

    @property
    def storage_dtype(self) -> torch.dtype:
        """Data type of the codes."""
        return STORAGE[self.dtype]

    @property
    def limit(self) -> float:
        """Largest code."""
        return LIMITS[self.dtype]

    def ranges(self, amax: Tensor) -> Tensor:
        """Largest absolute value that is stored unclipped, for latents whose largest absolute values are `amax` `[...]`."""
        ceiling = torch.full_like(amax, self.clip) if self.granularity == "static" else amax.clamp(max=self.clip)
        return ceiling.clamp(min=AMAX_FLOOR)

    def quantize(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of latents.

        Args:
            latent: `[..., r]`, any float type.

        Returns:
            Codes `[..., r]` in the storage type, scales `[...]` float32. Zero latents give zero codes.

        Raises:
            MlaError: the latent holds NaN or infinity (a broken model must not be hidden by a cast).
        """
        values = latent.float()
        amax = values.abs().amax(dim=-1)  # [...]
        if not bool(torch.isfinite(amax).all()):
            raise MlaError(
                "a latent holds NaN or infinity and cannot be quantised",
                fix="check the weights (`mla inspect`), or run with --kv-dtype bf16 --dtype float32",
            )
        scales = self.ranges(amax) / self.limit
        # Clamped here: a bare cast wraps in int8, and past 448 what an FP8 cast gives depends on device and version.
        codes = (values / scales[..., None]).clamp(-self.limit, self.limit)
        if self.dtype == "int8":
            codes = codes.round()  # half to even, on every device
        return codes.to(self.storage_dtype), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Latents from codes `[..., r]` and scales `[...]`, in `dtype`."""
    return (codes.float() * scales[..., None]).to(dtype)
