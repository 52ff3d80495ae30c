"""`mla bench`: how fast a checkpoint decodes, beside the model it was made from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from mla_cli import console
from mla_cli.commands import options
from mla_cli.commands.options import METHOD, OUTPUT, RUNTIME
from mla_cli.runtime import choices


def _whole_numbers(text: str) -> str:
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", part.strip()) for part in text.split(",")):
        raise typer.BadParameter(f"'{text}' is no list of whole numbers from 1, such as 1,4.")
    return text


def bench(
    ckpt: options.Checkpoint,
    baseline: options.Baseline = None,
    batch: Annotated[
        str,
        typer.Option(
            "--batch",
            metavar="A,B,...",
            help="Sequences that decode together.",
            rich_help_panel=METHOD,
            callback=_whole_numbers,
        ),
    ] = "1,4",
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="A,B,...",
            help="Tokens that each sequence holds in the end.",
            rich_help_panel=METHOD,
            callback=_whole_numbers,
        ),
    ] = "512,2048,8192",
    new_tokens: Annotated[
        int,
        typer.Option(
            "--new-tokens", metavar="N", min=1, help="Steps timed for each pair of these.", rich_help_panel=METHOD
        ),
    ] = 32,
    prefill: Annotated[
        bool, typer.Option("--prefill/--no-prefill", help="Also time prompts of each length.", rich_help_panel=METHOD)
    ] = True,
    engines: Annotated[
        str,
        typer.Option(
            "--engines",
            help="mla: CKPT in our runtime; standard and transformers: the baseline in ours, and there.",
            rich_help_panel=METHOD,
            **options.several_of("mla", "standard", "transformers"),
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
            help="How CKPT's latents are cached; auto: as calibrated, else as its weights are stored.",
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

    With --baseline the model that CKPT was made from runs beside it: in our runtime with its standard cache, and in
    transformers, if installed (in float32 and bfloat16, unless --dtype names one). All take their steps in turn, so
    that a busy machine slows them alike: compare by ratio. Decode is timed on a cache that is filled, not computed.

    Examples:

      mla bench out --baseline smollm2-135m

      mla bench out --batch 1,8 --context 1024,4096 --no-prefill --json
    """
    options.setup_runtime(threads, 0, quiet, debug)
    from mla_cli.benchmark import report as reports
    from mla_cli.benchmark.run import BenchOptions
    from mla_cli.benchmark.run import bench as run

    if out is not None:
        reports.check_out(out)
    chosen = BenchOptions(
        batch=_numbers(batch),
        context=_numbers(context),
        new_tokens=new_tokens,
        prefill=prefill,
        engines=tuple(engines.split(",")),
        kv_dtype=kv_dtype,
        weights=weights,
        dtype=options.resolve_dtype(dtype),
    )
    report = run(ckpt, baseline, chosen, options.resolve_device(device))
    if json:
        console.result_json(report)
    else:
        console.result(reports.table(report))
    if out is not None:
        for file in reports.write_files(report, out):
            console.note(f"wrote {file}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))
