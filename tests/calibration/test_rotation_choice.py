"""`--rotation`: what is written computes the same, in both forms and in transformers, and is turned once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_cli.app import main
from mla_cli.calibration.calibrate import calibrate
from mla_cli.checkpoint.kv_cache import KEY, cache_plan
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import UsageError
from tests.calibration.support import CPU, converted, edit_weights, options, read
from tests.tiny import random_tokens

TOKENS = random_tokens(2, 30)


def logits(checkpoint: Path, kv_dtype: str = "bf16") -> Tensor:
    model = open_model(str(checkpoint))
    decoder = load_decoder(model, dtype=torch.float64)
    cache = decoder.make_cache(2, 30, cache_plan(model.source.config, model.spec, kv_dtype).quantizers)
    with torch.inference_mode():
        return decoder.logits(decoder(TOKENS, cache))


def stored(checkpoint: Path) -> Any:
    return read(checkpoint / "config.json")[KEY]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(params=["stock", "native"])
def source(request: pytest.FixtureRequest, pristine: Path, pristine_native: Path) -> Path:
    return pristine if request.param == "stock" else pristine_native


@pytest.mark.parametrize("rotation", ["hadamard", "learned", "none"])
def test_a_rotation_that_is_asked_for_is_in_the_weights(source: Path, tmp_path: Path, rotation: Any) -> None:
    out = tmp_path / "out"
    chosen = options(source, kv_dtype="int4", rotation=rotation, max_loss=100.0)
    report = calibrate(str(source), out, chosen, CPU)
    assert report["rotation"] == {"kind": rotation, "measured": []}
    assert stored(out)["rotation"] == rotation
    assert [layer["dtype"] for layer in stored(out)["layers"]] == ["int4", "int4"]
    torch.testing.assert_close(logits(out), logits(source), atol=2e-4, rtol=1e-4)
    changed = (out / "model.safetensors").read_bytes() != (source / "model.safetensors").read_bytes()
    assert changed == (rotation != "none")
    moved = float((logits(out, "auto") - logits(out)).norm() / logits(out).norm())
    assert 1e-4 < moved < 0.3  # the cache is quantised, and usable


def test_a_channel_that_takes_the_range_is_turned_away(native: Path, tmp_path: Path) -> None:
    def outlier(tensors: dict[str, Tensor]) -> None:
        for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
            tensors["model.layers.0.self_attn." + name][3] *= 40
        tensors["model.layers.0.self_attn.kv_b_proj.weight"][:, 3] /= 40

    edit_weights(native, outlier)
    lost = {}
    for rotation in ("none", "hadamard", "learned", None):
        chosen = options(native, kv_dtype="int4", rotation=rotation, max_loss=1e6)
        report = calibrate(str(native), tmp_path / str(rotation), chosen, CPU)
        lost[rotation] = report["heldout"]["kl"]
        if rotation is None:
            measured = {one["rotation"]: one["kl"] for one in report["rotation"]["measured"]}
            assert set(measured) == {"none", "hadamard", "learned"}
            assert report["rotation"]["kind"] == min(measured, key=lambda kind: measured[kind]) != "none"
            assert lost[None] == lost[report["rotation"]["kind"]]
    assert max(lost["hadamard"], lost["learned"]) < 0.7 * lost["none"]


def test_where_int8_costs_little_nothing_is_turned(source: Path, tmp_path: Path) -> None:
    report = calibrate(str(source), tmp_path / "out", options(source), CPU)
    assert report["rotation"]["kind"] == "none"
    assert [one["rotation"] for one in report["rotation"]["measured"]] == ["none"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("rotation", ["hadamard", "learned"])
def test_transformers_reads_what_was_calibrated(pristine: Path, tmp_path: Path, rotation: Any) -> None:
    from transformers import AutoModelForCausalLM

    calibrate(str(pristine), tmp_path / "out", options(pristine, kv_dtype="int4", rotation=rotation), CPU)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS).logits, logits(pristine).float(), atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(pristine), atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("pictures")
def test_a_copy_is_what_would_have_been_written_in_place(checkpoint: Path, tmp_path: Path) -> None:
    chosen = options(checkpoint, kv_dtype="int4", rotation="learned")
    for name in ("one", "two"):
        calibrate(str(checkpoint), tmp_path / name, chosen, CPU)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    calibrate(str(checkpoint), None, chosen, CPU)
    copy = files(tmp_path / "one")
    weights = {name: copy.pop(name) for name in list(copy) if name.endswith(".safetensors")}
    assert {name: data for name, data in files(checkpoint).items() if name not in weights} == copy
    ours, theirs = (open_model(str(folder)).source.tensors for folder in (checkpoint, tmp_path / "one"))
    assert set(ours.infos) == set(theirs.infos)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.infos)


def test_the_card_and_inspect_say_how_latents_are_cached(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (checkpoint / "README.md").read_text()
    for dtype, said in (("int8", "latents in int8, a range for each token"), ("int4", "turned (hadamard)")):
        report = calibrate(str(checkpoint), None, options(checkpoint, kv_dtype=dtype, rotation="hadamard"), CPU)
        card = (checkpoint / "README.md").read_text()
        size = f"{report['bytes_per_token']['quantised']:,} bytes a token"
        assert card.startswith(first.rstrip())
        assert card.count("## Quantised cache") == 1
        assert said in card
        assert size in card
        capsys.readouterr()
        assert main(["inspect", str(checkpoint)]) == 0
        assert f"calibrated   {size}: {dtype}, token scales, turned (hadamard)" in capsys.readouterr().out


def test_what_is_turned_is_not_turned_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = calibrate(str(checkpoint), None, options(checkpoint, kv_dtype="int4"), CPU)
    kind, weights = report["rotation"]["kind"], (checkpoint / "model.safetensors").read_bytes()
    assert kind in ("hadamard", "learned")
    assert len(report["rotation"]["measured"]) == 3
    again = calibrate(str(checkpoint), None, options(checkpoint, kv_dtype="int8"), CPU)
    assert again["rotation"] == report["rotation"]  # why it is turned is still told
    assert stored(checkpoint)["rotation"] == kind
    same = calibrate(str(checkpoint), None, options(checkpoint, kv_dtype="int4", rotation=kind), CPU)
    assert same["heldout"]["kl"] == pytest.approx(report["heldout"]["kl"], rel=1e-4)
    assert (checkpoint / "model.safetensors").read_bytes() == weights
    before = files(checkpoint)

    def work(*_: Any, **__: Any) -> Any:
        raise AssertionError("refused before any work")

    monkeypatch.setattr("mla_cli.calibration.calibrate.choose_texts", work)
    for asked in {"none", "hadamard", "learned"} - {kind}:
        for budget in (None, 100):
            chosen = options(checkpoint, rotation=asked, budget_bytes=budget)
            with pytest.raises(UsageError, match=rf"turned \({kind}\) already") as caught:
                calibrate(str(checkpoint), None, chosen, CPU)
            assert asked in str(caught.value.where)
            assert "that it was made from" in caught.value.fix
    assert files(checkpoint) == before


@pytest.mark.parametrize(("family", "changes"), [("qwen2", {"bias": 0.5}), ("gpt2", {})])
def test_other_families_are_turned_too(tmp_path: Path, family: str, changes: Any) -> None:
    source = converted(tmp_path, family, **changes, **({"rope": 0} if family == "gpt2" else {}))
    report = calibrate(str(source), tmp_path / "out", options(source, kv_dtype="int4", rotation="hadamard"), CPU)
    assert report["rotation"]["kind"] == "hadamard"
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), atol=2e-4, rtol=1e-4)


def test_bfloat16_weights_are_measured_as_they_are_rounded(tmp_path: Path) -> None:
    source = converted(tmp_path, dtype=torch.bfloat16)
    chosen = options(source, kv_dtype="int4", rotation="hadamard", max_loss=100.0)
    report = calibrate(str(source), tmp_path / "out", chosen, CPU)
    again = calibrate(str(tmp_path / "out"), tmp_path / "again", chosen, CPU)
    # Nothing is turned the second time, so what is measured then is what was written.
    held, told = again["heldout"], report["heldout"]
    assert held["ppl_quantised"] == pytest.approx(told["ppl_quantised"], rel=1e-4)
    assert read(tmp_path / "again" / "config.json")[KEY]["layers"] == stored(tmp_path / "out")["layers"]
