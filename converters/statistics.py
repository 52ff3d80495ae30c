"""Second moments that the conversion is fitted to, in float64, summed layer by layer over calibration tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.calibration.layerwise import Batches, LayerAt, Tick, run
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


def source_statistics(
    frame: Decoder,
    layer_at: LayerAt,
    sequences: Tensor,
    lengths: Tensor,
    batches: Batches,
    *,
    tick: Tick = lambda: None,
) -> list[SourceStatistics]:
    """Forward statistics of every layer of a source model."""
    specs = [s for s in frame.spec.attention if isinstance(s, StandardAttentionSpec)]
    hidden = frame.spec.hidden_size
    inputs = [torch.zeros(hidden + 1, hidden + 1, dtype=torch.float64) for _ in specs]
    queries = [torch.zeros(s.num_heads, s.head_dim, s.head_dim, dtype=torch.float64) for s in specs]
    looks = [torch.zeros(s.num_heads, sequences.shape[1], dtype=torch.float64) for s in specs]
    looked = [0] * len(specs)

    def observe(layer: int, record: Record, valid: Tensor) -> None:
        few = SEQUENCES - looked[layer]
        if specs[layer].rotary is not None and few > 0:
            part = {name: record[name][:few] for name in ("q", "k", "v", "heads")}
            real = valid[:few]
            step = frame.begin_step(real.shape, lengths=real.sum(dim=1))
            found = influence_by_distance(part, step, specs[layer], real).cpu()
            looks[layer][:, : found.shape[1]] += found
            looked[layer] += len(part["q"])
        inputs[layer] += second_moment(with_constant(record["x"][valid])).cpu()
        q = record["q"][valid].double().transpose(0, 1)  # [H, N, d]
        queries[layer] += (q.transpose(1, 2) @ q).cpu()

    run(frame, layer_at, sequences, lengths, batches, observe=observe, tick=tick)
    statistics = []
    looked_at = int(lengths[:SEQUENCES].sum())  # tokens
    for spec, moment, query, look in zip(specs, inputs, queries, looks, strict=True):
        tokens = moment[-1, -1].clone()
        n = spec.rotary.dim // 2 if spec.rotary is not None else 0
        diagonal = (query / tokens).diagonal(dim1=1, dim2=2)  # [H, d]
        energy = diagonal[:, :n] + diagonal[:, n : 2 * n]
        turn = mean_turn(spec.rotary, look) if spec.rotary is not None else None
        influence = look.sum(dim=1, keepdim=True)  # [H, 1]
        if influence.any():
            energy = energy * influence.clamp(min=LEAST_INFLUENCE * influence.mean()) / looked_at
        statistics.append(SourceStatistics(moment / tokens, energy, query / tokens, turn, int(tokens)))
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
) -> list[LatentStatistics]:
    """Forward and backward statistics of every layer of a latent model (a wide one, straight after the rotary split).

    Args:
        compute: type of the matrix products. What comes out are means over thousands of tokens: rounding is lost in them.
    """
    specs = [s for s in frame.spec.attention if isinstance(s, LatentAttentionSpec)]
    hidden = frame.spec.hidden_size
    inputs = [torch.zeros(hidden + 1, hidden + 1, dtype=torch.float64) for _ in specs]
    tokens = [0] * len(specs)
    fishers = [torch.zeros(s.kv_lora_rank, s.kv_lora_rank, dtype=torch.float64) for s in specs]
    energies = [0.0] * len(specs)

    def observe(layer: int, record: Record, gradient: Tensor, valid: Tensor) -> None:
        x, g = with_constant(record["x"][valid]).double(), gradient[valid].double()  # [N, D + 1], [N, r]
        root = g.norm(dim=1, keepdim=True).sqrt()
        inputs[layer] += second_moment(x * root).cpu()
        fishers[layer] += second_moment(g / root.clamp(min=1e-150)).cpu()
        energies[layer] += float(g.square().sum())
        tokens[layer] += len(g)

    run(frame, layer_at, sequences, lengths, batches, observe_gradient=observe, seed=seed, compute=compute, tick=tick)
    return [
        LatentStatistics(moment / moment[-1, -1].clamp(min=1e-300), tempered(fisher, energy / max(1, count)), count)
        for moment, fisher, energy, count in zip(inputs, fishers, energies, tokens, strict=True)
    ]


def tempered(moment: Tensor, trace: float, power: float = TEMPER) -> Tensor:
    """A second moment with its eigenvalues taken to a power, scaled to a trace; zeros where it is zero."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    values = (values.clamp(min=0) / values.amax().clamp(min=1e-300)).pow(power)
    return (vectors * (values * (trace / values.sum().clamp(min=1e-300)))) @ vectors.T
