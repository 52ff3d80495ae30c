"""`mla convert`: a standard checkpoint in, a latent-attention checkpoint and its report out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_cli import console
from mla_cli.commands import options
from mla_cli.commands.options import BUDGET, METHOD, OUTPUT, RUNTIME
from mla_cli.errors import UsageError

if TYPE_CHECKING:
    from mla_cli.converters.options import ConvertOptions
    from mla_cli.converters.plan import ConversionPlan


def convert(
    src: options.Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the checkpoint to.")],
    ratio: Annotated[
        float | None,
        typer.Option(
            "--ratio",
            metavar="R",
            help="Cached numbers of the source over ours (default: the preset's, 4).",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    kv_lora_rank: Annotated[
        int | None,
        typer.Option(
            "--kv-lora-rank", metavar="N", help="Width of the latent, instead of --ratio.", rich_help_panel=BUDGET
        ),
    ] = None,
    qk_rope_head_dim: Annotated[
        int | None,
        typer.Option(
            "--qk-rope-head-dim",
            metavar="N",
            help="Width of the shared rotary key (default: chosen by measured loss).",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    calib: options.Calib = "auto",
    samples: options.Samples = options.DEFAULT_SAMPLES,
    seq_len: options.SeqLen = options.DEFAULT_SEQ_LEN,
    fisher_samples: Annotated[
        int,
        typer.Option(
            "--fisher-samples",
            metavar="N",
            min=1,
            help="Sequences that the Fisher information is taken over.",
            rich_help_panel=BUDGET,
        ),
    ] = 128,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="What the latent is fitted to: the loss, its stand-in without gradients, the activations, the weights alone.",
            rich_help_panel=METHOD,
            **options.one_of("fisher", "query-output", "activation", "weight"),
        ),
    ] = "fisher",
    compare_objectives: Annotated[
        bool,
        typer.Option(
            "--compare-objectives",
            help="Measure the closed form under every objective too; the report lists them.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            help="One rank for all layers, or shared out by what each loses (native form, where it measures better).",
            rich_help_panel=METHOD,
            **options.one_of("uniform", "global"),
        ),
    ] = "global",
    compensate: Annotated[
        bool,
        typer.Option(
            "--compensate/--no-compensate",
            help="Refit queries and outputs behind converted layers, where that lowers the loss on held-out text.",
            rich_help_panel=METHOD,
        ),
    ] = True,
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            help="What the model is for: bounds the ratio, and chooses calibration text where none is given.",
            rich_help_panel=METHOD,
            **options.one_of("general", "math", "chat", "code"),
        ),
    ] = "general",
    rotary_mixing: Annotated[
        str,
        typer.Option(
            "--rotary-mixing",
            help="How key heads share a rotary key; real is what other converters do, for comparison.",
            rich_help_panel=METHOD,
            **options.one_of("complex", "real"),
        ),
    ] = "complex",
    heal: Annotated[
        str,
        typer.Option(
            "--heal",
            help="Short training after the closed form: layer by layer, or end to end (slower, better).",
            rich_help_panel=METHOD,
            **options.one_of("none", "layers", "full"),
        ),
    ] = "layers",
    heal_minutes: Annotated[
        float,
        typer.Option("--heal-minutes", metavar="M", min=0.01, help="Longest time to heal.", rich_help_panel=METHOD),
    ] = 15.0,
    heal_steps: Annotated[
        int | None,
        typer.Option(
            "--heal-steps",
            metavar="N",
            min=1,
            help="Steps (a layer) instead of minutes: the result does not depend on the machine's speed.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    gate: Annotated[
        bool,
        typer.Option(
            "--gate",
            help="Also try a gate between chunks of tokens, for up to a third of the healing (native form; needs long texts).",
            rich_help_panel=METHOD,
        ),
    ] = False,
    nested: Annotated[
        bool,
        typer.Option(
            "--nested/--no-nested",
            help="Heal the first part of each latent too, in every fourth step, for a low --latent-strength.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    progressive: Annotated[
        bool,
        typer.Option(
            "--progressive",
            help="Heal at a milder rank first, cut the healed latents to the wanted one, and heal again.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="deepseek runs in other engines unchanged; native says more; auto says which it took.",
            rich_help_panel=OUTPUT,
            **options.one_of("auto", "deepseek", "native"),
        ),
    ] = "auto",
    dtype: options.Dtype = "auto",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file.", rich_help_panel=OUTPUT)
    ] = "5GB",
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            help="Memory to stay within, e.g. 10GB: what is kept by layer goes to files (default: half of what is free).",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    offload: Annotated[
        Path | None,
        typer.Option(
            "--offload",
            metavar="DIR",
            help="Folder for such files, and always use it (default: beside OUT, where memory is short).",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with an interrupted conversion to OUT.", rich_help_panel=OUTPUT),
    ] = False,
    force: options.Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and touch nothing.", rich_help_panel=OUTPUT)
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    seed: options.Seed = options.DEFAULT_SEED,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Convert a checkpoint to latent attention.

    SRC is a standard (MHA or GQA) model; OUT gets a multi-head latent attention model and its report.

    Examples:

      mla convert smollm2-135m out --ratio 2

      mla convert meta-llama/Llama-3.1-8B out --ratio 4 --calib texts/

      mla convert ./my-model out --kv-lora-rank 512 --qk-rope-head-dim 64 --dry-run
    """
    if ratio is not None and kv_lora_rank is not None:
        raise UsageError("--ratio and --kv-lora-rank say the same thing twice", fix="give one of them")
    if ratio is not None and not 1 < ratio < float("inf"):
        raise UsageError(f"a ratio of {ratio} saves nothing", where="--ratio", fix="give a number above 1, e.g. 4")
    for flag, given in (("--nested", nested), ("--progressive", progressive)):
        if given and heal == "none":
            raise UsageError(
                f"{flag} is a way to heal", where="--heal none", fix=f"use --heal layers, or leave out {flag}"
            )
    if progressive and heal_steps == 1:
        raise UsageError("--progressive heals twice", where="--heal-steps 1", fix="give 2 steps or more")

    options.setup_runtime(threads, seed, quiet, debug)
    from mla_cli.checkpoint.lock import locked
    from mla_cli.checkpoint.writer import parse_size
    from mla_cli.converters.convert import convert as run_conversion
    from mla_cli.converters.heal_options import GATE_CHUNKS, HealOptions
    from mla_cli.converters.options import ConvertOptions

    chosen = ConvertOptions(
        ratio=ratio,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        calib=calib,
        samples=samples,
        seq_len=seq_len,
        fisher_samples=fisher_samples,
        objective=objective,  # type: ignore[arg-type]
        compare_objectives=compare_objectives,
        mixing=rotary_mixing,  # type: ignore[arg-type]
        ranks=ranks,  # type: ignore[arg-type]
        compensate=compensate,
        preset=preset,
        format=form,  # type: ignore[arg-type]
        dtype=dtype,
        max_shard_bytes=parse_size(max_shard_size),
        force=force,
        seed=seed,
        heal=HealOptions(
            mode=heal,  # type: ignore[arg-type]
            minutes=heal_minutes,
            steps=heal_steps,
            seed=seed,
            gate=GATE_CHUNKS if gate else (),
            nested=nested,
        ),
        progressive=progressive,
        resume=resume,
        max_memory=None if max_memory is None else parse_size(max_memory),
        offload=None if offload is None else offload.absolute(),
    )
    if dry_run:
        _show_plan(src, chosen, json)
        return
    # Not from a program that calls `main` with arguments of its own: sys.argv would be that program's.
    started = Path(sys.argv[0]).name in ("mla", "mla.exe", "__main__.py")
    command = shlex.join(["mla", *(sys.argv[1:] if started else ("convert", src, str(out), "..."))])
    with locked(out):
        report = run_conversion(src, out, chosen, device=options.resolve_device(device), command=command)
    if json:
        console.result_json(report)
    else:
        console.result(summary(report, out))


