"""What one layer's latents look like over all calibration text: their ranges, and how values spread below them.

Everything that is kept is a count or a maximum, so the result depends on the tokens alone: not on their order, and not on how
they were cut into batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_cli.checkpoint.kv_cache import REACH_QUANTILE
from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import PAGE
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec

# A float32's leading bits number its bin: exponent and the first bits of the mantissa. No range has to be assumed.
_MANTISSA_BITS = 23
_BIAS = 127
ROW_BITS = 4  # what a group reaches: 16 bins an octave, so its bin says it within 3 %
COLUMN_BITS = 5  # a value's share of that: 32 bins an octave
OCTAVES = 16  # smaller shares are one bin: under 1/500 of an int8 step
_FIRST_COLUMN = (_BIAS - OCTAVES) << COLUMN_BITS
COLUMNS = (OCTAVES << COLUMN_BITS) + 1  # the last one holds a share of exactly 1
QUANTILES = (0.5, REACH_QUANTILE, 0.99, 0.999)
T = TypeVar("T", covariant=True)
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LatentRange:
    """One layer's latents.

    Attributes:
        tokens: tokens seen; amax: largest absolute value of all; group_amax: of each group.
        token_amax: quantiles (see `QUANTILES`) of each token's largest absolute value, to the width of a bin.
        rows: `[R]` float64, the middle of each occupied bin of what a group reaches, ascending within a group.
        groups: `[R]` int64, the group of each row, ascending.
        counts: `[R, COLUMNS]` int64, values by their row and their share of what it reaches.
        rotary: the largest number that a rotary key holds at any position.
    """

    tokens: int
    amax: float
    group_amax: tuple[float, ...]
    token_amax: tuple[float, ...]
    rows: Tensor
    groups: Tensor
    counts: Tensor
    rotary: float = 0.0


class LatentObserver:
    """Watches the latents of one layer, as the cache stores them (after the latent norm).

    Nothing is kept per batch: small tensors that stay, allocated among large ones that go, would tear the heap into pieces.

    Args:
        layer: its index, for messages. group: channels that share a scale; None: all.
    """

    def __init__(self, layer: int, group: int | None = None) -> None:
        self.layer, self.group = layer, group
        self.tokens = 0
        self.rotary = 0.0
        self._group_amax: Tensor | None = None  # [G]
        self._sizes: dict[int, int] = {}
        self._counts: dict[int, Tensor] = {}

    def add(self, latents: Tensor, reach: Tensor | None = None) -> None:
        """Count latents, padding left out by the caller.

        Args:
            latents: `[n, r]`.
            reach: `[n, G]` what the scales of each token's groups are made for; None: the groups' own largest values.

        Raises:
            MlaError: NaN or infinity among them.
        """
        if not latents.shape[0]:
            return
        values = latents.detach().float().abs()  # [n, r]
        amax = grouped_amax(values, self.group)  # [n, G]
        if not bool(torch.isfinite(amax).all()):
            raise MlaError(
                f"the latents of layer {self.layer} hold NaN or infinity",
                fix="the weights are damaged or overflow: try --dtype float32, or check with `mla inspect`",
            )
        self.tokens += latents.shape[0]
        most = amax.amax(dim=0).cpu()
        self._group_amax = most if self._group_amax is None else torch.maximum(self._group_amax, most)
        for size, count in _counted(_bits(amax.amax(dim=-1)) >> (_MANTISSA_BITS - ROW_BITS)):
            self._sizes[size] = self._sizes.get(size, 0) + count
        reach = amax if reach is None else reach.float()
        groups, width = amax.shape[1], self.group or latents.shape[1]
        for index in range(groups):
            self._count(values[:, index * width : (index + 1) * width], reach[:, index], index, groups)

    def _count(self, values: Tensor, reach: Tensor, index: int, groups: int) -> None:
        """Count one group's values `[n, c]` by what the group reaches `[n]` and by their share of it."""
        found, inverse = torch.unique(_bits(reach) >> (_MANTISSA_BITS - ROW_BITS), return_inverse=True)  # [R], [n]
        # In place and in 32 bits: there are a billion values, and each pass over them takes as long as a matrix product.
        columns = _bits(values / reach.clamp(min=_SMALLEST)[:, None])  # [n, c]
        columns.bitwise_right_shift_(_MANTISSA_BITS - COLUMN_BITS).sub_(_FIRST_COLUMN).clamp_(0, COLUMNS - 1)
        cells = columns.add_((inverse * COLUMNS).int()[:, None]).flatten()
        counts = torch.bincount(cells, minlength=len(found) * COLUMNS).view(-1, COLUMNS).cpu()  # [R, COLUMNS]
        for size, count in zip(found.tolist(), counts, strict=True):
            key = size * groups + index
            if key in self._counts:
                self._counts[key] += count
            else:
                self._counts[key] = count.clone()

    def result(self) -> LatentRange:
        """What was seen so far (at least one token)."""
        assert self._group_amax is not None
        total, most = len(self._group_amax), self._group_amax.double()
        keys = sorted(self._counts, key=lambda key: (key % total, key))
        groups, bins = (torch.tensor(part) for part in ([key % total for key in keys], [key // total for key in keys]))
        top = _bits(self._group_amax) >> (_MANTISSA_BITS - ROW_BITS)
        # The uppermost bin ends at what was seen; a page may be made for more, up to a factor of two.
        rows = torch.where(bins == top[groups], torch.minimum(_middle(bins), most[groups]), _middle(bins))
        sizes = sorted(self._sizes)
        token_sizes = _middle(torch.tensor(sizes)).clamp(max=float(most.max()))
        return LatentRange(
            self.tokens,
            float(most.max()),
            tuple(most.tolist()),
            _quantiles(token_sizes, torch.tensor([self._sizes[size] for size in sizes])),
            rows,
            groups,
            torch.stack([self._counts[key] for key in keys]),
            self.rotary,
        )


def grouped_amax(values: Tensor, group: int | None) -> Tensor:
    """Largest absolute value of each group, `[..., r]` to `[..., G]`."""
    width = values.shape[-1]
    if group is None or group >= width:
        return values.abs().amax(dim=-1, keepdim=True)
    count = -(-width // group)
    return F.pad(values.abs(), (0, count * group - width)).unflatten(-1, (count, group)).amax(dim=-1)


def page_reach(latents: Tensor, valid: Tensor, group: int | None) -> Tensor:
    """What the scales of each token's page are made for in the end: `[B, T, r]` and `[B, T]` to `[B, T, G]`.

    As the cache fills pages: the first token that is not zero decides, and powers of two are added as others need them.
    """
    tokens = latents.shape[1]
    pages = -(-tokens // PAGE)
    own = grouped_amax(latents.float(), group) * valid[..., None]  # [B, T, G]
    own = F.pad(own, (0, 0, 0, pages * PAGE - tokens)).unflatten(1, (pages, PAGE))  # [B, P, 16, G]
    first = own.gather(2, (own > 0).int().argmax(dim=2, keepdim=True))  # [B, P, 1, G]
    doublings = (own.amax(dim=2, keepdim=True) / first.clamp(min=_SMALLEST)).clamp(min=1).log2().ceil()
    return (first * torch.exp2(doublings)).expand_as(own).flatten(1, 2)[:, :tokens]


class Watcher(Protocol):
    """What has seen some tokens of a layer."""

    layer: int
    tokens: int


class ResultWatcher(Watcher, Protocol[T]):
    """One that says what it has found."""

    def result(self) -> T:
        """What was found so far."""


def check_complete(observers: Sequence[Watcher], tokens: int) -> None:
    """Make sure that every layer has seen every token.

    Raises:
        MlaError: the layers that have not; their ranges would be guesses.
    """
    incomplete = [observer for observer in observers if observer.tokens != tokens]
    if incomplete:
        names = ", ".join(f"{observer.layer} ({observer.tokens:,})" for observer in incomplete)
        raise MlaError(
            f"not every layer has seen all {tokens:,} calibration tokens; layer (tokens seen): {names}",
            fix="nothing was written; please report this",
        )


def results_by_layer(watchers: Sequence[ResultWatcher[T]], spec: DecoderSpec, tokens: int) -> list[T | None]:
    """What was found of each layer once every one has seen every token (see `check_complete`); None without a latent."""
    latent = [isinstance(attention, LatentAttentionSpec) for attention in spec.attention]
    check_complete([watcher for watcher, used in zip(watchers, latent, strict=True) if used], tokens)
    return [watcher.result() if used else None for watcher, used in zip(watchers, latent, strict=True)]


def _bits(values: Tensor) -> Tensor:
    """The bit patterns of floats from 0, which rise with the values."""
    return values.contiguous().view(torch.int32)


def _middle(bins: Tensor) -> Tensor:
    edges = torch.stack((bins, bins + 1)).int() << (_MANTISSA_BITS - ROW_BITS)
    return edges.view(torch.float32).double().mean(dim=0)


def _counted(bins: Tensor) -> list[tuple[int, int]]:
    found, counts = torch.unique(bins, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def _quantiles(rows: Tensor, tokens: Tensor) -> tuple[float, ...]:
    """Quantiles of values that are `rows` `[R]`, ascending, `tokens` `[R]` times each."""
    below = tokens.cumsum(dim=0)
    ranks = torch.tensor([int(q * int(below[-1])) for q in QUANTILES])
    return tuple(rows[torch.searchsorted(below, ranks, right=True)].tolist())
