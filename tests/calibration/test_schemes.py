"""Other caches end to end: pages, quantised rotary keys, static ranges that are derived anew, scales for other engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mla_cli.calibration import calibrate as module
from mla_cli.calibration import store
from mla_cli.calibration.calibrate import calibrate
from mla_cli.calibration.passes import watch_latents
from mla_cli.calibration.rotate_model import DOWN, UP
from mla_cli.checkpoint import inplace
from mla_cli.checkpoint.engine_scales import KEY as ENGINE_KEY
from mla_cli.checkpoint.engine_scales import QUANTIZATION, check_engine_scales, is_engine_scale
from mla_cli.checkpoint.kv_cache import KEY, KvScheme, cache_plan, read_scheme
from mla_cli.checkpoint.latent_strength import check_latent_strength
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.checkpoint.reader import open_tensors
from mla_cli.checkpoint.writer import CheckpointWriter
from mla_cli.errors import UsageError
from mla_cli.model.cache import Cache
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.request import Request
from mla_cli.runtime.sampling_params import SamplingParams
from tests.calibration.support import CPU, edit_weights, options, read, texts_of
from tests.tiny import random_tokens

LOOSE = 1000.0  # percent: no layer falls back


def scheme(checkpoint: Path) -> KvScheme:
    model = open_model(str(checkpoint))
    found = read_scheme(model.source.config, model.spec)
    assert found is not None
    return found


def allocated(checkpoint: Path) -> int:
    """Bytes a token, of a cache with room for many."""
    model = open_model(str(checkpoint))
    quantizers = cache_plan(model.source.config, model.spec, "auto").quantizers
    return Cache(model.spec, 3, 160, dtype=torch.float32, quantizers=quantizers).bytes_per_token()


def generated(checkpoint: Path, tokens: int = 40) -> Any:
    engine = open_engine(str(checkpoint))
    (found,) = engine.generator.generate([Request("hello", SamplingParams(max_new_tokens=tokens, ignore_eos=True))])
    assert len(found.token_ids) == tokens  # type: ignore[union-attr]
    return engine.generator.statistics.summary()


# --- pages and rotary keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_dtype", "codes", "scale"), [("int8", 24, 4), ("fp8", 24, 4), ("int4", 12, 2)])
def test_pages_end_to_end(native: Path, kv_dtype: Any, codes: int, scale: int) -> None:
    chosen = options(native, kv_dtype=kv_dtype, scales="page", rotation="none", max_loss=LOOSE)
    report = calibrate(str(native), None, chosen, CPU)
    assert scheme(native).granularity == report["scales"] == "page"
    expected = 2 * (codes + 16) + -(-2 * scale // 16)  # a scale for 16 tokens
    assert report["bytes_per_token"]["quantised"] == allocated(native) == expected
    assert generated(native)["cache_bytes_per_token"] == expected
    assert 0 < report["heldout"]["kl"] < {"int8": 1e-3, "fp8": 2e-2, "int4": 0.2}[kv_dtype]
    by_token = calibrate(str(native), None, options(native, kv_dtype=kv_dtype, rotation="none", max_loss=LOOSE), CPU)
    assert report["heldout"]["kl"] > by_token["heldout"]["kl"]  # what a coarser range costs
    assert all(layer["scale"] is None for layer in report["layers"])


@pytest.mark.parametrize("rope_dtype", ["bfloat16", "int8", "fp8"])
def test_rotary_keys_are_cached_as_asked(native: Path, rope_dtype: Any) -> None:
    chosen = options(native, rope_dtype=rope_dtype, rotation="none", max_loss=LOOSE)
    report = calibrate(str(native), None, chosen, CPU)
    key = 2 * 8 if rope_dtype == "bfloat16" else 8 + 4  # codes, and a scale of its own
    expected = 2 * (24 + 4 + key)
    assert report["bytes_per_token"]["quantised"] == allocated(native) == expected
    assert generated(native)["cache_bytes_per_token"] == expected
    assert scheme(native).rope_dtype == report["rope_dtype"] == rope_dtype
    quantizers = scheme(native).quantizers()
    assert all(quantizer is not None and quantizer.rope_dtype == rope_dtype for quantizer in quantizers)
    assert 0 < report["heldout"]["kl"] < 2e-2


def test_a_rotary_key_takes_no_range_of_the_latent(native: Path) -> None:
    def silence(tensors: dict[str, Tensor]) -> None:
        """Latents a ten-thousandth as large, read ten thousand times as strongly: only the rotary keys are large."""
        for name, tensor in tensors.items():
            if "kv_a_proj_with_mqa" in name:
                tensor[:24] /= 1e4
            if name.endswith("kv_b_proj.weight"):
                tensor *= 1e4

    chosen = options(native, rope_dtype="int8", rotation="none", max_loss=LOOSE)
    before = calibrate(str(native), None, chosen, CPU)
    edit_weights(native, silence)
    after = calibrate(str(native), None, chosen, CPU)
    assert after["layers"][0]["amax"] == pytest.approx(before["layers"][0]["amax"] / 1e4, rel=1e-4)
    assert after["heldout"]["kl"] == pytest.approx(before["heldout"]["kl"], rel=0.3)


# --- static ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "expected"), [(None, 1000), (20, 20)])
def test_static_ranges_are_derived_anew_so_often(native: Path, every: int | None, expected: int) -> None:
    report = calibrate(str(native), None, options(native, scales="static", every=every, max_loss=LOOSE), CPU)
    assert scheme(native).every == report["every"] == expected
    for layer, told in zip(scheme(native).layers, report["layers"], strict=True):
        assert layer.token_amax == told["token_amax"]["p90"]
        assert 0 < layer.token_amax <= layer.amax
    assert generated(native, 60)["latent_range_drift"] > 0


@pytest.mark.parametrize("scales", ["token", "page"])
def test_other_ranges_have_no_steps(native: Path, scales: Any) -> None:
    with pytest.raises(UsageError, match="only static scales"):
        calibrate(str(native), None, options(native, scales=scales, every=10), CPU)
    calibrate(str(native), None, options(native, scales=scales), CPU)
    assert scheme(native).every is None


def test_a_limit_of_loss_and_one_of_bytes_are_one_too_many(native: Path) -> None:
    with pytest.raises(UsageError, match="bytes that --budget-bytes does not grant"):
        calibrate(str(native), None, options(native, max_loss=1.0, budget_bytes=100), CPU)


# --- scales for other engines --------------------------------------------------------------------------------------------


def static_fp8(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    chosen = options(checkpoint, kv_dtype="fp8", scales="static", max_loss=LOOSE, **changes)
    return calibrate(str(checkpoint), None, chosen, CPU)


def engine_tensors(checkpoint: Path) -> dict[str, Tensor]:
    reader = open_tensors(checkpoint)
    return {name: reader.read(name) for name in reader.infos if is_engine_scale(name)}


def test_a_static_fp8_cache_is_told_to_other_engines(checkpoint: Path, tmp_path: Path) -> None:
    weights, before = load_file(checkpoint / "model.safetensors"), read(checkpoint / "config.json")
    report = static_fp8(checkpoint)
    assert report["engine_scales"] == {"written": True, "why_none": None}
    assert read(checkpoint / "config.json")[ENGINE_KEY] == QUANTIZATION
    model = open_model(str(checkpoint))
    scales = check_engine_scales(model)
    assert scales is not None
    found, texts = engine_tensors(checkpoint), texts_of(random_tokens(16, 32).tolist())
    for index, (scale, layer) in enumerate(zip(scales, scheme(checkpoint).layers, strict=True)):
        assert torch.tensor(scale).frexp().mantissa == 0.5  # a power of two
        names = [f"model.layers.{index}.self_attn.{kind}_scale" for kind in "kv"]
        assert [float(found.pop(name)) for name in names] == [scale, scale]
        # One scale for a row of latent and rotary key: the larger of the two, and no more than twice that.
        observer = watch_latents(model, texts, dtype=torch.float32, device=CPU)[index]
        assert isinstance(layer.clip, float)
        assert layer.clip <= 448 * scale
        assert max(layer.clip, observer.rotary * 1.5) > 448 * scale / 2
    assert not found
    after = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
    open_engine(str(checkpoint))
    # Calibrated for anything else, nothing of it is left.
    copy = tmp_path / "copy"
    for target, folder in ((copy, copy), (None, checkpoint)):
        calibrate(str(checkpoint), target, options(checkpoint), CPU)
        assert engine_tensors(folder) == {}
        config = read(folder / "config.json")
        assert config.pop(KEY)["dtype"] == "int8"
        assert config == before
        assert check_engine_scales(open_model(str(folder))) is None
    left = load_file(checkpoint / "model.safetensors")
    assert set(left) == set(weights)
    assert all(torch.equal(left[name], tensor) for name, tensor in weights.items())


def test_a_copy_has_the_scales_too(pristine: Path, tmp_path: Path) -> None:
    chosen = options(pristine, kv_dtype="fp8", scales="static", max_loss=LOOSE, rotation="hadamard")
    calibrate(str(pristine), tmp_path / "out", chosen, CPU)
    assert len(engine_tensors(tmp_path / "out")) == 4
    first = check_engine_scales(open_model(str(tmp_path / "out")))
    assert first is not None
    assert engine_tensors(pristine) == {}
    # Calibrated again, the scales are replaced.
    calibrate(str(tmp_path / "out"), tmp_path / "again", chosen, CPU)
    assert check_engine_scales(open_model(str(tmp_path / "again"))) == first


def test_our_own_form_says_why_it_has_none(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = static_fp8(native)
    assert report["engine_scales"] == {"written": False, "why_none": "only the stock form runs there"}
    assert "no FP8 scales for vLLM: only the stock form runs there" in report["warnings"]
    assert "no FP8 scales for vLLM" in capsys.readouterr().err
    assert engine_tensors(native) == {}
    assert ENGINE_KEY not in read(native / "config.json")


# --- stops ---------------------------------------------------------------------------------------------------------------


class Stop(KeyboardInterrupt):
    """What Ctrl-C, or an out-of-memory killer, does at the worst moment."""


def stop_at(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Stop at the replacement of a file number `at`; gives the names that came to be replaced."""
    put, names = inplace.os.replace, []  # type: ignore[var-annotated]

    def failing(source: Any, target: Any) -> None:
        names.append(Path(target).name)
        if len(names) == at:
            raise Stop
        put(source, target)

    monkeypatch.setattr(inplace.os, "replace", failing)
    return names


