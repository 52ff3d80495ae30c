"""`mla bench`: how fast a checkpoint decodes, beside the model it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mla_cli import console
from mla_cli.commands import options
from mla_cli.commands.options import METHOD, OUTPUT, RUNTIME
from mla_cli.runtime import choices


def _whole_numbers(text: str) -> str:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise typer.BadParameter(f"'{text}' is no list of whole numbers from 1, such as 1,4.")
    return text


def _engine_names(text: str) -> str:
    unknown = [name for name in text.split(",") if name.strip() not in ("mla", "standard", "transformers")]
    if unknown:
        raise typer.BadParameter(f"there is no engine '{unknown[0]}'; choose from mla, standard, transformers.")
    return text


def bench(
    ckpt: options.Checkpoint,
    baseline: options.Baseline = None,
    batch: Annotated[
        str,
        typer.Option(
            "--batch", metavar="A,B,...", help="Sequences at a time.", rich_help_panel=METHOD, callback=_whole_numbers
        ),
    ] = "1,4",
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="A,B,...",
            help="Tokens that each sequence holds.",
            rich_help_panel=METHOD,
            callback=_whole_numbers,
        ),
    ] = "512,2048,8192",
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="N", min=1, help="Steps timed for each.", rich_help_panel=METHOD)
    ] = 32,
    prefill: Annotated[
        bool, typer.Option("--prefill/--no-prefill", help="Also time reading the prompts.", rich_help_panel=METHOD)
    ] = True,
    engines: Annotated[
        str,
        typer.Option(
            "--engines",
            metavar="A,B,...",
            help="mla: CKPT in our runtime; standard and transformers: the baseline in ours, and there.",
            rich_help_panel=METHOD,
            callback=_engine_names,
        ),
    ] = "mla,standard,transformers",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write mla_bench.json, .md and a plot here.", rich_help_panel=OUTPUT),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype",
            help="How latents are cached; auto: as calibrated.",
            rich_help_panel=RUNTIME,
            **options.one_of(*choices.KV_DTYPES, aliases=choices.KV_DTYPE_ALIASES),
        ),
    ] = "auto",
    weights: options.Weights = "float",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    debug: options.Debug = False,
) -> None:
    """Time decoding and prompts over batch sizes and context lengths.

    All engines take their steps in turn, so that a busy machine slows them alike: compare by ratio. With --baseline the model
    that CKPT was made from runs beside it, in our runtime with its standard cache, and in transformers (in float32 and
    bfloat16, unless --dtype names one). Decode is timed on a cache that is filled, not computed.

    Examples:

      mla bench out --baseline smollm2-135m

      mla bench out --batch 1,8 --context 1024,4096 --no-prefill --json
    """
    options.setup_runtime(threads, 0, quiet, debug)
    from mla_cli.benchmark.report import table
    from mla_cli.benchmark.run import BenchOptions, write_files
    from mla_cli.benchmark.run import bench as run

    chosen = BenchOptions(
        batch=_numbers(batch),
        context=_numbers(context),
        new_tokens=new_tokens,
        prefill=prefill,
        engines=tuple(name.strip() for name in engines.split(",")),
        kv_dtype=kv_dtype,
        weights=weights,
        dtype=options.resolve_dtype(dtype),
    )
    report = run(ckpt, baseline, chosen, options.resolve_device(device))
    if json:
        console.result_json(report)
    else:
        console.result(table(report))
    if out is not None:
        for file in write_files(report, out):
            console.note(f"wrote {file}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))
