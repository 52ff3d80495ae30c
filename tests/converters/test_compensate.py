"""The refit behind converted layers: what it may change, what it must leave alone, and when it is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import open_model
from mla_cli.converters.closed_form import ClosedForm, closed_form, gather_source_statistics
from mla_cli.converters.compensate import compensate, ridge_shift
from mla_cli.converters.convert import convert
from mla_cli.converters.held_out import measure
from mla_cli.converters.options import ConvertOptions
from mla_cli.converters.plan import make_plan
from mla_cli.converters.refit_queries import Looked, refit_queries
from mla_cli.model.decoder import begin_step
from mla_cli.model.latent_weights import LatentWeights
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer

CPU = torch.device("cpu")
BATCHES = Batches(8, 4)
# Family, changes, and the cached numbers of a layer without loss: latent, rotary key.
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "llama": ("llama", {}, 32, 16),
    "window": ("mistral", {"sliding_window": 5}, 32, 16),
    "biases": ("qwen2", {"bias": 0.5}, 32, 16),
    "no rotary": ("gpt2", {"bias": 0.5}, 64, 0),
}


def texts() -> CalibrationTexts:
    return CalibrationTexts(random_tokens(20, 24), torch.tensor([24] * 12 + [17] * 8), "random", 0, 20)


def closed(folder: Path, case: str, *, full: bool = False, **changes: Any) -> tuple[LayerBank, ClosedForm]:
    """A tiny model, and its closed form before the refit: at full rank, or at a third of it."""
    family, more, rank, rope = CASES[case]
    save_tiny(folder, family, **more)
    bank = LayerBank(open_model(str(folder)), CPU)
    rank, rope = (rank, rope) if full else (rank // 3, rope // 2)
    plan = make_plan(bank.model.spec, form="native", reason="", kv_lora_rank=rank, qk_rope_head_dim=rope)
    statistics = gather_source_statistics(bank, texts(), BATCHES)
    return bank, closed_form(bank, plan, statistics, texts(), BATCHES, objective="fisher", **changes)


def divergence(bank: LayerBank, layers: Sequence[LatentWeights], tokens: torch.Tensor) -> float:
    lengths = torch.full((len(tokens),), tokens.shape[1])
    stages = {"source": (bank.frame, bank.source_layer), "ours": (bank.frame, bank.latent_layers(layers))}
    return measure(stages, tokens, lengths, BATCHES)["ours"].kl


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(2, 30), st.floats(1e-6, 10), st.integers(0, 1000))
def test_a_ridge_never_raises_what_it_fits(width: int, tokens: int, ridge: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    inputs = torch.cat((inputs, torch.ones(tokens, 1, dtype=torch.float64)), dim=1)
    rest = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    moved = ridge_shift(inputs.T @ inputs, rest.T @ inputs, ridge)
    left = rest - inputs @ moved.T
    assert left.square().sum() <= rest.square().sum() * (1 + 1e-9)
    # The bias is free: nothing of the mean is left.
    torch.testing.assert_close(left.mean(dim=0), torch.zeros(3, dtype=torch.float64), atol=1e-8, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_no_layer_fits_worse_and_text_it_was_fitted_to_comes_closer(tmp_path: Path, case: str) -> None:
    bank, before = closed(tmp_path, case)
    after = compensate(bank, before.narrow, texts(), BATCHES)
    for was, now in (*after.score_errors, *after.output_errors):
        assert now <= was
    assert any(now < 0.95 * was for was, now in after.score_errors)
    assert any(now < 0.95 * was for was, now in after.output_errors)
    seen = random_tokens(20, 24)[:12]
    assert divergence(bank, after.layers, seen) < 0.95 * divergence(bank, before.narrow, seen)


@pytest.mark.parametrize("case", CASES)
def test_where_nothing_was_lost_nothing_moves(tmp_path: Path, case: str) -> None:
    bank, exact = closed(tmp_path, case, full=True)
    after = compensate(bank, exact.narrow, texts(), BATCHES)
    for old, new in zip(exact.narrow, after.layers, strict=True):
        for name in ("q", "out", "down", "up_k", "up_v"):
            was = getattr(old, name)
            torch.testing.assert_close(getattr(new, name), was, atol=1e-4 * float(was.abs().max()), rtol=0)
    assert divergence(bank, after.layers, random_tokens(4, 24, seed=9)) < 1e-6


def test_queries_that_are_off_come_back(tmp_path: Path) -> None:
    bank, exact = closed(tmp_path, "biases", full=True)
    weights, attention = exact.narrow[0], bank.source_attention(0)
    noise = torch.randn(weights.q.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spoiled = replace(weights, q=weights.q + 0.3 * float(weights.q.std()) * noise)
    tokens = random_tokens(16, 24, seed=3)
    step = begin_step(bank.frame.spec, torch.Size((1, 24)), CPU)
    inputs = [bank.source_layer(0).input_layernorm(bank.frame.embed(row[None], step.positions)) for row in tokens]
    _, (was, now) = refit_queries(spoiled, attention, [Looked(x, x, step) for x in inputs])
    assert was > 0.03
    assert now < 0.1 * was


def test_a_part_can_be_left_as_it_was(tmp_path: Path) -> None:
    bank, before = closed(tmp_path, "biases")
    parts: dict[str, Any] = {"queries": {"toward": None}, "outputs": {"queries": False, "toward": "output"}}
    for part, options in parts.items():
        after = compensate(bank, before.narrow, texts(), BATCHES, **options)
        for old, new in zip(before.narrow, after.layers, strict=True):
            assert torch.equal(new.q, old.q) == (part == "outputs")
            assert torch.equal(new.out, old.out) == (part == "queries")
            assert torch.equal(new.down, old.down)


def test_padding_says_nothing(tmp_path: Path) -> None:
    bank, before = closed(tmp_path, "llama")
    padded = texts()
    garbage = padded.sequences.clone()
    for row, length in enumerate(padded.lengths.tolist()):
        garbage[row, length:] = 7
    one = compensate(bank, before.narrow, padded, BATCHES)
    other = compensate(bank, before.narrow, replace(padded, sequences=garbage), BATCHES)
    for a, b in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(a.q, b.q, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.out, b.out, atol=1e-5, rtol=1e-5)


def test_a_refit_that_held_out_text_speaks_against_is_dropped(tmp_path: Path) -> None:
    losses = iter((0.2, 0.1))  # refitted, before
    _, dropped = closed(tmp_path / "a", "llama", compensation=True, check=lambda layers: next(losses))
    assert dropped.compensated is None
    assert dropped.layers is dropped.narrow
    losses = iter((0.1, 0.2))
    _, taken = closed(tmp_path / "b", "llama", compensation=True, check=lambda layers: next(losses))
    assert taken.compensated is not None
    assert taken.layers is taken.compensated.layers


def test_the_report_has_the_refit_as_a_stage(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", initializer_range=0.15)
    save_tokenizer(tmp_path / "source")
    text = save_text(tmp_path / "text.txt", 20000)
    found = {}
    for on in (True, False):
        options = ConvertOptions(calib=str(text), samples=128, seq_len=64, ratio=2.0, format="native", compensate=on)
        found[on] = convert(str(tmp_path / "source"), tmp_path / f"{on}", options, device=CPU, command="mla convert")
    with_it, without = found[True]["heldout"], found[False]["heldout"]
    assert without["ppl_final"] == pytest.approx(without["ppl_closed_form"], rel=1e-4)
    assert "ppl_compensated" not in without
    assert with_it["ppl_closed_form"] == pytest.approx(without["ppl_closed_form"], rel=1e-4)
    assert with_it["ppl_final"] == pytest.approx(with_it["ppl_compensated"], rel=1e-4)
    assert with_it["kl_final"] < without["kl_final"]
    assert all(layer["refit_error"] is not None for layer in found[True]["layers"])
    assert "after the refit" in (tmp_path / "True" / "README.md").read_text()
