"""What a conversion report says in charts: plain data, drawn as SVG for the page and by matplotlib for the picture.

Null in a report is an infinite number where a loss is meant, and "not measured" where an optional figure is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mla_cli.report.values import mapping, number, numbers, objects, over, shown, span

POINTS = 400  # of a line: more than a screen has room for
LOG_FROM = 20.0  # largest value over smallest from which a linear axis would hide the small ones
FLOOR = 1e-9  # share of the largest value below which a logarithmic axis would show rounding only
SPECTRUM_FLOOR = 1e-6  # of spectra: nobody chooses a width that far down, and it would flatten the rest

# Blue, vermilion and green of Okabe and Ito's palette for all kinds of colour vision, dark enough for white ground (the page
# lightens them on dark ground). Shapes and dashes tell the lines apart too.
PALETTE = ("#0072b2", "#c44e00", "#00805c")
QUIET, GRID = "#9aa3ad", "#dfe3e8"

STAGES = {
    "ppl_source": "source",
    "ppl_rope_split": "rotary split",
    "ppl_closed_form": "closed form",
    "ppl_compensated": "compensated",
    "ppl_final": "final",
}


@dataclass(frozen=True)
class Series:
    """A line, or the bars of one colour. `y` is None where the number is infinite or unknown: a gap.

    `quiet` lines are the background of the others, without a colour of their own and a place in the legend.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    quiet: bool = False


@dataclass(frozen=True)
class Chart:
    """One plot.

    Attributes:
        kind: `lines` over numbers, `stacked` columns over numbers, `bars` to the right, one a category.
        alt: what the plot shows, in words, for who does not see it.
        categories, labels: of `bars`: what each bar is, and what is written at its end.
        log: the axis of the values is logarithmic; bars are dots then, because their length would mean nothing.
        reference: a named value to compare with.
        marks: points on lines, `(x, y)`, that stand for what the conversion chose.
    """

    key: str
    title: str
    kind: Literal["lines", "stacked", "bars"]
    x_label: str
    y_label: str
    alt: str
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    log: bool = False
    whole_x: bool = False
    reference: tuple[str, float] | None = None
    marks: tuple[tuple[float, float], ...] = ()
    mark_name: str = ""
    note: str = ""


def charts(report: Mapping[str, Any]) -> list[Chart]:
    """The charts of a report, without those whose figures it lacks."""
    layers = objects(report.get("layers"))
    healing = mapping(report.get("healing"))
    found = [
        _stages(mapping(report.get("heldout"))),
        _errors(layers),
        _widths(layers),
        _spectra(layers),
        _healing(healing),
        _gains(healing),
        _strengths(objects(report.get("latent_strength")), mapping(report.get("heldout"))),
        _objectives(objects(report.get("objectives")), mapping(report.get("heldout"))),
        _trade(mapping(report.get("calibration_kv"))),
        _seconds(mapping(report.get("seconds"))),
    ]
    return [chart for chart in found if chart is not None]


