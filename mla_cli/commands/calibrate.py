"""`mla calibrate`: find the ranges of a latent cache in INT8 or FP8, measure what it costs, and store the ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mla_cli import console
from mla_cli.commands import options
from mla_cli.commands.options import METHOD, OUTPUT
from mla_cli.runtime.choices import KV_DTYPE_ALIASES


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
        str,
        typer.Option(
            "--kv-dtype",
            help="How latents are cached.",
            rich_help_panel=METHOD,
            **options.one_of("int8", "fp8", aliases=KV_DTYPE_ALIASES),
        ),
    ] = "int8",
    scales: Annotated[
        str,
        typer.Option(
            "--scales",
            help="A range for each token, or one for all (coarser).",
            rich_help_panel=METHOD,
            **options.one_of("token", "static"),
        ),
    ] = "token",
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
    """Calibrate the latent cache of a converted checkpoint for INT8 or FP8.

    Rotary keys stay in bfloat16. A sixteenth of the text is held out: ranges never see it, and the cost is measured on it.
    `mla generate` and `mla eval` use the ranges by themselves; --kv-dtype bf16 ignores them.

    Examples:

      mla calibrate out

      mla calibrate out --kv-dtype fp8 --calib texts/ --out out-fp8

      mla calibrate out --scales static --calib self --samples 128
    """
    options.setup_runtime(threads, seed, quiet, debug)
    from mla_cli.calibration.calibrate import CalibrateOptions
    from mla_cli.calibration.calibrate import calibrate as run_calibration

    chosen = CalibrateOptions(
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        scales=scales,  # type: ignore[arg-type]
        calib=calib,
        samples=samples,
        seq_len=seq_len,
        dtype=options.resolve_dtype(dtype),
        force=force,
        seed=seed,
    )
    report = run_calibration(ckpt, out, chosen, options.resolve_device(device))
    if json:
        console.result_json(report)
    else:
        console.result(summary(report))


def summary(report: dict[str, Any]) -> str:
    """A calibration as a table of layers and a few lines about the whole."""
    lines = [
        f"{'layer':>5} {'cached as':>9} {'largest':>9} {'range':>9} {'clipped':>8} {'latents':>8} {'attention':>9}"
    ]
    for layer in report["layers"]:
        quantised = layer["dtype"] != "bf16"
        reach = "-" if not quantised else "own" if layer["clip"] is None else f"{layer['clip']:.4g}"
        lines.append(
            f"{layer['layer']:>5} {layer['dtype']:>9} {layer['amax']:>9.4g} {reach:>9} {layer['clipped_share']:>8.2%} "
            f"{layer['latent_error']:>8.2%} {layer['attention_error']:>9.2%}"
        )
    held, size, text = report["heldout"], report["bytes_per_token"], report["calibration"]
    saved = size["unquantised"] / size["quantised"]
    lines += [
        f"{report['checkpoint']}: latents in {report['kv_dtype']}, {_granularity(report['scales'])}, rotary keys in bfloat16",
        f"  cache        {size['quantised']:,} bytes a token instead of {size['unquantised']:,} ({saved:.3g} times fewer)",
        f"  perplexity   {_number(held['ppl_unquantised'])} unquantised, {_number(held['ppl_quantised'])} quantised "
        f"({held['ppl_change_percent']:+.2f} %), on {held['tokens']:,} held-out tokens",
        f"  KL           {held['kl']:.5f} nats a token",
        f"  calibrated   on {text['tokens']:,} tokens of {text['sequences']:,} sequences ({text['origin']})",
        f"  time         {report['seconds']:.0f} s",
    ]
    return "\n".join(lines)


def _granularity(scales: str) -> str:
    return "a range for each token" if scales == "token" else "one range a layer"


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"
