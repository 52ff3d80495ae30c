"""Where a calibration goes: the scheme into `config.json`, a turn into the weights, what was found into the report."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from mla_cli.calibration.card import with_cache
from mla_cli.calibration.rotate_model import turned_file_tensors
from mla_cli.calibration.variants import Turns
from mla_cli.checkpoint.engine_scales import KEY as ENGINE_KEY
from mla_cli.checkpoint.engine_scales import EngineScales, stale_engine_scales
from mla_cli.checkpoint.inplace import remove_tensors, replace_files
from mla_cli.checkpoint.kv_cache import KEY, KvScheme, Rotation, read_scheme, stored_scheme
from mla_cli.checkpoint.load import ModelSource
from mla_cli.checkpoint.weight_file import read_json_object
from mla_cli.checkpoint.writer import CheckpointWriter, check_output
from mla_cli.console import progress
from mla_cli.errors import MlaError, OutputError
from mla_cli.report.page import files_for_people

CONFIG, REPORT, REPORT_KEY = "config.json", "mla_report.json", "calibration_kv"
MODEL_CARD = "README.md"
_OWN_FILES = (MODEL_CARD, "generate.py")  # that a checkpoint of ours has, and that a copy keeps


def check_target(model: ModelSource, out: Path | None, *, force: bool) -> None:
    """Refuse, before any long work, what a calibration cannot be written to."""
    folder = model.source.folder
    stored_report(folder)
    if out is not None:
        size = sum(file.stat().st_size for file in model.source.tensors.files)
        check_output(out, force, source=folder, needed_bytes=size)
        return
    for name in (CONFIG, REPORT):
        if (folder / name).is_symlink():
            what = f"{name} is a link into a download cache, which is not changed"
            raise OutputError(what, where=folder, fix="give --out, so that a new checkpoint is written")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError("the checkpoint's folder cannot be written to", where=folder, fix="give --out")


def folded_rotation(model: ModelSource) -> Rotation:
    """The rotation that an earlier calibration has left in the weights."""
    scheme = model.source.config.get(KEY)
    found = scheme.get("rotation") if isinstance(scheme, dict) else None
    for kind in get_args(Rotation):
        if kind == found:
            return kind  # type: ignore[no-any-return]
    return "none"


def write_calibration(
    model: ModelSource,
    out: Path | None,
    scheme: KvScheme,
    turns: Turns | None,
    scales: EngineScales,
    report: dict[str, Any],
    *,
    force: bool,
) -> None:
    """Add a calibration to the checkpoint itself, or write a copy that has it; all or nothing.

    Args:
        turns: what is to be folded into the weights. scales: for other engines, with the `config.json` that says them.

    Raises:
        MlaError: it cannot be written, or not be read back.
    """
    folder = model.source.folder
    full = {**stored_report(folder), REPORT_KEY: report}
    config = {**scales.config, KEY: stored_scheme(scheme)}
    files = {REPORT: _json(full), **files_for_people(full), **_card(folder, report), CONFIG: _json(config)}
    stale = stale_engine_scales(model.source.tensors.infos.keys(), scales)
    if out is None:
        turned = {} if turns is None else _turned(model, turns)
        # A kill between the weights and the configuration leaves the same model, turned, and that has to be said: its channels
        # are in no order any more. What an earlier calibration says of the latents is not true of these.
        before = {CONFIG: _json(_only_turned(scales, scheme))} if turned else {}
        replace_files(folder, files, {**turned, **scales.tensors}, before=before)
        remove_tensors(folder, stale)
    else:
        _write_copy(model, out, turns, scales, stale, files, force=force)
    target = folder if out is None else out
    if read_scheme(read_json_object(target / CONFIG), model.spec) != scheme:
        raise MlaError("the scheme that was written cannot be read back", where=target / CONFIG, fix="check the disk")


def _only_turned(scales: EngineScales, scheme: KvScheme) -> dict[str, Any]:
    """`config.json` that says of caches that latents are, or are about to be, turned; they are not quantised."""
    layers = tuple(replace(layer, dtype="bf16", clip=None) for layer in scheme.layers)
    said = {name: value for name, value in scales.config.items() if name != ENGINE_KEY or not scales.tensors}
    return {**said, KEY: stored_scheme(replace(scheme, layers=layers))}


def _turned(model: ModelSource, turns: Turns) -> dict[str, Tensor]:
    """What turns change, of all layers: a latent's projections, a small part of a model."""
    changed: dict[str, Tensor] = {}
    for index, turn in enumerate(turns):
        if turn is not None:
            changed |= turned_file_tensors(model, index, turn)
    return changed


def _write_copy(
    model: ModelSource,
    out: Path,
    turns: Turns | None,
    scales: EngineScales,
    stale: Collection[str],
    files: dict[str, bytes],
    *,
    force: bool,
) -> None:
    folder = model.source.folder
    layer_of = {
        model.rules[name].source: index for index in range(model.spec.num_layers) for name in model.layer_names(index)
    }
    turned: dict[str, Tensor] = {}
    done: set[int] = set()
    with CheckpointWriter(out, force=force, source=folder) as writer:
        for name in progress(list(model.source.tensors.infos), "copying", unit="tensor"):
            index = layer_of.get(name)
            turn = None if turns is None or index is None else turns[index]
            if turn is not None and index is not None and index not in done:
                turned |= turned_file_tensors(model, index, turn)
                done.add(index)
            if name not in stale and name not in scales.tensors:
                writer.add(name, turned.pop(name) if name in turned else model.source.tensors.read(name))
        for name, tensor in scales.tensors.items():
            writer.add(name, tensor)
        for file in model.source.companion_files():
            writer.copy(file)
        for name in _OWN_FILES:
            if name not in files and (folder / name).is_file():
                writer.copy(folder / name)
        for name, data in files.items():
            writer.write_bytes(name, data)


def _card(folder: Path, report: dict[str, Any]) -> dict[str, bytes]:
    """The model card with what was found; none where there is none, or where it is no text."""
    try:
        card = (folder / MODEL_CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    return {MODEL_CARD: with_cache(card, report).encode()}


def stored_report(folder: Path) -> dict[str, Any]:
    """What `mla_report.json` says, if there is one."""
    file = folder / REPORT
    return read_json_object(file) if file.exists() else {}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
