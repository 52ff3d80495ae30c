"""Write a converted model: the source's tensors as they are, attention replaced, everything else a user needs beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_cli.calibration.offload import Mapped
from mla_cli.checkpoint.deepseek_form import stock_config, stock_tensors
from mla_cli.checkpoint.load import ModelSource
from mla_cli.checkpoint.writer import CheckpointWriter
from mla_cli.console import progress
from mla_cli.converters.plan import ConversionPlan
from mla_cli.errors import UsageError
from mla_cli.model.families.base import Config
from mla_cli.model.families.native import native_config
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.spec import LatentAttentionSpec
from mla_cli.report.page import files_for_people

REPORT = "mla_report.json"
MODEL_CARD = "README.md"

GENERATE = '''"""Generate text with this checkpoint: `python generate.py "Once upon a time"` (needs `pip install mla-cli`)."""

import sys
from pathlib import Path

from mla_cli.app import main

if __name__ == "__main__":
    sys.exit(main(["generate", str(Path(__file__).parent), *sys.argv[1:]]))
'''


def output_dtype(stored: torch.dtype, form: str, asked: str) -> torch.dtype:
    """Type of the written weights: the stored one, but for float16 in the stock form, where the latent norm would round.

    Raises:
        UsageError: float16 was asked for in the stock form, whose constant channels it cannot hold.
    """
    if asked == "float16" and form == "deepseek":
        raise UsageError(
            "float16 cannot hold the constant channels of the stock DeepSeek form",
            where="--dtype float16",
            fix="use --dtype bfloat16 or float32, or --format native",
        )
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]
    if stored == torch.float64:
        return torch.float32
    return torch.bfloat16 if stored == torch.float16 and form == "deepseek" else stored


def write_checkpoint(
    model: ModelSource,
    plan: ConversionPlan,
    layers: Sequence[LatentWeights],
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    force: bool,
) -> None:
    """Write the converted checkpoint, all or nothing. The report, which needs the file, is added afterwards."""
    # In the native form a layer needs the same keys as the others only where the configuration says so; each says its own.
    needed = Mapped(layers, LatentWeights.with_needed_biases)
    specs = [layer.spec for layer in needed]
    query_bias = any(spec.q_bias for spec in specs)
    with CheckpointWriter(out, force=force, max_shard_bytes=max_shard_bytes, source=model.source.folder) as writer:
        for name in progress(list(model.rules), "writing", unit="tensor"):
            if ".self_attn." not in name:
                writer.add(name, model.tensor(name).to(dtype))
        for index, layer in enumerate(progress(needed, "writing attention", unit="layer")):
            for name, tensor in _attention_tensors(layer, plan, index, query_bias).items():
                writer.add(f"model.layers.{index}.self_attn.{name}", tensor.to(dtype))
        config = _config(model, plan, specs, query_bias)
        for key in ("dtype", "torch_dtype"):
            config.pop(key, None)
        writer.write_json("config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
        for file in model.source.companion_files():
            writer.copy(file)
        writer.write_text("generate.py", GENERATE)


def _attention_tensors(layer: LatentWeights, plan: ConversionPlan, index: int, query_bias: bool) -> dict[str, Tensor]:
    if plan.form == "deepseek":
        return stock_tensors(layer, plan.layers[index].kv_lora_rank, query_bias=query_bias)
    return layer.named_tensors()


def _config(model: ModelSource, plan: ConversionPlan, specs: Sequence[LatentAttentionSpec], query_bias: bool) -> Config:
    source = model.source.config
    if plan.form == "deepseek":
        rank = plan.layers[0].kv_lora_rank
        return stock_config(source, model.spec, specs[0], rank, query_bias=query_bias)
    return native_config(source, model.spec.with_attention(tuple(specs)))


def report_files(report: dict[str, Any], card: str) -> dict[str, bytes]:
    """The files that tell what was done, as bytes."""
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return {REPORT: text.encode(), MODEL_CARD: card.encode(), **files_for_people(report)}
