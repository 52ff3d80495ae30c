"""Latents stay ordered through healing: nested steps, re-ordering, cuts in stages, and what the report says of each part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.app import main
from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.latent_strength import kept_channels
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters.closed_form import closed_form, gather_source_statistics
from mla_cli.converters.heal_data import Reader
from mla_cli.converters.heal_full import FullHealing, heldout_divergence
from mla_cli.converters.heal_layers import LayersHealing
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.nested import STRENGTHS, strength_at
from mla_cli.converters.plan import ConversionPlan, make_plan
from mla_cli.converters.recut import put_in_order, recut
from mla_cli.converters.student import Student
from mla_cli.converters.write import write_checkpoint
from mla_cli.model.latent_weights import LatentWeights
from tests.tiny import random_tokens, run_convert, save_tiny, with_latent_strength

CPU = torch.device("cpu")
BATCHES = Batches(8, 8)
UNSEEN = random_tokens(4, 24, seed=8), torch.full((4,), 24)


class Converted:
    """A tiny model's closed form with a latent of 16 beside a rotary key of 8."""

    def __init__(self, folder: Path, form: str = "native", **changes: Any) -> None:
        save_tiny(folder, "llama", **changes)
        self.bank = LayerBank(open_model(str(folder)), CPU)
        self.texts = CalibrationTexts(random_tokens(8, 24), torch.full((8,), 24), "random", 0, 8)
        self.plan: ConversionPlan = make_plan(
            self.bank.model.spec,
            form=form,
            reason="",
            kv_lora_rank=16,
            qk_rope_head_dim=8,  # type: ignore[arg-type]
        )
        statistics = gather_source_statistics(self.bank, self.texts, BATCHES)
        closed = closed_form(self.bank, self.plan, statistics, self.texts, BATCHES, objective="fisher")
        self.layers = closed.narrow

    def student(self, layers: tuple[LatentWeights, ...] | None = None) -> Student:
        return Student(load_decoder(self.bank.model), layers or self.layers)

    def divergence(self, layers: tuple[LatentWeights, ...], strength: float) -> float:
        """Held-out divergence of the layers with a part of their latents."""
        parts = tuple(layer.narrowed(kept_channels(layer.spec.kv_lora_rank, strength)) for layer in layers)
        return heldout_divergence(self.student(parts), *UNSEEN)


def healed(student: Student, mode: str, *, nested: bool, steps: int = 120) -> tuple[LatentWeights, ...]:
    fitted = random_tokens(32, 24, seed=5), torch.full((32,), 24)
    options = HealOptions(mode=mode, steps=steps, batch_tokens=96, nested=nested, learning_rate=3e-3)  # type: ignore[arg-type]
    if mode == "layers":
        LayersHealing(student, fitted, UNSEEN, options).run([], lambda index, layer: None)
    else:
        FullHealing(student, Reader(*fitted, None, 0), UNSEEN, options).run(lambda state: None)
    return student.result()


@pytest.mark.parametrize("form", ["native", "deepseek"])
@pytest.mark.parametrize("strength", [0.25, 0.5, 0.75, 1.0])
def test_a_nested_step_computes_what_generation_at_that_strength_does(
    tmp_path: Path, form: str, strength: float
) -> None:
    made = Converted(tmp_path / "source", form)
    student = made.student()
    with torch.no_grad():
        for index, master in enumerate(student.masters().values()):  # gains and biases too, as healing leaves them
            master += 0.02 * torch.randn(master.shape, generator=torch.Generator().manual_seed(index))
    write_checkpoint(
        made.bank.model, made.plan, student.result(), tmp_path / "out",
        dtype=torch.float32, max_shard_bytes=1 << 30, force=False,
    )  # fmt: skip
    tokens, lengths = random_tokens(3, 24, seed=9), torch.tensor([24, 24, 24])
    run = with_latent_strength(load_decoder(open_model(str(tmp_path / "out")), dtype=torch.float64), strength)
    with torch.no_grad():
        last, whole = (student(tokens, lengths, student.working(s))[-1] for s in (strength, 1.0))
        found, expected = student.decoder.logits(student.decoder.norm(last)), run.logits(run(tokens))
    torch.testing.assert_close(found.double(), expected, atol=5e-3, rtol=0)
    assert (strength == 1) == torch.equal(whole, last)


