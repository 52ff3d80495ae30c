"""A chart as inline SVG: colours come from the page's style sheet, so that one drawing serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from mla_cli.report.charts import GRID, PALETTE, QUIET, Chart, Series
from mla_cli.report.values import shown

WIDTH = 440  # narrow, so that its letters stay readable where a phone shrinks it
PLOT_HEIGHT = 210
RIGHT, TOP, BOTTOM = 14, 10, 46
LETTER = 7.1  # mean width of a letter at the font size of the style sheet
LEGEND_ROW, BAR_ROW = 18, 30
LONGEST_CATEGORY = 22
COLOURS = len(PALETTE)

STYLE = (
    f":root {{ --c0: {PALETTE[0]}; --c1: {PALETTE[1]}; --c2: {PALETTE[2]}; --quiet: {QUIET}; --grid: {GRID}; }}"
    + """
@media (prefers-color-scheme: dark) {
  :root { --c0: #56b4e9; --c1: #ff9a4d; --c2: #2ccf9f; --quiet: #5d6671; --grid: #343b44; }
}
svg.chart { width: 100%; height: auto; display: block; font-size: 13px; }
svg.chart text { fill: currentColor; }
svg.chart .axis { stroke: currentColor; stroke-width: 1; fill: none; }
svg.chart .grid { stroke: var(--grid); stroke-width: 1; }
svg.chart .reference { stroke: currentColor; stroke-width: 1.5; stroke-dasharray: 2 4; fill: none; }
svg.chart .mark { stroke: currentColor; stroke-width: 2; fill: none; }
svg.chart .l0, svg.chart .l1, svg.chart .l2, svg.chart .quiet { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg.chart .l0 { stroke: var(--c0); }
svg.chart .l1 { stroke: var(--c1); stroke-dasharray: 7 3; }
svg.chart .l2 { stroke: var(--c2); stroke-dasharray: 2 3; }
svg.chart .quiet { stroke: var(--quiet); stroke-width: 1; opacity: 0.55; }
svg.chart .f0 { fill: var(--c0); }
svg.chart .f1 { fill: var(--c1); }
svg.chart .f2 { fill: var(--c2); }
"""
)

Place = Callable[[float], float]


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element with a title and a description in words."""
    drawn, height = _bars(chart) if chart.kind == "bars" else _plot(chart)
    name = f"chart-{chart.key}"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(chart.title)}</title><desc id="{name}-desc">{escape(chart.alt)}</desc>'
        f"{drawn}</svg>"
    )


def ticks(low: float, high: float, log: bool, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        step = max(1, math.ceil((last - first) / (count + 1)))
        found = [10.0**e for e in range(first, last + 1, step)]
        if last - first <= 2:
            found = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    else:
        rough = (high - low) / count or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step_size = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        start = math.ceil(low / step_size - 1e-9)
        found = [(start + i) * step_size for i in range(int((high - low) / step_size + 1e-9) + 1)]
    slack = 1e-9 * max(abs(low), abs(high))
    return [value for value in found if low - slack <= value <= high + slack]


def _plot(chart: Chart) -> tuple[str, float]:
    """Lines or stacked columns over numbers, the legend above."""
    legend, legend_height = _legend(chart)
    top = TOP + legend_height
    bottom = top + PLOT_HEIGHT
    xs = [x for line in chart.series for x in line.x]
    low_x, high_x = min(xs), max(xs)
    if chart.kind == "stacked" or low_x == high_x:
        low_x, high_x = low_x - 0.5, high_x + 0.5
    low, high = _range(chart)
    y_ticks = ticks(low, high, chart.log)
    left = 26 + LETTER * max(len(shown(value)) for value in y_ticks or [0.0])
    x_at = _scale(low_x, high_x, left, WIDTH - RIGHT, False)
    y_at = _scale(low, high, bottom, top, chart.log)

    parts = [legend]
    for value in y_ticks:
        y = y_at(value)
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(left - 5, y + 4, shown(value), "end"))
    for value in ticks(low_x, high_x, False):
        if not chart.whole_x or value == round(value):
            parts.append(_text(x_at(value), bottom + 16, f"{value:g}", "middle"))
    parts.append(f'<path class="axis" d="M{left:.1f} {top}V{bottom}H{WIDTH - RIGHT}"/>')
    parts.append(_text((left + WIDTH - RIGHT) / 2, bottom + 36, chart.x_label, "middle"))
    middle = (top + bottom) / 2
    parts.append(
        f'<text text-anchor="middle" transform="translate(12 {middle:.1f}) rotate(-90)">{escape(chart.y_label)}</text>'
    )
    parts += _columns(chart, x_at, y_at) if chart.kind == "stacked" else _lines(chart, x_at, y_at)
    if chart.reference:
        parts.append(f'<path class="reference" d="M{left:.1f} {y_at(chart.reference[1]):.1f}H{WIDTH - RIGHT}"/>')
    parts += [f'<circle class="mark" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="5"/>' for x, y in chart.marks]
    return "".join(parts), bottom + BOTTOM