def logits(checkpoint: Path) -> Tensor:
    decoder = load_decoder(open_model(str(checkpoint)))
    with torch.inference_mode():
        return decoder.logits(decoder(random_tokens(2, 20)))


def in_shards(checkpoint: Path) -> None:
    """The same checkpoint in several files, which cut through its layers."""
    reader, aside = open_tensors(checkpoint), checkpoint.with_name("aside")
    with CheckpointWriter(aside, max_shard_bytes=12_000) as writer:
        for name in sorted(reader.infos, key=lambda name: name.rpartition(".")[::-1]):
            writer.add(name, reader.read(name))
        for file in checkpoint.iterdir():
            if file.suffix != ".safetensors":
                writer.copy(file)
    shutil.rmtree(checkpoint)
    aside.rename(checkpoint)


@pytest.mark.parametrize("earlier", [None, "int8", "fp8", "shards"])
@pytest.mark.parametrize("stop", range(1, 10))
def test_a_stop_while_it_is_written_leaves_a_checkpoint_that_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, earlier: Any, stop: int
) -> None:
    plain = logits(checkpoint)
    if earlier == "shards":
        in_shards(checkpoint)
        first = open_model(str(checkpoint))
        homes = {first.source.tensors.infos[f"model.layers.0.self_attn.{name}"].file for name in (DOWN, UP)}
        assert len(homes) == 2
    elif earlier is not None:
        chosen = options(checkpoint, kv_dtype=earlier, scales="static", max_loss=LOOSE, rotation="none")
        calibrate(str(checkpoint), None, chosen, CPU)
    told = read(checkpoint / "config.json").get(KEY)
    weights = weights_of(checkpoint)
    chosen = options(checkpoint, kv_dtype="int4", rotation="hadamard", max_loss=LOOSE)
    with monkeypatch.context() as patch:
        names = stop_at(patch, stop)
        try:
            calibrate(str(checkpoint), None, chosen, CPU)
        except Stop:
            assert len(names) == stop
    torch.testing.assert_close(logits(checkpoint), plain, atol=2e-4, rtol=1e-4)
    generated(checkpoint, 4)
    model = open_model(str(checkpoint))
    found, turned = read_scheme(model.source.config, model.spec), weights_of(checkpoint) != weights
    assert not list(checkpoint.glob("*.tmp*"))
    if found is not None and found.rotation == "hadamard":
        # Of latents that may not be turned yet, nothing is quantised; ranges of those before would not fit.
        assert found.dtype == "int4"
        assert turned or all(layer.dtype == "bf16" for layer in found.layers)
        with pytest.raises(UsageError, match="turned"):
            check_latent_strength(model, 0.5)
    else:  # nothing, or what an earlier calibration said of these very latents
        assert not turned
        assert read(checkpoint / "config.json").get(KEY) == told
    calibrate(str(checkpoint), None, options(checkpoint, max_loss=LOOSE), CPU)
    assert scheme(checkpoint).dtype == "int8"


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    """What a turn changes."""
    reader = open_tensors(checkpoint)
    return {name: reader.read(name).numpy().tobytes() for name in reader.infos if ".kv_" in name}


def test_a_stop_before_anything_is_written_changes_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}

    def stopped(*_: Any, **__: Any) -> Any:
        raise Stop

    for name in ("measure_sensitivity", "watch_latents", "choose_clips", "build_report"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stopped)
            with pytest.raises(Stop):
                calibrate(str(checkpoint), None, options(checkpoint), CPU)
    for target in ("turned_file_tensors", "files_for_people"):
        with monkeypatch.context() as patch:
            patch.setattr(store, target, stopped)
            with pytest.raises(Stop):
                calibrate(str(checkpoint), tmp_path / "out", options(checkpoint, rotation="hadamard"), CPU)
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before
    assert not (tmp_path / "out").exists()
