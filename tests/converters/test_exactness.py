"""A conversion that drops nothing equals its source, and the stock form says the same in transformers as in ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters.convert import convert
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.options import ConvertOptions
from mla_cli.model.rotary import inverse_frequencies
from tests.model.test_parity import ALL_CASES, CASES
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer


def run(tmp_path: Path, family: str, changes: dict[str, Any], **options: Any) -> tuple[Any, Path, dict[str, Any]]:
    """Save a tiny source, convert it, and give (transformers source, output folder, report)."""
    source, out = tmp_path / "source", tmp_path / "out"
    reference = save_tiny(source, family, **changes)
    save_tokenizer(source)
    text = save_text(tmp_path / "text.txt")
    chosen = ConvertOptions(calib=str(text), samples=16, seq_len=32, **options)
    report = convert(str(source), out, chosen, device=torch.device("cpu"), command="mla convert")
    return reference, out, report


def full_rank(folder: Path) -> dict[str, int]:
    """Options under which nothing is dropped, of a saved source."""
    layers = open_model(str(folder)).spec.attention
    turning = [layer.rotary.dim for layer in layers if layer.rotary is not None]
    first = layers[0]
    return {
        "kv_lora_rank": first.cached_per_token,
        "qk_rope_head_dim": first.num_kv_heads * turning[0] if turning else 0,  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("case", ALL_CASES)
def test_full_rank_native_equals_the_source(tmp_path: Path, case: str) -> None:
    family, changes = ALL_CASES[case]
    save_tiny(tmp_path / "probe", family, **changes)
    shape = full_rank(tmp_path / "probe")
    # What healing would do is tried on the first families.
    healing = {} if case in CASES else {"heal": HealOptions(mode="none")}
    reference, out, report = run(tmp_path, family, changes, format="native", **shape, **healing)
    tokens = random_tokens(2, 250)
    source = load_decoder(open_model(str(tmp_path / "source")), dtype=torch.float64)
    exact = load_decoder(open_model(str(out)), dtype=torch.float64)
    decoder = load_decoder(open_model(str(out)))
    with torch.inference_mode():
        truth, expected = source.logits(source(tokens)), reference(tokens).logits
        torch.testing.assert_close(exact.logits(exact(tokens)), truth, atol=1e-5, rtol=0)
        # In float32 the order of sums differs; these models magnify that, in transformers as well.
        noise = (expected - truth).abs().max().item()
        torch.testing.assert_close(decoder.logits(decoder(tokens)), expected, atol=max(1e-4, 4 * noise), rtol=0)
    assert report["heldout"]["kl_final"] < 1e-6
    assert all(layer["factorization_error"] < 1e-9 for layer in report["layers"])


@pytest.mark.parametrize("case", ["llama-mqa-tied", "llama-8-2", "llama3", "linear", "dynamic", "yarn", "yarn-mscale", "qwen2",
                                  "llama-wide-heads", "mistral-no-window"])  # fmt: skip
def test_stock_form_runs_in_transformers(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    family, changes = CASES[case]
    _, out, report = run(tmp_path, family, changes, format="deepseek", ratio=1.3)
    assert report["format"] == "deepseek"
    theirs, loading = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    decoder = load_decoder(open_model(str(out)))
    tokens = random_tokens(2, 100)
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(decoder(tokens)), theirs.eval()(tokens).logits, atol=3e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama-8-2", "llama3", "linear", "yarn"])
def test_stock_form_turns_at_a_table_of_frequencies(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    family, changes = CASES[case]
    _, out, _ = run(tmp_path, family, changes, format="deepseek", kv_lora_rank=8, qk_rope_head_dim=6)
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "longrope"
    source, stock = open_model(str(tmp_path / "source")).spec, open_model(str(out)).spec
    known = inverse_frequencies(source.attention[0].rotary)  # type: ignore[union-attr, arg-type]
    for frequency in inverse_frequencies(stock.attention[0].rotary):  # type: ignore[union-attr, arg-type]
        assert float((known - frequency).abs().min()) < 1e-6 * float(frequency)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    decoder = load_decoder(open_model(str(out)))
    tokens = random_tokens(2, 250)  # beyond the original context of the scaled ones
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(decoder(tokens)), theirs(tokens).logits, atol=3e-4, rtol=0)


def test_stock_form_of_one_key_head_loses_nothing(tmp_path: Path) -> None:
    # With a single key head the shared rotary key is that head's own, so the stock form is exact at the rank of the values.
    family, changes = CASES["llama-mqa-tied"]
    reference, out, _ = run(tmp_path, family, changes, format="deepseek", kv_lora_rank=16, qk_rope_head_dim=8)
    decoder = load_decoder(open_model(str(out)))
    tokens = random_tokens(2, 100)
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(decoder(tokens)), reference(tokens).logits, atol=5e-4, rtol=0)


def check_steps_equal_one_pass(out: Path, backend: str) -> None:
    decoder = load_decoder(open_model(str(out)))
    tokens = random_tokens(2, 60)
    with torch.inference_mode():
        expected = decoder(tokens)
        decoder.backend = backend
        cache = decoder.make_cache(2, 60)
        steps = [decoder(tokens[:, :40], cache)] + [decoder(tokens[:, i : i + 1], cache) for i in range(40, 60)]
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_absorbed_steps_equal_one_pass(tmp_path: Path, backend: str) -> None:
    _, out, _ = run(tmp_path, "llama", {}, ratio=2.0)
    check_steps_equal_one_pass(out, backend)


STRUCTURES = """qwen3 gemma2 gemma3 olmo2 smollm3 bloom falcon-alibi gpt-neox gptj phi granite qwen3-moe""".split()


@pytest.mark.parametrize(
    ("case", "backend"), [*((case, "torch") for case in STRUCTURES), ("qwen3", "reference"), ("bloom", "reference")]
)
def test_half_rank_steps_equal_one_pass_in_every_structure(tmp_path: Path, case: str, backend: str) -> None:
    # Key factors, ALiBi, windows, soft-caps and partial rotary embeddings: absorbed from the cache as in one pass.
    family, changes = ALL_CASES[case]
    _, out, report = run(tmp_path, family, changes, ratio=2.0, heal=HealOptions(mode="none"))
    assert report["format"] == "native"
    check_steps_equal_one_pass(out, backend)
