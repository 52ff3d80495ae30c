"""Healing: what it may change, what it must keep, and that it survives interruptions and bad numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters import heal_full
from mla_cli.converters.closed_form import closed_form, gather_source_statistics
from mla_cli.converters.convert_texts import pieces
from mla_cli.converters.heal_data import Reader
from mla_cli.converters.heal_full import FullHealing, heldout_divergence
from mla_cli.converters.heal_layers import LayersHealing
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.plan import make_plan
from mla_cli.converters.student import Student
from mla_cli.model.decoder import begin_step
from tests.tiny import random_tokens, run_convert, save_text, save_tiny

CPU = torch.device("cpu")


def a_student(folder: Path, family: str = "llama", rank: int = 12, rope: int = 8, **changes: Any) -> Student:
    """A tiny model's closed form, ready to heal; text of one seed."""
    save_tiny(
        folder, family, initializer_range=0.15, **changes
    )  # milder than elsewhere: something is left to learn from
    model = open_model(str(folder))
    bank = LayerBank(model, CPU)
    lengths = torch.full((8,), 24)
    texts = CalibrationTexts(random_tokens(8, 24), lengths, "random", 0, 8)
    batches = Batches(8, 8)
    plan = make_plan(model.spec, form="native", reason="", kv_lora_rank=rank, qk_rope_head_dim=rope)
    statistics = gather_source_statistics(bank, texts, batches)
    closed = closed_form(bank, plan, statistics, texts, batches, objective="fisher")
    return Student(load_decoder(model), closed.narrow)


def unseen() -> tuple[torch.Tensor, torch.Tensor]:
    return random_tokens(3, 24, seed=9), torch.tensor([24, 17, 9])


def reader(seed: int = 0, sequences: int = 32) -> Reader:
    return Reader(random_tokens(sequences, 24, seed=5), torch.full((sequences,), 24), None, seed)


def healing(student: Student, steps: int = 30, rate: float = 2e-3, sequences: int = 32) -> FullHealing:
    options = HealOptions(mode="full", steps=steps, batch_tokens=96, learning_rate=rate)
    return FullHealing(student, reader(sequences=sequences), unseen(), options)


def keep_nothing(_: Any) -> None:
    """Nothing is saved."""


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_end_to_end_healing_lowers_the_divergence_on_text_it_never_saw(tmp_path: Path, family: str) -> None:
    student = a_student(tmp_path, family, rope=0 if family == "gpt2" else 8)
    before = heldout_divergence(student, *unseen())
    run = healing(student, steps=150, rate=1e-2, sequences=256)  # enough to learn more than the text by heart
    run.run(keep_nothing)
    after = heldout_divergence(student, *unseen())
    assert after < 0.8 * before
    assert after == pytest.approx(run.progress.best, rel=1e-5)
    assert run.progress.curve[0]["heldout_kl"] == pytest.approx(before)


def test_what_was_learned_is_what_the_student_computes(tmp_path: Path) -> None:
    student = a_student(tmp_path)
    healing(student, steps=5).run(keep_nothing)
    with torch.no_grad():
        student.layer(0)[1].log_gain.fill_(0.7)  # the gain is folded into the written matrices
    tokens, lengths = unseen()
    expected = student(tokens, lengths, student.working())[-1]
    again = Student(student.decoder, student.result())
    found = again(tokens, lengths, again.working())[-1]
    for row, count in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[row, :count], expected[row, :count], rtol=2e-4, atol=2e-4)
    assert float(again.layer(0)[1].log_gain.detach()) == 0


def test_running_layers_a_second_time_gives_the_same_gradients(tmp_path: Path) -> None:
    student = a_student(tmp_path)
    tokens, lengths = unseen()
    gradients = []
    for recompute in (False, True):
        student(tokens, lengths, student.working(), recompute=recompute)[-1][0].square().sum().backward()
        gradients.append({name: master.grad.clone() for name, master in student.masters().items()})
        student.zero_grad()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_an_interrupted_healing_goes_on_to_the_same_result(tmp_path: Path) -> None:
    whole = healing(a_student(tmp_path / "a"), steps=12)
    whole.run(keep_nothing)

    class StoppedError(Exception):
        pass

    def stop(fraction: float, text: str) -> None:
        if first.progress.step == 7:
            raise StoppedError

    first = healing(a_student(tmp_path / "b"), steps=12)
    with pytest.raises(StoppedError):
        first.run(keep_nothing, stop)
    torch.save(first.state(), tmp_path / "state.pt")

    second = healing(a_student(tmp_path / "c"), steps=12)
    second.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    second.run(keep_nothing)
    for name, master in whole.masters.items():
        torch.testing.assert_close(second.masters[name], master, rtol=0, atol=0)
    assert [point["heldout_kl"] for point in second.progress.curve] == [
        point["heldout_kl"] for point in whole.progress.curve
    ]


