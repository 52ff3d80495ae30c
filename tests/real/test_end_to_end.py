"""The whole path on SmolLM2-135M: convert (a quick one), run here and in transformers, calibrate, evaluate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.app import main
from mla_cli.errors import MlaError

pytestmark = pytest.mark.real

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The three primary colours are",
    "Water boils at a temperature of",
    "In 1969, the first human",
    "My favourite recipe begins with",
    "Question: What is 12 times 12?\nAnswer:",
]


@pytest.fixture(scope="module")
def source() -> Path:
    """The real model's folder; skips where it can be neither found nor fetched."""
    from mla_cli.checkpoint.builtin import fetch_builtin

    try:
        return fetch_builtin("smollm2-135m")
    except MlaError as problem:
        pytest.skip(f"the real model is not in reach: {problem}")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick conversion: few samples, which is enough to run and to be far better than chance."""
    from mla_cli.calibration.texts import builtin_english

    folder = tmp_path_factory.mktemp("real")
    (folder / "text.txt").write_text(builtin_english(), encoding="utf-8")
    words = ["convert", source, folder / "out", "--calib", folder / "text.txt", "--samples", 12, "--seq-len", 256]
    shape = ["--heal", "none", "--fisher-samples", 8, "--kv-lora-rank", 256, "--qk-rope-head-dim", 64, "--quiet"]
    # In a process of its own: its peak of memory is in the report, and that of the tests before it is not.
    command = [sys.executable, "-m", "mla_cli", *(str(word) for word in [*words, *shape])]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    return folder / "out"


def test_quick_conversion_is_sound(converted: Path) -> None:
    report = json.loads((converted / "mla_report.json").read_text())
    held = report["heldout"]
    assert report["format"] == "deepseek"
    # Two thirds of the rank cost so little that perplexity on a few sequences may fall by chance; divergence may not.
    assert 0.97 < held["ppl_final"] / held["ppl_source"] < 1.2
    assert 0 < held["kl_final"] < 0.2
    assert abs(report["verification"]["nll_difference"]) < 0.02
    assert report["peak_rss_bytes"] < 4e9


def test_transformers_gives_the_same_logits(converted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mla_cli.checkpoint.load import load_decoder, open_model

    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = " ".join(PROMPTS) * 4
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, :256]
    for dtype in (torch.float32, torch.bfloat16):
        theirs = AutoModelForCausalLM.from_pretrained(converted, dtype=dtype).eval()
        ours = load_decoder(open_model(str(converted)), dtype=dtype)
        with torch.inference_mode():
            a, b = theirs(tokens).logits.float(), ours.logits(ours(tokens)).float()
        if dtype == torch.float32:
            torch.testing.assert_close(a, b, atol=2e-4, rtol=0)  # sums in another order: up to 1.03e-4 was seen
        else:
            assert (a.argmax(-1) == b.argmax(-1)).float().mean() >= 0.97


def test_greedy_tokens_are_those_of_transformers(converted: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    flags = ["--max-new-tokens", "64", "--dtype", "float32", "--ignore-eos", "--quiet", "--out", str(results)]
    assert main(["generate", str(converted), "--prompts", str(file), *flags]) == 0
    ours: list[dict[str, Any]] = [json.loads(line) for line in results.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # as with --ignore-eos: it may be written, and ends nothing
    for prompt, result in zip(PROMPTS, ours, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected = model.generate(tokens, do_sample=False, max_new_tokens=64)
        assert result["token_ids"] == expected[0, tokens.shape[1] :].tolist(), prompt
