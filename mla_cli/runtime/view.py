"""The live view of a generator: a few lines that say whether it keeps up."""

from __future__ import annotations

from rich.table import Table

from mla_cli.runtime.monitor import Picture
from mla_cli.runtime.statistics import Statistics


def view(statistics: Statistics, picture: Picture) -> Table:
    """What there is to see now, two figures a line."""
    s = statistics.summary()
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(style="dim")
        table.add_column(justify="right")
    kept = picture.kept / picture.limit if picture.limit else 0.0
    rows = (
        ("running", f"{picture.running:,}", "waiting", f"{picture.waiting:,}"),
        ("answered", f"{statistics.completed:,}", "failed", f"{statistics.failed:,}"),
        ("tokens", f"{statistics.new_tokens:,}", "tokens/s", _figure(s["tokens_per_s"])),
        (
            "first token, 99 %",
            _figure(s["ttft_ms_p99"], " ms"),
            "token, median",
            _figure(s["ms_per_token_median"], " ms"),
        ),
        ("cache in use", f"{picture.use:.0%}", "kept for prompts", f"{kept:.0%}"),
        ("fragmentation", f"{picture.fragmentation:.0%}", "computed again", f"{statistics.preemptions:,}"),
    )
    for row in rows:
        table.add_row(*row)
    if picture.firing:
        table.add_row("alerts", ", ".join(picture.firing), "", "")
    return table


def _figure(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.1f}{unit}"
