"""What a latent cache takes in bytes, by type and by the share of each latent that is cached."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_cli.calibration.variants import narrowed_spec, own_channels
from mla_cli.checkpoint.kv_cache import Quantizers, Rotation
from mla_cli.checkpoint.latent_strength import check_latent_strength
from mla_cli.checkpoint.load import ModelSource
from mla_cli.errors import UsageError
from mla_cli.kernels.quantized import CacheDtype, Granularity, LatentQuantizer, RopeDtype
from mla_cli.model.cache import Cache
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec

TYPES: tuple[CacheDtype | None, ...] = (None, "int8", "fp8", "int4")  # None: bfloat16


@dataclass(frozen=True)
class CacheSizes:
    """The caches that a model can have.

    Attributes:
        granularity: how scales are shared; rope_dtype: of rotary keys; folded: the rotation that the weights hold already.
    """

    model: ModelSource
    granularity: Granularity
    rope_dtype: RopeDtype
    folded: Rotation = "none"

    def dynamic(self, dtype: CacheDtype | None) -> Quantizers:
        """Quantizers without calibrated ranges. (Static ones need ranges, so each token's own stand in for these.)"""
        granularity: Granularity = "token" if self.granularity == "static" else self.granularity
        return self._quantizers(dtype, granularity, float("inf"))

    def strengths(self) -> list[float]:
        """Shares of the latents that can be cached, ascending: one for each channel of the widest, or all alone."""
        try:
            check_latent_strength(self.model, 0.5)
        except UsageError:  # the channels are in no order
            return [1.0]
        if self.folded != "none":
            return [1.0]
        widest = max(own_channels(a) for a in self.model.spec.attention if isinstance(a, LatentAttentionSpec))
        return [channels / widest for channels in range(1, widest + 1)]

    def largest_strength(self, dtype: CacheDtype | None, budget: int) -> float | None:
        """The largest share of the latents that fits in `budget` bytes a token over all layers; None if none does."""
        possible = self.strengths()
        low, high = 0, len(possible)  # the first `low` fit, those from `high` on do not
        while low < high:
            middle = (low + high) // 2
            fits = self._at(dtype, possible[middle]) <= budget
            low, high = (middle + 1, high) if fits else (low, middle)
        return possible[low - 1] if low else None

    def check(self, budget: int, dtype: CacheDtype | None = None) -> None:
        """Refuse a budget that no cache fits in.

        Args:
            dtype: the type that the user named; None: any.

        Raises:
            UsageError: not even the smallest fits.
        """
        smallest = min(self._at(each, self.strengths()[0]) for each in (TYPES if dtype is None else (dtype,)))
        if smallest > budget:
            raise UsageError(
                f"no cache of this model takes {budget:,} bytes a token or fewer over all {self.model.spec.num_layers} "
                f"layers; the smallest takes {smallest:,}",
                where=f"--budget-bytes {budget}",
                fix=f"give at least {smallest}, or convert with a smaller latent and rotary key (`mla convert --ratio`)",
            )

    def _at(self, dtype: CacheDtype | None, strength: float) -> int:
        static = self.granularity == "static"
        quantizers = self._quantizers(dtype, "static", 1.0) if static else self.dynamic(dtype)
        return bytes_per_token(self.model, narrowed_spec(self.model.spec, strength), quantizers)

    def _quantizers(self, dtype: CacheDtype | None, granularity: Granularity, reach: float) -> Quantizers:
        if dtype is None:
            return (None,) * self.model.spec.num_layers
        quantizer = LatentQuantizer(dtype, granularity, reach, self.rope_dtype)
        return tuple(
            quantizer if isinstance(attention, LatentAttentionSpec) else None for attention in self.model.spec.attention
        )


def bytes_per_token(model: ModelSource, spec: DecoderSpec, quantizers: Quantizers | None) -> int:
    """From what a cache really allocates, in the type the weights are stored in."""
    return Cache(spec, 1, 1, dtype=cache_dtype(model), quantizers=quantizers).bytes_per_token()


def cache_dtype(model: ModelSource) -> torch.dtype:
    """The type of what is not quantised in a cache: as the weights are stored, no wider than float32."""
    return torch.float32 if model.stored_dtype == torch.float64 else model.stored_dtype
