"""Calibration of a latent cache from start to end: checkpoint, texts, observers, ranges, held-out cost, writing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_cli.calibration.choose_texts import choose_texts
from mla_cli.calibration.clipping import choose_clip
from mla_cli.calibration.observers import QUANTILES, LatentObserver, LatentRange, check_complete
from mla_cli.calibration.passes import measure_cost, watch_latents
from mla_cli.calibration.report import build_report
from mla_cli.calibration.texts import CalibrationTexts, hold_out
from mla_cli.checkpoint.kv_cache import KEY, KvScheme, LayerRange, read_scheme, stored_scheme
from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.checkpoint.weight_file import read_json_object
from mla_cli.checkpoint.writer import CheckpointWriter, check_output, replace_files
from mla_cli.console import note, progress, warn
from mla_cli.errors import MlaError, OutputError, UsageError
from mla_cli.kernels.quantized import CacheDtype, Granularity
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec
from mla_cli.model.tokenizer import load_tokenizer

CONFIG, REPORT, REPORT_KEY = "config.json", "mla_report.json", "calibration_kv"
# Held-out sequences for the report: enough to tell half a percent of perplexity, few enough to cost seconds.
HELD_OUT = 16
# Other files that a checkpoint of ours has, and that a copy keeps.
_OWN_FILES = ("README.md", "generate.py", "mla_report.html", "mla_report.png")


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `mla calibrate`, in the terms of its help."""

    kv_dtype: CacheDtype = "int8"
    scales: Granularity = "token"
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
    model = open_model(checkpoint)
    for line in model.notes:
        note(line)
    _check(model, out, options)
    watched_in, measured_in = _dtypes(model, options, device)
    tokenizer = load_tokenizer(model.source.folder)
    texts = choose_texts(
        model, tokenizer, calib=options.calib, samples=options.samples, seq_len=options.seq_len, seed=options.seed,
        device=device,
    )  # fmt: skip
    fitted, unseen = hold_out(texts, HELD_OUT)

    ranges = _ranges(model.spec, watch_latents(model, fitted, dtype=watched_in, device=device), fitted.tokens)
    scheme = _scheme(ranges, fitted, options)
    cost = measure_cost(model, unseen, scheme.quantizers(), dtype=measured_in, device=device)
    report = build_report(model, scheme, ranges, cost, fitted, unseen, watched_in=watched_in, measured_in=measured_in)
    for warning in report["warnings"]:
        warn(warning)
    _write(model, out, scheme, report, options)
    target = model.source.folder if out is None else out
    return {"checkpoint": str(target), **report, "seconds": round(time.monotonic() - begun, 2)}


def _check(model: ModelSource, out: Path | None, options: CalibrateOptions) -> None:
    """Refuse what cannot end well, before any long work."""
    folder = model.source.folder
    if not model.spec.is_latent:
        raise UsageError(
            f"this {model.spec.model_type} model caches keys and values; only latents are calibrated",
            where=model.source.name,
            fix="convert it first (`mla convert`)",
        )
    _stored_report(folder)
    if out is not None:
        size = sum(file.stat().st_size for file in model.source.tensors.files)
        check_output(out, options.force, source=folder, needed_bytes=size)
        return
    for name in (CONFIG, REPORT):
        if (folder / name).is_symlink():
            what = f"{name} is a link into a download cache, which is not changed"
            raise OutputError(what, where=folder, fix="give --out, so that a new checkpoint is written")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError("the checkpoint's folder cannot be written to", where=folder, fix="give --out")


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


def _ranges(spec: DecoderSpec, observers: list[LatentObserver], tokens: int) -> list[LatentRange | None]:
    """What each layer's observer saw; None for layers without a latent."""
    latent = [isinstance(attention, LatentAttentionSpec) for attention in spec.attention]
    check_complete([observer for observer, used in zip(observers, latent, strict=True) if used], tokens)
    return [observer.result() if used else None for observer, used in zip(observers, latent, strict=True)]


def _scheme(ranges: list[LatentRange | None], texts: CalibrationTexts, options: CalibrateOptions) -> KvScheme:
    layers = []
    for seen in progress(ranges, "choosing ranges", unit="layer"):
        if seen is None:
            layers.append(LayerRange("bf16", None, 0.0))
        else:
            clip = choose_clip(seen, options.kv_dtype, options.scales)
            layers.append(LayerRange(options.kv_dtype, clip, seen.amax, seen.token_amax[QUANTILES.index(0.99)]))
    return KvScheme(
        options.kv_dtype, options.scales, tuple(layers), len(texts.lengths), texts.tokens, texts.origin
    )  # fmt: skip


def _write(
    model: ModelSource, out: Path | None, scheme: KvScheme, report: dict[str, Any], options: CalibrateOptions
) -> None:
    folder = model.source.folder
    config = {**read_json_object(folder / CONFIG), KEY: stored_scheme(scheme)}
    full = {**_stored_report(folder), REPORT_KEY: report}
    if out is None:
        replace_files(folder, {REPORT: _json(full), CONFIG: _json(config)})
    else:
        with CheckpointWriter(out, force=options.force, source=folder) as writer:
            for name in progress(list(model.source.tensors.infos), "copying", unit="tensor"):
                writer.add(name, model.source.tensors.read(name))
            for file in model.source.companion_files():
                writer.copy(file)
            for name in _OWN_FILES:
                if (folder / name).is_file():
                    writer.copy(folder / name)
            writer.write_json(REPORT, full)
            writer.write_json(CONFIG, config)
    target = folder if out is None else out
    if read_scheme(read_json_object(target / CONFIG), model.spec) != scheme:
        raise MlaError("the scheme that was written cannot be read back", where=target / CONFIG, fix="check the disk")


def _stored_report(folder: Path) -> dict[str, Any]:
    file = folder / REPORT
    return read_json_object(file) if file.exists() else {}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
