"""`--budget-bytes`: what is written takes no more, more bytes never lose more, and it runs as it was measured."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.calibration.calibrate import calibrate
from mla_cli.calibration.passes import HeldOut
from mla_cli.calibration.variants import make_variant
from mla_cli.checkpoint.kv_cache import KEY, cache_plan
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import UsageError
from mla_cli.evaluation.subject import load_subject
from mla_cli.model.cache import Cache
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.request import Request
from mla_cli.runtime.sampling_params import SamplingParams
from tests.calibration.support import CPU, converted, options, read, texts_of
from tests.tiny import random_tokens, with_latent_strength

LAYERS, ROPE = 2, 8
SMALLEST = LAYERS * (1 + 2 + 2 * ROPE)  # INT4: one byte of codes, one scale, the rotary key in bfloat16
BUDGETS = (SMALLEST, 48, 60, 88, 300)
TOKENS = random_tokens(2, 30)


def within(source: Path, out: Path, budget: int, **changes: Any) -> dict[str, Any]:
    return calibrate(str(source), out, options(source, budget_bytes=budget, **changes), CPU)


@pytest.fixture(scope="module")
def budgeted(pristine_native: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("budgets")
    return {budget: (folder / str(budget), within(pristine_native, folder / str(budget), budget)) for budget in BUDGETS}


def bytes_of(checkpoint: Path) -> int:
    """What a token takes in the cache that a checkpoint says."""
    model = open_model(str(checkpoint))
    plan = cache_plan(model.source.config, model.spec, "auto")
    decoder = with_latent_strength(load_decoder(model), plan.strength)
    return Cache(decoder.spec, 2, 50, dtype=torch.float32, quantizers=plan.quantizers).bytes_per_token()


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_more_bytes_than_granted(budgeted: Any, budget: int) -> None:
    checkpoint, report = budgeted[budget]
    assert report["bytes_per_token"]["quantised"] == bytes_of(checkpoint) <= budget
    stored = read(checkpoint / "config.json")[KEY]
    assert stored["strength"] == report["strength"]
    assert stored["max_loss"] is None
    assert len(report["trade"]) == 1  # no layer takes more bytes than were granted
    found = report["budget"]
    assert found["bytes_per_token"] == budget
    assert all(one["bytes_per_token"] <= budget for one in found["candidates"])
    best = min(found["candidates"], key=lambda one: one["kl"])
    assert (best["kv_dtype"], best["rotation"], best["strength"]) == (
        report["kv_dtype"], report["rotation"]["kind"], report["strength"],
    )  # fmt: skip


def test_more_bytes_never_lose_more(budgeted: Any, pristine_native: Path) -> None:
    lost = [budgeted[budget][1]["heldout"]["kl"] for budget in BUDGETS]
    assert all(more <= less * 1.05 + 1e-6 for less, more in pairwise(lost))
    assert lost[0] > 10 * lost[2] > 0
    assert lost[-1] < 1e-4
    # Everything as it is, where there is room for it.
    assert budgeted[300][1]["kv_dtype"] in ("bf16", "int8")
    assert {one["kv_dtype"] for one in budgeted[300][1]["budget"]["candidates"]} == {"bf16", "int8", "fp8", "int4"}
    assert budgeted[SMALLEST][1]["kv_dtype"] == "int4"


def test_every_type_takes_as_many_channels_as_fit(budgeted: Any) -> None:
    shares = {one["kv_dtype"]: one["strength"] for one in budgeted[60][1]["budget"]["candidates"]}
    assert shares == {"int4": 1.0, "int8": 10 / 24, "fp8": 10 / 24}  # 10 + 4 + 16 bytes; one in float32 has no room
    assert budgeted[60][1]["kv_dtype"] == "int4"


@pytest.mark.parametrize(("kv_dtype", "least"), [(None, SMALLEST), ("int8", LAYERS * (1 + 4 + 2 * ROPE))])
def test_too_few_bytes_are_refused_with_the_least(
    pristine_native: Path, tmp_path: Path, kv_dtype: Any, least: int
) -> None:
    with pytest.raises(UsageError, match=f"the smallest takes {least}") as caught:
        within(pristine_native, tmp_path / "out", least - 1, kv_dtype=kv_dtype)
    assert f"at least {least}" in caught.value.fix
    assert not (tmp_path / "out").exists()
    assert within(pristine_native, tmp_path / "out", least, kv_dtype=kv_dtype)["bytes_per_token"]["quantised"] == least


@pytest.mark.parametrize("form", ["native", "stock"])
def test_a_type_and_a_rotation_that_are_given_are_kept(
    pristine: Path, pristine_native: Path, tmp_path: Path, form: str
) -> None:
    source = pristine if form == "stock" else pristine_native
    report = within(source, tmp_path / "out", 60, kv_dtype="int8", rotation="hadamard", scales="static")
    assert {one["kv_dtype"] for one in report["budget"]["candidates"]} == {"int8"}
    assert report["rotation"]["kind"] == "hadamard"
    kept = 14  # of 24, or of the 21 that are not constant: 14 + 16 bytes
    assert report["strength"] == kept / (24 if form == "native" else 21)
    assert bytes_of(tmp_path / "out") == report["bytes_per_token"]["quantised"] == 60
    # What is turned are the kept channels alone: unquantised, they compute what they computed before.
    ours, before = (
        with_latent_strength(load_decoder(open_model(str(folder)), dtype=torch.float64), report["strength"])
        for folder in (tmp_path / "out", source)
    )
    with torch.inference_mode():
        torch.testing.assert_close(ours(TOKENS), before(TOKENS), atol=2e-4, rtol=1e-4)
    # And the whole latent is what it was, too.
    ours, before = (load_decoder(open_model(str(f)), dtype=torch.float64) for f in (tmp_path / "out", source))
    caches = [decoder.make_cache(2, 30) for decoder in (ours, before)]
    with torch.inference_mode():
        outputs = [decoder(TOKENS, cache) for decoder, cache in zip((ours, before), caches, strict=True)]
    torch.testing.assert_close(*outputs, atol=2e-4, rtol=1e-4)
    latents = [cache.read(0, 30, torch.float64)[0] for cache in caches]
    torch.testing.assert_close(latents[0][..., kept:], latents[1][..., kept:], atol=1e-5, rtol=1e-5)
    assert float((latents[0] - latents[1])[..., :kept].abs().max()) > 0.1


def test_what_is_written_runs_as_it_was_measured(budgeted: Any, pristine_native: Path) -> None:
    checkpoint, report = budgeted[48]
    assert report["strength"] < 1
    engine = open_engine(str(checkpoint))
    assert engine.generator.statistics.summary()["cache_bytes_per_token"] == report["bytes_per_token"]["quantised"]
    (found,) = engine.generator.generate([Request("hello", SamplingParams(max_new_tokens=8, ignore_eos=True))])
    assert len(found.token_ids) == 8  # type: ignore[union-attr]
    subject = load_subject(open_model(str(checkpoint)), device=CPU)
    assert subject.latent_strength == report["strength"]
    # The plan that was compared is the checkpoint that was written, ranges aside.
    texts = texts_of(random_tokens(6, 40).tolist())
    model, written = open_model(str(pristine_native)), open_model(str(checkpoint))
    plan = cache_plan(written.source.config, written.spec, "auto")
    assert plan.quantizers is not None
    (whole,) = HeldOut(model, texts, dtype=torch.float32, device=CPU).costs([make_variant(model)])
    variant = make_variant(written, None, plan.strength).cached(plan.quantizers)
    (small,) = HeldOut(written, texts, dtype=torch.float32, device=CPU).costs([variant])
    assert small.plain_nll == pytest.approx(whole.plain_nll, rel=1e-5)  # a turn changes nothing that is computed
    assert 0 < small.kl < 5 * report["heldout"]["kl"]


@pytest.mark.parametrize("scales", ["page", "static"])
def test_other_scales_leave_room_for_more_channels(pristine_native: Path, tmp_path: Path, scales: Any) -> None:
    report = within(pristine_native, tmp_path / "out", 50, scales=scales, kv_dtype="int8", rotation="none")
    assert report["bytes_per_token"]["quantised"] == bytes_of(tmp_path / "out") <= 50
    assert report["strength"] == {"static": 9 / 24, "page": 8 / 24}[scales]
    assert read(tmp_path / "out" / "config.json")[KEY]["granularity"] == scales


def test_too_few_bytes_are_refused_before_any_text_is_read(pristine_native: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the smallest takes"):
        within(pristine_native, tmp_path / "out", 1, calib=str(tmp_path / "missing.txt"))


def test_layers_of_different_ranks_share_a_budget(tmp_path: Path) -> None:
    source = converted(tmp_path, num_hidden_layers=3, rank=16)
    ranks = [layer["kv_lora_rank"] for layer in read(source / "config.json")["mla"]["layers"]]
    assert len(set(ranks)) > 1
    report = within(source, tmp_path / "out", 70, kv_dtype="int8", rotation="hadamard")
    assert report["bytes_per_token"]["quantised"] == bytes_of(tmp_path / "out") <= 70
    ours, before = (
        with_latent_strength(load_decoder(open_model(str(f)), dtype=torch.float64), report["strength"])
        for f in (tmp_path / "out", source)
    )
    with torch.inference_mode():
        torch.testing.assert_close(ours(TOKENS), before(TOKENS), atol=2e-4, rtol=1e-4)


def test_a_turned_checkpoint_keeps_its_channels(pristine_native: Path, tmp_path: Path) -> None:
    turned = tmp_path / "turned" / "mla"
    (tmp_path / "turned").mkdir()
    (tmp_path / "turned" / "text.txt").write_bytes((pristine_native.parent / "text.txt").read_bytes())
    calibrate(str(pristine_native), turned, options(pristine_native, kv_dtype="int4", rotation="hadamard"), CPU)
    report = within(turned, tmp_path / "out", 90)
    assert report["rotation"]["kind"] == "hadamard"
    assert report["strength"] == 1  # its first channels are no smaller latent
    with pytest.raises(UsageError, match="the smallest takes 60"):
        within(turned, tmp_path / "other", 59)
