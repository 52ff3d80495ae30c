"""A benchmark from names to report: engines interleaved step by step, so that a busy machine slows all of them alike."""

from __future__ import annotations

import platform
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from mla_cli.benchmark.engines import BenchEngine, OurEngine, TransformersEngine
from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.console import note, progress_bar, warn
from mla_cli.errors import MlaError, UsageError
from mla_cli.kernels.quantized import normalize_dtype
from mla_cli.runtime.loading import add_fast_step, computing_dtype, load_to_run, plan_to_run

ENGINES = ("mla", "standard", "transformers")
WARM_UP = 2  # steps
# Numbers that are read to measure how fast memory is: far more than any cache holds.
BANDWIDTH_NUMBERS = 1 << 27
BANDWIDTH_TURNS = 5


@dataclass(frozen=True)
class BenchOptions:
    """What to time.

    Attributes:
        context: tokens a sequence holds at the end. new_tokens: steps that are timed for each pair.
        prefill: also time prompts of that length.
        dtype: None: our runtime as it computes by default, transformers in float32 and in bfloat16.
    """

    batch: tuple[int, ...] = (1, 4)
    context: tuple[int, ...] = (512, 2048, 8192)
    new_tokens: int = 32
    prefill: bool = True
    engines: tuple[str, ...] = ENGINES
    kv_dtype: str = "auto"
    weights: str = "float"
    dtype: torch.dtype | None = None


def bench(checkpoint: str, baseline: str | None, options: BenchOptions, device: torch.device) -> dict[str, Any]:
    """Time a checkpoint and, if named, the model it was made from.

    Returns:
        `rows` (see `_row`), `bandwidth` in bytes a second, what ran and on what machine.

    Raises:
        MlaError: a model cannot be opened. UsageError: no context fits the model.
    """
    model = open_model(checkpoint)
    other = None if baseline is None else open_model(baseline)
    positions = min(each.spec.max_position_embeddings for each in (model, other) if each is not None)
    contexts = _contexts(options, positions)
    engines, notes = _engines(model, other, options, device)
    bandwidth = measure_bandwidth(device)
    rows: list[dict[str, Any]] = []
    turns = len(options.batch) * len(contexts) * len(engines) * (options.new_tokens + WARM_UP + options.prefill)
    with progress_bar("timing", turns, "step") as bar:
        for batch in options.batch:
            for context in contexts:
                times, cached = _time_steps(engines, batch, context, options.new_tokens, bar.update)
                prefills = _time_prefills(engines, batch, context, bar.update) if options.prefill else {}
                rows += [
                    _row(engine, batch, context, times[i], cached[i], prefills.get(i), bandwidth)
                    for i, engine in enumerate(engines)
                ]
    return {
        "checkpoint": checkpoint, "baseline": baseline, "rows": rows, "bandwidth_bytes_per_s": round(bandwidth),
        "new_tokens": options.new_tokens, "threads": torch.get_num_threads(), "device": str(device), "notes": notes,
        "machine": machine(), "versions": _versions(),
    }  # fmt: skip


def measure_bandwidth(device: torch.device) -> float:
    """Bytes of memory that can be read in a second: the fastest of some sums over more than any cache holds."""
    numbers = torch.ones(BANDWIDTH_NUMBERS, device=device)
    best = float("inf")
    for _ in range(BANDWIDTH_TURNS):
        began = perf_counter()
        float(numbers.sum())
        best = min(best, perf_counter() - began)
    return numbers.nbytes / best