def test_a_number_that_is_not_finite_rolls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = healing(a_student(tmp_path), steps=10)
    honest, calls = heal_full.divergence, []

    def broken(*given: Any, gradient: bool) -> Any:
        total, slope = honest(*given, gradient=gradient)
        if gradient:
            calls.append(1)
            if len(calls) == 4 and slope is not None:
                slope[0, 0] = float("nan")
        return total, slope

    monkeypatch.setattr(heal_full, "divergence", broken)
    run.run(keep_nothing)
    assert run.progress.rollbacks == 1
    assert run.progress.rate == 0.5
    assert run.progress.step == 10
    assert all(bool(torch.isfinite(master).all()) for master in run.masters.values())


def test_gradients_are_no_longer_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = healing(a_student(tmp_path), steps=3)
    honest, seen = heal_full.divergence, []

    def steep(*given: Any, gradient: bool) -> Any:
        total, slope = honest(*given, gradient=gradient)
        return total, None if slope is None else 1e4 * slope

    def step() -> None:
        squares = [master.grad.square().sum() for master in run.masters.values() if master.grad is not None]
        seen.append(float(torch.stack(squares).sum().sqrt()))

    monkeypatch.setattr(heal_full, "divergence", steep)
    monkeypatch.setattr(run.adam, "step", step)
    run.run(keep_nothing)
    assert seen == pytest.approx([1.0] * 3, rel=1e-3)


def test_healing_that_only_meets_bad_numbers_ends_with_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = healing(a_student(tmp_path), steps=10)
    before = {name: master.detach().clone() for name, master in run.masters.items()}
    honest = heal_full.divergence
    monkeypatch.setattr(
        heal_full, "divergence", lambda *g, gradient: (float("nan"), None) if gradient else honest(*g, gradient=False)
    )
    run.run(keep_nothing)
    assert run.progress.stopped == "numbers were not finite"
    for name, master in run.masters.items():
        assert torch.equal(master, before[name])


def test_the_best_matrices_are_kept_and_a_plateau_ends_it(tmp_path: Path) -> None:
    student = a_student(tmp_path)
    before = heldout_divergence(student, *unseen())
    options = HealOptions(mode="full", steps=300, batch_tokens=96, learning_rate=30.0)  # far too fast: it can only harm
    run = FullHealing(student, reader(), unseen(), options)
    run.run(keep_nothing)
    assert run.progress.stopped in ("no gain on held-out text", "numbers were not finite")
    assert heldout_divergence(student, *unseen()) == pytest.approx(before, rel=1e-5)


def test_layers_heal_one_by_one_and_never_get_worse(tmp_path: Path) -> None:
    student = a_student(tmp_path)
    before = heldout_divergence(student, *unseen())
    fitted = random_tokens(32, 24, seed=5), torch.full((32,), 24)
    kept: list[int] = []
    run = LayersHealing(student, fitted, unseen(), HealOptions(mode="layers", steps=200, batch_tokens=96))
    run.run([], lambda index, layer: kept.append(index))
    assert kept == [0, 1]
    assert all(record.after <= record.before for record in run.records)
    assert run.records[0].after < 0.9 * run.records[0].before
    assert heldout_divergence(student, *unseen()) < before


def test_layers_go_on_after_an_interruption_to_the_same_result(tmp_path: Path) -> None:
    fitted = random_tokens(16, 24, seed=5), torch.full((16,), 24)
    options = HealOptions(mode="layers", steps=6, batch_tokens=96)
    whole, layers = a_student(tmp_path / "a"), []
    first_run = LayersHealing(whole, fitted, unseen(), options)
    first_run.run([], lambda index, layer: layers.append(layer))
    again = a_student(tmp_path / "b")
    second_run = LayersHealing(again, fitted, unseen(), options)
    second_run.run(layers[:1], lambda index, layer: None)
    assert second_run.records[0] == first_run.records[0]
    for first, second in zip(whole.result(), again.result(), strict=True):
        torch.testing.assert_close(second.down, first.down, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second.out, first.out, rtol=1e-5, atol=1e-6)


def test_a_reader_gives_every_token_once_before_any_twice() -> None:
    lengths = torch.tensor([24, 24, 10, 3])
    sequences = torch.arange(4 * 24).view(4, 24)
    source = Reader(sequences, lengths, None, seed=3)
    seen: list[int] = []
    while True:
        place = source.epoch
        tokens, counts = source.batch(8, 16)
        if source.epoch != place and seen:
            break
        seen += [int(t) for row, n in zip(tokens, counts.tolist(), strict=True) for t in row[:n]]
    assert len(seen) == len(set(seen))
    assert set(range(24)) | set(range(24, 48)) <= set(seen)
    state = source.state()
    following = source.batch(8, 16)
    source.restore(state)
    assert torch.equal(source.batch(8, 16)[0], following[0])


