"""The norm on the latent: what it computes, that it survives a file, and that it is kept only where it is no loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters import latent_norm
from mla_cli.converters.heal_layers import LayersHealing
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.held_out import Loss
from mla_cli.converters.latent_norm import shared, with_norms
from mla_cli.converters.plan import make_plan
from mla_cli.converters.student import Student
from mla_cli.converters.write import write_checkpoint
from mla_cli.errors import UsageError
from mla_cli.model.decoder import Decoder, begin_step
from mla_cli.model.latent_weights import LatentWeights
from tests.converters.test_heal import a_student
from tests.tiny import random_tokens, run_convert, save_tokenizer, with_latent_strength


def normed_layers(student: Student) -> list[LatentWeights]:
    """The student's layers with norms whose weights differ from channel to channel."""
    torch.manual_seed(0)
    found = with_norms(student.result(), [0.7, 1.3])
    return [layer.with_norm(layer.spec.norm_eps or 1.0, layer.norm * (0.5 + torch.rand(12))) for layer in found]


def written(tmp_path: Path) -> tuple[Student, list[LatentWeights], Path]:
    student = a_student(tmp_path / "source")
    layers, out = normed_layers(student), tmp_path / "out"
    model = open_model(str(tmp_path / "source"))
    plan = make_plan(model.spec, form="native", reason="", kv_lora_rank=12, qk_rope_head_dim=8)
    save_tokenizer(tmp_path / "source")
    write_checkpoint(model, plan, layers, out, dtype=torch.float32, max_shard_bytes=10**9, force=False)
    return student, layers, out


def test_a_written_norm_is_read_back_and_computed(tmp_path: Path) -> None:
    student, layers, out = written(tmp_path)
    decoder = load_decoder(open_model(str(out)))
    tokens = random_tokens(2, 40)
    with torch.inference_mode():
        for index, weights in enumerate(layers):
            attention, record = decoder.layers[index].self_attn, {}
            x = torch.randn(2, 40, 48)
            attention(x, begin_step(decoder.spec, x.shape[:2], x.device), record)
            raw = (x.double() @ weights.down.T + weights.down_bias)[..., :12]  # [B, T, r]
            eps = weights.spec.norm_eps
            expected = weights.norm * raw / (raw.square().mean(dim=-1, keepdim=True) + eps).sqrt()
            torch.testing.assert_close(record["latent"].double(), expected, rtol=1e-4, atol=1e-5)
            assert float((raw / expected).std()) > 0.01  # it is not a constant factor that could be left out
        whole = decoder(tokens)
        computed: Decoder = student.decoder.with_layers(
            [student.layer(i)[0].with_attention(weights.module(i)) for i, weights in enumerate(layers)]
        )
        torch.testing.assert_close(whole, computed(tokens), rtol=1e-5, atol=1e-5)
        cache = decoder.make_cache(2, 40)
        steps = [decoder(tokens[:, :30], cache)] + [decoder(tokens[:, i : i + 1], cache) for i in range(30, 40)]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=2e-4)
    with pytest.raises(UsageError, match="a norm over all of them"):
        with_latent_strength(decoder, 0.5)


def test_a_soft_norm_leaves_the_closed_form_nearly_as_it_is(tmp_path: Path) -> None:
    student = a_student(tmp_path)
    tokens, lengths = random_tokens(2, 24), torch.tensor([24, 24])
    expected = student(tokens, lengths, student.working())[-1]
    soft = Student(student.decoder, with_norms(student.result(), [1.0, 1.0]))
    hard = Student(student.decoder, [w.with_norm(1e-6, torch.ones(12)) for w in student.result()])
    near, far = (float((s(tokens, lengths, s.working())[-1] - expected).norm().detach()) for s in (soft, hard))
    assert near < 0.5 * far


def test_a_learned_gain_goes_into_the_norm(tmp_path: Path) -> None:
    student = a_student(tmp_path)
    tokens, lengths = random_tokens(2, 24), torch.tensor([24, 24])
    normed = Student(student.decoder, normed_layers(student))
    before = normed(tokens, lengths, normed.working())[-1]
    with torch.no_grad():
        normed.layer(0)[1].log_gain.fill_(0.7)
    expected = normed(tokens, lengths, normed.working())[-1]
    assert float((expected - before).detach().norm()) > 0.01 * float(before.detach().norm())
    again = Student(student.decoder, normed.result())
    torch.testing.assert_close(again(tokens, lengths, again.working())[-1], expected, rtol=2e-4, atol=2e-4)


def test_the_trials_take_their_time_from_the_healing() -> None:
    trial, rest = shared(HealOptions(mode="full", minutes=10.0))
    assert trial.mode == "layers"
    assert rest.mode == "full"
    assert 2 * trial.minutes + rest.minutes == pytest.approx(10.0)
    trial, rest = shared(HealOptions(mode="layers", steps=50))
    assert 2 * trial.steps + rest.steps == 50  # type: ignore[operator]


def convert(source: Path, *more: object) -> dict[str, Any]:
    shape = ("--preset", "chat", "--kv-lora-rank", 6, "--qk-rope-head-dim", 4)
    assert run_convert(source, *shape, *more) == 0
    return json.loads((source.parent / "out" / "mla_report.json").read_text())


@pytest.mark.parametrize("better", [True, False])
def test_it_is_kept_where_it_is_no_loss(source: Path, monkeypatch: pytest.MonkeyPatch, better: bool) -> None:
    measured = []

    def loss_of(bank: Any, layers: Any, texts: Any, batches: Any) -> Loss:
        measured.append(layers[0].norm is not None)
        return Loss(1.0, 0.3 if measured[-1] == better else 0.5, 10)

    monkeypatch.setattr(latent_norm, "loss_of", loss_of)
    report = convert(source, "--format", "native", "--heal", "layers", "--heal-steps", 5)
    assert sorted(measured) == [False, True]
    assert report["latent_norm"]["kept"] == better
    line = next(note for note in report["notes"] if "norm on the latent" in note)
    assert line.startswith("no norm" if not better else "a norm")
    spec = open_model(str(source.parent / "out")).spec
    assert [layer.norm_eps is not None for layer in spec.attention] == [better] * 2  # type: ignore[union-attr]
    assert report["verification"]["reloaded"]


def test_an_interrupted_trial_goes_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("--format", "native", "--heal", "layers", "--heal-steps", 5)
    whole = convert(source, *chosen)
    heal, calls = LayersHealing._heal, []

    def interrupted(self: LayersHealing, index: int, seconds: float) -> Any:
        calls.append(index)
        if len(calls) == 4:  # the second layer of the second trial
            raise KeyboardInterrupt
        return heal(self, index, seconds)

    monkeypatch.setattr(LayersHealing, "_heal", interrupted)
    with pytest.raises(AssertionError):
        convert(source, *chosen, "--force")
    resumed = convert(source, *chosen, "--force", "--resume")
    assert calls == [0, 1, 0, 1, 1, 0, 1]  # nothing was healed twice
    assert resumed["latent_norm"] == whole["latent_norm"]
    assert resumed["layers"] == whole["layers"]


def test_where_it_cannot_be_tried_the_report_says_why(source: Path) -> None:
    report = convert(source, "--format", "deepseek", "--heal", "none")
    assert report["latent_norm"] == {"kept": False, "reason": "the stock form neutralises its norm on the latent"}
    assert "stock form" in " ".join(report["notes"])
