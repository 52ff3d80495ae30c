"""Layers that stay unquantised: the worst first, as few as bring the whole model within what it may lose.

What a layer costs by itself is known to second order from the ranges (`clipping`); that gives the order. How many it takes is
measured on the whole model, by bisection, because costs do not add up: every step of that is a point of the trade between bytes
and loss. More layers in bfloat16 cost less, so the first number that is small enough is the least; each is measured, so what
is chosen holds even where that is not quite so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mla_cli.calibration.passes import HeldOutCost
from mla_cli.checkpoint.kv_cache import Quantizers


@dataclass(frozen=True)
class TradePoint:
    """Layers in bfloat16, the quantizers of the others, and what the whole model costs so."""

    layers: tuple[int, ...]
    quantizers: Quantizers
    cost: HeldOutCost


@dataclass(frozen=True)
class Fallback:
    """What to use, and the trade: everything that was tried on the way and both ends, by number of layers in bfloat16."""

    chosen: TradePoint
    trade: tuple[TradePoint, ...]

    @property
    def quantizers(self) -> Quantizers:
        """Those to use."""
        return self.chosen.quantizers


def fall_back(
    quantizers: Quantizers,
    losses: Sequence[float],
    all_quantised: HeldOutCost,
    max_loss: float | None,
    measure: Callable[[Quantizers], HeldOutCost],
    *,
    exact: bool = True,
) -> Fallback:
    """Leave layers unquantised until the perplexity is at most `max_loss` percent higher (None: leave none).

    Args:
        losses: what each layer costs by itself. all_quantised: what the whole costs with `quantizers`.
        measure: what the whole costs with others.
        exact: unquantised layers compute what they did before, to the bit. (Weights that were turned are rounded anew.)
    """
    used = [layer for layer, quantizer in enumerate(quantizers) if quantizer is not None]
    order = sorted(used, key=lambda layer: (-losses[layer], layer))
    tried = {0: TradePoint((), quantizers, all_quantised)}
    if order and max_loss is not None:  # the other end of the trade is known
        nothing = replace(all_quantised, quantised_nll=all_quantised.plain_nll, kl=0.0, layers=())
        tried[len(order)] = TradePoint(tuple(sorted(order)), without(quantizers, order), nothing)

    def small_enough(count: int) -> bool:
        if count not in tried:
            others = without(quantizers, order[:count])
            tried[count] = TradePoint(tuple(sorted(order[:count])), others, measure(others))
        return max_loss is None or tried[count].cost.change_percent <= max_loss

    low, high = 0, 0
    if not small_enough(0):
        high, step = len(order), 1
        while low + step < high:  # few layers are to blame, mostly: double before halving
            if small_enough(low + step):
                high = low + step
            else:
                low, step = low + step, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if small_enough(middle) else (middle, high)
        small_enough(high)
        if high == len(order) and not exact:
            tried[high] = replace(tried[high], cost=measure(tried[high].quantizers))
    return Fallback(tried[high], tuple(tried[count] for count in sorted(tried)))


def without(quantizers: Quantizers, layers: Sequence[int]) -> Quantizers:
    """The same, with these layers unquantised."""
    return tuple(None if index in layers else quantizer for index, quantizer in enumerate(quantizers))