def _lines(chart: Chart, x_at: Place, y_at: Place) -> list[str]:
    parts, colour = [], 0
    for line in chart.series:
        title = f"<title>{escape(line.name)}</title>"
        kind = "quiet" if line.quiet else f"l{colour % COLOURS}"
        parts += [f'<path class="{kind}" d="{run}">{title}</path>' for run in _runs(line, x_at, y_at)]
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        if not line.quiet:
            # A shape at every point would hide a long line; a single point would be no line at all.
            every = max(1, len(points) // 16)
            parts += [
                _shape(colour, x_at(x), y_at(y), f"{line.name}: {x:g}, {shown(y)}") for x, y in points[:: every or 1]
            ]
            colour += 1
    return parts


def _runs(line: Series, x_at: Place, y_at: Place) -> list[str]:
    """The stretches between the gaps of a line, as path data."""
    runs: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            runs.append([])
        else:
            runs[-1].append(f"{x_at(x):.1f} {y_at(y):.1f}")
    return ["M" + "L".join(run) for run in runs if len(run) > 1]


def _columns(chart: Chart, x_at: Place, y_at: Place) -> list[str]:
    width = (x_at(1.0) - x_at(0.0)) * 0.8
    parts = []
    for place, x in enumerate(chart.series[0].x):
        below = 0.0
        for colour, part in enumerate(chart.series):
            value = part.y[place] or 0.0
            top, base = y_at(below + value), y_at(below)
            parts.append(
                f'<rect class="f{colour % COLOURS}" x="{x_at(x) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, base - top):.1f}"><title>layer {x:g}: {escape(part.name)} {shown(value)}</title></rect>'
            )
            below += value
    return parts


def _bars(chart: Chart) -> tuple[str, float]:
    """Bars to the right, one a category, with their values at the end; dots on a logarithmic axis."""
    legend, legend_height = _legend(chart)
    top = TOP + legend_height
    names = [_short(name) for name in chart.categories]
    left = 10 + LETTER * max(len(name) for name in names)
    room = 8 + LETTER * max(len(label) for label in chart.labels)
    bottom = top + BAR_ROW * len(names)
    low, high = _range(chart)
    x_at = _scale(low, high, left, max(left + 60, WIDTH - RIGHT - room), chart.log)
    parts = [legend]
    for tick in ticks(low, high, chart.log, 4):
        parts.append(f'<path class="grid" d="M{x_at(tick):.1f} {top}V{bottom}"/>')
        parts.append(_text(x_at(tick), bottom + 16, shown(tick), "middle"))
    for row, (whole, name, label) in enumerate(zip(chart.categories, names, chart.labels, strict=True)):
        y, value = top + BAR_ROW * (row + 0.5), chart.series[0].y[row]
        # What is infinite has no bar; its word must not lie on the line of the reference.
        start = x_at(chart.reference[1]) if chart.reference else left
        end = start if value is None else x_at(value)
        parts.append(
            f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}<title>{escape(whole)}</title></text>'
        )
        if value is not None and chart.log:
            parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{end:.1f}"/>')
            parts.append(_shape(0, end, y, f"{whole}: {label}"))
        elif value is not None:
            parts.append(
                f'<rect class="f0" x="{left:.1f}" y="{y - 9:.1f}" width="{max(0.0, end - left):.1f}" height="18"/>'
            )
        parts.append(_text(end + 8, y + 4, label, "start"))
    if chart.reference:
        parts.append(f'<path class="reference" d="M{x_at(chart.reference[1]):.1f} {top}V{bottom}"/>')
    parts.append(f'<path class="axis" d="M{left:.1f} {top}V{bottom}H{WIDTH - RIGHT}"/>')
    parts.append(_text((left + WIDTH - RIGHT) / 2, bottom + 36, chart.x_label, "middle"))
    return "".join(parts), bottom + BOTTOM


