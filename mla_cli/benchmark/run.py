"""A benchmark from names to report: engines interleaved step by step, so that a busy machine slows all of them alike."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from time import perf_counter
from typing import Any

import torch

from mla_cli.benchmark.engines import BenchEngine, OurEngine, TransformersEngine
from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.console import note, progress_bar, warn
from mla_cli.errors import MlaError, UsageError, is_out_of_memory
from mla_cli.kernels.quantized import normalize_dtype
from mla_cli.runtime.loading import add_fast_step, computing_dtype, load_to_run, plan_to_run, steps_are_fast
from mla_cli.runtime.statistics import peak_rss_bytes
from mla_cli.runtime.triton_kernels import add_triton

ENGINES = ("mla", "standard", "transformers")
WARM_UP = 2  # steps
WARM_UP_PROMPT = 16  # tokens
# Prompts are read so often, or less often once all engines together took so long: long ones hardly vary.
PREFILL_TURNS = 3
PREFILL_SECONDS = 10.0
# Numbers that are read to measure how fast memory is: far more than any cache holds.
BANDWIDTH_NUMBERS = 1 << 27
BANDWIDTH_TURNS = 5


@dataclass(frozen=True)
class BenchOptions:
    """What to time.

    Attributes:
        context: tokens a sequence holds at the end. new_tokens: steps that are timed for each pair.
        prefill: also time prompts of that length.
        kv_dtype, weights: of the checkpoint; the baseline runs as it is stored.
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
        `rows` (see `_row`), the `engines` behind them, `bandwidth_bytes_per_s`, what ran and on what machine.

    Raises:
        MlaError: a model cannot be opened. UsageError: no context fits the model, or no engine has one.
    """
    _check_room(options)
    model = open_model(checkpoint)
    other = None if baseline is None else open_model(baseline)
    _check_roles(model, other)
    notes: list[str] = []
    contexts = _contexts(options, [each for each in (model, other) if each is not None], notes)
    engines = _engines(model, other, options, device, notes)
    bandwidth = measure_bandwidth(device)
    vocab = min(each.spec.vocab_size for each in (model, other) if each is not None)
    pairs = [(batch, context) for batch in options.batch for context in contexts]
    rows: list[dict[str, Any]] = []
    turns = options.new_tokens + WARM_UP + options.prefill
    with progress_bar("timing", len(pairs) * len(engines) * turns, "step") as bar:
        for batch, context in pairs:
            try:
                times, cached = _time_steps(engines, batch, context, options.new_tokens, bar.update)
                prefills = _time_prefills(engines, batch, context, vocab, bar.update) if options.prefill else None
            except Exception as error:
                if not is_out_of_memory(error) or (not rows and (batch, context) == pairs[-1]):
                    raise
                notes.append(f"batch {batch} with a context of {context:,} is left out: out of memory")
                warn(notes[-1])
                continue
            finally:
                for engine in engines:
                    engine.release()
            rows += [
                _row(engine, batch, context, times[i], cached[i], prefills[i] if prefills else None, bandwidth)
                for i, engine in enumerate(engines)
            ]
    return {
        "checkpoint": checkpoint, "baseline": baseline, "rows": rows,
        "engines": [
            {"engine": e.name, "kv_dtype": e.kv_dtype, "dtype": e.dtype, "weight_bytes": e.weight_bytes}
            for e in engines
        ],
        "bandwidth_bytes_per_s": round(bandwidth), "new_tokens": options.new_tokens,
        "threads": torch.get_num_threads(), "device": str(device), "notes": notes, "machine": machine(device),
        "versions": _versions(),
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


def machine(device: torch.device) -> str:
    """The processor or GPU, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]}, {len(names)} cores" if names else f"{platform.machine()} {platform.processor()}".strip()


def _check_room(options: BenchOptions) -> None:
    least = options.new_tokens + WARM_UP + 1
    for context in options.context:
        if context < least:
            raise UsageError(
                f"a context of {context} has no room for {options.new_tokens} new tokens",
                where="--context", fix=f"give at least {least}, or fewer --new-tokens",
            )  # fmt: skip


def _check_roles(model: ModelSource, other: ModelSource | None) -> None:
    if other is None:
        return
    if other.spec.is_latent:
        what = "the baseline caches latents itself, and would be no baseline"
        raise UsageError(what, where=f"--baseline {other.source.name}", fix="name the model that CKPT was made from")
    if not model.spec.is_latent:
        what = "the checkpoint has standard attention, as its baseline has"
        raise UsageError(what, where=model.source.name, fix="convert it (`mla convert`), or leave out --baseline")


def _contexts(options: BenchOptions, models: Sequence[ModelSource], notes: list[str]) -> tuple[int, ...]:
    positions = min(model.spec.max_position_embeddings for model in models)
    fitting = tuple(context for context in options.context if context <= positions)
    if not fitting:
        raise UsageError(
            f"the model has {positions} positions", where="--context", fix=f"give a context of {positions} or fewer"
        )
    beyond = [f"{context:,}" for context in options.context if context > positions]
    if beyond:
        _tell(notes, f"contexts beyond the model's {positions} positions are left out: {', '.join(beyond)}")
    return fitting


