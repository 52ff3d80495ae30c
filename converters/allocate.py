"""Who gets what of the budget: rotary slots by what a frequency loses without one, ranks by one threshold over all layers.

Slots: a component of the keys at one frequency that no slot carries is read with its mean rotation, so what is lost of it is
`E|q|^2 E|k|^2 (1 - |mean turn|^2)`: fast frequencies of strong keys lose most, slow ones next to nothing.

Ranks: the Fisher spectra of all layers are in one unit, the loss. Keeping every channel above one threshold, over all layers
together, keeps the most for a given cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_cli.converters.factorize import Spectrum
from mla_cli.converters.rotary_split import component_energies
from mla_cli.converters.statistics import SourceStatistics
from mla_cli.model.attention import StandardAttention

# No layer gets less than this share of the even rank, nor more than this multiple: spectra are of second order, and far from
# the optimum (a layer left with almost nothing) they promise too much.
LEAST_SHARE, MOST_SHARE = 0.5, 1.75


def turned_energy(statistics: SourceStatistics) -> Tensor:
    """`[H, n]` energy of the queries that a missing rotation would spoil; all of it where no mean turn is known."""
    if statistics.mean_turn is None:
        return statistics.query_energy
    return statistics.query_energy * (1 - statistics.mean_turn.abs().square()).clamp(min=1e-4)


def slot_worth(attention: StandardAttention, statistics: SourceStatistics) -> Tensor:
    """`[n, G]` what the 1st, 2nd, ... slot of each frequency saves: mean square of the score errors that it takes away."""
    energies = component_energies(attention, statistics.input_moment, turned_energy(statistics))
    return energies * attention.spec.scale**2


def choose_slots(worths: Sequence[Tensor], count: int) -> tuple[tuple[int, ...], ...]:
    """Rotary slots of all layers, `count` of them on average: a strong frequency gets several, a weak or slow one none.

    Args:
        worths: `slot_worth` of each layer.

    Returns:
        For each layer the frequency of each slot, ascending.
    """
    flat = torch.cat([worth.flatten() for worth in worths])
    taken = torch.zeros(len(flat), dtype=torch.bool)
    taken[flat.argsort(descending=True, stable=True)[: count * len(worths)]] = True
    parts = taken.split([worth.numel() for worth in worths])
    return tuple(
        tuple((part.nonzero()[:, 0] // worth.shape[1]).tolist()) for part, worth in zip(parts, worths, strict=True)
    )


def choose_common_slots(worths: Sequence[Tensor], count: int) -> tuple[int, ...]:
    """The same for a form with one table of frequencies for all layers."""
    return choose_slots([torch.stack(tuple(worths)).sum(dim=0)], count)[0]


def choose_ranks(spectra: Sequence[Spectrum], budget: int, *, even: int) -> tuple[int, ...]:
    """Ranks of all layers that together are `budget`, by one threshold over their spectra.

    Args:
        even: the rank that every layer would have alike; bounds go by it.
    """
    least = max(1, int(LEAST_SHARE * even))
    ranks = [min(least, len(spectrum.energy)) for spectrum in spectra]
    most = [min(len(spectrum.energy), int(MOST_SHARE * even)) for spectrum in spectra]
    heap = [(-_energy(s, ranks[i]), i) for i, s in enumerate(spectra) if ranks[i] < most[i]]
    heapq.heapify(heap)
    left = budget - sum(ranks)
    while left > 0 and heap:
        _, index = heapq.heappop(heap)
        ranks[index] += 1
        left -= 1
        if ranks[index] < most[index]:
            heapq.heappush(heap, (-_energy(spectra[index], ranks[index]), index))
    return tuple(ranks)


def _energy(spectrum: Spectrum, channel: int) -> float:
    return float(spectrum.energy[channel])
