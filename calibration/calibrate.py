"""Calibration of a latent cache from start to end: checkpoint, texts, observers, ranges, held-out cost, writing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_cli.calibration.cache_sizes import CacheSizes, bytes_per_token
from mla_cli.calibration.choose import Candidate, Chooser, Plan, check_rotation, choose_rotation, choose_within
from mla_cli.calibration.choose_clips import ChosenClips, choose_clips
from mla_cli.calibration.choose_texts import choose_texts
from mla_cli.calibration.clipping import Clip
from mla_cli.calibration.fallback import Fallback, fall_back
from mla_cli.calibration.observers import QUANTILES, LatentRange, results_by_layer
from mla_cli.calibration.passes import HeldOut, HeldOutCost, watch_latents
from mla_cli.calibration.precision import keep_freed_memory
from mla_cli.calibration.report import Calibration, build_report
from mla_cli.calibration.sensitivity import SEQUENCES, by_content, measure_sensitivity
from mla_cli.calibration.store import REPORT_KEY, check_target, folded_rotation, stored_report, write_calibration
from mla_cli.calibration.texts import CalibrationTexts, first, hold_out
from mla_cli.calibration.variants import Variant, unchanged
from mla_cli.checkpoint.engine_scales import make_engine_scales
from mla_cli.checkpoint.kv_cache import LARGEST, REACH_QUANTILE, KvScheme, LayerRange, Rotation
from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.checkpoint.weight_file import read_json_object
from mla_cli.console import note, warn
from mla_cli.errors import UsageError
from mla_cli.kernels.quantized import CacheDtype, Granularity, RopeDtype
from mla_cli.model.tokenizer import load_tokenizer

# Held-out sequences for the report: enough to tell half a percent of perplexity, few enough to cost seconds.
HELD_OUT = 16
# Sequences that rotations, and caches within a budget, are compared on. The divergence tells them apart sooner than perplexity.
COMPARED, COMPARED_IN_BUDGET = 8, 4
MAX_LOSS = 1.0  # percent of perplexity, the whole model: about what a reader of benchmarks takes for noise
EVERY = 1000  # decode steps


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `mla calibrate`, in the terms of its help.

    Attributes:
        kv_dtype: None: INT8, or what is best within `budget_bytes`. rotation: None: by measurement.
        max_loss: None: `MAX_LOSS`; within `budget_bytes` no layer may take more bytes for it.
        every: None: `EVERY`, where scales are static.
    """

    kv_dtype: CacheDtype | None = None
    scales: Granularity = "token"
    rotation: Rotation | None = None
    rope_dtype: RopeDtype = "bfloat16"
    max_loss: float | None = None
    every: int | None = None
    budget_bytes: int | None = None
    calib: str = "auto"
    samples: int = 512
    seq_len: int = 512
    dtype: torch.dtype | None = None  # None: see `_dtypes`
    force: bool = False
    seed: int = 0


