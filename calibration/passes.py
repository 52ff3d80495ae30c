"""Forward passes over calibration text with one layer in memory: one that watches latents, one that measures their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_cli.calibration.observers import LatentObserver, page_reach
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.calibration.variants import Change, Variant, unchanged
from mla_cli.checkpoint.engine_scales import rotary_reach
from mla_cli.checkpoint.load import ModelSource, load_frame, load_layer
from mla_cli.console import progress
from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import CacheDtype, Granularity, LatentQuantizer, group_of
from mla_cli.model.attention import Record, Step
from mla_cli.model.cache import Cache
from mla_cli.model.decoder import Decoder, DecoderLayer
from mla_cli.model.spec import LatentAttentionSpec

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
    layers: tuple[LayerCost, ...] = ()

    @property
    def change_percent(self) -> float:
        """By how many percent the perplexity is higher than unquantised."""
        return 100 * math.expm1(min(700.0, self.quantised_nll - self.plain_nll))


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

    def step(self, frame: Decoder, cache: Cache | None = None) -> Step:
        # With its own length each sequence is rotated as if it ran alone (dynamic scaling goes by the length).
        return frame.begin_step(self.tokens.shape, cache, self.lengths)


def watch_latents(
    model: ModelSource,
    texts: CalibrationTexts,
    *,
    dtype: torch.dtype,
    device: torch.device,
    variant: Variant | None = None,
    kv_dtype: CacheDtype = "int8",
    granularity: Granularity = "token",
) -> list[LatentObserver]:
    """Pass all text through all layers, an observer at each.

    Args:
        variant: layers to watch; None: as stored. kv_dtype, granularity: what the ranges are for: how channels share scales.
    """
    group = group_of(kv_dtype)
    observers = [LatentObserver(layer, group) for layer in range(model.spec.num_layers)]
    frame = load_frame(model, dtype=dtype, device=device)

    def run(layers: list[DecoderLayer], index: int, micro: _Micro, hidden: Tensor) -> Tensor:
        record: Record = {}
        out: Tensor = layers[0](hidden[0], micro.step(frame), record)
        if "latent" in record:
            latent, valid = record["latent"], micro.valid
            reach = page_reach(latent, valid, group)[valid] if granularity == "page" else None
            observers[index].add(latent[valid], reach)
            attention = model.spec.attention[index]
            assert isinstance(attention, LatentAttentionSpec)
            most = rotary_reach(record["k_rope"][valid], attention)
            observers[index].rotary = max(observers[index].rotary, most)
        return out[None]

    changes = [unchanged if variant is None else variant.change]
    for _ in _layer_by_layer(model, frame, texts, changes, run, title="watching latents"):
        pass
    return observers


class HeldOut:
    """Text that no range has seen, and the model's own hidden states at its end, which every comparison needs."""

    def __init__(
        self, model: ModelSource, texts: CalibrationTexts, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.texts, self.dtype, self.device = model, texts, dtype, device
        self._plain: list[Tensor] = []  # [N, T, D] a round

    def costs(
        self, variants: Sequence[Variant], *, layers: bool = False, title: str = "measuring"
    ) -> list[HeldOutCost]:
        """Run the text with latents as computed and as each variant caches them, through the cache that the generator uses.

        Args:
            layers: measure what the first variant does to each layer by itself, too.
        """
        model, known = self.model, bool(self._plain) and not layers
        frame = load_frame(model, dtype=self.dtype, device=self.device)
        sums = [_LayerSums() for _ in range(model.spec.num_layers if layers else 0)]
        caches: dict[tuple[int, int], Cache] = {}

        def cached(micro: _Micro, number: int) -> Step:
            variant, key = variants[number], (micro.rows.start, number)
            if key not in caches:
                caches[key] = Cache(
                    variant.spec, micro.tokens.shape[0], micro.width, dtype=frame.dtype, device=frame.device,
                    quantizers=variant.quantizers,
                )  # fmt: skip
            # Never advanced: each layer finds the cache empty and leaves its own part in it.
            return micro.step(frame, caches[key])

        def run(changed: list[DecoderLayer], index: int, micro: _Micro, hidden: Tensor) -> Tensor:
            states = list(hidden.unbind())  # [B, T, D] each
            out = []
            if not known:
                plain = states.pop(0)
                clean: Record = {}
                out.append(changed.pop(0)(plain, micro.step(frame), clean))
                if layers and "latent" in clean:
                    local: Record = {}
                    changed[0](plain, cached(micro, 0), local)
                    sums[index].add(clean, local, micro.valid, variants[0].quantizers[index])
            for number, (layer, state) in enumerate(zip(changed, states, strict=True)):
                out.append(layer(state, cached(micro, number)))
            return torch.stack(out)

        changes = [*([] if known else [unchanged]), *(variant.change for variant in variants)]
        totals = torch.zeros(len(variants), 3, dtype=torch.float64)
        count, rounds = 0, []
        for number, (micros, hidden) in enumerate(
            _layer_by_layer(model, frame, self.texts, changes, run, title=title)
        ):  # fmt: skip
            rounds.append(self._plain[number] if known else hidden[0].clone())
            states = torch.cat((rounds[-1][None], hidden if known else hidden[1:]))  # [1 + V, N, T, D]
            for micro in micros:
                for row in range(micro.tokens.shape[0]):
                    length = int(micro.lengths[row])
                    totals += _score(frame, states[:, micro.rows.start + row, :length], micro.tokens[row])
                    count += length - 1
            caches.clear()
        self._plain = rounds
        means = (totals / max(1, count)).tolist()
        found = tuple(layer.cost() for layer in sums)
        return [
            HeldOutCost(plain, quantised, kl, max(1, count), found if number == 0 else ())
            for number, (plain, quantised, kl) in enumerate(means)
        ]


Run = Callable[[list[DecoderLayer], int, _Micro, Tensor], Tensor]


def _layer_by_layer(
    model: ModelSource, frame: Decoder, texts: CalibrationTexts, changes: Sequence[Change], run: Run, *, title: str
) -> Iterator[tuple[list[_Micro], Tensor]]:
    """Advance hidden states `[streams, N, T, D]`, one stream for each way to change the layers; gives those of each round."""
    layers, device, streams = model.spec.num_layers, frame.device, len(changes)
    order = texts.lengths.argsort(descending=True, stable=True)  # alike lengths together: little padding
    sequences, lengths = texts.sequences[order], texts.lengths[order]
    # By the size of the text alone, so that rounds are the same whatever is compared.
    per_sequence = sequences.shape[1] * model.spec.hidden_size * frame.dtype.itemsize
    size = max(1, MEMORY // per_sequence)
    starts = range(0, len(lengths), size)
    ticks = iter(progress(range(len(starts) * layers), title, unit="layer"))
    for start in starts:
        micros = list(_micros(sequences[start : start + size], lengths[start : start + size], device))
        with torch.inference_mode():
            shape = (streams, len(lengths[start : start + size]), micros[0].width, model.spec.hidden_size)
            hidden = torch.zeros(shape, dtype=frame.dtype, device=device)
            for micro in micros:
                positions = micro.step(frame).positions
                hidden[:, micro.rows, : micro.width] = frame.embed(micro.tokens, positions)
            for index in range(layers):
                stored = load_layer(model, index, dtype=frame.dtype, device=device)
                changed = [change(index, stored) for change in changes]
                for micro in micros:
                    out = run([*changed], index, micro, hidden[:, micro.rows, : micro.width])  # [streams, B, T, D]
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


def _score(frame: Decoder, states: Tensor, tokens: Tensor) -> Tensor:
    """Summed losses of the first and of each other, and summed divergence, of one sequence `[1 + V, T, D]`: `[V, 3]`."""
    variants = states.shape[0] - 1
    total = torch.zeros(variants, 3, dtype=torch.float64)
    last = states.shape[1] - 1
    for begin in range(0, last, SCORED_AT_ONCE):
        end = min(begin + SCORED_AT_ONCE, last)
        labels = tokens[begin + 1 : end + 1]
        plain = F.log_softmax(frame.logits(frame.norm(states[0, begin:end])).float(), dim=-1)  # [t, V]
        loss = float(F.nll_loss(plain, labels, reduction="sum"))
        for number in range(variants):
            other = F.log_softmax(frame.logits(frame.norm(states[1 + number, begin:end])).float(), dim=-1)
            divergence = float(F.kl_div(other, plain, log_target=True, reduction="sum"))
            own = float(F.nll_loss(other, labels, reduction="sum"))
            total[number] += torch.tensor([loss, own, divergence], dtype=torch.float64)
    return total


class _LayerSums:
    """Squared errors and values of one layer, summed over batches."""

    def __init__(self) -> None:
        self.latent = [0.0, 0.0]
        self.heads = [0.0, 0.0]
        self.clipped = [0, 0]

    def add(self, clean: Record, local: Record, valid: Tensor, quantizer: LatentQuantizer | None) -> None:
        """Errors of `local`, whose latents were cached, against `clean`: `[B, T, ...]`, of which `valid` count."""
        heads = clean["heads"][valid].double()
        self.heads[0] += float((local["heads"][valid].double() - heads).square().sum())
        self.heads[1] += float(heads.square().sum())
        # Padding may share a page with the last tokens, and must not widen its range.
        latent = local["latent"].double() * valid[..., None]  # [B, T, r]
        self.latent[1] += float(latent.square().sum())
        self.clipped[1] += int(valid.sum()) * latent.shape[-1]
        if quantizer is None:
            return
        self.latent[0] += float((quantizer.rounded(latent) - latent).square().sum())
        self.clipped[0] += quantizer.clipped(latent)

    def cost(self) -> LayerCost:
        def root(pair: list[float]) -> float:
            return math.sqrt(pair[0] / pair[1]) if pair[1] else 0.0

        return LayerCost(root(self.latent), root(self.heads), self.clipped[0] / max(1, self.clipped[1]))
