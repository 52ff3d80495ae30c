"""`mla generate --serve`: what is checked before the model is loaded, and what is said when clients may come."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_cli import console
from mla_cli.commands.options import RUNTIME, existing_path
from mla_cli.errors import UsageError
from mla_cli.server.address import KEY_VARIABLE, Address, bind, parse_address, read_key, require_server
from mla_cli.server.limits import Limits

if TYPE_CHECKING:
    from mla_cli.runtime.engine import Engine
    from mla_cli.runtime.prometheus import Figures
    from mla_cli.runtime.sampling_params import SamplingParams

ServeAt = Annotated[
    str | None,
    typer.Option(
        "--serve",
        metavar="[HOST]:PORT",
        help="Answer requests of OpenAI's API there, on this machine only unless HOST is given.",
        rich_help_panel=RUNTIME,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help=f"Key that clients of --serve must have (default: {KEY_VARIABLE} of the environment, if set).",
        rich_help_panel=RUNTIME,
        callback=existing_path("file"),
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option("--max-queue", metavar="N", min=0, help="Most answers of --serve that wait.", rich_help_panel=RUNTIME),
]
MaxSeconds = Annotated[
    float,
    typer.Option(
        "--max-seconds", metavar="S", min=1, help="Longest time of an answer of --serve.", rich_help_panel=RUNTIME
    ),
]


@dataclass(frozen=True)
class Serving:
    """A place that is taken, for a server that is not there yet."""

    address: Address
    socket: socket.socket
    api_key: str | None
    limits: Limits


def begin(address: str, key_file: Path | None, queue: int, seconds: float, *, alone: bool) -> Serving:
    """Take the place, with all checks that need no model.

    Args:
        alone: nothing else is asked for.

    Raises:
        MlaError: the packages, the address, the port or the key cannot be used.
    """
    if not alone:
        what = "--serve goes with no prompt, file, conversation or output"
        raise UsageError(what, where="--serve", fix="give the prompts to the server")
    place = parse_address(address)
    require_server()
    key = read_key(key_file)
    if key is None and not place.is_local:
        console.warn(f"anybody who reaches {place.host} can use this server: set {KEY_VARIABLE} or give --api-key-file")
    return Serving(place, bind(place), key, Limits(queue=queue, seconds=seconds))


def run(serving: Serving, engine: Engine, checkpoint: str, defaults: SamplingParams, figures: Figures | None) -> None:
    """Answer requests until the process is told to end."""
    from mla_cli.runtime.prometheus import figures_text
    from mla_cli.server.run import serve

    name = model_name(checkpoint)
    port = serving.socket.getsockname()[1]

    def say(_: object) -> None:
        console.note(f"serving {name} at {serving.address.url(port)}/v1; Ctrl-C ends it")

    serve(
        engine.generator, [serving.socket], model=name, defaults=defaults, limits=serving.limits,
        api_key=serving.api_key, local=serving.address.is_local and serving.api_key is None, log=console.error,
        metrics=None if figures is None else partial(figures_text, figures),
        started=say,
    )  # fmt: skip


def model_name(checkpoint: str) -> str:
    """What clients call a checkpoint: its Hub id, or the last part of its path."""
    path = Path(checkpoint)
    return (path.resolve().name or checkpoint) if path.exists() else checkpoint