def calibrate(checkpoint: str, out: Path | None, options: CalibrateOptions, device: torch.device) -> dict[str, Any]:
    """Calibrate a checkpoint's latent cache, and write the scheme into it or, with `out`, into a copy.

    Returns:
        The report: what `mla_report.json` holds under `calibration_kv`, and how long it took.

    Raises:
        MlaError: anything that stops it; the checkpoint is as before then.
    """
    begun = time.monotonic()
    keep_freed_memory()
    model = open_model(checkpoint)
    for line in model.notes:
        note(line)
    _check(model, out, options)
    positions = model.spec.max_position_embeddings
    if options.seq_len > positions:
        note(
            f"--seq-len {options.seq_len}: the model has {positions:,} positions, so sequences have {positions:,} tokens"
        )
    watched_in, measured_in = _dtypes(model, options, device)
    tokenizer = load_tokenizer(model.source.folder)
    texts = choose_texts(
        model, tokenizer, calib=options.calib, samples=options.samples, seq_len=options.seq_len, seed=options.seed,
        device=device,
    )  # fmt: skip
    fitted, unseen = hold_out(texts, HELD_OUT)

    weighed, compared = _parts(fitted, COMPARED if options.budget_bytes is None else COMPARED_IN_BUDGET)
    sensitivity = measure_sensitivity(model, weighed, compute=watched_in, device=device, seed=options.seed)
    chooser = Chooser(
        model, sensitivity, HeldOut(model, compared, dtype=measured_in, device=device), _sizes(model, options)
    )
    plan, candidates = _plan(chooser, options)
    variant, sensitivity = plan.variant(model), chooser.sensitivity_with(plan)

    ranges = _ranges(model, plan, variant, fitted, options, watched_in, device)
    chosen = choose_clips(
        ranges, sensitivity, variant, chooser.text, dtype=plan.dtype, granularity=options.scales,
        rope_dtype=options.rope_dtype,
    )  # fmt: skip
    held_out = HeldOut(model, unseen, dtype=measured_in, device=device)
    fallback, cost = _fall_back(held_out, variant, chosen, options)
    found = Calibration(
        plan=plan, scheme=_scheme(plan, ranges, chosen.clips, fallback, fitted, options), ranges=ranges, chosen=chosen,
        cost=cost, fallback=fallback, candidates=candidates, fitted=fitted, unseen=unseen, weighed=weighed,
        compared=compared if candidates or chosen.measured else None, budget=options.budget_bytes, watched_in=watched_in,
        measured_in=measured_in,
        bytes=lambda quantizers: bytes_per_token(model, variant.spec, quantizers),
        unquantised_bytes=bytes_per_token(model, model.spec, None),
        earlier=_earlier(model),
    )  # fmt: skip
    rotary = [0.0 if seen is None else seen.rotary for seen in ranges]
    scales = make_engine_scales(read_json_object(model.source.folder / "config.json"), found.scheme, rotary)
    report = build_report(found, scales)
    for warning in report["warnings"]:
        warn(warning)
    write_calibration(model, out, found.scheme, plan.turns, scales, report, force=options.force)
    target = model.source.folder if out is None else out
    return {"checkpoint": str(target), **report, "seconds": round(time.monotonic() - begun, 2)}


def _check(model: ModelSource, out: Path | None, options: CalibrateOptions) -> None:
    """Refuse what cannot end well, before any long work."""
    if options.every is not None and options.scales != "static":
        raise UsageError(
            "only static scales are derived anew: others follow each token anyway", where="--every",
            fix="add --scales static, or leave the option out",
        )  # fmt: skip
    if options.max_loss is not None and not 0 <= options.max_loss <= LARGEST:
        raise UsageError(
            f"{options.max_loss:g} is no percentage that a checkpoint can say", where="--max-loss",
            fix="give a number from 0, or a large one (1000) to quantise all layers",
        )  # fmt: skip
    if options.max_loss is not None and options.budget_bytes is not None:
        raise UsageError(
            "layers left in bfloat16 for --max-loss take bytes that --budget-bytes does not grant",
            where="--max-loss",
            fix="give one of the two",
        )
    if not model.spec.is_latent:
        raise UsageError(
            f"this {model.spec.model_type} model caches keys and values; only latents are calibrated",
            where=model.source.name,
            fix="convert it first (`mla convert`)",
        )
    check_rotation(folded_rotation(model), options.rotation)
    check_target(model, out, force=options.force)
    if options.budget_bytes is not None:
        _sizes(model, options).check(options.budget_bytes, options.kv_dtype)


def _sizes(model: ModelSource, options: CalibrateOptions) -> CacheSizes:
    return CacheSizes(model, options.scales, options.rope_dtype, folded_rotation(model))


