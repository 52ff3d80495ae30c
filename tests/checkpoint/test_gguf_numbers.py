"""Every type of number that GGUF files commonly hold is read as the gguf package reads it, and kept in a type that holds it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from mla_cli.checkpoint.gguf import materialise_gguf
from mla_cli.errors import UnsupportedError
from tests.checkpoint.test_gguf import tiny, write_gguf

WRITTEN = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16", "F32"]
READ = "Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS IQ1_S IQ1_M TQ1_0 TQ2_0 MXFP4".split()
PLAIN = {"F32": torch.float32, "F16": torch.float16}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 8, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", WRITTEN)
def test_quantised_numbers(tmp_path: Path, kind: str) -> None:
    quantization = GGMLQuantizationType[kind]
    model = tiny(tmp_path, hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4)
    folder = materialise_gguf(write_gguf(tmp_path / "model.gguf", model, kind=quantization))
    found = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    original = model.state_dict()["model.layers.0.mlp.down_proj.weight"].float().numpy()
    expected = torch.from_numpy(dequantize(quantize(original, quantization), quantization))
    dtype = PLAIN.get(kind, torch.bfloat16)
    assert found.dtype == dtype  # of float16 and float32 nothing is rounded away
    assert torch.equal(found, expected.to(dtype))
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


def blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Random blocks of a type that the gguf package reads but does not write: [rows, bytes]."""
    block, size = GGML_QUANT_SIZES[kind]
    rng, found = np.random.default_rng(0), np.empty((0, size), np.uint8)
    while len(found) < rows * columns // block:
        more = rng.integers(0, 256, (4096, size), np.uint8)
        with np.errstate(all="ignore"):
            values = dequantize(more, kind)
        found = np.concatenate([found, more[(np.abs(values) < 1e5).all(axis=1)]])  # the bytes of a scale may be NaN
    return found[: rows * columns // block].reshape(rows, -1)


def test_every_common_type_is_read(tmp_path: Path) -> None:
    kinds = {f"blk.{i}.ffn_down.weight": GGMLQuantizationType[name] for i, name in enumerate(READ)}
    raw = {name: blocks(kind, 256, 256) for name, kind in kinds.items()}
    model = tiny(tmp_path, num_hidden_layers=len(kinds), **WIDE)
    path = write_gguf(tmp_path / "model.gguf", model, edit=lambda tensors: tensors.update(raw), kinds=kinds)
    weights = load_file(materialise_gguf(path) / "model.safetensors")
    for i, (name, kind) in enumerate(kinds.items()):
        found = weights[f"model.layers.{i}.mlp.down_proj.weight"]
        assert torch.equal(found, torch.from_numpy(dequantize(raw[name], kind)).to(found.dtype)), kind.name
        assert float(found.float().std()) > 0


def test_a_type_that_nobody_reads_is_named(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_K  # llama.cpp computes in it, and stores nothing so
    raw = {"blk.0.ffn_down.weight": np.zeros((256, GGML_QUANT_SIZES[kind][1]), np.uint8)}
    kinds = dict.fromkeys(raw, kind)
    path = write_gguf(
        tmp_path / "model.gguf", tiny(tmp_path, **WIDE), edit=lambda tensors: tensors.update(raw), kinds=kinds
    )
    with pytest.raises(UnsupportedError, match=r"Q8_K.*ffn_down"):
        materialise_gguf(path)
