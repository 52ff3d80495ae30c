"""Second moments that the conversion is fitted to, in float64, summed layer by layer over calibration tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.calibration.layerwise import Batches, LayerAt, Tick, run
from mla_cli.calibration.offload import Series, Workplace
from mla_cli.converters.distances import SEQUENCES, influence_by_distance, mean_turn
from mla_cli.model.attention import Record
from mla_cli.model.decoder import Decoder
from mla_cli.model.spec import LatentAttentionSpec, StandardAttentionSpec

# Eigenvalues of the Fisher factor are taken to this power: small ones rest on few tokens and come out too small.
TEMPER = 0.8
# A head that hardly moves its output on the text at hand counts for at least this share of the mean head.
LEAST_INFLUENCE = 1e-3


@dataclass(frozen=True)
class SourceStatistics:
    """What one standard attention layer sees.

    Attributes:
        input_moment: `[D + 1, D + 1]` mean of `x x^T`, `x` the normed input with a constant 1 appended.
        query_energy: `[H, n]` mean `|q_j|^2` per head and rotary frequency, times how far the head's scores move its output
            (`distances.influence_by_distance`, per query): an error of a key counts for what it does to the output.
        query_moment: `[H, d, d]` mean of `q q^T` before rotation.
        mean_turn: `[H, n]` complex, see `distances.mean_turn`; None without rotary embedding.
        tokens: how many tokens were seen.
    """

    input_moment: Tensor
    query_energy: Tensor
    query_moment: Tensor
    mean_turn: Tensor | None
    tokens: int


@dataclass(frozen=True)
class LatentStatistics:
    """What one latent layer sees, and how much the loss depends on each direction of its latent.

    Attributes:
        input_moment: mean of `x x^T` as above, on inputs that passed through the split layers before, each token weighted
            by `|g|`, `g` the gradient of the loss with respect to the latent. It is what keeps the first token exact, which
            most queries attend to: its gradient is worth hundreds of others.
        fisher: `[r, r]` mean of `g g^T / |g|`, tempered, with the trace of the Fisher information `E[g g^T]`, so that layers
            are in one unit, the loss. A token's weight `|g|^2` is shared out between the two Kronecker factors: with all of it
            in both, fifty tokens out of 24,000 decided most layers (docs/decisions/0002).
        tokens: how many tokens were seen.
    """

    input_moment: Tensor
    fisher: Tensor
    tokens: int


def second_moment(rows: Tensor) -> Tensor:
    """Sum of `x x^T` over rows `[N, D]`, in float64."""
    doubled = rows.double()
    return doubled.T @ doubled


def with_constant(rows: Tensor) -> Tensor:
    """`[N, D]` to `[N, D + 1]`: a constant 1 appended, so that a moment also holds the mean and the count."""
    return torch.cat((rows, rows.new_ones(rows.shape[0], 1)), dim=1)


class Sums:
    """Running sums of each layer: those of the layer at hand are in memory, the others where the workplace keeps them."""

    def __init__(self, workplace: Workplace, layers: int, fresh: Callable[[int], dict[str, Tensor]]) -> None:
        """Args: fresh: a layer's sums before anything was added, under names."""
        self._series: Series[dict[str, Tensor] | None] = Series(workplace.series())
        for _ in range(layers):
            self._series.append(None)
        self._fresh, self._index = fresh, -1
        self._sums: dict[str, Tensor] = {}

    def taken(self, layer: int) -> dict[str, Tensor]:
        """The sums of a layer, which are not kept any longer."""
        found = self.of(layer)
        self._series[layer], self._index, self._sums = None, -1, {}
        return found

    def of(self, layer: int) -> dict[str, Tensor]:
        """The sums of a layer, to add to in place."""
        if layer != self._index:
            if self._index >= 0:
                self._series[self._index] = self._sums
            self._sums = {}  # before the next ones come
            self._sums = self._series[layer] or self._fresh(layer)
            self._index = layer
        return self._sums


