"""The decoder equals transformers on tiny random models of every family, whole, in steps, and on ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.checkpoint.load import load_decoder, open_model
from tests.tiny import random_tokens, save_tiny

TRAINED = {"original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-mqa-tied": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-8-2": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "bias": 1.0}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "dynamic": ("llama", DYNAMIC),
    "yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **TRAINED}}),
    "yarn-mscale": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, **TRAINED}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"bias": 1.0}),
    "qwen2-window": ("qwen2", {"bias": 1.0, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "gpt2": ("gpt2", {"bias": 0.5}),
    "gpt2-layer-scale": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    reference = save_tiny(tmp_path, family, **changes)
    decoder = load_decoder(open_model(str(tmp_path)))
    tokens = random_tokens(3, 100)
    with torch.inference_mode():
        expected = reference(tokens).logits  # [B, T, V]
        assert expected.std() > 1  # flat logits would hide errors
        torch.testing.assert_close(decoder.logits(decoder(tokens)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [name for name in CASES if name != "dynamic"])
def test_ragged_batches_and_single_steps_equal_one_pass(tmp_path: Path, case: str) -> None:
    # (dynamic scaling turns earlier keys at the angle of their own time, in every engine)
    family, changes = CASES[case]
    reference = save_tiny(tmp_path, family, **changes)
    decoder = load_decoder(open_model(str(tmp_path)))
    tokens, first, second = random_tokens(3, 100), torch.tensor([50, 37, 50]), torch.tensor([50, 0, 14])
    with torch.inference_mode():
        expected = reference(tokens).logits
        cache = decoder.make_cache(3, 100)
        start = decoder.logits(decoder(tokens[:, :50], cache, first))
        rest = decoder.logits(decoder(tokens[:, 50:], cache, second))
        for row in range(3):
            torch.testing.assert_close(start[row, : first[row]], expected[row, : first[row]], atol=2e-4, rtol=0)
        torch.testing.assert_close(rest[0], expected[0, 50:], atol=2e-4, rtol=0)
        torch.testing.assert_close(rest[2, :14], expected[2, 50:64], atol=2e-4, rtol=0)
        cache = decoder.make_cache(1, 100)
        steps = [decoder(tokens[:1, :90], cache)] + [decoder(tokens[:1, i : i + 1], cache) for i in range(90, 100)]
        torch.testing.assert_close(decoder.logits(torch.cat(steps, dim=1)), expected[:1], atol=2e-4, rtol=0)


def test_dynamic_scaling_depends_on_the_row_alone(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", **DYNAMIC)
    decoder = load_decoder(open_model(str(tmp_path)))
    tokens = random_tokens(2, 100)
    with torch.inference_mode():
        cache = decoder.make_cache(2, 100)
        logits = decoder.logits(decoder(tokens, cache, torch.tensor([100, 40])))
        torch.testing.assert_close(logits[1, :40], reference(tokens[1:, :40]).logits[0], atol=1e-4, rtol=0)