def _range(chart: Chart) -> tuple[float, float]:
    """From where to where the axis of the values goes."""
    if chart.kind == "stacked":
        sums = (sum(part.y[i] or 0.0 for part in chart.series) for i in range(len(chart.series[0].y)))
        return 0.0, max(max(sums), 1e-12) * 1.05
    values = [y for line in chart.series for y in line.y if y is not None]
    values += [chart.reference[1]] if chart.reference else []
    values = values or [1.0]
    low, high = min(values), max(values)
    if chart.log and low > 0:
        return (low / 1.2, high * 1.2) if high > low else (low / 2, high * 2)
    if chart.kind == "bars":
        return min(0.0, low), max(high, 1e-12) * 1.02
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.3 * high else low - margin), high + margin


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Place:
    if log:
        low, high = math.log10(low), math.log10(high)
    factor = (end - start) / (high - low)
    return lambda value: start + factor * ((math.log10(value) if log else value) - low)


def _legend(chart: Chart) -> tuple[str, float]:
    """Names beside samples, in as many rows above the plot as they need; nothing where there is one unnamed kind."""
    entries: list[tuple[str, str]] = []
    loud = [line for line in chart.series if not line.quiet]
    if chart.kind == "stacked":
        entries = [
            (f'<rect class="f{i % COLOURS}" width="22" height="10" y="-9"/>', s.name) for i, s in enumerate(loud)
        ]
    elif chart.kind == "lines" and (len(loud) > 1 or chart.reference or chart.marks):
        entries = [
            (f'<path class="l{i % COLOURS}" d="M0 -4H22"/>{_shape(i, 11, -4)}', line.name)
            for i, line in enumerate(loud)
        ]
    if chart.marks:
        entries.append(('<circle class="mark" cx="11" cy="-4" r="5"/>', chart.mark_name))
    if chart.reference:
        entries.append(('<path class="reference" d="M0 -4H22"/>', f"{chart.reference[0]}: {shown(chart.reference[1])}"))
    parts, x, row = [], 4.0, 0
    for sample, name in entries:
        width = 44 + LETTER * len(name)
        if x > 4 and x + width > WIDTH:
            x, row = 4.0, row + 1
        parts.append(
            f'<g transform="translate({x:.1f} {14 + LEGEND_ROW * row})">{sample}<text x="28">{escape(name)}</text></g>'
        )
        x += width
    return "".join(parts), (LEGEND_ROW * (row + 1) + 4 if entries else 0)


def _shape(colour: int, x: float, y: float, title: str = "") -> str:
    said = f"<title>{escape(title)}</title>" if title else ""
    kind, style = colour % COLOURS, f'class="f{colour % COLOURS}"'
    if kind == 0:
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="3.5">{said}</circle>'
    if kind == 1:
        return f'<path {style} d="M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z">{said}</path>'
    return f'<path {style} d="M{x:.1f} {y - 5:.1f}l4.5 8h-9z">{said}</path>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_CATEGORY else name[: LONGEST_CATEGORY - 1] + "…"
