"""The gate as a part of healing: kept and exported where it helps, dropped where it does not, refused where it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_cli.app import main
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import ModelSource, load_decoder, open_model
from mla_cli.converters import heal_gate
from mla_cli.converters.convert import convert
from mla_cli.converters.heal_gate import Gated, fresh_gate, learn_gates, shared_with_gate
from mla_cli.converters.heal_options import GATE_CHUNKS, HealOptions
from mla_cli.converters.heal_state import HealState
from mla_cli.converters.options import ConvertOptions
from mla_cli.converters.plan import make_plan
from mla_cli.converters.rotary_split import latent_spec
from mla_cli.converters.write import write_checkpoint
from mla_cli.errors import InputError, UsageError
from mla_cli.model.decoder import begin_step
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.request import Request
from mla_cli.runtime.sampling_params import SamplingParams
from tests.tiny import random_tokens, save_tiny, save_tokenizer

CPU = torch.device("cpu")
LAST = 3  # the token that every fourth place holds


def a_case_for_a_gate(folder: Path) -> tuple[ModelSource, LatentWeights]:
    """A source whose attention gives one constant, and a latent that holds it at the token `LAST` alone.

    What a token lacks, the last token of the chunk before has: exactly what a gate can carry.
    """
    save_tiny(folder, "llama", num_hidden_layers=1, attention_bias=True, bias=1.0)
    save_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight"):
        tensors[f"model.layers.0.self_attn.{name}"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = open_model(str(folder))
    decoder = load_decoder(model, dtype=torch.float64)
    attention, known = decoder.layers[0].self_attn, torch.arange(LAST, 24)
    x = decoder.layers[0].input_layernorm(decoder.embed(known[None], known[None]))[0]  # [21, D]
    spec = latent_spec(attention.spec, 2, ())
    zeros = torch.zeros
    down, up_v = zeros(2, 48), zeros(6, 8, 2)
    down[0] = torch.linalg.pinv(x) @ torch.eye(len(known), dtype=torch.float64)[0]  # 1 at LAST, 0 at the others
    up_v[..., 0] = attention.v_proj.bias.view(2, 8).repeat_interleave(3, dim=0)  # [H, v]
    weights = LatentWeights(
        spec, zeros(6, 8, 48), zeros(6, 8), down.double(), zeros(2), zeros(6, 8, 2), up_v.double(),
        attention.o_proj.weight, attention.o_proj.bias,
    )  # fmt: skip
    return model, weights.with_needed_biases()


def texts(rows: int, seed: int) -> CalibrationTexts:
    sequences = random_tokens(rows, 32, vocab=24, seed=seed).clamp(min=LAST + 1)
    sequences[:, 3::4] = LAST
    return CalibrationTexts(sequences, torch.full((rows,), 32), "random", 0, rows)


def options(steps: int = 6, **changes: Any) -> HealOptions:
    return HealOptions(mode="layers", steps=steps, gate=(4, 8), **changes)


def learned(model: ModelSource, weights: LatentWeights, folder: Path, **changes: Any) -> Gated:
    state = HealState(folder / "out", {}, device=CPU, resume=False)
    return learn_gates(model, [weights], texts(8, 1), texts(3, 2), options(**changes), state, device=CPU)


def test_a_gate_that_helps_is_kept_exported_and_obeyed(tmp_path: Path) -> None:
    model, weights = a_case_for_a_gate(tmp_path / "source")
    found = learned(model, weights, tmp_path)
    (record,) = found.record["layers"]
    assert record["kept"]
    assert record["after"] < 0.95 * record["before"]
    assert record["steps"] == 6
    assert found.record["kl_with"] < found.record["kl_without"]
    assert found.layers[0].spec.gate_chunk == 8  # the last of the curriculum
    fresh = fresh_gate(2, seed=0)
    assert any(not torch.equal(fresh[name].double(), tensor) for name, tensor in (found.layers[0].gate or {}).items())

    plan = make_plan(model.spec, form="native", reason="", kv_lora_rank=2, qk_rope_head_dim=0)
    folders = {"gated": found.layers, "plain": (weights,)}
    for name, layers in folders.items():
        write_checkpoint(model, plan, layers, tmp_path / name, dtype=torch.float32, max_shard_bytes=10**9, force=False)
    prompt = texts(1, 5).sequences[0, :20].tolist()
    request = Request(tuple(prompt), SamplingParams(max_new_tokens=12, ignore_eos=True))
    answers = {name: open_engine(str(tmp_path / name)).generator.complete(request).token_ids for name in folders}
    decoder = load_decoder(open_model(str(tmp_path / "gated")))
    with torch.inference_mode():
        for token in answers["gated"]:
            assert int(decoder.logits(decoder(torch.tensor([prompt])))[0, -1].argmax()) == token
            prompt.append(token)
        x = torch.randn(1, 20, 48)
        step = begin_step(decoder.spec, x.shape[:2], CPU)
        plain = load_decoder(open_model(str(tmp_path / "plain"))).layers[0].self_attn
        assert float((decoder.layers[0].self_attn(x, step) - plain(x, step))[:, 8:].abs().mean()) > 1e-3


def test_gates_that_help_layers_but_not_the_model_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = a_case_for_a_gate(tmp_path / "source")
    monkeypatch.setattr(heal_gate, "heldout_divergence", lambda student, *text: 0.25)
    found = learned(model, weights, tmp_path)
    assert found.layers == (weights,)
    assert found.record["kl_with"] == found.record["kl_without"] == 0.25
    assert not found.record["layers"][0]["kept"]
    assert found.record["layers"][0]["after"] < found.record["layers"][0]["before"]


def test_a_new_gate_is_mostly_shut_and_the_same_for_the_same_seed() -> None:
    gate = fresh_gate(6, seed=3)
    assert gate["2.bias"].tolist() == [-1.0]
    again: dict[str, Tensor] = fresh_gate(6, seed=3)
    assert all(torch.equal(gate[name], again[name]) for name in gate)
    assert not torch.equal(gate["0.weight"], fresh_gate(6, seed=4)["0.weight"])


def chosen(source: Path, **changes: Any) -> ConvertOptions:
    made = ConvertOptions(
        kv_lora_rank=12, qk_rope_head_dim=8, format="native", calib=str(source.parent / "text.txt"),
        samples=12, seq_len=32, heal=options(steps=3),
    )  # fmt: skip
    return replace(made, **changes)


def test_a_gate_that_does_not_help_is_dropped_and_the_report_says_so(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = source.parent / "out"
    # Latents that hold all that the source caches: whatever is mixed into them can only do harm.
    lossless = chosen(source, kv_lora_rank=32, qk_rope_head_dim=16, ranks="uniform")
    run, done = heal_gate._Trial.run, []

    def interrupted(self: Any, seconds: float) -> Any:
        if done == [0]:
            done.append(-1)
            raise KeyboardInterrupt
        done.append(self.index)
        return run(self, seconds)

    monkeypatch.setattr(heal_gate._Trial, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), out, lossless, device=CPU, command="")
    report = convert(str(source), out, replace(lossless, resume=True), device=CPU, command="")
    assert done == [0, -1, 1]  # the first layer's gate was not learned again
    gate = report["healing"]["gate"]
    assert gate["chunks"] == [4, 8]
    assert [entry["kept"] for entry in gate["layers"]] == [False, False]
    assert all(entry["after"] > entry["before"] for entry in gate["layers"])
    assert any("gates over chunks of 8 tokens helped in none of 2 layers" in note for note in report["notes"])
    assert [layer.gate_chunk for layer in open_model(str(out)).spec.attention] == [None, None]  # type: ignore[union-attr]
    assert "error with gate" in (out / "mla_report.html").read_text()


def test_it_is_refused_where_it_cannot_be(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(**changes: Any) -> str:
        with pytest.raises((UsageError, InputError)) as caught:
            convert(str(source), source.parent / "out", chosen(source, **changes), device=CPU, command="")
        assert not (source.parent / "out").exists()
        return str(caught.value)

    assert "stock DeepSeek form cannot express a gate" in refused(format="deepseek")
    assert "--format native" in refused(format="auto")
    assert "after healing" in refused(heal=HealOptions(mode="none", gate=(4, 8)))
    assert "does not hold two" in refused(heal=HealOptions(mode="layers", gate=GATE_CHUNKS))
    words = ["convert", str(source), str(source.parent / "out"), "--format", "native", "--gate", "--dry-run"]
    assert main(words) == 2
    assert "context of 256" in capsys.readouterr().err


def test_text_that_is_too_short_for_a_chunk_is_refused(source: Path) -> None:
    text = source.parent / "short.jsonl"
    text.write_text("".join(json.dumps({"text": "abcdefgh" * 3}) + "\n" for _ in range(30)))
    made = chosen(source, calib=str(text), heal=HealOptions(mode="layers", steps=2, gate=(32, 64)))
    with pytest.raises(InputError, match="chunks of 64 tokens"):
        convert(str(source), source.parent / "out", made, device=CPU, command="")


def test_gates_take_their_time_from_the_healing() -> None:
    rest, gates = shared_with_gate(HealOptions(mode="layers", minutes=10.0, gate=(4,)))
    assert rest.minutes + gates.minutes == pytest.approx(10.0)
    assert shared_with_gate(HealOptions(mode="layers", minutes=10.0))[0].minutes == 10.0
