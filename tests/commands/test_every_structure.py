"""What decoders other than Llama's go through: healing, a gate, an interruption, calibration, generation from INT8 latents."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_cli.app import main
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters import heal_full, heal_gate
from mla_cli.converters.convert import convert
from mla_cli.converters.heal_full import FullHealing
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.options import ConvertOptions
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.request import Request
from mla_cli.runtime.sampling_params import SamplingParams
from tests.model.test_parity import ALL_CASES
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer

CPU = torch.device("cpu")
QUICK = ("gemma3", "bloom")
LONG = """gpt2 gpt-neox gpt-neox-sequential qwen2-window qwen3 qwen3-window-bias qwen3-moe qwen2-moe mixtral gemma gemma2
phi3-window-partial phi smollm3 olmo olmo2 granite starcoder2-window stablelm-parallel gptj opt falcon falcon-new falcon-alibi
mpt mpt-six-heads""".split()
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LONG)]


def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third step of healing end to end; what was learned until then is on disk."""
    step, count = FullHealing._step, 0

    def interrupted(self: FullHealing, fraction: float) -> float | None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return step(self, fraction)

    monkeypatch.setattr(FullHealing, "_step", interrupted)
    monkeypatch.setattr(heal_full, "SAVE_SECONDS", 0.0)


@pytest.mark.filterwarnings("error::UserWarning")  # PyTorch's would be all that a user sees of it
@pytest.mark.parametrize("case", CASES)
def test_heal_gate_resume_calibrate_and_generate(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = ALL_CASES[case]
    source, out, again = tmp_path / "source", tmp_path / "out", tmp_path / "again"
    save_tiny(source, family, **{**changes, "initializer_range": 0.15})
    save_tokenizer(source)
    text = save_text(tmp_path / "text.txt")
    chosen = ConvertOptions(
        ratio=1.5,
        format="native",
        calib=str(text),
        samples=12,
        seq_len=32,
        heal=HealOptions("full", steps=8, gate=(4, 8)),
    )
    for measured in ("mean_error", "heldout_divergence"):  # every gate is taken for a gain, so that all of it is run
        values = itertools.cycle((1.0, 0.5))
        monkeypatch.setattr(heal_gate, measured, lambda *_, values=values: next(values))
    report = convert(str(source), out, chosen, device=CPU, command="")
    assert report["healing"]["mode"] == "full"
    assert all(layer.gate_chunk == 8 for layer in open_model(str(out)).spec.attention)  # type: ignore[union-attr]
    assert report["heldout"]["ppl_final"] < 1.2 * report["heldout"]["ppl_closed_form"]

    with monkeypatch.context() as patched:
        interrupt_once(patched)
        with pytest.raises(KeyboardInterrupt):
            convert(str(source), again, chosen, device=CPU, command="")
    assert not again.exists()
    convert(str(source), again, replace(chosen, resume=True), device=CPU, command="")
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()

    small = tmp_path / "int8"
    words = ["calibrate", str(out), "--kv-dtype", "int8", "--calib", str(text), "--samples", "12", "--seq-len", "32"]
    assert main([*words, "--out", str(small), "--max-loss", "100"]) == 0
    held = json.loads((small / "mla_report.json").read_text())["calibration_kv"]["heldout"]
    assert 0 <= held["kl"] < 5e-3  # eight bits cost next to nothing
    assert abs(held["ppl_change_percent"]) < 2
    assert generated(out) == one_pass(out)  # from the cache as without one
    assert len(generated(small)) == 8


PROMPT = random_tokens(1, 20).flatten().tolist()


def generated(folder: Path) -> list[int]:
    request = Request(tuple(PROMPT), SamplingParams(max_new_tokens=8, ignore_eos=True))
    return list(open_engine(str(folder)).generator.complete(request).token_ids)


def one_pass(folder: Path) -> list[int]:
    """The likeliest next tokens, without a cache."""
    decoder, tokens = load_decoder(open_model(str(folder))), list(PROMPT)
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(decoder.logits(decoder(torch.tensor([tokens])))[0, -1].argmax()))
    return tokens[len(PROMPT) :]
