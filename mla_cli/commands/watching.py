"""`--metrics`, `--watch` and the alerts: who is shown what a generator does, from before the model is loaded to the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_cli import console
from mla_cli.commands.options import OUTPUT
from mla_cli.errors import MlaError, UsageError
from mla_cli.runtime import choices
from mla_cli.server.address import Address, parse_address

if TYPE_CHECKING:
    from mla_cli.runtime.generator import Generator
    from mla_cli.runtime.monitor import Monitor, Picture
    from mla_cli.runtime.prometheus import Figures
    from mla_cli.runtime.statistics import Statistics

WRITE_EVERY_S = 5.0
DRAW_EVERY_S = 0.25

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="FILE|[HOST]:PORT",
        help="Prometheus text: to a file, or served there (on this machine only unless HOST is given).",
        rich_help_panel=OUTPUT,
    ),
]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch", help="A live view of --prompts or --serve, where stderr is a terminal.", rich_help_panel=OUTPUT
    ),
]


@dataclass(frozen=True)
class Watching:
    """Who watches a generator that is not there yet.

    Attributes:
        figures, file: what `--metrics` or a server gives, and the file that it goes to.
        live: draw a live view. figures_wanted: at the end. alerts: are said. thresholds: of alerts, by their names.
        chunk_pages: pages of a chunk of the pool.
    """

    figures: Figures | None
    file: Path | None
    live: bool
    figures_wanted: bool
    alerts: bool
    thresholds: Mapping[str, float | None]
    chunk_pages: int


@contextmanager
def place(
    metrics: str | None,
    watch: bool,
    values: Mapping[str, Any],
    *,
    stats: bool,
    force: bool,
    others: Sequence[Path | None],
    several: bool,
    shared: bool,
    served: bool,
) -> Iterator[Watching]:
    """Take the file or the port, before any work; let go of it at the end.

    Args:
        values: of the configuration. stats: figures are wanted at the end. force: replace a file that holds something else.
        others: files that are read or written, and must not be replaced. several: there are requests that a view could show.
        shared: results go to the same terminal as the view. served: a server gives the figures to who asks.

    Raises:
        MlaError: the file or the port cannot be had.
    """
    if watch and not several:
        raise UsageError("there is nothing to watch", where="--watch", fix="use it with --prompts or --serve")
    prefix = "metrics.alerts."
    thresholds = {name[len(prefix) :]: value for name, value in values.items() if name.startswith(prefix)}
    chunk = values.get("latent_attention.chunk_size", choices.CHUNK_TOKENS) // choices.PAGE_TOKENS
    live = watch and sys.stderr.isatty() and _has_rich()
    if live and shared:
        console.note("no live view, as the results go to the same terminal: use --out")
        live = False
    with ExitStack() as stack:
        figures, file = None, None
        if served or metrics is not None:
            from mla_cli.runtime.prometheus import Figures, check_figures_file, serve_figures

            figures = Figures()
        if figures is not None and metrics is not None:
            address = _address(metrics)
            if address is None:
                file = Path(metrics)
                if any(other is not None and file.resolve() == other.resolve() for other in others):
                    what = "the metrics would replace a file that this command reads or writes"
                    raise UsageError(what, where=f"--metrics {file}", fix="choose another file")
                check_figures_file(file, force=force)
            else:
                port, end = serve_figures(figures, address.host, address.port)
                stack.callback(end)
                console.note(f"metrics at {address.url(port)}/metrics")
        alerts = live or metrics is not None or bool(thresholds)
        yield Watching(figures, file, live, stats, alerts, thresholds, chunk)


@contextmanager
def watched(watching: Watching, generator: Generator) -> Iterator[None]:
    """Show what a generator does while this lasts, and once more at its end."""
    if not (watching.alerts or watching.figures_wanted or watching.figures is not None):
        yield
        return
    from mla_cli.runtime.alerts import Thresholds
    from mla_cli.runtime.energy import EnergyMeter
    from mla_cli.runtime.monitor import Monitor

    say = console.warn if watching.alerts else lambda _: None
    monitor = Monitor(
        generator.statistics, EnergyMeter(_gpu_uuid(generator)), Thresholds(**watching.thresholds), say,
        chunk_pages=watching.chunk_pages, interval=DRAW_EVERY_S if watching.live else 1.0,
    )  # fmt: skip
    generator.look = monitor.look
    with ExitStack() as stack:
        if watching.figures is not None:
            watching.figures.follow(generator.statistics, monitor)
            if watching.file is not None:
                stack.enter_context(_written(watching.figures, watching.file, monitor))
        if watching.live:
            stack.enter_context(_drawn(generator.statistics, monitor))
        yield


@contextmanager
def _written(figures: Figures, file: Path, monitor: Monitor) -> Iterator[None]:
    """Write the file every few seconds, and at the end; a fault ends that, not the run."""
    from mla_cli.runtime.prometheus import write_figures

    due, broken = monotonic(), False

    def write() -> None:
        nonlocal broken
        if broken:
            return
        try:
            write_figures(figures, file)
        except MlaError as error:
            broken = True
            console.warn(f"no more metrics are written: {error}")

    def show(_: Picture) -> None:
        nonlocal due
        if monotonic() >= due:
            due = monotonic() + WRITE_EVERY_S
            write()

    monitor.shows.append(show)
    try:
        yield
    finally:
        write()


@contextmanager
def _drawn(statistics: Statistics, monitor: Monitor) -> Iterator[None]:
    """A table on the terminal, drawn anew with every picture; what is said meanwhile stands above it."""
    from rich.console import Console
    from rich.live import Live

    from mla_cli.runtime.view import view

    with Live(
        console=Console(stderr=True, markup=False, highlight=False), auto_refresh=False, redirect_stdout=False
    ) as live:

        def show(picture: Picture) -> None:
            live.update(view(statistics, picture), refresh=True)

        monitor.shows.append(show)
        yield


def _address(text: str) -> Address | None:
    """The address that a text is; None if it is a file."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host or "\\" in host:
        return None
    return parse_address(text, "--metrics")


def _gpu_uuid(generator: Generator) -> str | None:
    device = generator.decoder.device
    if device.type != "cuda":
        return None
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _has_rich() -> bool:
    from importlib.util import find_spec

    if find_spec("rich") is not None:
        return True
    console.note("no live view without the package rich: pip install rich")
    return False
