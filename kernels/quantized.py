"""Quantised latents: symmetric INT8, FP8-E4M3 and INT4 codes with a dynamic range.

    scale = max(min(amax(c), clip), floor) / limit;  code = cast(clamp(c / scale, -limit, limit))

A scale covers a group of channels: the whole latent (INT8, FP8), or 32 of them (INT4), the last group what is left. It covers
one token (`granularity="token"`), a page of 16 consecutive ones (`"page"`), or every token of a layer (`"static"`).

Scales are float32; those of INT4, of which there are many, bfloat16, rounded up so that the rounding itself clips nothing. Two
INT4 codes share a byte, the even channel in the lower half; an odd latent gets a code more, which is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_cli.errors import MlaError

CacheDtype = Literal["int8", "fp8", "int4"]
Granularity = Literal["token", "page", "static"]
RopeDtype = Literal["bfloat16", "int8", "fp8"]

GROUP = 32  # channels of an INT4 latent that share a scale: half a bit a number
PAGE = 16  # consecutive tokens that share scales

# Largest code of each type. FP8 is E4M3 without infinities: 448 is its largest finite number.
LIMITS: dict[str, float] = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
STORAGE: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
GRANULARITIES = ("token", "page", "static")
ROPE_DTYPES = ("bfloat16", "int8", "fp8")

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
    "i4": "int4",
    "bfloat16": "bf16",
}


def normalize_dtype(name: str) -> str:
    """One spelling for each cache type, whatever alias it was given by (`fp8_e4m3` is `fp8`)."""
    lowered = name.strip().lower().replace("-", "_").removeprefix("torch.")
    return _ALIASES.get(lowered, lowered)


def group_of(dtype: str) -> int | None:
    """Channels of a latent that share a scale in this cache type; None: all of them."""
    return GROUP if dtype == "int4" else None


@dataclass(frozen=True)
class LatentQuantizer:
    """How one layer's cache entries are stored.

    Attributes:
        dtype: of the latent's codes.
        granularity: `token` derives the scales from each latent, `page` from all latents of a page, `static` from `clip`.
        clip: most that a range may reach (calibrated), one number or one a group; infinite: the values alone decide.
        rope_dtype: of the rotary key. Quantised, it has a scale of its own for each token: one taken from the latent would
            ruin it.
    """

    dtype: CacheDtype
    granularity: Granularity = "token"
    clip: float | tuple[float, ...] = math.inf
    rope_dtype: RopeDtype = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in LIMITS or self.granularity not in GRANULARITIES:
            raise MlaError(f"latents cannot be stored as {self.dtype!r} with {self.granularity!r} scales")
        if self.rope_dtype not in ROPE_DTYPES:
            raise MlaError(f"rotary keys cannot be stored as {self.rope_dtype!r}")
        clips = self.clip if isinstance(self.clip, tuple) else (self.clip,)
        if isinstance(self.clip, tuple) and (self.group is None or not clips):
            raise MlaError(f"{len(clips)} ranges a latent: only int4 latents have groups with ranges of their own")
        for clip in clips:
            if not clip > 0 or (self.granularity == "static" and math.isinf(clip)):
                raise MlaError(f"a range of {clip} gives no scale for {self.granularity} {self.dtype} latents")

    @property
    def storage_dtype(self) -> torch.dtype:
        """Data type of the codes."""
        return STORAGE[self.dtype]

    @property
    def scale_dtype(self) -> torch.dtype:
        """Data type of the scales."""
        return torch.bfloat16 if self.dtype == "int4" else torch.float32

    @property
    def limit(self) -> float:
        """Largest code."""
        return LIMITS[self.dtype]

    @property
    def group(self) -> int | None:
        """Channels that share a scale; None: all of a latent."""
        return group_of(self.dtype)

    @property
    def rope(self) -> LatentQuantizer | None:
        """What quantises the rotary key; None: it stays in bfloat16."""
        return None if self.rope_dtype == "bfloat16" else LatentQuantizer(self.rope_dtype)

    def groups(self, width: int) -> int:
        """Scales of a latent of `width` channels, `G`."""
        return 1 if self.group is None else -(-width // self.group)

    def code_width(self, width: int) -> int:
        """Numbers in which the codes of `width` channels are stored."""
        return -(-width // 2) if self.dtype == "int4" else width

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of one latent."""
        return self.code_width(width) * self.storage_dtype.itemsize

    def scale_bytes(self, width: int) -> int:
        """Bytes of one set of stored scales: a token's, or a page's; static scales are not stored with the tokens."""
        return 0 if self.granularity == "static" else self.groups(width) * self.scale_dtype.itemsize

    def narrowed(self, width: int) -> LatentQuantizer:
        """The quantizer of the first `width` channels of the latents that this one is for."""
        return replace(self, clip=self.clip[: self.groups(width)]) if isinstance(self.clip, tuple) else self

    def amax(self, latent: Tensor, layer: int | None = None) -> Tensor:
        """Largest absolute value of each group.

        Args:
            latent: `[..., r]`, any float type; layer: whose they are, for the message.

        Returns:
            `[..., G]` float32.

        Raises:
            MlaError: the latent holds NaN or infinity (a broken model must not be hidden by a cast).
        """
        size = latent.float().abs()  # [..., r]
        if self.dtype == "int4":
            width, groups = latent.shape[-1], self.groups(latent.shape[-1])
            size = F.pad(size, (0, groups * GROUP - width)).unflatten(-1, (groups, GROUP))  # [..., G, GROUP]
            amax = size.amax(dim=-1)
        else:
            amax = size.amax(dim=-1, keepdim=True)
        if not bool(torch.isfinite(amax).all()):
            whose = "a latent holds" if layer is None else f"the latents of layer {layer} hold"
            raise MlaError(
                f"{whose} NaN or infinity and cannot be quantised",
                fix="check the weights (`mla inspect`), or run with --kv-dtype bf16 --dtype float32",
            )
        return amax

    def ranges(self, amax: Tensor) -> Tensor:
        """Largest absolute values that are stored unclipped, for groups whose largest ones are `amax` `[..., G]`."""
        clip = self._clip(amax)
        ceiling = clip.expand_as(amax) if self.granularity == "static" else torch.minimum(amax, clip)
        return ceiling.clamp(min=AMAX_FLOOR)

    def scales(self, amax: Tensor) -> Tensor:
        """Scales `[..., G]` in their stored type, for groups whose largest absolute values are `amax`."""
        exact = self.ranges(amax.float()) / self.limit
        if self.scale_dtype == torch.float32:
            return exact
        # The upper half of a float32 is a bfloat16: what the lower half holds is carried over, never cut.
        return ((exact.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32).to(self.scale_dtype)

    def encode(self, latent: Tensor, scales: Tensor) -> Tensor:
        """Codes `[..., code_width]` of latents `[..., r]` at `scales` `[..., G]`; what is beyond the range saturates."""
        return self._packed(self._steps(latent.float() / _spread(scales, latent.shape[-1])))

    def quantize(self, latent: Tensor, layer: int | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scales of latents. Zero latents give zero codes.

        Args:
            latent: `[..., r]`, any float type; with page granularity `[..., T, r]`, consecutive tokens from the start of a
                page on, written one after the other.

        Returns:
            Codes `[..., code_width]` in the storage type, scales `[..., G]` in theirs (with page granularity those that the
            token's page has in the end).

        Raises:
            MlaError: the latent holds NaN or infinity.
        """
        if self.granularity == "page":
            return self._quantized_pages(latent, layer)
        scales = self.scales(self.amax(latent, layer))
        return self.encode(latent, scales), scales

    def rounded(self, latent: Tensor, layer: int | None = None) -> Tensor:
        """Latents as they are read back, in the type they came in (see `quantize`)."""
        codes, scales = self.quantize(latent, layer)
        return decode(codes, scales, latent.shape[-1], latent.dtype)

    def clipped(self, latent: Tensor) -> int:
        """How many values of latents `[..., r]` are beyond the range. (A page's may be wider than its tokens' own.)"""
        reach = _spread(self.ranges(self.amax(latent)), latent.shape[-1])
        return int((latent.float().abs() > reach).sum())

    def fill_pages(
        self, codes: Tensor, scales: Tensor, latent: Tensor, first: Tensor, counts: Tensor, layer: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write tokens into pages, one after the other, so that the result does not depend on how many come at once.

        The first token of a page decides its scales. One that needs more range multiplies them by powers of two, up to `clip`,
        and the codes already there are divided by as much and rounded: whatever is within `clip` is never clipped.

        Args:
            codes: `[N, 16, code_width]` pages so far; scales: `[N, G]` theirs.
            latent: `[N, 16, r]` new latents in their places; what is elsewhere does not matter if it is finite.
            first: `[N]` place of each page's first new token; counts: `[N]` new tokens; both on the CPU.

        Returns:
            The pages and their scales afterwards.
        """
        width, places = latent.shape[-1], torch.arange(PAGE)
        fills = (places >= first[:, None]) & (places < (first + counts)[:, None])  # [N, 16]
        own = self.scales(self.amax(latent, layer))  # [N, 16, G]
        floor, most = (self.scales(torch.full_like(own[:, 0], reach, dtype=torch.float32)) for reach in (0.0, math.inf))
        taken, shrinks, current = own.clone(), [], scales
        rows = torch.arange(len(first))
        for n in range(int(counts.max()) if len(counts) else 0):
            place, active = (first + n).clamp(max=PAGE - 1), (n < counts).to(own.device)[:, None]
            mine = own[rows, place]  # [N, G]
            starts = (place == 0).to(own.device)[:, None]
            grown, shrink = _grown(current, mine, most, anew=starts | (current <= floor))
            current = torch.where(active, grown, current)
            shrinks.append(torch.where(active & ~starts, shrink, 1.0))  # [N, G]
            taken[rows, place] = current
        steps = _steps_of(codes, width)  # [N, 16, r]
        fresh = self._steps(latent.float() / _spread(taken, width))
        steps = torch.where(fills.to(own.device)[..., None], fresh, steps)
        grew = torch.stack(shrinks).flatten(1).lt(1).any(dim=1).tolist() if shrinks else []
        for n, shrink in enumerate(shrinks):
            if grew[n]:
                earlier = (places < (first + n)[:, None]).to(own.device)[..., None]  # [N, 16, 1]
                steps = torch.where(earlier, self._steps(steps * _spread(shrink, width)[:, None]), steps)
        return self._packed(steps), current

    def _quantized_pages(self, latent: Tensor, layer: int | None) -> tuple[Tensor, Tensor]:
        *batch, tokens, width = latent.shape
        pages = -(-tokens // PAGE)
        padded = F.pad(latent, (0, 0, 0, pages * PAGE - tokens)).reshape(-1, PAGE, width)  # [N, 16, r]
        counts = (tokens - PAGE * torch.arange(pages)).clamp(max=PAGE).repeat(math.prod(batch))  # [N]
        empty = torch.zeros(len(padded), PAGE, self.code_width(width), device=latent.device)
        codes, scales = self.fill_pages(
            empty.to(self.storage_dtype),
            torch.zeros(len(padded), self.groups(width), dtype=self.scale_dtype, device=latent.device),
            padded,
            torch.zeros_like(counts),
            counts,
            layer,
        )
        each = scales.repeat_interleave(PAGE, dim=0)
        return tuple(x.view(*batch, pages * PAGE, -1)[..., :tokens, :] for x in (codes, each))  # type: ignore[return-value]

    def _clip(self, like: Tensor) -> Tensor:
        """`[G]`, or `[1]` for all groups."""
        if isinstance(self.clip, float | int):
            return torch.tensor([self.clip], dtype=torch.float32, device=like.device)
        if len(self.clip) != like.shape[-1]:
            raise MlaError(f"{len(self.clip)} ranges for latents of {like.shape[-1]} groups")
        return torch.tensor(self.clip, dtype=torch.float32, device=like.device)

    def _steps(self, values: Tensor) -> Tensor:
        """Values in units of their scale, on the grid of the codes: float32."""
        # Clamped here: a bare cast wraps in int8, and past 448 what an FP8 cast gives depends on device and version.
        values = values.clamp(-self.limit, self.limit)
        # Half to even, on every device; FP8 has its own grid.
        return values.to(self.storage_dtype).float() if self.dtype == "fp8" else values.round()

    def _packed(self, steps: Tensor) -> Tensor:
        if self.dtype != "int4":
            return steps.to(self.storage_dtype)
        low, high = F.pad(steps, (0, steps.shape[-1] % 2)).to(torch.int8).unflatten(-1, (-1, 2)).unbind(dim=-1)
        return ((low & 15) | (high << 4)).view(torch.uint8)


def decode(codes: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Latents `[..., width]` in `dtype`, from codes as `LatentQuantizer` gives them and scales `[..., G]`."""
    return (_steps_of(codes, width) * _spread(scales, width)).to(dtype)


def _steps_of(codes: Tensor, width: int) -> Tensor:
    """Codes as float32 numbers, `[..., width]`."""
    if codes.dtype != torch.uint8:
        return codes.float()
    pairs = codes.view(torch.int8)
    # Shifting right carries the sign along.
    return torch.stack(((pairs << 4) >> 4, pairs >> 4), dim=-1).flatten(-2)[..., :width].float()


def _spread(scales: Tensor, width: int) -> Tensor:
    """What is one number a group, `[..., G]`, for every channel: `[..., width]`, or `[..., 1]` for a single group."""
    scales = scales.float()
    return scales if scales.shape[-1] == 1 else scales.repeat_interleave(GROUP, dim=-1)[..., :width]


def _grown(scales: Tensor, own: Tensor, most: Tensor, anew: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that also suit tokens that need `own`, none beyond `most`, and what the codes there are shrink by: `[N, G]`.

    `anew`: nothing but zeros so far, or what counts as such; `own` is taken as it is.
    """
    before = scales.double().clamp(min=1e-300)
    mantissa, exponent = torch.frexp(
        own.double() / before
    )  # own / before = mantissa * 2^exponent, mantissa in [1/2, 1)
    doublings = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(0, 1000)
    power = ((doublings.long() + 1023) << 52).view(torch.float64)  # exact, which exp2 need not be
    grown = torch.where(anew, own, torch.minimum((before * power).to(own.dtype), most))
    return grown, (before / grown.double()).clamp(max=1).float()