def _dtypes(model: ModelSource, options: CalibrateOptions, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """The number formats that ranges are watched in, and that the cost is measured in."""
    if options.dtype is not None:
        return options.dtype, options.dtype
    if device.type != "cpu":
        return model.stored_dtype, model.stored_dtype
    # Ranges bear bfloat16's rounding, which nearly halves the time where the CPU multiplies it; so small a cost does not.
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    fast = model.stored_dtype == torch.bfloat16 and bool(probe())
    return torch.bfloat16 if fast else torch.float32, torch.float32


def _parts(fitted: CalibrationTexts, compared: int) -> tuple[CalibrationTexts, CalibrationTexts]:
    """Sequences to weigh errors on, and others to compare plans on (the same where there are few)."""
    ordered = by_content(fitted)
    compared = min(compared, max(1, len(ordered.lengths) // 2))
    weighed = first(ordered, min(SEQUENCES, max(1, len(ordered.lengths) - compared)))
    rest = slice(-compared, None)
    return weighed, CalibrationTexts(
        ordered.sequences[rest], ordered.lengths[rest], ordered.origin, ordered.skipped, ordered.requested
    )


def _plan(chooser: Chooser, options: CalibrateOptions) -> tuple[Plan, list[Candidate]]:
    if options.budget_bytes is not None:
        return choose_within(chooser, options.budget_bytes, options.rotation, options.kv_dtype)
    return choose_rotation(chooser, options.kv_dtype or "int8", options.rotation, _max_loss(options))


def _max_loss(options: CalibrateOptions) -> float:
    return MAX_LOSS if options.max_loss is None else options.max_loss


def _earlier(model: ModelSource) -> list[dict[str, Any]]:
    """What an earlier calibration measured to choose the rotation that is in the weights."""
    told = stored_report(model.source.folder).get(REPORT_KEY)
    rotation = told.get("rotation") if isinstance(told, dict) else None
    measured = rotation.get("measured") if isinstance(rotation, dict) else None
    return measured if isinstance(measured, list) and folded_rotation(model) != "none" else []


def _ranges(
    model: ModelSource,
    plan: Plan,
    variant: Variant,
    texts: CalibrationTexts,
    options: CalibrateOptions,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LatentRange | None]:
    """What each layer's observer saw; None for layers without a latent, or where nothing is quantised."""
    if plan.dtype is None:
        return [None] * model.spec.num_layers
    observers = watch_latents(
        model, texts, dtype=dtype, device=device, variant=variant, kv_dtype=plan.dtype, granularity=options.scales
    )  # fmt: skip
    return results_by_layer(observers, model.spec, texts.tokens)


def _fall_back(
    held_out: HeldOut,
    variant: Variant,
    chosen: ChosenClips,
    options: CalibrateOptions,
) -> tuple[Fallback, HeldOutCost]:
    """Layers that stay unquantised, and what each layer costs by itself."""
    cost = held_out.costs([variant.cached(chosen.quantizers)], layers=True, title="measuring on held-out text")[0]
    fallback = fall_back(
        chosen.quantizers,
        [0.0 if clip is None else clip.loss for clip in chosen.clips],
        cost,
        _max_loss(options) if options.budget_bytes is None else None,
        lambda others: held_out.costs([variant.cached(others)], title="leaving layers unquantised")[0],
        exact=variant.change is unchanged,
    )
    return fallback, cost


def _scheme(
    plan: Plan,
    ranges: Sequence[LatentRange | None],
    clips: Sequence[Clip | None],
    fallback: Fallback,
    texts: CalibrationTexts,
    options: CalibrateOptions,
) -> KvScheme:
    layers = []
    for seen, clip, quantizer in zip(ranges, clips, fallback.quantizers, strict=True):
        if seen is None:
            layers.append(LayerRange("bf16", None, 0.0))
            continue
        usual = seen.token_amax[QUANTILES.index(REACH_QUANTILE)]
        if quantizer is None or clip is None:
            layers.append(LayerRange("bf16", None, seen.amax, usual))
        else:
            layers.append(LayerRange(quantizer.dtype, clip.reach, seen.amax, usual))
    dtype = plan.dtype or "int8"  # of no layer then
    return KvScheme(
        dtype=dtype,
        granularity=options.scales,
        layers=tuple(layers),
        samples=len(texts.lengths),
        tokens=texts.tokens,
        origin=texts.origin,
        rope_dtype="bfloat16" if plan.dtype is None else options.rope_dtype,  # nothing is quantised then
        rotation=plan.rotation,
        every=(options.every or EVERY) if options.scales == "static" and plan.dtype is not None else None,
        strength=plan.strength,
        max_loss=_max_loss(options) if options.budget_bytes is None else None,
    )