def stages(heldout: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name and perplexity of every stage that was measured, in the order they ran; unknown stages go before the last."""
    last = "ppl_final"
    known = [key for key in STAGES if key in heldout and key != last]
    others = [key for key in heldout if key.startswith("ppl_") and key not in STAGES]
    order = [*known, *others, *([last] if last in heldout else [])]
    return [(STAGES.get(key) or key.removeprefix("ppl_").replace("_", " "), heldout[key]) for key in order]


def spectrum_points(energy: Sequence[float], *, keep: int | None = None, at_most: int = 64) -> dict[str, list[float]]:
    """`layers[i].spectrum` of a report: the loss left when the first `rank` channels are kept, at some ranks.

    Args:
        energy: what each channel is worth, descending. keep: a rank to have among the points, the chosen one.
    """
    left = [0.0] * (len(energy) + 1)
    for index in range(len(energy) - 1, -1, -1):  # small ones first: they would vanish in a large sum
        left[index] = left[index + 1] + float(energy[index])
    wanted = {round(i * len(energy) / max(1, at_most - 2)) for i in range(at_most - 1)}
    ranks = sorted({rank for rank in wanted | {keep or 0} if 0 <= rank <= len(energy)})
    return {"rank": [float(rank) for rank in ranks], "loss": [left[rank] for rank in ranks]}


def _stages(heldout: Mapping[str, Any]) -> Chart | None:
    found = stages(heldout)
    source = heldout.get("ppl_source")
    labels = [shown(value) if name == "source" else over(value, source) for name, value in found]
    return _bars(
        "stages", "Perplexity after each stage", "perplexity on held-out text", found, labels,
        reference=source, reference_name="source",
    )  # fmt: skip


def _objectives(found: list[Mapping[str, Any]], heldout: Mapping[str, Any]) -> Chart | None:
    source = heldout.get("ppl_source")
    values = [(str(row.get("objective", "?")), row.get("perplexity")) for row in found]
    labels = [over(value, source) for _, value in values]
    return _bars(
        "objectives", "Objectives compared", "perplexity on held-out text", values, labels,
        reference=source, reference_name="source",
    )  # fmt: skip


def _seconds(seconds: Mapping[str, Any]) -> Chart | None:
    found = [(name.replace("_", " "), value) for name, value in seconds.items() if name != "total"]
    known = [(name, value) for name, value in found if number(value) is not None]
    return _bars("seconds", "Time of each stage", "time (s)", known, [f"{shown(value)} s" for _, value in known])


def _bars(
    key: str,
    title: str,
    unit: str,
    found: list[tuple[str, Any]],
    labels: list[str],
    *,
    reference: object = None,
    reference_name: str = "",
) -> Chart | None:
    if not found:
        return None
    values = [number(value) for _, value in found]
    known = [value for value in values if value is not None]
    base = number(reference)
    log = bool(known) and min(known) > 0 and max(known) > LOG_FROM * min(known) and key != "seconds"
    return Chart(
        key, title, "bars", unit, "",
        alt="; ".join(f"{name}: {label}" for (name, _), label in zip(found, labels, strict=True)),
        series=(Series(unit, tuple(map(float, range(len(found)))), tuple(values)),),
        categories=tuple(name for name, _ in found),
        labels=tuple(labels),
        log=log,
        reference=(reference_name, base) if base is not None else None,
    )  # fmt: skip


def _errors(layers: list[Mapping[str, Any]]) -> Chart | None:
    kinds = (
        ("rope_split_error", "rotary split"),
        ("factorization_error", "factorisation"),
        ("healed_error", "after healing"),
    )
    found = [(name, [number(layer.get(key)) for layer in layers]) for key, name in kinds]
    found = [(name, values) for name, values in found if any(value is not None for value in values)]
    if not found:
        return None
    series, log, note = _scaled([(name, list(range(len(values))), values) for name, values in found], log=True)
    return Chart(
        "errors", "Error of each layer", "lines", "layer", "share that is lost",
        alt="; ".join(f"{name}: {_range_over_layers(values)}" for name, values in found),
        series=series, log=log, whole_x=True, note=note,
    )  # fmt: skip


def _widths(layers: list[Mapping[str, Any]]) -> Chart | None:
    kinds = (("kv_lora_rank", "latent (kv_lora_rank)"), ("qk_rope_head_dim", "rotary key (qk_rope_head_dim)"))
    columns = tuple(map(float, range(len(layers))))
    found = [(name, tuple(number(layer.get(key)) or 0.0 for layer in layers)) for key, name in kinds]
    if not any(any(values) for _, values in found):
        return None
    return Chart(
        "widths", "Cache of each layer", "stacked", "layer", "cached numbers a token",
        alt="; ".join(f"{name}: {span(values)}" for name, values in found),
        series=tuple(Series(name, columns, values) for name, values in found), whole_x=True,
    )  # fmt: skip


def _spectra(layers: list[Mapping[str, Any]]) -> Chart | None:
    found: list[tuple[int, list[float], list[float | None], float | None]] = []
    for index, layer in enumerate(layers):
        spectrum = mapping(layer.get("spectrum"))
        points = [
            (rank, loss)
            for rank, loss in zip(numbers(spectrum.get("rank")), numbers(spectrum.get("loss")), strict=False)
            if rank is not None
        ]
        if any(loss for _, loss in points):
            chosen = number(layer.get("fitted_rank", layer.get("kv_lora_rank")))
            found.append((index, [rank for rank, _ in points], [loss for _, loss in points], chosen))
    if not found:
        return None
    kept = [(_at(ranks, losses, chosen), index) for index, ranks, losses, chosen in found]
    by_loss = [index for _, index in sorted(kept, key=lambda pair: (pair[0] or 0.0, pair[1]))]
    named = {by_loss[len(by_loss) // 2]: "median", by_loss[0]: "least lost", by_loss[-1]: "most lost"}
    floor = SPECTRUM_FLOOR * max(loss for _, _, losses, _ in found for loss in losses if loss is not None)
    cut = [
        (f"layer {index}", ranks, [None if loss is None or loss < floor else loss for loss in losses])
        for index, ranks, losses, _ in found
    ]
    series, log, _ = _scaled(cut, log=True)
    series = tuple(
        Series(f"{line.name}: {named[index]}" if index in named else line.name, line.x, line.y, index not in named)
        for line, (index, *_) in zip(series, found, strict=True)
    )
    drawn = [(index, line, chosen) for line, (index, _, _, chosen) in zip(series, found, strict=True) if index in named]
    marks = [(chosen, _at(line.x, line.y, chosen)) for _, line, chosen in drawn if chosen is not None]
    lost = {index: value for value, index in kept}
    return Chart(
        "spectra", "Loss left by latent width", "lines", "latent channels kept", "loss left (objective's unit)",
        alt="loss left at the chosen width: "
        + "; ".join(f"layer {index}, {named[index]}: {shown(lost[index], 'unknown')}" for index in sorted(named)),
        # The background first, so that it lies under the named lines.
        series=tuple(sorted(series, key=lambda line: not line.quiet)),
        log=log, marks=tuple((x, y) for x, y in marks if y is not None), mark_name="chosen width",
        note="Grey: the other layers." if len(found) > len(named) else "",
    )  # fmt: skip


def _healing(healing: Mapping[str, Any]) -> Chart | None:
    curve = [point for point in objects(healing.get("curve")) if number(point.get("minutes")) is not None]
    curve.sort(key=lambda point: float(point["minutes"]))
    minutes = [float(point["minutes"]) for point in curve]
    kinds = (("train_kl", "training text"), ("heldout_kl", "held-out text"))
    found = [(name, [number(point.get(key)) for point in curve]) for key, name in kinds]
    found = [(name, values) for name, values in found if any(value is not None for value in values)]
    if not found:
        return None
    # Held-out text is measured at some steps only: its line joins what was measured.
    lines = [
        (name, [m for m, y in zip(minutes, values, strict=True) if y is not None], [y for y in values if y is not None])
        for name, values in found
    ]
    series, log, note = _scaled([(name, xs, [*ys]) for name, xs, ys in lines])
    words = []
    for name, values in found:
        known = [value for value in values if value is not None]
        words.append(
            f"{name}: {shown(known[0])} at the start, {shown(min(known))} at best, {shown(known[-1])} at the end"
        )
    return Chart(
        "healing", "Divergence while healing", "lines", "time (minutes)", "KL to the source (nats a token)",
        alt="; ".join(words), series=series, log=log, note=note,
    )  # fmt: skip


def _gains(healing: Mapping[str, Any]) -> Chart | None:
    gains = numbers(healing.get("gains"))
    if not any(gain is not None for gain in gains):
        return None
    return Chart(
        "gains", "Learned gain of each layer", "lines", "layer", "gain on the latent",
        alt=_range_over_layers(gains),
        series=(Series("gain", tuple(map(float, range(len(gains)))), tuple(gains)),),
        whole_x=True, reference=("unchanged", 1.0),
    )  # fmt: skip


def _strengths(found: list[Mapping[str, Any]], heldout: Mapping[str, Any]) -> Chart | None:
    points = sorted((share, number(row.get("perplexity"))) for row in found if (share := number(row.get("strength"))))
    if not any(value is not None for _, value in points):
        return None
    shares = [100 * share for share, _ in points]
    series, log, note = _scaled([("this checkpoint", shares, [value for _, value in points])])
    base = number(found[0].get("source_perplexity")) or number(heldout.get("ppl_source"))
    return Chart(
        "strength", "Perplexity by share of the latent read", "lines", "share of the latent channels (%)",
        "perplexity on held-out text",
        alt="; ".join(f"{share:.3g} %: {shown(value)}" for share, (_, value) in zip(shares, points, strict=True)),
        series=series, log=log, note=note, reference=("source", base) if base else None,
    )  # fmt: skip


def _trade(calibration: Mapping[str, Any]) -> Chart | None:
    """What each number of unquantised layers costs in bytes, and gains."""
    points = [
        (int(size), number(row.get("ppl_change_percent")), bool(row.get("chosen")))
        for row in objects(calibration.get("trade"))
        if (size := number(row.get("bytes_per_token"))) is not None
    ]
    points.sort(key=lambda point: point[0])
    if len(points) < 2 or not any(change is not None for _, change, _ in points):
        return None
    most = number(calibration.get("max_loss_percent"))
    series = Series("quantised", tuple(float(size) for size, _, _ in points), tuple(change for _, change, _ in points))
    return Chart(
        "trade", "What the cache's bytes buy", "lines", "cache (bytes a token, all layers)", "perplexity over unquantised (%)",
        alt="; ".join(f"{size:,} bytes: {shown(change)} %" for size, change, _ in points),
        series=(series,), whole_x=True,
        reference=("most allowed", most) if most is not None else None,
        marks=tuple((float(size), change) for size, change, chosen in points if chosen and change is not None),
        mark_name="chosen",
    )  # fmt: skip


def _scaled(
    lines: list[tuple[str, list[Any], list[float | None]]], *, log: bool | None = None
) -> tuple[tuple[Series, ...], bool, str]:
    """Series ready to draw, whether the axis is logarithmic, and what a reader must know about that."""
    values = [value for _, _, ys in lines for value in ys if value is not None]
    positive = [value for value in values if value > 0]
    spread = max(positive) / min(positive) if positive else 1.0
    log = bool(positive) and min(values) >= 0 and (spread > LOG_FROM if log is None else log and spread > 1)
    floor = max(positive) * FLOOR if log else -math.inf
    clamped = log and min(values) < floor
    series = tuple(
        _thinned(Series(name, tuple(map(float, xs)), tuple(None if y is None else max(y, floor) for y in ys)))
        for name, xs, ys in lines
    )
    note = f"Values below {floor:.1g} are drawn there. " if clamped else ""
    if any(value is None for _, _, ys in lines for value in ys):
        note += "Gaps: infinite, or not measured. "
    return series, log, note


def _thinned(line: Series) -> Series:
    if len(line.x) <= POINTS:
        return line
    places = sorted({round(i * (len(line.x) - 1) / (POINTS - 1)) for i in range(POINTS)})
    return Series(line.name, tuple(line.x[i] for i in places), tuple(line.y[i] for i in places), line.quiet)


def _at(xs: Sequence[float], ys: Sequence[float | None], place: float | None) -> float | None:
    """The value of a line at `place`; between its points as a logarithmic axis draws it, where both are positive."""
    known = [(x, y) for x, y in zip(xs, ys, strict=False) if y is not None]
    if place is None or not known or not known[0][0] <= place <= known[-1][0]:
        return None
    (x0, y0) = max((point for point in known if point[0] <= place), key=lambda point: point[0])
    (x1, y1) = min((point for point in known if point[0] >= place), key=lambda point: point[0])
    part = 0.0 if x1 == x0 else (place - x0) / (x1 - x0)
    return y0 * (y1 / y0) ** part if min(y0, y1) > 0 else y0 + (y1 - y0) * part


def _range_over_layers(values: Sequence[float | None]) -> str:
    known = [(value, index) for index, value in enumerate(values) if value is not None]
    (least, where), (most, place) = min(known), max(known)
    if len(known) == 1:
        return f"{shown(least)} in layer {where}"
    return f"from {shown(least)} in layer {where} to {shown(most)} in layer {place}"