def _tell(notes: list[str], text: str) -> None:
    notes.append(text)
    note(text)


def _engines(
    model: ModelSource, other: ModelSource | None, options: BenchOptions, device: torch.device, notes: list[str]
) -> list[BenchEngine]:
    standard = other if model.spec.is_latent else model
    sources = {"mla": model if model.spec.is_latent else None, "standard": standard, "transformers": standard}
    missing = [name for name in options.engines if sources[name] is None]
    if len(missing) == len(options.engines):
        if standard is None:
            raise UsageError(
                f"{' and '.join(missing)} run the model that CKPT was made from",
                where=f"--engines {','.join(missing)}", fix="name it with --baseline",
            )  # fmt: skip
        what = "the checkpoint has standard attention, not latents"
        raise UsageError(what, where="--engines mla", fix="convert it (`mla convert`), or name another engine")
    if standard is None and missing:
        _tell(notes, "only CKPT is timed; --baseline adds the model that it was made from")
    engines: list[BenchEngine] = []
    for name, source in sources.items():
        if name not in options.engines or source is None:
            continue
        if name != "transformers":
            engines.append(_our_engine(name, source, source is model, options, device, notes))
            continue
        for dtype in [torch.float32, torch.bfloat16] if options.dtype is None else [options.dtype]:
            try:
                engines.append(TransformersEngine(source.source.folder, dtype, device))
            except MlaError as error:
                if options.engines == ("transformers",):
                    raise
                notes.append(f"transformers is left out: {error}")
                warn(notes[-1])
                break
    return engines


def _our_engine(
    name: str, source: ModelSource, chosen: bool, options: BenchOptions, device: torch.device, notes: list[str]
) -> OurEngine:
    """`chosen`: it is the checkpoint, whose cache and weights the user chose."""
    kv_dtype, weights = (normalize_dtype(options.kv_dtype), options.weights) if chosen else ("auto", "float")
    dtype = computing_dtype(source, options.dtype, device, weights)
    plan = plan_to_run(source, kv_dtype, 1.0)
    decoder = load_to_run(
        source, dtype=dtype, device=device, latent_strength=plan.strength, weights=weights,
        keep_bfloat16=device.type == "cpu",
    )  # fmt: skip
    # What is not quantised is stored as one would: as the weights are.
    narrow = kv_dtype == "bf16" or source.stored_dtype == torch.bfloat16
    stored = torch.bfloat16 if narrow else None
    for text in add_triton(decoder, plan.quantizers, "auto"):
        _tell(notes, f"{name}: {text}")
    if device.type == "cpu":
        slow = add_fast_step(decoder)
        if not steps_are_fast(decoder, plan.quantizers, stored):
            slow = "they do not read a cache of this kind"
        if slow is not None:
            _tell(notes, f"{name} runs without the compiled CPU kernels: {slow}")
    return OurEngine(name, decoder, plan.quantizers, stored)


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
    return times, [engine.cache_bytes() for engine in engines]


def _time_prefills(
    engines: Sequence[BenchEngine], batch: int, context: int, vocab: int, tick: Callable[[], Any]
) -> list[float]:
    """Seconds from prompts of `context` tokens to their first new ones, the median of each engine's turns."""
    for engine in engines:
        engine.release()
    prompts = torch.randint(0, vocab, (batch, context), generator=torch.Generator().manual_seed(0))
    for engine in engines:
        engine.prefill(prompts[:1, :WARM_UP_PROMPT])
    times: list[list[float]] = [[] for _ in engines]
    while len(times[0]) < PREFILL_TURNS:
        for seconds, engine in zip(times, engines, strict=True):
            began = perf_counter()
            engine.prefill(prompts)
            seconds.append(perf_counter() - began)
            if len(seconds) == 1:
                tick()
        if sum(map(sum, times)) >= PREFILL_SECONDS:
            break
    return [statistics.median(seconds) for seconds in times]


def _row(
    engine: BenchEngine,
    batch: int,
    context: int,
    times: Sequence[float],
    cached: int,
    prefill: float | None,
    bandwidth: float,
) -> dict[str, Any]:
    """One line of the report.

    `ms_spread`: from the 10th to the 90th percentile. `peak_rss_bytes`: of the whole process, with all engines, so far.
    """
    median = statistics.median(times)
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    least = (engine.weight_bytes + cached) / bandwidth  # seconds to read what a step must
    return {
        "engine": engine.name, "kv_dtype": engine.kv_dtype, "batch": batch, "context": context,
        "ms_per_step": round(1000 * median, 3), "ms_spread": round(1000 * (high - low), 3),
        "tokens_per_s": round(batch / median, 2), "ttft_ms": None if prefill is None else round(1000 * prefill, 1),
        "prefill_s": None if prefill is None else round(prefill, 4), "cache_bytes": cached,
        "peak_rss_bytes": peak_rss_bytes(), "roofline_share": round(least / median, 4),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("mla-cli", "torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
