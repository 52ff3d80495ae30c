"""Every family that GGUF knows comes back from it as it was; the others, and what would be computed otherwise, are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType

from mla_cli.checkpoint.gguf import materialise_gguf
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import UnsupportedError
from tests.checkpoint.gguf_families import write_family
from tests.checkpoint.test_gguf import add_bpe
from tests.tiny import random_tokens, save_tiny

EVEN = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8, "intermediate_size": 64, "sliding_window": None}
FACTORS = {"short_factor": [1.0, 1.25], "long_factor": [2.0, 4.0]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "bias": 0.5}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"bias": 0.5}),
    "qwen3": ("qwen3", {}),
    "qwen2-moe": ("qwen2_moe", {"mlp_only_layers": [], "bias": 0.5}),
    "qwen3-moe": ("qwen3_moe", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 8, "sliding_window_pattern": 6, "num_hidden_layers": 6}),
    "gemma3-linear": ("gemma3", {
        "query_pre_attn_scalar": 8, "sliding_window_pattern": 6, "num_hidden_layers": 6, "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "phi2": ("phi", {"bias": 0.5}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3-partial-longrope": ("phi3", {
        "sliding_window": None, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64, **FACTORS,
        },
    }),
    "gpt-neox": ("gpt_neox", {"bias": 0.5}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": ("gpt2", {"bias": 0.5}),
    "starcoder2": ("starcoder2", {"bias": 0.5}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "bias": 0.5}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-new-one-norm": ("falcon", {
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
    }),
    "bloom": ("bloom", {"bias": 0.5}),
    "mpt": ("mpt", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "granite": ("granite", {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLA_CPU_KERNELS", "off")  # in an empty cache they would be compiled again for each test
    return tmp_path / "cache"


def written(tmp_path: Path, family: str, changes: dict[str, Any], **options: Any) -> tuple[Any, Path]:
    model = save_tiny(tmp_path / "source", family, **changes)
    return model, write_family(tmp_path / "model.gguf", tmp_path / "source", model.config, add_bpe, **options)


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_those_of_the_source(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    family, changes = FAMILIES[case]
    source, file = written(tmp_path, family, changes, kind=GGMLQuantizationType.F32)
    folder = materialise_gguf(file)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=source.config._attn_implementation).eval()
    tokens = random_tokens(2, 100)
    decoder = load_decoder(open_model(str(file)))
    with torch.inference_mode():
        expected = source(tokens).logits
        assert len(expected.unique()) > 0.9 * expected.numel()  # neither flat nor at the ends of a soft-cap
        # (Gemma's norms are written as 1 + w.)
        assert torch.allclose(theirs(tokens).logits, expected, atol=1e-4 if "gemma" in case else 0, rtol=0)
        assert torch.allclose(decoder.logits(decoder(tokens)), expected, atol=2e-4, rtol=0)


def test_internlm2_is_read_as_the_llama_that_it_is(tmp_path: Path) -> None:
    model, file = written(tmp_path, "llama", {}, architecture="internlm2")
    decoder, tokens = load_decoder(open_model(str(file))), random_tokens(1, 50)
    with torch.inference_mode():
        assert torch.allclose(decoder.logits(decoder(tokens)), model(tokens).logits, atol=2e-4)


@pytest.mark.parametrize(
    ("family", "changes", "keys", "message"),
    [
        ("olmo", {}, {"attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ("olmo2", {}, {"attention.sliding_window": 64}, "sliding_window"),
        ("mpt", {}, {"attention.max_alibi_bias": 0.0}, "alibi"),
        ("mpt", {}, {"attention.head_count_kv": 2}, "fewer key heads"),
        ("qwen3_moe", {}, {"expert_gating_func": 2}, "expert_gating_func"),
        ("llama", {}, {"rope.dimension_count": 4}, "rotating 4 of 8"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    _, file = written(tmp_path, family, changes, keys=keys)
    with pytest.raises(UnsupportedError, match=message):
        materialise_gguf(file)


@pytest.mark.parametrize(("architecture", "message"), [("gptj", "knows no GPT-J"), ("opt", "knows no OPT")])
def test_families_that_gguf_lacks_are_refused_by_name(tmp_path: Path, architecture: str, message: str) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=message):
        materialise_gguf(tmp_path / "model.gguf")


def test_experts_are_quantised_and_read_one_at_a_time(tmp_path: Path) -> None:
    _, file = written(tmp_path, "mixtral", EVEN, kind=GGMLQuantizationType.Q8_0)
    decoder = load_decoder(open_model(str(file)))
    source = load_decoder(open_model(str(tmp_path / "source")))
    weights = source.state_dict()
    for name, weight in decoder.state_dict().items():
        assert torch.allclose(weight, weights[name], atol=0.02 * float(weights[name].abs().max())), name
    assert json.loads((materialise_gguf(file) / "config.json").read_text())["torch_dtype"] == "bfloat16"
