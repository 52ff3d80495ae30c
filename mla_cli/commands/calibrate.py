"""`mla calibrate`: find how to cache latents in INT8, FP8 or INT4, measure what it costs, and store the scheme."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_cli import console
from mla_cli.commands import options
from mla_cli.commands.options import BUDGET, METHOD, OUTPUT
from mla_cli.runtime.choices import KV_DTYPE_ALIASES, ROPE_DTYPE_ALIASES


def calibrate(
    ckpt: options.Checkpoint,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write a calibrated copy here (default: add the ranges to CKPT itself).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            help="How latents are cached (default: int8, or the best within --budget-bytes).",
            rich_help_panel=METHOD,
            **options.one_of("int8", "fp8", "int4", aliases=KV_DTYPE_ALIASES),
        ),
    ] = None,
    scales: Annotated[
        str,
        typer.Option(
            "--scales",
            help="A range for each token, for each page of 16 tokens, or one for all (coarser).",
            rich_help_panel=METHOD,
            **options.one_of("token", "page", "static"),
        ),
    ] = "token",
    rotation: Annotated[
        str,
        typer.Option(
            "--rotation",
            help="Mix a latent's channels so that none takes the range of all; folded into the weights (auto: as measured).",
            rich_help_panel=METHOD,
            **options.one_of("auto", "none", "hadamard", "learned"),
        ),
    ] = "auto",
    rope_dtype: Annotated[
        str,
        typer.Option(
            "--rope-dtype",
            help="How rotary keys are cached.",
            rich_help_panel=METHOD,
            **options.one_of("bfloat16", "int8", "fp8", aliases=ROPE_DTYPE_ALIASES),
        ),
    ] = "bfloat16",
    max_loss: Annotated[
        float | None,
        typer.Option(
            "--max-loss",
            min=0.0,
            metavar="PERCENT",
            help="Most that the perplexity may rise; the worst layers stay in bfloat16 for it (default: 1).",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    budget_bytes: Annotated[
        int | None,
        typer.Option(
            "--budget-bytes",
            min=1,
            metavar="N",
            help="Bytes a token over all layers: type, rotation and channels are chosen to lose least within them.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            min=1,
            metavar="STEPS",
            help="Static scales: a generator derives them anew so often (default: 1000).",
            rich_help_panel=METHOD,
        ),
    ] = None,
    calib: options.Calib = "auto",
    samples: options.Samples = options.DEFAULT_SAMPLES,
    seq_len: options.SeqLen = options.DEFAULT_SEQ_LEN,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    seed: options.Seed = options.DEFAULT_SEED,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Calibrate the latent cache of a converted checkpoint for INT8, FP8 or INT4.

    A sixteenth of the text is held out: ranges never see it, and the cost is measured on it. `mla generate` and `mla eval` use
    the calibration by themselves; --kv-dtype bf16 ignores it. A rotation goes into the weights: what the model computes stays.

    Examples:

      mla calibrate out

      mla calibrate out --kv-dtype int4 --calib texts/ --out out-int4

      mla calibrate out --kv-dtype fp8 --scales static --calib self --samples 128

      mla calibrate out --budget-bytes 6000 --out out-small
    """
    options.setup_runtime(threads, seed, quiet, debug)
    from mla_cli.calibration.calibrate import CalibrateOptions
    from mla_cli.calibration.calibrate import calibrate as run_calibration
    from mla_cli.checkpoint.lock import locked

    chosen = CalibrateOptions(
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        scales=scales,  # type: ignore[arg-type]
        rotation=None if rotation == "auto" else rotation,  # type: ignore[arg-type]
        rope_dtype=rope_dtype,  # type: ignore[arg-type]
        max_loss=max_loss,
        every=every,
        budget_bytes=budget_bytes,
        calib=calib,
        samples=samples,
        seq_len=seq_len,
        dtype=options.resolve_dtype(dtype),
        force=force,
        seed=seed,
    )
    here = Path(ckpt).expanduser()
    with locked(out or here) if out or here.is_dir() else nullcontext():
        report = run_calibration(ckpt, out, chosen, options.resolve_device(device))
    if json:
        console.result_json(report)
    else:
        console.result(summary(report))


def summary(report: dict[str, Any]) -> str:
    """A calibration as a table of layers and a few lines about the whole."""
    from mla_cli.calibration.card import cached_as
    from mla_cli.report.values import brief

    lines = [
        f"{'layer':>5} {'cached as':>9} {'largest':>9} {'range':>9} {'clipped':>8} {'latents':>8} {'attention':>9}"
    ]
    for layer in report["layers"]:
        lines.append(
            f"{layer['layer']:>5} {layer['dtype']:>9} {layer['amax']:>9.4g} {_range(layer):>9} {layer['clipped_share']:>8.2%} "
            f"{layer['latent_error']:>8.2%} {layer['attention_error']:>9.2%}"
        )
    held, size, text = report["heldout"], report["bytes_per_token"], report["calibration"]
    saved = size["unquantised"] / size["quantised"]
    plain, cached = brief(held["ppl_unquantised"]), brief(held["ppl_quantised"])
    lines.append(f"{report['checkpoint']}: {cached_as(report)}, rotary keys in {report['rope_dtype']}")
    lines += _compared(report)
    lines += [
        f"  cache        {size['quantised']:,} bytes a token instead of {size['unquantised']:,} ({saved:.3g} times fewer)",
        f"  perplexity   {plain} unquantised, {cached} cached so "
        f"({held['ppl_change_percent']:+.2f} %), on {held['tokens']:,} held-out tokens",
        f"  KL           {held['kl']:.5f} nats a token",
    ]
    if len(report["trade"]) > 2:  # more than its ends
        lines.append("  trade        layers in bf16, bytes a token, perplexity:")
        lines += [
            f"    {len(point['bf16_layers']):>3} {point['bytes_per_token']:>9,} {point['ppl_change_percent']:>+8.2f} %"
            f"{'  chosen' if point['chosen'] else ''}"
            for point in report["trade"]
        ]
    if report["engine_scales"]["written"]:
        lines.append("  other        FP8 scales for vLLM written (--kv-cache-dtype fp8)")
    lines += [
        f"  calibrated   on {text['tokens']:,} tokens of {text['sequences']:,} sequences ({text['origin']})",
        f"  time         {report['seconds']:.0f} s",
    ]
    return "\n".join(lines)


def _range(layer: dict[str, Any]) -> str:
    """A layer's range; of groups with ranges of their own, the widest."""
    clip = layer["clip"]
    if layer["dtype"] == "bf16":
        return "-"
    if clip is None:
        return "own"
    return f"{clip:.4g}" if isinstance(clip, float | int) else "by group"


def _compared(report: dict[str, Any]) -> list[str]:
    """What was measured to choose."""
    measured = (report["budget"] or {}).get("candidates") or report["rotation"]["measured"]
    if len(measured) < 2:
        return []
    lines = ["  compared     type, rotation, share of the latent, bytes a token, KL:"]
    return lines + [
        f"    {one['kv_dtype']:>4} {one['rotation']:>9} {one['strength']:>7.1%} {one['bytes_per_token']:>9,} {one['kl']:>9.5f}"
        for one in measured
    ]
