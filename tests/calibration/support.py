"""What the tests of calibration share: tiny converted checkpoints, texts of given tokens, options."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mla_cli.calibration.calibrate import CalibrateOptions
from mla_cli.calibration.passes import HeldOut, HeldOutCost
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.calibration.variants import make_variant
from mla_cli.checkpoint.load import ModelSource
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from mla_cli.kernels.quantized import LatentQuantizer
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer

CPU = torch.device("cpu")
ROOMY = {"hidden_size": 48, "initializer_range": 0.15}  # logits that quantised latents move a little, not wildly
RAGGED = [random_tokens(1, 3 + 5 * i, seed=i)[0].tolist() for i in range(8)]


def converted(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A tiny source, converted; `form`, `rank` and `rope` say how."""
    form, rank, rope = changes.pop("form", "native"), changes.pop("rank", 24), changes.pop("rope", 8)
    save_tiny(folder / "source", family, **{**ROOMY, **changes})
    save_tokenizer(folder / "source")
    text = save_text(folder / "text.txt")
    options = ConvertOptions(
        calib=str(text), samples=16, seq_len=32, kv_lora_rank=rank, qk_rope_head_dim=rope, format=form
    )
    convert(str(folder / "source"), folder / "mla", options, device=CPU, command="mla convert")
    return folder / "mla"


def options(checkpoint: Path, **changes: Any) -> CalibrateOptions:
    chosen = CalibrateOptions(calib=str(checkpoint.parent / "text.txt"), samples=64, seq_len=32)
    return replace(chosen, **changes)


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def texts_of(rows: list[list[int]], pad: int = 0) -> CalibrationTexts:
    sequences = torch.full((len(rows), max(map(len, rows))), pad)
    for place, row in zip(sequences, rows, strict=True):
        place[: len(row)] = torch.tensor(row)
    return CalibrationTexts(sequences, torch.tensor([len(row) for row in rows]), "test", 0, len(rows))


def edit_weights(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def measure_cost(
    model: ModelSource,
    texts: CalibrationTexts,
    quantizers: Sequence[LatentQuantizer | None],
    dtype: torch.dtype = torch.float32,
) -> HeldOutCost:
    """What a model's caches cost on text, of the whole and of each layer."""
    variant = make_variant(model).cached(tuple(quantizers))
    return HeldOut(model, texts, dtype=dtype, device=CPU).costs([variant], layers=True)[0]