def source_statistics(
    frame: Decoder,
    layer_at: LayerAt,
    sequences: Tensor,
    lengths: Tensor,
    batches: Batches,
    *,
    tick: Tick = lambda: None,
) -> Series[SourceStatistics]:
    """Forward statistics of every layer of a source model."""
    specs = [s for s in frame.spec.attention if isinstance(s, StandardAttentionSpec)]
    hidden = frame.spec.hidden_size

    def fresh(layer: int) -> dict[str, Tensor]:
        s = specs[layer]
        return {
            "input": torch.zeros(hidden + 1, hidden + 1, dtype=torch.float64),
            "query": torch.zeros(s.num_heads, s.head_dim, s.head_dim, dtype=torch.float64),
            "look": torch.zeros(s.num_heads, sequences.shape[1], dtype=torch.float64),
        }

    sums = Sums(batches.workplace, len(specs), fresh)
    looked = [0] * len(specs)

    def observe(layer: int, record: Record, valid: Tensor) -> None:
        mine = sums.of(layer)
        few = SEQUENCES - looked[layer]
        if specs[layer].rotary is not None and few > 0:
            part = {name: record[name][:few] for name in ("q", "k", "v", "heads")}
            real = valid[:few]
            step = frame.begin_step(real.shape, lengths=real.sum(dim=1))
            found = influence_by_distance(part, step, specs[layer], real).cpu()
            mine["look"][:, : found.shape[1]] += found
            looked[layer] += len(part["q"])
        mine["input"] += second_moment(with_constant(record["x"][valid])).cpu()
        q = record["q"][valid].double().transpose(0, 1)  # [H, N, d]
        mine["query"] += (q.transpose(1, 2) @ q).cpu()

    run(frame, layer_at, sequences, lengths, batches, observe=observe, tick=tick)
    statistics: Series[SourceStatistics] = Series(batches.workplace.series())
    looked_at = int(lengths[:SEQUENCES].sum())  # tokens
    for index, spec in enumerate(specs):
        seen = sums.taken(index)
        tokens = seen["input"][-1, -1].clone()
        n = spec.rotary.dim // 2 if spec.rotary is not None else 0
        diagonal = (seen["query"] / tokens).diagonal(dim1=1, dim2=2)  # [H, d]
        energy = diagonal[:, :n] + diagonal[:, n : 2 * n]
        turn = mean_turn(spec.rotary, seen["look"]) if spec.rotary is not None else None
        influence = seen["look"].sum(dim=1, keepdim=True)  # [H, 1]
        if influence.any():
            energy = energy * influence.clamp(min=LEAST_INFLUENCE * influence.mean()) / looked_at
        found = SourceStatistics(seen["input"] / tokens, energy, seen["query"] / tokens, turn, int(tokens))
        statistics.append(found)
    return statistics


def latent_statistics(
    frame: Decoder,
    layer_at: LayerAt,
    sequences: Tensor,
    lengths: Tensor,
    batches: Batches,
    *,
    seed: int = 0,
    compute: torch.dtype = torch.float32,
    tick: Tick = lambda: None,
) -> Series[LatentStatistics]:
    """Forward and backward statistics of every layer of a latent model (a wide one, straight after the rotary split).

    Args:
        compute: type of the matrix products. What comes out are means over thousands of tokens: rounding is lost in them.
    """
    specs = [s for s in frame.spec.attention if isinstance(s, LatentAttentionSpec)]
    hidden = frame.spec.hidden_size

    def fresh(layer: int) -> dict[str, Tensor]:
        rank = specs[layer].kv_lora_rank
        return {
            "input": torch.zeros(hidden + 1, hidden + 1, dtype=torch.float64),
            "fisher": torch.zeros(rank, rank, dtype=torch.float64),
            "energy": torch.zeros((), dtype=torch.float64),
            "tokens": torch.zeros((), dtype=torch.float64),
        }

    sums = Sums(batches.workplace, len(specs), fresh)

    def observe(layer: int, record: Record, gradient: Tensor, valid: Tensor) -> None:
        mine = sums.of(layer)
        x, g = with_constant(record["x"][valid]).double(), gradient[valid].double()  # [N, D + 1], [N, r]
        root = g.norm(dim=1, keepdim=True).sqrt()
        mine["input"] += second_moment(x * root).cpu()
        mine["fisher"] += second_moment(g / root.clamp(min=1e-150)).cpu()
        mine["energy"] += float(g.square().sum())
        mine["tokens"] += len(g)

    run(frame, layer_at, sequences, lengths, batches, observe_gradient=observe, seed=seed, compute=compute, tick=tick)
    statistics: Series[LatentStatistics] = Series(batches.workplace.series())
    for layer in range(len(specs)):
        seen = sums.taken(layer)
        count = int(seen["tokens"])
        moment = seen["input"] / seen["input"][-1, -1].clamp(min=1e-300)
        trace = float(seen["energy"]) / max(1, count)
        statistics.append(LatentStatistics(moment, tempered(seen["fisher"], trace), count))
    return statistics


def tempered(moment: Tensor, trace: float, power: float = TEMPER) -> Tensor:
    """A second moment with its eigenvalues taken to a power, scaled to a trace; zeros where it is zero."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    values = (values.clamp(min=0) / values.amax().clamp(min=1e-300)).pow(power)
    return (vectors * (values * (trace / values.sum().clamp(min=1e-300)))) @ vectors.T