def test_a_nested_step_teaches_the_part_that_is_read_and_nothing_else(tmp_path: Path) -> None:
    student = Converted(tmp_path).student()
    student(random_tokens(2, 24), torch.tensor([24, 24]), student.working(0.5))[-1].square().sum().backward()
    _, learning = student.layer(0)
    up, down = learning.attention.kv_b_proj.weight.grad, learning.attention.kv_a_proj_with_mqa.weight.grad
    assert up is not None
    assert down is not None
    assert up[:, :8].abs().min() > 0
    assert not up[:, 8:].any()
    assert down[:8].abs().sum() > 0
    assert not down[8:16].any()
    assert down[16:].abs().sum() > 0  # the rotary key


def test_every_fourth_step_is_nested_with_the_parts_in_turn() -> None:
    drawn = [strength_at(step, nested=True) for step in range(24)]
    assert [s for i, s in enumerate(drawn) if i % 4 == 3] == [*STRENGTHS, *STRENGTHS]
    assert all(s == 1 for i, s in enumerate(drawn) if i % 4 != 3)
    assert all(strength_at(step, nested=False) == 1 for step in range(24))


@pytest.mark.parametrize("mode", ["layers", "full"])
def test_nested_healing_improves_the_parts(tmp_path: Path, mode: str) -> None:
    made = Converted(tmp_path, initializer_range=0.15)
    nested = healed(made.student(), mode, nested=True)
    strengths = (0.25, 0.5, 0.75)
    losses, whole = [made.divergence(nested, strength) for strength in strengths], made.divergence(nested, 1.0)
    assert [*losses, whole] == sorted(
        [*losses, whole], reverse=True
    )  # in order of importance: every part adds something
    plain = healed(made.student(), mode, nested=False)
    assert sum(losses) < sum(made.divergence(plain, strength) for strength in strengths)
    assert whole < made.divergence(made.layers, 1.0)  # and the whole heals


