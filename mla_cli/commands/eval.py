"""`mla eval`: measure a checkpoint, and how much it lost against the model it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mla_cli import console
from mla_cli.commands import options
from mla_cli.commands.options import INPUT, METHOD, OUTPUT, RUNTIME
from mla_cli.errors import QualityError, UsageError
from mla_cli.runtime import choices

# Published compressions call a loss of this size small; what is asked for in earnest is the user's to say.
DEFAULT_MAX_DROP = 2.3


def _batch_size(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise typer.BadParameter(f"'{text}' is neither auto nor a whole number from 1.")
    return text


def command(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="Converted checkpoint, or any model that could be converted.")
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="A,B,...",
            help="lambada, hellaswag, gsm8k (slow: it writes text), ppl (with loss and accuracy of the next token), kl, "
            "or any lm-evaluation-harness task. "
            "Default: those whose data is in --data, and ppl.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    baseline: options.Baseline = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Local task data: lambada/test.jsonl, hellaswag/validation.jsonl, gsm8k/{train,test}.jsonl.",
            rich_help_panel=INPUT,
            callback=options.existing_path("folder"),
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text for ppl and kl (default: DIR/text/wikitext2-test.txt, else built-in English).",
            rich_help_panel=INPUT,
            callback=options.existing_path("file"),
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="First N items (windows of text) of each task.", rich_help_panel=METHOD
        ),
    ] = None,
    max_drop: Annotated[
        float,
        typer.Option(
            "--max-drop",
            metavar="PERCENT",
            min=0.0,
            help="Most that a metric may be worse than the baseline's; exit code 3 beyond.",
            rich_help_panel=METHOD,
        ),
    ] = DEFAULT_MAX_DROP,
    seed: options.Seed = options.DEFAULT_SEED,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write mla_eval.json and mla_eval.md here.", rich_help_panel=OUTPUT),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    batch_size: Annotated[
        str,
        typer.Option(
            "--batch-size",
            metavar="auto|N",
            help="Sequences of a forward pass.",
            rich_help_panel=RUNTIME,
            callback=_batch_size,
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype",
            help="How latents are cached; auto: as calibrated.",
            rich_help_panel=RUNTIME,
            **options.one_of(*choices.KV_DTYPES, aliases=choices.KV_DTYPE_ALIASES),
        ),
    ] = "auto",
    backend: options.Backend = "auto",
    latent_strength: options.LatentStrength = 1.0,
    weights: options.Weights = "float",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    debug: options.Debug = False,
) -> None:
    """Measure a checkpoint on tasks and text, beside the model it was made from.

    A task that fails is named, and the others are reported (exit code 1).
    With --baseline both run on the same items: per metric the difference, its 95 % interval (paired bootstrap) and the
    verdict against --max-drop. With --dtype auto a CPU computes in float32 (with --weights
    int8 in bfloat16 where it has instructions for it), a GPU in the stored type.

    Examples:

      mla eval out --baseline smollm2-135m --tasks ppl,kl --limit 24

      mla eval out --baseline smollm2-135m --tasks lambada,hellaswag --data ../shared/data --limit 200

      mla eval out --kv-dtype int8 --tasks ppl --text book.txt --out results
    """
    if max_drop != max_drop or max_drop == float("inf"):
        raise UsageError("the gate is not a number", where=f"--max-drop {max_drop}", fix="give percent, e.g. 2.3")
    from mla_cli.evaluation.tasks import split_names, tasks_in_reach

    names = tasks_in_reach(data) if tasks is None else split_names(tasks)
    options.setup_runtime(threads, seed, quiet, debug)
    from mla_cli.calibration.precision import keep_freed_memory
    from mla_cli.evaluation import report as reports
    from mla_cli.evaluation.run import evaluate as run

    keep_freed_memory()
    if out is not None:
        reports.check_out(out)
    if tasks is None:
        missing = "" if data is not None else " (--data DIR or --tasks adds lambada, hellaswag and gsm8k)"
        console.note(f"tasks: {', '.join(names)}{missing}")
    if "gsm8k" in names and limit is None:
        console.note(
            "gsm8k writes up to 256 tokens for each of 1319 questions: on a CPU that takes hours (see --limit)"
        )
    report = run(
        ckpt,
        names,
        baseline=baseline,
        data=data,
        text=text,
        limit=limit,
        batch_size=None if batch_size == "auto" else int(batch_size),
        max_drop=max_drop,
        kv_dtype=kv_dtype,
        latent_strength=latent_strength,
        weights=weights,
        backend=backend,
        dtype=options.resolve_dtype(dtype),
        device=options.resolve_device(device),
        seed=seed,
    )
    if json:
        console.result_json(report.as_json())
    else:
        console.result(report.table())
    if out is not None:
        for file in reports.write_report(report, out):
            console.note(f"wrote {file}")
    if report.failed:
        raise reports.failure(report.failed) from next(iter(report.failed.values()))
    if report.passed is False:
        missed = ", ".join(f"{task} {name}" for task, name in report.missed)
        raise QualityError(
            f"more than {max_drop:g} % worse than the baseline: {missed}",
            where=ckpt,
            fix="convert with a smaller ratio, or accept more with --max-drop",
        )
