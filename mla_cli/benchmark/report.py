"""What a benchmark found, as JSON, as a plain table, as Markdown and as a plot over the context."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_cli.checkpoint.disk import check_report_folder, write_report_files
from mla_cli.report.chart_png import png
from mla_cli.report.charts import Chart, Series

JSON_NAME, MARKDOWN_NAME, PLOT_NAME = "mla_bench.json", "mla_bench.md", "mla_bench.png"

_COLUMNS = (
    "engine", "computes", "cache", "batch", "context", "ms/step", "spread", "tokens/s", "prefill s", "cache MiB",
    "roofline", "times mla",
)  # fmt: skip
_NUMBERS_FROM = 3


def check_out(out: Path) -> None:
    """Refuse a folder that cannot take the report, before any work (see `check_report_folder`)."""
    check_report_folder(out, (JSON_NAME, MARKDOWN_NAME, PLOT_NAME))


def write_files(report: Mapping[str, Any], out: Path) -> list[Path]:
    """The report as JSON, as Markdown and, of more than one context, as a plot; gives what was written."""
    files = {
        JSON_NAME: (json.dumps(report, ensure_ascii=False, allow_nan=False, indent=2) + "\n").encode(),
        MARKDOWN_NAME: markdown(report).encode(),
    }
    picture = plot(report)
    if picture is not None:
        files[PLOT_NAME] = picture
    written = write_report_files(out, files)
    if picture is None:
        (out / PLOT_NAME).unlink(missing_ok=True)  # of an earlier report
    return written


def table(report: Mapping[str, Any]) -> str:
    """A line an engine, batch and context, and what the columns mean."""
    cells = _cells(report)
    widths = [max(len(row[i]) for row in [_COLUMNS, *cells]) for i in range(len(_COLUMNS))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i < _NUMBERS_FROM else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return "\n".join([line(_COLUMNS), line(["-" * width for width in widths]), *map(line, cells), "", *_told(report)])


def markdown(report: Mapping[str, Any]) -> str:
    """The same for a page."""
    head = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * _NUMBERS_FROM + "--:|" * (len(_COLUMNS) - _NUMBERS_FROM)]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in _cells(report)), "", *_told(report)]) + "\n"


def plot(report: Mapping[str, Any]) -> bytes | None:
    """Milliseconds a step over the context, a panel a batch; None where there is one context only."""
    rows = report["rows"]
    if len({row["context"] for row in rows}) < 2:
        return None
    return png([_chart(rows, batch) for batch in sorted({row["batch"] for row in rows})], "time of a decode step")


def _chart(rows: Sequence[Mapping[str, Any]], batch: int) -> Chart:
    mine = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["context"])  # stable
    names = list(dict.fromkeys(_engine(row) for row in mine))
    series = tuple(
        Series(
            name,
            tuple(float(row["context"]) for row in mine if _engine(row) == name),
            tuple(float(row["ms_per_step"]) for row in mine if _engine(row) == name),
        )
        for name in names
    )
    return Chart(
        f"bench-{batch}", f"batch {batch}", "lines", "tokens of context", "ms a step",
        f"Milliseconds of a decode step over the context, batch {batch}: {', '.join(names)}", series, log=True,
    )  # fmt: skip


def _engine(row: Mapping[str, Any]) -> str:
    return f"{row['engine']}, {row['kv_dtype']} cache"


def _cells(report: Mapping[str, Any]) -> list[list[str]]:
    rows = report["rows"]
    computes = {(each["engine"], each["kv_dtype"]): each["dtype"] for each in report["engines"]}
    first = {(row["batch"], row["context"]): row["ms_per_step"] for row in reversed(rows) if row["engine"] == "mla"}
    cells = []
    for row in rows:
        base = first.get((row["batch"], row["context"]))
        prefill = "-" if row["prefill_s"] is None else f"{row['prefill_s']:.3g}"
        cells.append([
            row["engine"], computes[row["engine"], row["kv_dtype"]], row["kv_dtype"], str(row["batch"]), f"{row['context']:,}",
            f"{row['ms_per_step']:.4g}", f"{row['ms_spread']:.3g}", f"{row['tokens_per_s']:.4g}", prefill,
            f"{row['cache_bytes'] / 2**20:.4g}", f"{row['roofline_share']:.0%}",
            "-" if base is None else f"{row['ms_per_step'] / base:.2f}",
        ])  # fmt: skip
    return cells


def _told(report: Mapping[str, Any]) -> list[str]:
    return [
        f"{report['machine']}, {report['threads']} threads on {report['device']}; memory is read at "
        f"{report['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s; median of {report['new_tokens']} steps, engines in turn.",
        "spread: 10th to 90th percentile. roofline: time to read weights and cache once at that speed, over the step's.",
        *report["notes"],
    ]
