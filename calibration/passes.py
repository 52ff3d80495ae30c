"""Forward passes over calibration text with one layer in memory: one that watches latents, one that measures their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_cli.calibration.observers import LatentObserver
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import ModelSource, load_frame, load_layer
from mla_cli.console import progress
from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.attention import Record, Step
from mla_cli.model.cache import Cache
from mla_cli.model.decoder import Decoder, DecoderLayer, begin_step

MEMORY = 1 << 30  # bytes for hidden states; more text goes in rounds, each with a pass over the layers
MICRO_TOKENS = 4096  # run at once
SCORED_AT_ONCE = 256  # tokens whose logits are held at a time


@dataclass(frozen=True)
class LayerCost:
    """What quantisation does to one layer that gets unquantised input.

    Attributes:
        latent_error: of the latents, root of the squared error over the squared values.
        attention_error: the same of the attention heads' outputs, which is what the model sees of it.
        clipped_share: values beyond the range, of all.
    """

    latent_error: float
    attention_error: float
    clipped_share: float


@dataclass(frozen=True)
class HeldOutCost:
    """Mean loss (nats a token) with and without quantisation, and mean KL(unquantised || quantised)."""

    plain_nll: float
    quantised_nll: float
    kl: float
    tokens: int
    layers: tuple[LayerCost, ...]


@dataclass(frozen=True)
class _Micro:
    """Some sequences: which rows, their tokens `[B, T]`, how many of these count `[B]` and which `[B, T]`."""

    rows: slice
    tokens: Tensor
    lengths: Tensor
    valid: Tensor

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def step(self, model: ModelSource, cache: Cache | None = None) -> Step:
        # With its own length each sequence is rotated as if it ran alone (dynamic scaling goes by the length).
        return begin_step(model.spec, self.tokens.shape, self.tokens.device, cache, self.lengths)


def watch_latents(
    model: ModelSource, texts: CalibrationTexts, *, dtype: torch.dtype, device: torch.device
) -> list[LatentObserver]:
    """Pass all text through all layers, an observer at each."""
    observers = [LatentObserver(layer) for layer in range(model.spec.num_layers)]
    frame = load_frame(model, dtype=dtype, device=device)

    def run(layer: DecoderLayer, index: int, micro: _Micro, hidden: Tensor) -> Tensor:
        record: Record = {}
        out: Tensor = layer(hidden, micro.step(model), record)
        if "latent" in record:
            observers[index].add(record["latent"][micro.valid])
        return out

    for _ in _layer_by_layer(model, frame, texts, run, streams=1, title="watching latents"):
        pass
    return observers


def measure_cost(
    model: ModelSource,
    texts: CalibrationTexts,
    quantizers: Sequence[LatentQuantizer | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> HeldOutCost:
    """Run text with latents as computed and as cached, through the cache that the generator uses."""
    frame = load_frame(model, dtype=dtype, device=device)
    sums = [_LayerSums() for _ in quantizers]
    caches: dict[int, Cache] = {}

    def run(layer: DecoderLayer, index: int, micro: _Micro, hidden: Tensor) -> Tensor:
        plain, quantised = hidden.unbind()  # [B, T, D]
        clean: Record = {}
        out = layer(plain, micro.step(model), clean)
        if micro.rows.start not in caches:
            caches[micro.rows.start] = frame.make_cache(micro.tokens.shape[0], micro.width, tuple(quantizers))
        cache = caches[micro.rows.start]  # never advanced: each layer finds it empty and leaves its own part in it
        local: Record = {}
        layer(plain, micro.step(model, cache), local)
        other = layer(quantised, micro.step(model, cache))
        if "latent" in clean:
            sums[index].add(clean, local, micro.valid, quantizers[index])
        return torch.stack((out, other))

    totals = [0.0, 0.0, 0.0]
    count = 0
    for micros, hidden in _layer_by_layer(model, frame, texts, run, streams=2, title="measuring on held-out text"):
        for micro in micros:
            for row in range(micro.tokens.shape[0]):
                length = int(micro.lengths[row])
                states = hidden[:, micro.rows.start + row, :length]  # [2, T, D]
                totals = [a + b for a, b in zip(totals, _score(frame, states, micro.tokens[row]), strict=True)]
                count += length - 1
        caches.clear()
    count = max(1, count)
    return HeldOutCost(
        totals[0] / count, totals[1] / count, totals[2] / count, count, tuple(layer.cost() for layer in sums)
    )


Run = Callable[[DecoderLayer, int, _Micro, Tensor], Tensor]


def _layer_by_layer(
    model: ModelSource, frame: Decoder, texts: CalibrationTexts, run: Run, *, streams: int, title: str
) -> Iterator[tuple[list[_Micro], Tensor]]:
    """Advance hidden states `[streams, N, T, D]` (`[N, T, D]` for one) by all layers; gives those of each round."""
    layers, device = model.spec.num_layers, frame.device
    order = texts.lengths.argsort(descending=True, stable=True)  # alike lengths together: little padding
    sequences, lengths = texts.sequences[order], texts.lengths[order]
    per_sequence = sequences.shape[1] * model.spec.hidden_size * frame.dtype.itemsize * streams
    size = max(1, MEMORY // per_sequence)
    starts = range(0, len(lengths), size)
    ticks = iter(progress(range(len(starts) * layers), title, unit="layer"))
    for start in starts:
        micros = list(_micros(sequences[start : start + size], lengths[start : start + size], device))
        with torch.inference_mode():
            shape = (streams, len(lengths[start : start + size]), micros[0].width, model.spec.hidden_size)
            hidden = torch.zeros(shape, dtype=frame.dtype, device=device)
            for micro in micros:
                hidden[:, micro.rows, : micro.width] = frame.embed(micro.tokens, micro.step(model).positions)
            for index in range(layers):
                layer = load_layer(model, index, dtype=frame.dtype, device=device)
                for micro in micros:
                    part = hidden[:, micro.rows, : micro.width]  # [streams, B, T, D]
                    out = run(layer, index, micro, part[0] if streams == 1 else part)
                    hidden[:, micro.rows, : micro.width] = out
                    if not bool(torch.isfinite(out).all(dim=-1)[..., micro.valid].all()):
                        raise MlaError(
                            f"layer {index} gives NaN or infinity on calibration text",
                            fix="the weights are damaged or overflow: try --dtype float32, or check with `mla inspect`",
                        )
                next(ticks, None)
            yield micros, hidden
    next(ticks, None)


def _micros(sequences: Tensor, lengths: Tensor, device: torch.device) -> Iterator[_Micro]:
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        end = min(len(lengths), start + max(1, MICRO_TOKENS // longest))
        counts = lengths[start:end]
        valid = torch.arange(longest) < counts[:, None]  # [B, T]
        yield _Micro(slice(start, end), sequences[start:end, :longest].to(device), counts, valid.to(device))
        start = end


def _score(frame: Decoder, states: Tensor, tokens: Tensor) -> tuple[float, float, float]:
    """Summed loss without and with quantisation, and summed divergence, of one sequence `[2, T, D]`."""
    plain, quantised, divergence = 0.0, 0.0, 0.0
    last = states.shape[1] - 1
    for begin in range(0, last, SCORED_AT_ONCE):
        end = min(begin + SCORED_AT_ONCE, last)
        scores = F.log_softmax(frame.logits(frame.norm(states[:, begin:end])).float(), dim=-1)  # [2, t, V]
        labels = tokens[begin + 1 : end + 1]
        plain += float(F.nll_loss(scores[0], labels, reduction="sum"))
        quantised += float(F.nll_loss(scores[1], labels, reduction="sum"))
        divergence += float(F.kl_div(scores[1], scores[0], log_target=True, reduction="sum"))
    return plain, quantised, divergence


class _LayerSums:
    """Squared errors and values of one layer, summed over batches."""

    def __init__(self) -> None:
        self.latent = [0.0, 0.0]
        self.heads = [0.0, 0.0]
        self.clipped = [0, 0]

    def add(self, clean: Record, local: Record, valid: Tensor, quantizer: LatentQuantizer | None) -> None:
        heads = clean["heads"][valid].double()
        self.heads[0] += float((local["heads"][valid].double() - heads).square().sum())
        self.heads[1] += float(heads.square().sum())
        latent = clean["latent"][valid]  # [n, r]
        self.latent[1] += float(latent.double().square().sum())
        self.clipped[1] += latent.numel()
        if quantizer is None:
            return
        exact = latent.double()
        self.latent[0] += float((quantizer.rounded(exact) - exact).square().sum())
        self.clipped[0] += quantizer.clipped(latent)

    def cost(self) -> LayerCost:
        def root(pair: list[float]) -> float:
            return math.sqrt(pair[0] / pair[1]) if pair[1] else 0.0

        return LayerCost(root(self.latent), root(self.heads), self.clipped[0] / max(1, self.clipped[1]))
