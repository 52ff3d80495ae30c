"""Calibration of a latent cache: every token is seen once, what is stored is what is used, and the cost is as measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_cli.calibration import calibrate as module
from mla_cli.calibration.calibrate import calibrate
from mla_cli.calibration.choose_texts import choose_texts
from mla_cli.calibration.clipping import choose_clip, clip_error
from mla_cli.calibration.observers import LatentObserver, LatentRange, check_complete
from mla_cli.calibration.passes import measure_cost, watch_latents
from mla_cli.calibration.report import MOST_LOSS_PERCENT
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.kv_cache import KEY, quantizers_for
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import InputError, MlaError, OutputError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.attention import LatentAttention
from mla_cli.model.cache import Cache
from mla_cli.model.tokenizer import load_tokenizer
from tests.calibration.support import CPU, RAGGED, converted, edit_weights, options, read, texts_of
from tests.tiny import random_tokens


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("pristine"), form="deepseek")


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(pristine, tmp_path / "mla")
    shutil.copy(pristine.parent / "text.txt", tmp_path / "text.txt")
    return tmp_path / "mla"


# --- what is seen --------------------------------------------------------------------------------------------------------


def latents_with_outliers(tokens: int = 400, rank: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp2(torch.rand(tokens, 1, generator=generator) * 6 - 3)
    return torch.randn(tokens, rank, generator=generator) * spread


def assert_same(one: LatentRange, other: LatentRange) -> None:
    assert (one.tokens, one.amax, one.token_amax) == (other.tokens, other.amax, other.token_amax)
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.counts, other.counts)


def test_an_observer_depends_on_neither_order_nor_batches() -> None:
    latents = latents_with_outliers()
    whole = LatentObserver(0)
    whole.add(latents)
    order = torch.randperm(len(latents), generator=torch.Generator().manual_seed(0))
    for size in (1, 7, 399):
        parts = LatentObserver(0)
        for part in latents[order].split(size):
            parts.add(part)
        parts.add(latents[:0])
        assert_same(parts.result(), whole.result())
    assert int(whole.result().counts.sum()) == latents.numel()
    largest = latents.abs().amax(dim=-1).double().sort().values
    assert whole.result().token_amax == pytest.approx([float(largest[i]) for i in (200, 396, 399)], rel=0.04)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_an_outlier_of_any_sample_shows(place: int) -> None:
    observer = LatentObserver(0)
    for sample in range(8):
        latents = torch.ones(5 + sample, 4)
        if sample == place:
            latents[2, 1] = -50.0
        observer.add(latents)
    seen = observer.result()
    assert seen.amax == 50
    assert seen.tokens == sum(range(5, 13))
    assert seen.token_amax == pytest.approx((1, 1 if seen.tokens > 100 else 50, 50), rel=0.04)


def test_zeros_and_tiny_latents_are_counted() -> None:
    observer = LatentObserver(0)
    observer.add(torch.zeros(5, 4))
    assert observer.result().amax == 0
    observer.add(torch.full((3, 4), 1e-7))
    observer.add(torch.full((1, 4), 1e-42))
    seen = observer.result()
    assert seen.tokens == 9
    assert seen.amax == pytest.approx(1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_latent_that_is_not_finite_names_its_layer(value: float) -> None:
    latents = torch.zeros(4, 8)
    latents[2, 3] = value
    with pytest.raises(MlaError, match="layer 7 hold NaN or infinity"):
        LatentObserver(7).add(latents)


def test_layers_that_missed_tokens_are_listed() -> None:
    observers = [LatentObserver(layer) for layer in range(4)]
    for observer, tokens in zip(observers, (10, 9, 10, 0), strict=True):
        observer.add(torch.ones(tokens, 3))
    check_complete(observers[:1], 10)
    with pytest.raises(MlaError, match=r"all 10 calibration tokens.*1 \(9\), 3 \(0\)"):
        check_complete(observers, 10)


def test_a_layer_that_is_not_watched_stops_the_calibration(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LatentAttention.forward

    def bypassed(self: LatentAttention, x: Any, step: Any, record: Any = None) -> Any:
        return forward(self, x, step, None if self.layer == 1 else record)

    monkeypatch.setattr(LatentAttention, "forward", bypassed)
    before = (checkpoint / "config.json").read_bytes()
    with pytest.raises(MlaError, match=r"not every layer .* 1 \(0\)"):
        calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert (checkpoint / "config.json").read_bytes() == before


def test_each_layer_sees_each_token_once_and_no_padding(checkpoint: Path) -> None:
    def loud_padding(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][63] *= 1e4

    edit_weights(checkpoint, loud_padding)
    model = open_model(str(checkpoint))
    rows = [[token for token in row if token != 63] for row in RAGGED]
    quiet, loud = (
        [o.result() for o in watch_latents(model, texts_of(rows, pad), dtype=torch.float32, device=CPU)]
        for pad in (0, 63)
    )
    for one, other in zip(quiet, loud, strict=True):
        assert one.tokens == other.tokens == sum(map(len, rows))
        assert_same(one, other)
    decoder = load_decoder(model)
    cache = decoder.make_cache(1, 64)
    largest = [0.0] * len(quiet)
    with torch.inference_mode():
        for row in rows:
            cache.advance(torch.tensor([0]))
            decoder(torch.tensor([row]), cache)
            for i in range(len(largest)):
                latents, _ = cache.read(i, len(row), torch.float32)
                largest[i] = max(largest[i], float(latents.abs().max()))
    assert [seen.amax for seen in quiet] == pytest.approx(largest, rel=1e-5)


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


def test_dynamic_rotation_goes_by_each_sequences_own_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    checkpoint = converted(tmp_path, max_position_embeddings=16, rope_parameters=rope)
    model = open_model(str(checkpoint))
    short, long = random_tokens(1, 12)[0].tolist(), random_tokens(1, 40, seed=5)[0].tolist()

    def spread(rows: list[list[int]]) -> torch.Tensor:
        """How each layer's values spread below their token's largest."""
        seen = [o.result() for o in watch_latents(model, texts_of(rows), dtype=torch.float64, device=CPU)]
        return torch.stack([s.counts.sum(dim=0) for s in seen])

    assert torch.equal(spread([short, long]), spread([short]) + spread([long]))


def test_rounds_and_batches_change_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = open_model(str(checkpoint)), texts_of(RAGGED)
    quantizers = (LatentQuantizer("int8"),) * 2
    everything = watch_latents(model, texts, dtype=torch.float64, device=CPU)
    cost = measure_cost(model, texts, quantizers, dtype=torch.float64, device=CPU)
    monkeypatch.setattr("mla_cli.calibration.passes.MEMORY", 3 * 38 * 48 * 8)
    monkeypatch.setattr("mla_cli.calibration.passes.MICRO_TOKENS", 64)
    for one, other in zip(everything, watch_latents(model, texts, dtype=torch.float64, device=CPU), strict=True):
        assert_same(one.result(), other.result())
    again = measure_cost(model, texts, quantizers, dtype=torch.float64, device=CPU)
    assert again.tokens == cost.tokens == sum(len(row) - 1 for row in RAGGED)
    assert (again.plain_nll, again.quantised_nll) == pytest.approx((cost.plain_nll, cost.quantised_nll), rel=1e-6)


# --- the ranges ----------------------------------------------------------------------------------------------------------


def true_error(latents: torch.Tensor, quantizer: LatentQuantizer) -> float:
    error = (quantizer.rounded(latents.double()) - latents.double()).square().sum(dim=-1)
    return float((error / latents.double().abs().amax(dim=-1)).mean())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("granularity", ["token", "static"])
def test_the_error_of_a_clip_is_what_quantising_gives(dtype: Any, granularity: Any) -> None:
    latents = latents_with_outliers(2000, 64)
    observer = LatentObserver(0)
    observer.add(latents)
    seen = observer.result()
    for share in (1.0, 0.5, 0.2, 0.05):
        quantizer = LatentQuantizer(dtype, granularity, seen.amax * share)
        estimate = clip_error(seen, dtype, granularity, quantizer.clip)
        assert estimate == pytest.approx(true_error(latents, quantizer), rel=0.1)


def test_a_range_is_cut_only_where_that_pays() -> None:
    outlier = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))
    outlier[17, 5] = 400.0
    observer = LatentObserver(0)
    observer.add(outlier)
    seen = observer.result()
    static = choose_clip(seen, "int8", "static")
    assert static is not None
    assert static < 20  # one value in 192,000 does not take the range of all others
    best = min(
        true_error(outlier, LatentQuantizer("int8", "static", float(clip))) for clip in torch.logspace(0, 2.6, 60)
    )
    assert true_error(outlier, LatentQuantizer("int8", "static", static)) < 1.1 * best
    assert choose_clip(seen, "int8", "token") is None  # each token has a range of its own
    even = LatentObserver(0)
    even.add(torch.rand(100, 64) + 1)
    assert choose_clip(even.result(), "int8", "static") == even.result().amax


@pytest.mark.parametrize("granularity", ["token", "static"])
def test_silent_layers_get_a_range_that_can_be_used(granularity: Any) -> None:
    observer = LatentObserver(0)
    observer.add(torch.zeros(10, 4))
    clip = choose_clip(observer.result(), "int8", granularity)
    assert clip is None if granularity == "token" else clip is not None and clip > 0


# --- the whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("scales", ["token", "static"])
def test_the_stored_scheme_is_used_and_costs_what_the_report_says(checkpoint: Path, kv_dtype: Any, scales: Any) -> None:
    report = calibrate(str(checkpoint), None, options(checkpoint, kv_dtype=kv_dtype, scales=scales), CPU)
    model = open_model(str(checkpoint))
    quantizers = quantizers_for(model.source.config, model.spec, "auto")
    assert quantizers is not None
    assert all(q is not None and (q.dtype, q.granularity) == (kv_dtype, scales) for q in quantizers)
    held = report["heldout"]
    assert abs(held["ppl_change_percent"]) < {"int8": 1.0, "fp8": 3.0}[kv_dtype]
    assert 0 < held["kl"] < {"int8": 1e-3, "fp8": 2e-2}[kv_dtype]
    limit = {"int8": 127, "fp8": 448}[kv_dtype]
    for layer, stored in zip(report["layers"], read(checkpoint / "config.json")[KEY]["layers"], strict=True):
        usual = layer["token_amax"]["p99"]
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
    # FP8 costs this tiny model about the percent from which a calibration warns.
    assert bool(report["warnings"]) == (held["ppl_change_percent"] > MOST_LOSS_PERCENT)
    assert kv_dtype == "fp8" or report["warnings"] == []


def test_an_unquantised_cache_ignores_the_scheme(checkpoint: Path) -> None:
    tokens = random_tokens(2, 40)
    before, after = [], []
    for said in (before, after):
        model = open_model(str(checkpoint))
        assert quantizers_for(model.source.config, model.spec, "bf16") is None
        decoder = load_decoder(model)
        cache = decoder.make_cache(2, 40, quantizers_for(model.source.config, model.spec, "bf16"))
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


def test_the_same_command_twice_gives_the_same_bytes(checkpoint: Path) -> None:
    weights = (checkpoint / "model.safetensors").stat()
    found = []
    for _ in range(2):
        calibrate(str(checkpoint), None, options(checkpoint), CPU)
        found.append([(checkpoint / name).read_bytes() for name in ("config.json", "mla_report.json")])
    assert found[0] == found[1]
    after = (checkpoint / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (weights.st_ino, weights.st_mtime_ns)


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
    watch, measure = module.watch_latents, module.measure_cost

    def watching(model: Any, texts: CalibrationTexts, **rest: Any) -> Any:
        given["watched"] = texts
        return watch(model, texts, **rest)

    def measuring(model: Any, texts: CalibrationTexts, *rest: Any, **more: Any) -> Any:
        given["measured"] = texts
        return measure(model, texts, *rest, **more)

    monkeypatch.setattr(module, "watch_latents", watching)
    monkeypatch.setattr(module, "measure_cost", measuring)
    report = calibrate(str(checkpoint), None, options(checkpoint), CPU)
    watched, measured = (
        {tuple(row[:n]) for row, n in zip(t.sequences.tolist(), t.lengths.tolist(), strict=True)}
        for t in (given["watched"], given["measured"])
    )
    assert watched
    assert measured
    assert not watched & measured
    stored = read(checkpoint / "config.json")[KEY]
    assert stored["samples"] == report["calibration"]["sequences"] == len(given["watched"].lengths)
    assert stored["tokens"] == report["calibration"]["tokens"] == int(given["watched"].lengths.sum())
    assert stored["origin"] == "files: text.txt"


def test_values_beyond_a_range_saturate_and_are_counted(checkpoint: Path) -> None:
    model, texts = open_model(str(checkpoint)), texts_of(RAGGED)
    seen = [o.result() for o in watch_latents(model, texts, dtype=torch.float32, device=CPU)]

    def clipped(share: float) -> list[float]:
        quantizers = [LatentQuantizer("int8", "static", s.amax / share) for s in seen]
        return [
            layer.clipped_share
            for layer in measure_cost(model, texts, quantizers, dtype=torch.float32, device=CPU).layers
        ]

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
        cache = decoder.make_cache(1, 20, quantizers_for(model.source.config, model.spec, "auto"))
        with torch.inference_mode():
            assert bool(torch.isfinite(decoder.logits(decoder(random_tokens(1, 20), cache))).all())


def test_a_channel_that_takes_the_range_is_warned_of(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def outlier(tensors: dict[str, torch.Tensor]) -> None:
        # The latent's own relative error shrinks: only what attention gives shows the harm.
        tensors["model.layers.0.self_attn.kv_a_layernorm.weight"][3] *= 2000
        tensors["model.layers.0.self_attn.kv_b_proj.weight"][:, 3] /= 2000

    calm = calibrate(str(checkpoint), None, options(checkpoint), CPU)
    edit_weights(checkpoint, outlier)
    report = calibrate(str(checkpoint), None, options(checkpoint), CPU)
    assert report["layers"][0]["latent_error"] < calm["layers"][0]["latent_error"]
    assert any("in layer: 0 (" in warning for warning in report["warnings"])
    assert "in layer: 0 (" in capsys.readouterr().err


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
