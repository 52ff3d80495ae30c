"""Options that several commands share: one name, one default, one check, one place in the help.

Every value is checked while the command line is parsed, so that a mistake costs no work (exit code 2).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from mla_cli import console
from mla_cli.checkpoint.latent_strength import check_strength
from mla_cli.errors import UsageError
from mla_cli.runtime.choices import BACKENDS, WEIGHTS, check_backend

if TYPE_CHECKING:
    import torch

INPUT, METHOD, BUDGET, OUTPUT, RUNTIME = GROUPS = ("Input", "Method", "Budget", "Output", "Runtime")

DEFAULT_SEED = 0
DEFAULT_SAMPLES = (
    512  # with sequences of 512 tokens the statistics of a hidden size of 4096 have full rank, 64 times over
)
DEFAULT_SEQ_LEN = 512

DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


class GroupedCommand(TyperCommand):
    """A command whose plain-text help keeps the groups of its options, which Typer draws only with rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panel = getattr(param, "rich_help_panel", None)
                groups.setdefault(panel or (INPUT if param.param_type_name == "argument" else "Options"), []).append(
                    record
                )
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def one_of(*names: str, aliases: dict[str, str] | None = None) -> dict[str, Any]:
    """Keywords of a `typer.Option` whose value is one of `names` (an alias is replaced by what it stands for)."""

    def check(value: str | None) -> str | None:
        if value is None:
            return None
        known = (aliases or {}).get(value.lower(), value.lower())
        if known not in names:
            raise typer.BadParameter(f"'{value}' is not one of {', '.join(names)}.")
        return known

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return {"callback": check, "autocompletion": complete, "metavar": "|".join(names)}


def several_of(*names: str) -> dict[str, Any]:
    """Keywords of a `typer.Option` whose value is a comma-separated list of `names`, each once."""

    def check(value: str | None) -> str | None:
        if value is None:
            return None
        chosen = list(dict.fromkeys(part.strip().lower() for part in value.split(",") if part.strip()))
        unknown = [name for name in chosen if name not in names]
        if unknown or not chosen:
            raise typer.BadParameter(f"'{value}' is not a list of {', '.join(names)}.")
        return ",".join(chosen)

    return {"callback": check, "metavar": ",".join(names)}


def existing_path(kind: str) -> Callable[[Path | None], Path | None]:
    """A callback that refuses a path which is not there (`kind`: 'file' or 'folder')."""

    def check(value: Path | None) -> Path | None:
        if value is None or (value.is_file() if kind == "file" else value.is_dir()):
            return value
        raise typer.BadParameter(f"no such {kind}: {value}" if not value.exists() else f"not a {kind}: {value}")

    return check


def _check_samples(value: int) -> int:
    if value == 1:
        raise typer.BadParameter("1 is too few: one sequence is held out to measure on, so give 2 or more.")
    return value


def _check_device(value: str) -> str:
    if not DEVICES.fullmatch(value.lower()):
        raise typer.BadParameter(f"'{value}' is not one of auto, cpu, cuda, cuda:N.")
    return value.lower()


def _start_debug(value: bool) -> bool:
    # Eager, and never switched off here: MLA_DEBUG or `mla --debug` may have switched it on before.
    if value:
        console.set_debug(True)
    return value


Source = Annotated[
    str,
    typer.Argument(metavar="SRC", help="Folder, Hub id (org/name[@revision]), .gguf file or built-in name."),
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CKPT", help="Folder that mla wrote, or any dense DeepSeek-style checkpoint.")
]
Baseline = Annotated[
    str | None, typer.Option("--baseline", metavar="SRC", help="Model to compare with.", rich_help_panel=INPUT)
]
Calib = Annotated[
    str,
    typer.Option(
        "--calib",
        metavar="auto|self|FILE|DIR|HUB-DATASET",
        help="Calibration text: .txt, .json(l), a folder of them, org/name[:config][:split], or the model's own.",
        rich_help_panel=INPUT,
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        "--samples",
        metavar="N",
        min=1,
        help="Calibration sequences, from 2: some are held out.",
        rich_help_panel=BUDGET,
        callback=_check_samples,
    ),
]
SeqLen = Annotated[
    int, typer.Option("--seq-len", metavar="N", min=8, help="Tokens of a calibration sequence.", rich_help_panel=BUDGET)
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.", rich_help_panel=OUTPUT)]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.", rich_help_panel=OUTPUT)]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of a failure (or MLA_DEBUG=1).",
        rich_help_panel=RUNTIME,
        is_eager=True,
        callback=_start_debug,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="N", min=0, max=2**32 - 1, help="Seed of everything random.", rich_help_panel=RUNTIME
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda[:N]",
        help="Where to compute.",
        rich_help_panel=RUNTIME,
        callback=_check_device,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Number format of the weights in memory.",
        rich_help_panel=RUNTIME,
        **one_of(*DTYPES, aliases=DTYPE_ALIASES),
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="|".join(BACKENDS),
        help="What computes attention; auto: triton on a GPU. reference is slow.",
        rich_help_panel=RUNTIME,
        callback=check_backend,
    ),
]
LatentStrength = Annotated[
    float,
    typer.Option(
        "--latent-strength",
        metavar="S",
        help="Cache and use the first share S of each latent's channels, 0 < S <= 1.",
        rich_help_panel=RUNTIME,
        callback=check_strength,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="int8: a byte a weight for the projections of attention and MLP.",
        rich_help_panel=RUNTIME,
        **one_of(*WEIGHTS),
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="CPU threads (default: all cores).", rich_help_panel=RUNTIME),
]


def resolve_device(device: str) -> torch.device:
    """The device to compute on: `auto` is the GPU where there is one."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        count = torch.cuda.device_count()
        if count == 0:
            raise UsageError("no CUDA device is available", where=f"--device {device}", fix="use --device cpu or auto")
        chosen = torch.device(device)
        if chosen.index is not None and chosen.index >= count:
            what = f"there are {count} CUDA devices, counted from 0"
            raise UsageError(what, where=f"--device {device}", fix=f"use --device cuda:{count - 1} or lower")
        return chosen
    return torch.device(device)


def resolve_dtype(dtype: str) -> torch.dtype | None:
    """The number format asked for; None for `auto`: as stored."""
    import torch

    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return formats.get(dtype)


def setup_runtime(threads: int | None, seed: int, quiet: bool, debug: bool) -> None:
    """Apply the options of the whole process; call it first in a command."""
    import random

    import numpy as np
    import torch

    console.set_quiet(quiet)
    if debug:
        console.set_debug(True)
    if threads is not None:
        cores = os.cpu_count() or 1
        if threads > cores:  # thousands of threads would end the process, a few too many only slow it
            console.note(f"--threads {threads}: this machine has {cores} cores, using {cores}")
        torch.set_num_threads(min(threads, cores))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