def _show_plan(src: str, chosen: ConvertOptions, json: bool) -> None:
    from mla_cli.checkpoint.load import open_model
    from mla_cli.converters.choose import plan_conversion
    from mla_cli.converters.convert_texts import within_context
    from mla_cli.converters.estimate import estimate

    model = open_model(src)
    chosen, notes = within_context(chosen, model.spec.max_position_embeddings)
    plans = plan_conversion(model, chosen)
    cost = estimate(model, chosen, plans)
    plan = plans[0]
    for text in notes:
        console.note(text)
    if plan.warning is not None:
        console.warn(plan.warning)
        notes.append(plan.warning)
    if json:
        shown = {"source": src, "plans": [_plan_json(plan) for plan in plans], "estimate": cost, "notes": notes}
        console.result_json(shown)
        return
    lines = [f"{src}: {plan.form} form ({plan.reason})"]
    for p in plans:
        shapes = {(layer.kv_lora_rank, layer.qk_rope_head_dim) for layer in p.layers}
        shape = ", ".join(f"kv_lora_rank {rank} + qk_rope_head_dim {rope}" for rank, rope in sorted(shapes))
        lines.append(
            f"  {len(p.layers)} layers, {shape}: {p.cached_per_token:,} cached numbers a token instead of "
            f"{p.source_cached_per_token:,} (ratio {p.ratio:.3g})"
        )
    if len(plans) > 1:
        lines.append("  the conversion measures these and takes the best")
    lines.append(
        f"  about {cost['peak_bytes'] / 1e9:.1f} GB of memory, {cost['output_bytes'] / 1e9:.2f} GB of disk, "
        f"{cost['seconds'] / 60:.0f} min on this machine; nothing was written"
    )
    console.result("\n".join(lines))


