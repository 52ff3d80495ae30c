"""A calibration depends on the model, the text and the options: not on batches, not on the order of samples, not on the day."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_cli.calibration import calibrate as module
from mla_cli.calibration import passes
from mla_cli.calibration.calibrate import calibrate
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.kv_cache import KEY
from tests.calibration.support import CPU, options, read


@pytest.mark.usefixtures("pictures")
def test_the_same_command_twice_gives_the_same_bytes(checkpoint: Path) -> None:
    weights = (checkpoint / "model.safetensors").stat()
    found = []
    for _ in range(2):
        calibrate(str(checkpoint), None, options(checkpoint), CPU)
        found.append({file.name: file.read_bytes() for file in checkpoint.iterdir()})
    assert found[0] == found[1]
    after = (checkpoint / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (weights.st_ino, weights.st_mtime_ns)


def clips(layer: dict[str, Any]) -> list[float]:
    """A layer's ranges, of a group or of all; none where each token has its own."""
    clip = layer["clip"]
    return [] if clip is None else clip if isinstance(clip, list) else [clip]


@pytest.mark.parametrize(
    "changes",
    [
        {"scales": "static"},
        {"scales": "page", "kv_dtype": "fp8", "max_loss": 100.0},
        {"kv_dtype": "int4", "rotation": "learned", "max_loss": 100.0},
        {"budget_bytes": 70},
    ],
)
def test_neither_batches_nor_the_order_of_samples_matter(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    def calibrated(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        report = calibrate(str(checkpoint), tmp_path / name, options(checkpoint, **changes), CPU)
        return read(tmp_path / name / "config.json")[KEY]["layers"], report

    (plain, report), hold_out = calibrated("plain"), module.hold_out

    def turned_round(texts: CalibrationTexts, most: int) -> tuple[CalibrationTexts, CalibrationTexts]:
        fitted, unseen = hold_out(texts, most)
        return replace(fitted, sequences=fitted.sequences.flip(0), lengths=fitted.lengths.flip(0)), unseen

    monkeypatch.setattr(module, "hold_out", turned_round)
    monkeypatch.setattr(passes, "MEMORY", 3 * 32 * 48 * 4)
    monkeypatch.setattr(passes, "MICRO_TOKENS", 64)
    monkeypatch.setattr(Batches, "fit", staticmethod(lambda *_, **__: Batches(6, 2)))
    layers, other = calibrated("other")
    for ours, theirs in zip(layers, plain, strict=True):
        assert ours["dtype"] == theirs["dtype"]
        assert (ours["amax"], ours["token_amax"]) == pytest.approx((theirs["amax"], theirs["token_amax"]), rel=1e-4)
        assert clips(ours) == pytest.approx(clips(theirs), rel=1e-3)
    for key in ("kv_dtype", "strength", "bytes_per_token"):
        assert other[key] == report[key]
    assert other["rotation"]["kind"] == report["rotation"]["kind"]
    assert other["heldout"]["kl"] == pytest.approx(report["heldout"]["kl"], rel=0.02)
