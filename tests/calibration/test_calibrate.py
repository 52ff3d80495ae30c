"""Calibration of a latent cache: what is stored is what is used, the cost is as measured, and it goes where it should."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_cli.calibration import calibrate as module
from mla_cli.calibration.calibrate import calibrate
from mla_cli.calibration.choose_texts import choose_texts
from mla_cli.calibration.passes import watch_latents
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.kv_cache import KEY, cache_plan
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from mla_cli.errors import InputError, MlaError, OutputError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.attention import LatentAttention
from mla_cli.model.cache import Cache
from mla_cli.model.tokenizer import load_tokenizer
from tests.calibration.support import CPU, RAGGED, ROOMY, converted, edit_weights, measure_cost, options, read, texts_of
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer

# --- the whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("scales", ["token", "static"])
def test_the_stored_scheme_is_used_and_costs_what_the_report_says(checkpoint: Path, kv_dtype: Any, scales: Any) -> None:
    chosen = options(checkpoint, kv_dtype=kv_dtype, scales=scales, max_loss=100.0)
    report = calibrate(str(checkpoint), None, chosen, CPU)
    model = open_model(str(checkpoint))
    quantizers = cache_plan(model.source.config, model.spec, "auto").quantizers
    assert quantizers is not None
    assert all(q is not None and (q.dtype, q.granularity) == (kv_dtype, scales) for q in quantizers)
    held = report["heldout"]
    assert abs(held["ppl_change_percent"]) < {"int8": 1.0, "fp8": 3.0}[kv_dtype]
    assert 0 < held["kl"] < {"int8": 1e-3, "fp8": 2e-2}[kv_dtype]
    limit = {"int8": 127, "fp8": 448}[kv_dtype]
    for layer, stored in zip(report["layers"], read(checkpoint / "config.json")[KEY]["layers"], strict=True):
        usual = layer["token_amax"]["p90"]
        assert stored == {"dtype": kv_dtype, "clip": layer["clip"], "amax": layer["amax"], "token_amax": usual}
        assert 0 < layer["latent_error"] < 0.06
        assert 0 < layer["attention_error"] < 0.1
        if scales == "static":
            # Never the 1.0 of a scale that nobody set.
            assert layer["scale"] == layer["clip"] / limit
            assert layer["amax"] / 8 <= layer["clip"] <= layer["amax"]
    plain, small = report["bytes_per_token"]["unquantised"], report["bytes_per_token"]["quantised"]
    assert plain == 2 * (24 + 8) * 4
    assert small == 2 * (24 + 8 * 2 + (0 if scales == "static" else 4))
    assert small == Cache(model.spec, 3, 100, dtype=torch.float32, quantizers=quantizers).bytes_per_token()
    assert report["warnings"] == []


def test_an_unquantised_cache_ignores_the_scheme(checkpoint: Path) -> None:
    tokens = random_tokens(2, 40)
    before, after = [], []
    for said in (before, after):
        model = open_model(str(checkpoint))
        assert cache_plan(model.source.config, model.spec, "bf16").quantizers is None
        decoder = load_decoder(model)
        cache = decoder.make_cache(2, 40, cache_plan(model.source.config, model.spec, "bf16").quantizers)
        with torch.inference_mode():
            said.append(decoder.logits(decoder(tokens, cache)))
        if said is before:
            calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert torch.equal(before[0], after[0])


@pytest.mark.parametrize(
    "quantizer", [LatentQuantizer("int8"), LatentQuantizer("fp8"), LatentQuantizer("int8", "static", 9.0)]
)
def test_single_steps_equal_one_pass_over_quantised_latents(checkpoint: Path, quantizer: LatentQuantizer) -> None:
    decoder = load_decoder(open_model(str(checkpoint)), dtype=torch.float64)
    tokens = random_tokens(2, 30)
    quantizers = (quantizer,) * 2
    with torch.inference_mode():
        plain = decoder(tokens)
        at_once = decoder(tokens, decoder.make_cache(2, 30, quantizers))
        cache = decoder.make_cache(2, 30, quantizers)
        steps = torch.cat([decoder(tokens[:, i : i + 1], cache) for i in range(30)], dim=1)
    torch.testing.assert_close(steps, at_once, atol=1e-6, rtol=1e-6)
    assert float((plain - at_once).abs().max()) > 1e-6
    assert float((plain - at_once).norm() / plain.norm()) < (0.05 if quantizer.dtype == "int8" else 0.12)


def test_a_report_keeps_what_it_held_and_its_calibration_is_replaced(checkpoint: Path) -> None:
    before = read(checkpoint / "mla_report.json")
    calibrate(str(checkpoint), None, options(checkpoint), CPU)
    report = calibrate(str(checkpoint), None, options(checkpoint, kv_dtype="fp8"), CPU)
    after = read(checkpoint / "mla_report.json")
    assert {key: after[key] for key in before} == before
    assert set(after) - set(before) == {"calibration_kv"}
    assert after["calibration_kv"]["kv_dtype"] == "fp8"
    assert {**after["calibration_kv"], "checkpoint": str(checkpoint), "seconds": report["seconds"]} == report
    assert read(checkpoint / "config.json")[KEY]["dtype"] == "fp8"


def test_held_out_text_gives_no_ranges(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, CalibrationTexts] = {}
    watch, weigh, held_out = module.watch_latents, module.measure_sensitivity, module.HeldOut

    def watching(model: Any, texts: CalibrationTexts, **rest: Any) -> Any:
        given["watched"] = texts
        return watch(model, texts, **rest)

    def weighing(model: Any, texts: CalibrationTexts, **rest: Any) -> Any:
        given["weighed"] = texts
        return weigh(model, texts, **rest)

    def measuring(model: Any, texts: CalibrationTexts, **rest: Any) -> Any:
        given["measured" if "compared" in given else "compared"] = texts
        return held_out(model, texts, **rest)

    monkeypatch.setattr(module, "watch_latents", watching)
    monkeypatch.setattr(module, "measure_sensitivity", weighing)
    monkeypatch.setattr(module, "HeldOut", measuring)
    report = calibrate(str(checkpoint), None, options(checkpoint), CPU)
    rows = {
        name: {tuple(row[:n]) for row, n in zip(t.sequences.tolist(), t.lengths.tolist(), strict=True)}
        for name, t in given.items()
    }
    assert set(rows) == {"watched", "weighed", "compared", "measured"}
    assert all(rows.values())
    assert not rows["measured"] & rows["watched"]
    assert rows["weighed"] | rows["compared"] <= rows["watched"]
    assert not rows["weighed"] & rows["compared"]  # a turn is not judged by the text that it was fitted to
    stored = read(checkpoint / "config.json")[KEY]
    assert stored["samples"] == report["calibration"]["sequences"] == len(given["watched"].lengths)
    assert stored["tokens"] == report["calibration"]["tokens"] == int(given["watched"].lengths.sum())
    assert stored["origin"] == "files: text.txt"


def test_values_beyond_a_range_saturate_and_are_counted(checkpoint: Path) -> None:
    model, texts = open_model(str(checkpoint)), texts_of(RAGGED)
    seen = [o.result() for o in watch_latents(model, texts, dtype=torch.float32, device=CPU)]

    def clipped(share: float) -> list[float]:
        quantizers = [LatentQuantizer("int8", "static", s.amax / share) for s in seen]
        return [layer.clipped_share for layer in measure_cost(model, texts, quantizers).layers]

    assert clipped(0.999) == [0, 0]
    assert all(0 < share < 0.2 for share in clipped(2.4))


def test_silent_and_tiny_latents_survive_the_whole_way(tmp_path: Path) -> None:
    checkpoint = converted(tmp_path)

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "kv_a_proj_with_mqa" in name:  # and its bias, where it has one
                tensor[:24] *= 0 if ".0." in name else 1e-7

    edit_weights(checkpoint, silence)
    for scales in ("token", "static"):
        report = calibrate(str(checkpoint), None, options(checkpoint, scales=scales), CPU)
        assert report["layers"][0]["amax"] == 0
        assert 0 < report["layers"][1]["amax"] < 1e-5
        assert report["layers"][0]["attention_error"] == 0
        assert report["layers"][1]["attention_error"] < 0.1
        model = open_model(str(checkpoint))
        decoder = load_decoder(model)
        cache = decoder.make_cache(1, 20, cache_plan(model.source.config, model.spec, "auto").quantizers)
        with torch.inference_mode():
            assert bool(torch.isfinite(decoder.logits(decoder(random_tokens(1, 20), cache))).all())


def test_small_latents_of_a_bfloat16_model_keep_their_scales(tmp_path: Path) -> None:
    checkpoint = converted(tmp_path, dtype=torch.bfloat16)

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "kv_a_proj_with_mqa" in name:
                tensor[:24] /= 2**13
            if name.endswith("kv_b_proj.weight"):
                tensor *= 2**13

    for kv_dtype in ("int8", "fp8"):
        chosen = options(checkpoint, kv_dtype=kv_dtype, scales="static", max_loss=100.0, rotation="none")
        usual = calibrate(str(checkpoint), None, chosen, CPU)
        small = checkpoint.parent / f"small-{kv_dtype}"
        shutil.copytree(checkpoint, small)
        edit_weights(small, shrink)
        report = calibrate(str(small), None, chosen, CPU)
        for one, other in zip(report["layers"], usual["layers"], strict=True):
            assert one["amax"] < 2e-3
            assert one["scale"] == pytest.approx(other["scale"] / 2**13, rel=1e-6)
        assert report["heldout"]["kl"] == pytest.approx(usual["heldout"]["kl"], rel=1e-2)


def test_a_huge_key_bias_is_judged_by_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "source", "qwen2", **ROOMY, bias=0.1)
    save_tokenizer(tmp_path / "source")

    def huge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.bias"][0] = 600.0

    edit_weights(tmp_path / "source", huge)
    text = save_text(tmp_path / "text.txt")
    chosen = ConvertOptions(calib=str(text), samples=16, seq_len=32, kv_lora_rank=24, qk_rope_head_dim=4)
    convert(str(tmp_path / "source"), tmp_path / "mla", chosen, device=CPU, command="mla convert")
    loose = options(tmp_path / "mla", rotation="none", max_loss=1000.0)
    # A constant is in no latent of ours; in bfloat16 the rotary keys that have it stay what they are.
    report = calibrate(str(tmp_path / "mla"), None, loose, CPU)
    assert report["warnings"] == []
    assert report["heldout"]["kl"] < 5e-3
    # Where it takes the range of a key, the latents' own error shows nothing, and the outputs do.
    ruined = calibrate(str(tmp_path / "mla"), None, replace(loose, rope_dtype="int8"), CPU)
    assert ruined["layers"][0]["latent_error"] == pytest.approx(report["layers"][0]["latent_error"], rel=0.1)
    assert ruined["layers"][0]["attention_error"] > 0.1
    assert ruined["heldout"]["kl"] > 3 * report["heldout"]["kl"]
    assert "in layer: 0 (" in capsys.readouterr().err


def test_a_channel_that_takes_the_range_is_warned_of(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def outlier(tensors: dict[str, torch.Tensor]) -> None:
        # The latent's own relative error shrinks: only what attention gives shows the harm.
        tensors["model.layers.0.self_attn.kv_a_layernorm.weight"][3] *= 2000
        tensors["model.layers.0.self_attn.kv_b_proj.weight"][:, 3] /= 2000

    chosen = options(checkpoint, rotation="none", max_loss=1000.0)
    calm = calibrate(str(checkpoint), None, chosen, CPU)
    edit_weights(checkpoint, outlier)
    report = calibrate(str(checkpoint), None, chosen, CPU)
    assert report["layers"][0]["latent_error"] < calm["layers"][0]["latent_error"]
    assert any("in layer: 0 (" in warning for warning in report["warnings"])
    assert "in layer: 0 (" in capsys.readouterr().err


def test_a_layer_that_is_not_watched_stops_the_calibration(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LatentAttention.forward

    def bypassed(self: LatentAttention, x: Any, step: Any, record: Any = None) -> Any:
        return forward(self, x, step, None if self.layer == 1 else record)

    monkeypatch.setattr(LatentAttention, "forward", bypassed)
    before = (checkpoint / "config.json").read_bytes()
    with pytest.raises(MlaError, match=r"not every layer .* 1 \(0\)"):
        calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert (checkpoint / "config.json").read_bytes() == before


def test_half_precision_calibrates_too(checkpoint: Path) -> None:
    report = calibrate(str(checkpoint), None, options(checkpoint, dtype=torch.bfloat16), CPU)
    exact = calibrate(str(checkpoint), None, options(checkpoint), CPU)
    for half, full in zip(report["layers"], exact["layers"], strict=True):
        assert half["amax"] == pytest.approx(full["amax"], rel=0.05)


@pytest.mark.parametrize("native", [True, False])
def test_ranges_are_watched_in_bfloat16_where_the_cpu_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native, raising=False)
    checkpoint = converted(tmp_path, dtype=torch.bfloat16)
    report = calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert report["calibration"]["dtype"] == ("bfloat16" if native else "float32")
    assert report["heldout"]["dtype"] == "float32"  # so small a cost would drown in bfloat16's rounding
    assert report["bytes_per_token"]["unquantised"] == 2 * (24 + 8) * 2


# --- where it goes -------------------------------------------------------------------------------------------------------


def test_a_copy_holds_everything_and_the_source_stays(checkpoint: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    out = tmp_path / "copy"
    calibrate(str(checkpoint), out, options(checkpoint), CPU)
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before
    assert {file.name for file in out.iterdir()} == set(before)
    ours, theirs = load_file(out / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    config = read(out / "config.json")
    assert config.pop(KEY)["dtype"] == "int8"
    assert config == read(checkpoint / "config.json")
    with pytest.raises(OutputError, match="--force"):
        calibrate(str(checkpoint), out, options(checkpoint), CPU)
    first = {file.name: file.read_bytes() for file in out.iterdir()}
    calibrate(str(checkpoint), out, options(checkpoint, force=True), CPU)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == first
    calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert (checkpoint / "config.json").read_bytes() == first["config.json"]
    with pytest.raises(OutputError, match="replace the source"):
        calibrate(str(checkpoint), checkpoint, options(checkpoint, force=True), CPU)


def test_a_download_cache_is_not_changed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").rename(tmp_path / "blob")
    (checkpoint / "config.json").symlink_to(tmp_path / "blob")
    with pytest.raises(OutputError, match="--out"):
        calibrate(str(checkpoint), None, options(checkpoint), CPU)
    calibrate(str(checkpoint), tmp_path / "copy", options(checkpoint), CPU)
    assert KEY not in read(checkpoint / "config.json")


def test_a_model_without_latents_is_to_be_converted_first(pristine: Path) -> None:
    with pytest.raises(UsageError, match="convert it first"):
        calibrate(str(pristine.parent / "source"), None, options(pristine), CPU)


def test_one_sequence_is_no_calibration(checkpoint: Path) -> None:
    (checkpoint.parent / "text.txt").write_text("one short line of text")
    with pytest.raises(InputError, match="one calibration sequence"):
        calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert KEY not in read(checkpoint / "config.json")


def test_fewer_sequences_than_asked_are_counted(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": "some letters of text, " * n}) for n in range(1, 8)]
    (checkpoint.parent / "seven.jsonl").write_text("\n".join(lines) + "\n")
    chosen = options(checkpoint, calib=str(checkpoint.parent / "seven.jsonl"), samples=512)
    text = calibrate(str(checkpoint), None, chosen, CPU)["calibration"]
    assert (text["requested"], text["sequences"], text["heldout_sequences"]) == (512, 6, 1)
    assert "7 calibration sequences instead of 512" in capsys.readouterr().err


def test_sequences_longer_than_the_model_can_hold_are_said_to_be_cut(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate(str(checkpoint), None, options(checkpoint, samples=4, seq_len=1000), CPU)
    assert "the model has 256 positions" in capsys.readouterr().err


def test_one_line_many_times_is_no_trouble(checkpoint: Path) -> None:
    (checkpoint.parent / "text.txt").write_text("the same words again and again\n" * 512)
    report = calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert report["heldout"]["kl"] < 1e-2


def test_a_model_can_calibrate_on_what_it_writes(checkpoint: Path) -> None:
    chosen = options(checkpoint, calib="self", samples=20, seq_len=16)
    report = calibrate(str(checkpoint), None, chosen, CPU)
    assert report["calibration"]["origin"].startswith("self")
    first = (checkpoint / "config.json").read_bytes()
    calibrate(str(checkpoint), None, chosen, CPU)  # the scheme stored meanwhile changes nothing
    assert (checkpoint / "config.json").read_bytes() == first


def test_auto_falls_back_to_what_the_model_writes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise InputError("no network here")

    monkeypatch.setattr("mla_cli.calibration.choose_texts.load_texts", unreachable)
    model = open_model(str(checkpoint))
    wanted = {"samples": 3, "seq_len": 16, "seed": 0, "device": CPU}
    texts = choose_texts(model, load_tokenizer(checkpoint), calib="auto", **wanted)  # type: ignore[arg-type]
    assert texts.origin.startswith("self")
    with pytest.raises(InputError, match="no network"):
        choose_texts(model, load_tokenizer(checkpoint), calib="org/data", **wanted)  # type: ignore[arg-type]