def test_pieces_open_as_sequences_do() -> None:
    tokens, _ = Reader(random_tokens(4, 24), torch.full((4,), 24), 1, seed=0).batch(8, 64)
    assert tokens[:, 0].tolist() == [1] * len(tokens)


def test_long_sequences_are_cut_into_pieces_for_statistics() -> None:
    sequences = torch.arange(1, 41).view(2, 20)
    texts = CalibrationTexts(sequences, torch.tensor([20, 11]), "numbers", 0, 2)
    found = pieces(texts, 8, opening=None)
    assert found.lengths.tolist() == [8, 8, 4, 8]  # the second sequence's rest of three is too short
    assert found.sequences[1].tolist() == list(range(9, 17))
    assert pieces(texts, 8, opening=0).sequences[:, 0].tolist() == [0, 0, 0, 0]
    assert pieces(texts, 32, opening=None).lengths.tolist() == [20, 11]


def test_training_attention_equals_the_usual_one(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    decoder = load_decoder(open_model(str(tmp_path)), dtype=torch.bfloat16)
    x = torch.randn(2, 20, 48, dtype=torch.bfloat16)
    outs = []
    for backend in ("torch", "training"):
        step = begin_step(decoder.spec, x.shape[:2], CPU, lengths=torch.tensor([20, 12]), backend=backend)
        outs.append(decoder.layers[0].self_attn(x, step).float())
    assert float((outs[0] - outs[1])[0].norm() / outs[0][0].norm()) < 0.03


def convert(source: Path, *more: object) -> int:
    return run_convert(source, "--ratio", 2, *more)


@pytest.mark.parametrize("mode", ["layers", "full"])
def test_the_command_heals_and_reports_it(source: Path, mode: str) -> None:
    assert convert(source, "--heal", mode, "--heal-steps", 12) == 0
    report = json.loads((source.parent / "out" / "mla_report.json").read_text())
    assert report["healing"]["mode"] == mode
    assert len(report["healing"]["gains"]) == 2
    assert all(gain > 0 for gain in report["healing"]["gains"])
    assert all(layer["healed_error"] is not None for layer in report["layers"])
    assert report["heldout"]["ppl_final"] > 0
    assert not list(source.parent.glob(".out*"))  # nothing is left to resume


def test_resume_goes_on_after_an_interruption(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert(source, "--heal", "full", "--heal-steps", 12) == 0
    out = source.parent / "out"
    expected = (out / "model.safetensors").read_bytes()

    step, count = FullHealing._step, 0

    def interrupted(self: FullHealing, fraction: float) -> float | None:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return step(self, fraction)

    monkeypatch.setattr(FullHealing, "_step", interrupted)
    monkeypatch.setattr(heal_full, "SAVE_SECONDS", 0.0)
    assert convert(source, "--heal", "full", "--heal-steps", 12, "--force") == 130
    assert (source.parent / ".out.mla-resume").is_dir()
    assert convert(source, "--heal", "full", "--heal-steps", 12, "--force", "--resume") == 0
    assert count == 6 + 7  # five steps were kept
    assert (out / "model.safetensors").read_bytes() == expected
    assert not (source.parent / ".out.mla-resume").exists()


def test_a_resumed_report_has_the_errors_of_every_layer(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert(source, "--heal", "layers", "--heal-steps", 6) == 0
    out = source.parent / "out"
    whole = json.loads((out / "mla_report.json").read_text())

    heal = LayersHealing._heal

    def interrupted(self: LayersHealing, index: int, seconds: float) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return heal(self, index, seconds)

    with monkeypatch.context() as patched:
        patched.setattr(LayersHealing, "_heal", interrupted)
        assert convert(source, "--heal", "layers", "--heal-steps", 6, "--force") == 130
    assert convert(source, "--heal", "layers", "--heal-steps", 6, "--force", "--resume") == 0
    resumed = json.loads((out / "mla_report.json").read_text())
    assert resumed["layers"] == whole["layers"]
    assert resumed["healing"] == whole["healing"]


def test_resume_refuses_what_it_cannot_go_on_with(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert convert(source, "--heal", "none", "--resume") == 0
    assert "starting from the beginning" in capsys.readouterr().err

    def interrupted(self: FullHealing, fraction: float) -> float | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FullHealing, "_step", interrupted)
    assert convert(source, "--heal", "full", "--heal-steps", 3, "--force") == 130
    assert convert(source, "--heal", "full", "--heal-steps", 4, "--force", "--resume") == 2
    assert "other options" in capsys.readouterr().err
    save_text(source.parent / "text.txt", seed=3)
    assert convert(source, "--heal", "full", "--heal-steps", 3, "--force", "--resume") == 2
    assert "another calibration text" in capsys.readouterr().err