def machine() -> str:
    """The processor, in words."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]}, {len(names)} cores" if names else f"{platform.machine()} {platform.processor()}".strip()


def _contexts(options: BenchOptions, positions: int) -> tuple[int, ...]:
    least = options.new_tokens + WARM_UP + 1
    for context in options.context:
        if context < least:
            raise UsageError(
                f"a context of {context} has no room for {options.new_tokens} new tokens",
                where="--context", fix=f"give at least {least}, or fewer --new-tokens",
            )  # fmt: skip
    fitting = tuple(context for context in options.context if context <= positions)
    if not fitting:
        raise UsageError(
            f"the model has {positions} positions", where="--context", fix="give a context that it can hold"
        )
    if len(fitting) < len(options.context):
        note(f"contexts beyond the model's {positions:,} positions are left out")
    return fitting


def _engines(
    model: ModelSource, other: ModelSource | None, options: BenchOptions, device: torch.device
) -> tuple[list[BenchEngine], list[str]]:
    engines: list[BenchEngine] = []
    notes: list[str] = []

    def ours(name: str, source: ModelSource, kv_dtype: str, weights: str) -> None:
        dtype = computing_dtype(source, options.dtype, device, weights)
        plan = plan_to_run(source, kv_dtype, 1.0)
        decoder = load_to_run(
            source, dtype=dtype, device=device, latent_strength=plan.strength, weights=weights,
            keep_bfloat16=device.type == "cpu",
        )  # fmt: skip
        why = add_fast_step(decoder) if device.type == "cpu" else None
        if why is not None:
            notes.append(f"{name}: without the compiled CPU kernels: {why}")
        # What a user would store: as the weights are, unless the checkpoint is calibrated.
        stored = torch.bfloat16 if source.stored_dtype == torch.bfloat16 else None
        engines.append(OurEngine(name, decoder, plan.quantizers, stored))

    wanted = normalize_dtype(options.kv_dtype)
    if "mla" in options.engines:
        ours("mla" if model.spec.is_latent else "standard", model, wanted, options.weights)
    if other is not None and "standard" in options.engines:
        ours("standard", other, "auto", options.weights)
    source = other or (None if model.spec.is_latent else model)
    if source is not None and "transformers" in options.engines:
        types = [options.dtype] if options.dtype is not None else [torch.float32, torch.bfloat16]
        for dtype in types:
            try:
                engines.append(TransformersEngine(source.source.folder, dtype, device))
            except MlaError as error:
                notes.append(f"transformers is left out: {error}")
                warn(notes[-1])
                break
    if not engines:
        raise UsageError("there is nothing to time", where="--engines", fix=f"name some of {', '.join(ENGINES)}")
    return engines, notes


def _time_steps(
    engines: Sequence[BenchEngine], batch: int, context: int, steps: int, tick: Callable[[], Any]
) -> tuple[list[list[float]], list[int]]:
    """Seconds of each step of each engine, and the bytes of its cache."""
    start = context - steps - WARM_UP
    for engine in engines:
        engine.fill(batch, start, context)
    times: list[list[float]] = [[] for _ in engines]
    for turn in range(WARM_UP + steps):
        for seconds, engine in zip(times, engines, strict=True):
            began = perf_counter()
            engine.step()
            if turn >= WARM_UP:
                seconds.append(perf_counter() - began)
            tick()
    cached = [engine.cache_bytes() for engine in engines]
    for engine in engines:
        engine.release()
    return times, cached


def _time_prefills(
    engines: Sequence[BenchEngine], batch: int, context: int, tick: Callable[[], Any]
) -> dict[int, float]:
    """Seconds from prompts of `context` tokens to their first new ones, one engine after the other."""
    prompts = torch.randint(0, 256, (batch, context), generator=torch.Generator().manual_seed(0))
    found = {}
    for index, engine in enumerate(engines):
        began = perf_counter()
        engine.prefill(prompts)
        found[index] = perf_counter() - began
        tick()
    return found


def _row(
    engine: BenchEngine,
    batch: int,
    context: int,
    times: Sequence[float],
    cached: int,
    prefill: float | None,
    bandwidth: float,
) -> dict[str, Any]:
    """One line of the report. `ms_spread`: from the 10th to the 90th percentile; `peak_rss_bytes`: of the process so far."""
    median = statistics.median(times)
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    least = (engine.weight_bytes + cached) / bandwidth  # seconds to read what a step must
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "engine": engine.name, "dtype": engine.dtype, "kv_dtype": engine.kv_dtype, "batch": batch, "context": context,
        "ms_per_step": round(1000 * median, 3), "ms_spread": round(1000 * (high - low), 3),
        "tokens_per_s": round(batch / median, 2), "ttft_ms": None if prefill is None else round(1000 * prefill, 1),
        "prefill_s": None if prefill is None else round(prefill, 4), "cache_bytes": cached,
        "weight_bytes": engine.weight_bytes, "peak_rss_bytes": rss, "roofline_share": round(least / median, 4),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("mla-cli", "torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_files(report: dict[str, Any], out: Path) -> list[Path]:
    """`mla_bench.json`, `.md` and, of more than one context, a plot `.png`; gives what was written."""
    import json

    from mla_cli.benchmark.report import markdown, plot
    from mla_cli.checkpoint.disk import write_file

    out.mkdir(parents=True, exist_ok=True)
    files = {
        "mla_bench.json": (json.dumps(report, indent=2) + "\n").encode(),
        "mla_bench.md": markdown(report).encode(),
    }
    picture = plot(report)
    if picture is not None:
        files["mla_bench.png"] = picture
    for name, data in files.items():
        write_file(out / name, data)
    return [out / name for name in files]
