"""Charts as one picture, drawn by matplotlib, which is loaded here only: it takes a second."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from mla_cli.errors import MlaError
from mla_cli.report.chart_svg import ticks
from mla_cli.report.charts import GRID, PALETTE, QUIET, Chart
from mla_cli.report.values import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2
PANEL_INCHES = (6.2, 3.7)
DOTS_PER_INCH = 110
SHAPES, DASHES = ("o", "s", "^"), ("-", "--", ":")


def png(charts: Sequence[Chart], title: str) -> bytes:
    """The charts side by side as a PNG.

    Raises:
        MlaError: matplotlib is missing or damaged.
    """
    # It tells of its font cache and of letters that the font lacks; neither concerns a conversion.
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _draw(charts, title)
    except ImportError as failure:
        raise MlaError(
            f"matplotlib cannot be loaded: {failure}", fix="pip install --force-reinstall matplotlib"
        ) from failure
    finally:
        log.setLevel(level)


def _draw(charts: Sequence[Chart], title: str) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which keeps a global state and looks for a screen

    rows = max(1, math.ceil(len(charts) / COLUMNS))
    style: dict[Any, Any] = {
        "text.parse_math": False,  # a dollar in a name is a dollar
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
    }
    with matplotlib.rc_context(style):
        size = (PANEL_INCHES[0] * COLUMNS, PANEL_INCHES[1] * rows + 0.6)
        figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
        figure.suptitle(title, fontsize=12)
        for place, chart in enumerate(charts, start=1):
            _panel(figure.add_subplot(rows, COLUMNS, place), chart)
        picture = BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})  # same report, same bytes
    return picture.getvalue()


def _panel(axes: Axes, chart: Chart) -> None:
    draw = {"lines": _lines, "stacked": _columns, "bars": _bars}[chart.kind]
    draw(axes, chart)
    if chart.log:  # its own labels are formulas, which are not parsed here
        axis, (low, high) = (axes.xaxis, axes.get_xlim()) if chart.kind == "bars" else (axes.yaxis, axes.get_ylim())
        chosen = ticks(low, high, log=True)
        axis.set_ticks(chosen, [shown(value) for value in chosen])
        axis.set_ticks([], minor=True)
        axis.set_view_interval(low, high, ignore=True)
    if chart.whole_x:
        axes.locator_params(axis="x", integer=True)
    axes.set_xlabel(chart.x_label)
    if chart.y_label:
        axes.set_ylabel(chart.y_label)
    entries, names = axes.get_legend_handles_labels()
    named = len(entries) > 1 or bool(chart.reference)
    if named:  # above the plot, where it covers nothing
        axes.legend(
            entries, names, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2 if len(entries) > 2 else len(entries),
            frameon=False, fontsize=8, borderaxespad=0.2,
        )  # fmt: skip
    axes.set_title(
        chart.title, loc="left", fontweight="bold", pad=8 + 14 * (math.ceil(len(entries) / 2) if named else 0)
    )


def _lines(axes: Axes, chart: Chart) -> None:
    colour = 0
    if chart.log:
        axes.set_yscale("log")
    for line in chart.series:
        ys = [math.nan if y is None else y for y in line.y]
        if line.quiet:
            axes.plot(line.x, ys, color=QUIET, linewidth=0.7, alpha=0.6)
        else:
            style = colour % len(PALETTE)
            other = (colour + colour // len(PALETTE)) % len(DASHES)  # a fourth line is no copy of the first
            axes.plot(
                line.x, ys, DASHES[other], color=PALETTE[style], marker=SHAPES[other], markersize=4,
                markevery=max(1, len(ys) // 16), label=line.name,
            )  # fmt: skip
            colour += 1
    if chart.marks:
        xs, marked = zip(*chart.marks, strict=True)
        axes.plot(xs, marked, "o", color="black", fillstyle="none", markersize=9, label=chart.mark_name)
    if chart.reference:
        axes.axhline(
            chart.reference[1], color="black", linestyle=(0, (2, 3)), linewidth=1.2,
            label=f"{chart.reference[0]}: {shown(chart.reference[1])}",
        )  # fmt: skip
    axes.grid(axis="y")


def _columns(axes: Axes, chart: Chart) -> None:
    below = [0.0] * len(chart.series[0].y)
    for colour, part in enumerate(chart.series):
        heights = [y or 0.0 for y in part.y]
        axes.bar(part.x, heights, bottom=below, color=PALETTE[colour % len(PALETTE)], label=part.name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.grid(axis="y")
    axes.set_xlim(min(chart.series[0].x) - 0.6, max(chart.series[0].x) + 0.6)


def _bars(axes: Axes, chart: Chart) -> None:
    rows = list(range(len(chart.categories)))
    values = chart.series[0].y
    if chart.log:
        axes.set_xscale("log")
        known = [(value, row) for row, value in zip(rows, values, strict=True) if value is not None]
        axes.plot([value for value, _ in known], [row for _, row in known], "o", color=PALETTE[0])
    else:
        axes.barh(rows, [value or 0.0 for value in values], height=0.6, color=PALETTE[0])
    if chart.reference:
        axes.axvline(
            chart.reference[1], color="black", linestyle=(0, (2, 3)), linewidth=1.2,
            label=f"{chart.reference[0]}: {shown(chart.reference[1])}",
        )  # fmt: skip
    axes.set_yticks(rows, [name if len(name) <= 28 else name[:27] + "…" for name in chart.categories])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    least, most = axes.get_xlim()
    start = chart.reference[1] if chart.reference else least  # of the word for what is infinite and has no bar
    for row, (value, label) in enumerate(zip(values, chart.labels, strict=True)):
        axes.annotate(
            label, (start if value is None else value, row), xytext=(7, 0), textcoords="offset points", va="center"
        )
    # Room for what is written at the end of the longest bar.
    axes.set_xlim(least, most * (most / least) ** 0.5 if chart.log else least + (most - least) * 1.4)
    axes.grid(axis="x")