def _plan_json(plan: ConversionPlan) -> dict[str, Any]:
    return {
        "format": plan.form,
        "reason": plan.reason,
        "ratio": plan.ratio,
        "cached_per_token": {"source": plan.source_cached_per_token, "mla": plan.cached_per_token},
        "layers": [
            {"kv_lora_rank": layer.kv_lora_rank, "qk_rope_head_dim": layer.qk_rope_head_dim} for layer in plan.layers
        ],
    }


def summary(report: dict[str, Any], out: Path) -> str:
    """A conversion in a few lines."""
    from mla_cli.converters.report import over_layers
    from mla_cli.report.values import brief, shown

    held, cache = report["heldout"], report["cache_bytes_per_token"]

    def over(value: float | None) -> str:
        if value is None or held["ppl_source"] is None:
            return "infinite"
        return f"{value:.4g} ({100 * (value / held['ppl_source'] - 1):+.1f} %)"

    closed = held.get("ppl_compensated", held["ppl_closed_form"])
    return "\n".join(
        [
            f"{out}: {report['format']} form, kv_lora_rank {over_layers(report, 'kv_lora_rank')}, "
            f"qk_rope_head_dim {over_layers(report, 'qk_rope_head_dim')}",
            f"  cache        {cache['mla']:,} bytes a token instead of {cache['source']:,} (ratio {report['ratio']:.3g})",
            f"  perplexity   {brief(held['ppl_source'])} source, {over(held['ppl_rope_split'])} after the rotary split, "
            + (f"{over(closed)} in closed form, " if report["healing"] else "")
            + f"{over(held['ppl_final'])} at the end (held-out calibration text)",
            f"  KL to source {held['kl_final']:.4f} nats a token",
            *(
                f"  objective    {row['objective']}: {over(row['perplexity'])} in closed form, KL {shown(row['kl'])}"
                for row in report["objectives"] or ()
            ),
            *_parts(report["latent_strength"]),
            f"  time         {report['seconds']['total']:.0f} s, peak memory {(report['peak_rss_bytes'] or 0) / 1e9:.1f} GB",
            f'  next         mla generate {shlex.quote(str(out))} "Once upon a time"',
        ]
    )


def _parts(rows: list[dict[str, Any]]) -> list[str]:
    """What a part of the latents costs, on a line."""
    from mla_cli.report.values import brief

    def told(row: dict[str, Any]) -> str:
        return f"{row['strength']:g}: {brief(row['perplexity'])} at {row['cache_bytes_per_token']:,} bytes"

    return ["  by strength  " + ", ".join(map(told, rows)) + " (perplexity with --latent-strength)"] if rows else []
