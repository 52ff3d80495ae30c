"""FP8 scales for other engines: read back the way vLLM reads them, and refused where it would go on with wrong ones."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_cli.checkpoint import inplace
from mla_cli.checkpoint.engine_scales import (
    KEY,
    QUANTIZATION,
    EngineScales,
    check_engine_scales,
    make_engine_scales,
    power_of_two_scale,
    rotary_reach,
    stale_engine_scales,
)
from mla_cli.checkpoint.inplace import remove_tensors, replace_files
from mla_cli.checkpoint.kv_cache import KvScheme, LayerRange
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.checkpoint.reader import open_tensors
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from mla_cli.errors import InputError
from mla_cli.evaluation.subject import load_subject
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import begin_step
from mla_cli.model.rotary import rotary_tables, rotate
from mla_cli.model.spec import LatentAttentionSpec, RotarySpec
from mla_cli.runtime.engine import open_engine
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    save_tiny(folder / "source", "llama")
    save_tokenizer(folder / "source")
    options = ConvertOptions(
        calib=str(save_text(folder / "text.txt")), samples=16, seq_len=32, kv_lora_rank=20, qk_rope_head_dim=8,
        format="deepseek", ranks="uniform",
    )  # fmt: skip
    convert(str(folder / "source"), folder / "mla", options, device=CPU, command="mla convert")
    return folder / "mla"


@pytest.fixture(params=["one file", "shards"])
def checkpoint(request: pytest.FixtureRequest, converted: Path, tmp_path: Path) -> Path:
    """A converted model in the stock form."""
    out = tmp_path / "mla"
    shutil.copytree(converted, out)
    if request.param == "shards":
        tensors = load_file(out / "model.safetensors")
        (out / "model.safetensors").unlink()
        owners = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in set(owners.values()):
            save_file({n: tensors[n] for n, owner in owners.items() if owner == file}, out / file)
        (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    return out


def scheme(*clips: float, **changes: Any) -> KvScheme:
    layers = tuple(LayerRange("fp8", clip, 1.1 * clip) for clip in clips)
    return replace(KvScheme("fp8", "static", layers, samples=8, tokens=256, origin="a.txt", every=1000), **changes)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def calibrated(folder: Path, *clips: float, rotary: tuple[float, ...] = (1.0, 1.0)) -> EngineScales:
    """Write scales for these ranges into a checkpoint."""
    scales = make_engine_scales(read_config(folder), scheme(*clips), rotary)
    replace_files(folder, {"config.json": json.dumps(scales.config).encode()}, scales.tensors)
    return scales


def as_vllm_reads(folder: Path, dtype: torch.dtype) -> list[float]:
    """What vLLM scales each latent layer's cache by under `--kv-cache-dtype fp8`, after its documentation and source.

    The quantisation is found in config.json; a cache scale of a layer is a parameter in the model's type that holds -1 until a
    scalar of the checkpoint fills it; two positive ones are taken, two that were never filled stand for 1, of one the larger
    serves for both; latent attention scales its whole row, latent and rotary key, by that of the keys.
    """
    said = read_config(folder).get("quantization_config", {})
    cached = said.get("kv_cache_scheme") or {}
    if said.get("quant_method") != "modelopt" or (cached.get("type"), cached.get("num_bits")) != ("float", 8):
        return [1.0, 1.0]
    assert said["quant_algo"] == "FP8"
    assert said["ignore"] == ["*"]  # no weight is looked for in FP8
    stored: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys() if name.endswith("_scale")}  # noqa: SIM118
    found = []
    for layer in range(2):
        key, value = (torch.tensor(-1.0, dtype=dtype) for _ in range(2))
        for kind, parameter in (("k", key), ("v", value)):
            scalar = stored.get(f"model.layers.{layer}.self_attn.{kind}_scale")
            if scalar is not None:
                assert scalar.numel() == 1
                parameter.fill_(scalar.item())
        if key > 0 and value > 0:
            found.append(float(key))
        else:
            found.append(1.0 if key < 0 and value < 0 else max(float(key), float(value)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_engine_reads_what_was_calibrated(checkpoint: Path, dtype: torch.dtype) -> None:
    assert as_vllm_reads(checkpoint, dtype) == [1.0, 1.0]
    calibrated(checkpoint, 3.0, 700.0)
    found = as_vllm_reads(checkpoint, dtype)
    assert found == [2.0**-7, 2.0]  # 3 / 448 and 700 / 448, up to the next power of two
    assert check_engine_scales(open_model(str(checkpoint))) == tuple(found)


def test_the_scale_covers_the_row_that_an_engine_stores(checkpoint: Path) -> None:
    model, tokens = open_model(str(checkpoint)), random_tokens(4, 64)
    decoder = load_decoder(model)
    step = begin_step(model.spec, tokens.shape, CPU)
    x, rows, clips, rotary = decoder.embed(tokens, step.positions), [], [], []
    for layer in decoder.layers:
        record: dict[str, Tensor] = {}
        x = layer(x, step, record)
        attention = layer.self_attn
        assert isinstance(attention, LatentAttention)
        spec = attention.spec
        assert spec.rotary is not None
        turned = rotate(record["k_rope"], *step.rotary(spec.rotary), interleaved=spec.interleaved)
        rows.append(torch.cat((record["latent"], turned), dim=-1))
        clips.append(float(record["latent"].abs().max()))
        rotary.append(rotary_reach(record["k_rope"].flatten(0, 1), spec))
        assert rotary[-1] > clips[-1]  # or the rotary keys would not be tried here
    calibrated(checkpoint, *clips, rotary=tuple(rotary))
    for row, scale in zip(rows, as_vllm_reads(checkpoint, torch.bfloat16), strict=True):
        scaled = row / scale
        assert (
            224 < float(scaled.abs().max()) <= 448
        )  # nothing saturates, and no more than a power of two is given away
        back = scaled.to(torch.float8_e4m3fn).float() * scale
        assert float((back - row).norm() / row.norm()) < 0.05


@given(st.floats(1e-6, 1e6))
def test_a_scale_is_the_smallest_power_of_two_that_does(reach: float) -> None:
    scale = power_of_two_scale(reach)
    assert float(torch.tensor(scale, dtype=torch.bfloat16)) == scale
    assert torch.tensor(scale).frexp().mantissa == 0.5
    assert reach / scale <= 448 < 2 * reach / scale


def test_exact_powers_and_silent_layers() -> None:
    assert power_of_two_scale(448.0) == 1.0
    assert power_of_two_scale(896.0) == 2.0
    assert 0 < power_of_two_scale(0.0) < 1e-20


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_rotary_key_never_reaches_further_and_nearly_so_far(interleaved: bool, factor: float) -> None:
    spec = LatentAttentionSpec(
        num_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=8, scale=1.0,
        rotary=RotarySpec(dim=6, attention_factor=factor), interleaved=interleaved,
    )  # fmt: skip
    assert spec.rotary is not None
    keys = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    tables = rotary_tables(spec.rotary, torch.arange(2000).expand(5, 2000), torch.full((5,), 2000))
    turned = rotate(keys[:, None].expand(-1, 2000, -1), *tables, interleaved=interleaved)
    reach = rotary_reach(keys, spec)
    assert 0.99 * reach < float(turned.abs().max()) <= reach * (1 + 1e-5)


def test_transformers_and_this_program_run_the_model_as_before(checkpoint: Path) -> None:
    import transformers

    tokens = random_tokens(2, 12)
    before = load_decoder(open_model(str(checkpoint)))
    expected = before.logits(before(tokens))
    calibrated(checkpoint, 3.0, 4.0)
    after = load_decoder(open_model(str(checkpoint)))
    assert torch.equal(after.logits(after(tokens)), expected)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-3, atol=1e-3)


def changed(folder: Path, **scalars: Tensor | None) -> None:
    """Change scales in the files (None: removed), whatever they become; `k1`: that of the keys of layer 1."""
    names = {key: f"model.layers.{key[1:]}.self_attn.{key[0]}_scale" for key in scalars}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for key, name in names.items():
            value = scalars[key]
            if name in tensors:
                del tensors[name]
                if value is not None:
                    tensors[name] = value
        save_file(tensors, file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        said = json.loads(index.read_text())
        said["weight_map"] = {
            name: file
            for name, file in said["weight_map"].items()
            if not any(value is None and names[key] == name for key, value in scalars.items())
        }
        index.write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("scalars", "reason"),
    [
        ({"v1": torch.tensor(0.5)}, "both scale the same latent"),
        ({"v0": None}, r"layers\.0\.self_attn\.v_scale is missing"),
        ({"k1": None}, r"layers\.1\.self_attn\.k_scale is missing"),
        ({"k0": None, "v0": None, "k1": None, "v1": None}, r"layers\.0\.self_attn\.k_scale is missing"),
        ({"k0": torch.tensor(0.0), "v0": torch.tensor(0.0)}, "is 0, not a positive number"),
        ({"k1": torch.tensor(-1.0), "v1": torch.tensor(-1.0)}, "is -1, not a positive number"),
        ({"k1": torch.tensor(float("nan")), "v1": torch.tensor(float("nan"))}, "is nan, not a positive number"),
        ({"k1": torch.tensor(float("inf")), "v1": torch.tensor(float("inf"))}, "is inf, not a positive number"),
        ({"k1": torch.ones(2), "v1": torch.ones(2)}, "is no single number"),
        ({"k1": torch.tensor(1), "v1": torch.tensor(1)}, "is no single number"),
    ],
)
def test_scales_that_do_not_agree_are_refused(checkpoint: Path, scalars: dict[str, Any], reason: str) -> None:
    calibrated(checkpoint, 3.0, 4.0)
    changed(checkpoint, **scalars)
    model = open_model(str(checkpoint))
    with pytest.raises(InputError, match=reason) as caught:
        check_engine_scales(model)
    assert caught.value.fix
    with pytest.raises(InputError, match=reason):
        open_engine(str(checkpoint))
    with pytest.raises(InputError, match=reason):
        load_subject(model, device=CPU, kv_dtype="fp8")
    open_engine(str(checkpoint), kv_dtype="bf16")  # nothing of them is used
    load_subject(model, device=CPU, kv_dtype="bf16")


def test_scales_of_layers_that_do_not_exist_are_refused(checkpoint: Path) -> None:
    calibrated(checkpoint, 3.0, 4.0)
    replace_files(checkpoint, {}, {"model.layers.2.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(InputError, match="belongs to none of the 2 layers"):
        check_engine_scales(open_model(str(checkpoint)))


def test_a_model_that_says_nothing_has_none(checkpoint: Path) -> None:
    assert check_engine_scales(open_model(str(checkpoint))) is None


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"dtype": "int8", "layers": (LayerRange("int8", 3.0, 3.0),) * 2}, {}, None),
        ({"granularity": "token"}, {}, None),
        ({"layers": (LayerRange("fp8", 3.0, 3.0), LayerRange("bf16", None, 3.0))}, {}, r"layer\(s\) 1 must stay"),
        ({"strength": 0.5}, {}, "whole latents"),
        ({}, {"architectures": ["MlaNativeForCausalLM"]}, "stock form"),
        ({}, {KEY: {"quant_method": "fp8"}}, "another quantization_config"),
    ],
)
def test_what_an_engine_cannot_do_is_not_said(
    changes: dict[str, Any], config: dict[str, Any], reason: str | None
) -> None:
    stored = {"architectures": ["TransformersForCausalLM"], "model_type": "deepseek_v3", **config}
    found = make_engine_scales(stored, scheme(3.0, 3.0, **changes), (1.0, 1.0))
    assert found.tensors == {}
    assert found.config == stored
    assert (found.why_none is None) == (reason is None)
    if reason is not None:
        assert found.why_none is not None
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found.why_none)


def test_another_calibration_leaves_nothing_of_an_earlier_one(checkpoint: Path) -> None:
    before = read_config(checkpoint)
    first = calibrated(checkpoint, 3.0, 4.0)
    assert first.config[KEY] == QUANTIZATION
    assert stale_engine_scales(open_tensors(checkpoint).infos.keys(), first) == []
    again = make_engine_scales(read_config(checkpoint), scheme(3.0, 4.0, granularity="token"), (1.0, 1.0))
    assert again.config == before
    stale = stale_engine_scales(open_tensors(checkpoint).infos.keys(), again)
    assert stale == sorted(first.tensors)
    replace_files(checkpoint, {"config.json": json.dumps(again.config).encode()})
    remove_tensors(checkpoint, stale)
    remove_tensors(checkpoint, stale)  # nothing is left to do
    assert not set(first.tensors) & set(open_tensors(checkpoint).infos)
    for file in checkpoint.glob("*.safetensors"):
        assert not set(first.tensors) & set(load_file(file))
    assert check_engine_scales(open_model(str(checkpoint))) is None


@pytest.mark.parametrize("stop", [1, 2])
def test_a_stop_while_scales_are_removed_leaves_a_readable_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    weights = {name: open_tensors(checkpoint).read(name) for name in open_tensors(checkpoint).infos}
    scales = calibrated(checkpoint, 3.0, 4.0)
    put, calls = os.replace, [0]

    def failing(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] == stop:
            raise KeyboardInterrupt
        put(source, target)

    monkeypatch.setattr(inplace.os, "replace", failing)
    try:
        remove_tensors(checkpoint, scales.tensors)
    except KeyboardInterrupt:
        assert calls[0] == stop
    reader = open_tensors(checkpoint)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in weights.items())
    open_model(str(checkpoint))
