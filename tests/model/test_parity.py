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
# Structures that the converters were not made for at first; the same tests hold for them.
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-window-bias": (
        "qwen3",
        {"attention_bias": True, "bias": 0.5, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "phi3-window-partial": (
        "phi3",
        {"sliding_window": 8, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {"bias": 0.5}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 8, "use_bias": False}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "bias": 0.5}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "gpt-neox": ("gpt_neox", {"bias": 0.5}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gptj": ("gptj", {"bias": 0.5}),
    "phi": ("phi", {"bias": 0.5}),
    "opt": ("opt", {"bias": 0.5}),
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("bloom", {"bias": 0.5}),
    "bloom-six-heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt": ("mpt", {}),
    "mpt-six-heads": ("mpt", {"n_heads": 6, "d_model": 48}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {"bias": 0.5}),
    "qwen3-moe": ("qwen3_moe", {}),
}
ALL_CASES = {**CASES, **FAMILY_CASES}


@pytest.mark.parametrize("case", ALL_CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    family, changes = ALL_CASES[case]
    reference = save_tiny(tmp_path, family, **changes)
    decoder = load_decoder(open_model(str(tmp_path)))
    tokens = random_tokens(3, 100)
    with torch.inference_mode():
        expected = reference(tokens).logits  # [B, T, V]
        assert expected.std() > 1  # flat logits would hide errors
        torch.testing.assert_close(decoder.logits(decoder(tokens)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [name for name in ALL_CASES if name != "dynamic"])
def test_ragged_batches_and_single_steps_equal_one_pass(tmp_path: Path, case: str) -> None:
    # (dynamic scaling turns earlier keys at the angle of their own time, in every engine)
    family, changes = ALL_CASES[case]
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