def test_a_nested_healing_goes_on_after_an_interruption_to_the_same_result(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def run(stop_at: int | None, state: Any = None) -> FullHealing:
        options = HealOptions(mode="full", steps=12, batch_tokens=96, nested=True)
        reader = Reader(random_tokens(32, 24, seed=5), torch.full((32,), 24), None, 0)
        run = FullHealing(made.student(), reader, UNSEEN, options)

        def tick(fraction: float, text: str) -> None:
            if run.progress.step == stop_at:
                raise StoppedError

        if state is not None:
            run.restore(state)
        try:
            run.run(lambda state: None, tick)
        except StoppedError:
            assert stop_at is not None
        return run

    made = Converted(tmp_path)
    whole, half = run(None), run(6)  # the next step but one is nested
    again = run(None, half.state())
    for name, master in whole.masters.items():
        assert torch.equal(again.masters[name], master)


def test_reordering_changes_nothing_but_the_order(tmp_path: Path) -> None:
    made = Converted(tmp_path, initializer_range=0.15)  # milder: half a latent is not lost altogether
    turned = []
    for index, layer in enumerate(made.layers):  # any turn of the latent, as healing might leave one
        turn = torch.linalg.qr(
            torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
        )[0]
        down, bias = layer.down.clone(), layer.down_bias.clone()
        down[:16], bias[:16] = turn @ down[:16], turn @ bias[:16]
        turned.append(replace(layer, down=down, down_bias=bias, up_k=layer.up_k @ turn.T, up_v=layer.up_v @ turn.T))
    ordered = recut(made.bank, turned, [16, 16], made.texts, BATCHES)
    whole = made.divergence(made.layers, 1.0)
    assert made.divergence(tuple(turned), 1.0) == pytest.approx(whole, rel=1e-3)
    assert made.divergence(ordered, 1.0) == pytest.approx(whole, rel=1e-3)
    for strength in (0.5, 0.75):
        assert made.divergence(ordered, strength) < 0.8 * made.divergence(tuple(turned), strength)
    probe = CalibrationTexts(*UNSEEN, "random", 0, 4)
    for layers in (made.layers, tuple(turned)):  # whichever order is better is kept
        orders = [
            made.divergence(those, 0.5) for those in (layers, recut(made.bank, layers, [16, 16], made.texts, BATCHES))
        ]
        kept = put_in_order(made.bank, layers, made.texts, probe, BATCHES)
        assert made.divergence(kept, 0.5) == min(orders)
    assert [layer.spec.kv_lora_rank for layer in recut(made.bank, turned, [8, 5], made.texts, BATCHES)] == [8, 5]


def convert(source: Path, *more: object) -> int:
    return run_convert(source, "--ratio", 2, *more)


def read_report(source: Path) -> dict[str, Any]:
    return json.loads((source.parent / "out" / "mla_report.json").read_text())


@pytest.mark.parametrize("form", ["native", "deepseek"])
def test_the_report_lists_the_loss_at_every_strength(
    source: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(source, "--format", form, "--heal-steps", 4) == 0
    rows = read_report(source)["latent_strength"]
    assert [row["strength"] for row in rows] == [1.0, 0.75, 0.5, 0.25]
    assert all(row["perplexity"] > 0 and row["kl"] >= 0 and row["tokens"] > 0 for row in rows)
    assert rows[-1]["kl"] > rows[0]["kl"]
    for row in rows:
        run = with_latent_strength(load_decoder(open_model(str(source.parent / "out"))), row["strength"])
        assert run.make_cache(1, 8).bytes_per_token() == row["cache_bytes_per_token"]  # what is really allocated
    printed = capsys.readouterr().out
    card, page = ((source.parent / "out" / name).read_text() for name in ("README.md", "mla_report.html"))
    assert f"0.5: {rows[2]['perplexity']:.4g} at {rows[2]['cache_bytes_per_token']:,} bytes" in printed
    assert f"| 0.5 | {rows[2]['cache_bytes_per_token']:,} | {rows[2]['perplexity']:.4g} |" in card
    assert "Loss by share of the latent" in page


def test_latents_without_an_order_have_no_strengths(source: Path) -> None:
    shape = ("--kv-lora-rank", 32, "--qk-rope-head-dim", 8, "--format", "native", "--heal", "none")
    assert run_convert(source, *shape) == 0
    assert read_report(source)["latent_strength"] == []
    assert main(["generate", str(source.parent / "out"), "hi", "--latent-strength", "0.5"]) == 2


@pytest.mark.parametrize("mode", ["layers", "full"])
def test_progressive_conversion_heals_cuts_and_heals_again(source: Path, mode: str) -> None:
    assert convert(source, "--heal", mode, "--heal-steps", 8, "--progressive", "--nested") == 0
    report = read_report(source)
    target = [layer["fitted_rank"] for layer in report["layers"]]
    milder = report["healing"]["milder"]["kv_lora_rank"]
    assert all(32 > first > rank for first, rank in zip(milder, target, strict=True))
    held = report["heldout"]
    assert all(held[f"ppl_{stage}"] > 0 for stage in ("milder_closed_form", "milder_healed", "cut"))
    assert report["cache_bytes_per_token"]["mla"] == report["cache_bytes_per_token"]["source"] // 2
    page = (source.parent / "out" / "mla_report.html").read_text()
    assert "milder healed" in page
    assert "In two stages" in page
    assert report["options"]["progressive"]
    assert report["options"]["heal"]["nested"]


@pytest.mark.parametrize(("stop_at", "healed"), [(2, [0, 1, 1, 0, 1]), (4, [0, 1, 0, 1, 1])])
def test_progressive_conversion_resumes_in_either_stage(
    source: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, healed: list[int]
) -> None:
    words = ("--heal", "layers", "--heal-steps", 8, "--progressive")
    assert convert(source, *words) == 0

    def scores() -> torch.Tensor:
        decoder = load_decoder(open_model(str(source.parent / "out")))
        return decoder.logits(decoder(random_tokens(4, 40)))

    expected, report = scores(), read_report(source)
    heal, calls = LayersHealing._heal, []  # two layers in each of the two stages

    def interrupted(self: LayersHealing, index: int, seconds: float) -> Any:
        calls.append(index)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return heal(self, index, seconds)

    monkeypatch.setattr(LayersHealing, "_heal", interrupted)
    assert convert(source, *words, "--force") == 130
    assert convert(source, *words, "--force", "--resume") == 0
    assert calls == healed
    # A layer that was kept has its gain folded in, which rounds; channels of a latent may change sign by it.
    torch.testing.assert_close(scores(), expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
    again = read_report(source)
    for key in ("ppl_milder_healed", "ppl_cut", "ppl_final"):
        assert again["heldout"][key] == pytest.approx(report["heldout"][key], rel=1e-2)
    for layer, expected_layer in zip(again["layers"], report["layers"], strict=True):
        assert layer["healed_error"] == pytest.approx(expected_layer["healed_error"], rel=1e-2)
    assert not (source.parent / ".out.mla-resume").exists()


@pytest.mark.parametrize("flag", ["--nested", "--progressive"])
def test_ways_to_heal_need_a_healing(source: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert convert(source, "--heal", "none", flag) == 2
    assert flag in capsys.readouterr().err
    assert not (source.parent / "out").exists()
