"""Which configurations the families accept, what they take them for, and that everything else is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import MlaError
from mla_cli.model.families import family_of
from tests.tiny import SHAPE, random_tokens, save_tiny

LLAMA = {"model_type": "llama", **SHAPE, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.0, "truncate": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 1e4,
}  # fmt: skip
QWEN2 = {
    **LLAMA, "model_type": "qwen2", "head_dim": None, "use_sliding_window": True, "sliding_window": 8,
    "max_window_layers": 1,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DEEPSEEK = {
    "model_type": "deepseek_v3", **SHAPE, "num_key_value_heads": 6, "head_dim": None, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "rope_parameters": YARN,
}  # fmt: skip
NATIVE_LAYER = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "frequencies": [0, 1, 2, 3],
    "q_bias": False, "kv_a_bias": True, "o_bias": True,
}  # fmt: skip
NATIVE = {
    "model_type": "mla_native", "tie_word_embeddings": False, "source_config": LLAMA,
    "mla": {"version": 1, "layers": [NATIVE_LAYER, NATIVE_LAYER]},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "yarn": {**LLAMA, "rope_parameters": YARN},
    "llama3": {**LLAMA, "rope_parameters": LLAMA3},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "qwen2": QWEN2,
    "gpt2": GPT2,
    "deepseek": DEEPSEEK,
    "native": NATIVE,
}
DAMAGE = [
    None, "x", "", [], ["a"], [[1]], {}, {"a": 1}, -1, 0, 1, 2, 3, 10**9, 10**12, 10**400, -(10**30), 0.5, 1e308, 1e-320,
    float("nan"), float("inf"), True, False, "8",
]  # fmt: skip
KEYS = """head_dim num_key_value_heads sliding_window use_sliding_window layer_types max_window_layers rope_scaling
    rope_parameters rope_theta attention_bias mlp_bias q_lora_rank hidden_act n_inner scale_attn_weights is_causal""".split()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a configuration."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(config: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set what stands at a place."""
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def judge(config: dict[str, Any]) -> None:
    """Read a configuration; only a refusal in one line may come of it."""
    try:
        family = family_of(config)
        family.tensors(family.spec(config), frozenset())
        said = ""
    except MlaError as refusal:
        said = str(refusal)
    assert "\n" not in said
    assert len(said) < 600


@pytest.mark.parametrize("name", CONFIGS)
def test_one_damaged_value_is_read_or_refused(name: str) -> None:
    known = [*places(CONFIGS[name]), *((key,) for key in KEYS)]
    for path in known:
        for value in DAMAGE:
            config = deepcopy(CONFIGS[name])
            put(config, path, value)
            judge(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_several_damaged_values_are_read_or_refused(name: str) -> None:
    rng = random.Random(name)
    for _ in range(1000):
        config = deepcopy(CONFIGS[name])
        for _ in range(rng.randint(2, 4)):
            put(config, rng.choice(list(places(config))), deepcopy(rng.choice(DAMAGE)))
        judge(config)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tokens that see the future": ({**LLAMA, "is_causal": False}, "is_causal"),
    "two rotary tables that differ": (
        {**LLAMA, "rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "disagree",
    ),
    "one frequency with dynamic scaling": (
        {**LLAMA, "head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "single frequency",
    ),
    "yarn without a base": ({**LLAMA, "rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta"),
    "llama3 with its band upside down": (
        {**LLAMA, "rope_parameters": {**LLAMA3, "low_freq_factor": 8.0}},
        "low_freq_factor",
    ),
    "a billion layers": ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers"),
    "attention types that are no list": (
        {**LLAMA, "model_type": "gemma3_text", "layer_types": 0.5},
        "layer_types",
    ),
    "fewer numbers than heads": (
        {"model_type": "bloom", "vocab_size": 64, "hidden_size": 2, "n_layer": 2, "n_head": 4},
        "multiple of 4 heads",
    ),
    "a native rotary key without frequencies": (
        {**NATIVE, "mla": {"version": 1, "layers": [NATIVE_LAYER, {**NATIVE_LAYER, "frequencies": None}]}},
        "frequencies",
    ),
    "a native extra nobody reads": ({**NATIVE, "mla": {**NATIVE["mla"], "gate": 1}}, "gate"),
    "a native key nobody reads": ({**NATIVE, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_name(case: str) -> None:
    config, word = REFUSED[case]
    with pytest.raises(MlaError, match=word):
        family_of(config).spec(config)


def test_harmless_keys_are_accepted() -> None:
    for harmless in (
        {"is_causal": True},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": LLAMA3, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True}},
    ):
        config = {**LLAMA, **harmless}
        assert family_of(config).spec(config).num_layers == 2


def test_an_absent_context_means_the_family_s_own() -> None:
    for model_type, context in (("llama", 2048), ("mistral", 131072), ("qwen2", 32768)):
        config = {**LLAMA, "model_type": model_type, "max_position_embeddings": None}
        assert family_of(config).spec(config).max_position_embeddings == context


def test_a_window_of_null_is_none(tmp_path: Path) -> None:
    # transformers 5: null means no window, whatever use_sliding_window says
    reference = save_tiny(tmp_path, "qwen2", use_sliding_window=True, sliding_window=None, max_window_layers=0)
    file = tmp_path / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "layer_types"}
    file.write_text(json.dumps({**config, "use_sliding_window": True, "sliding_window": None}))
    model = open_model(str(tmp_path))
    assert {layer.window for layer in model.spec.attention} == {None}
    decoder = load_decoder(model)
    with torch.inference_mode():
        tokens = random_tokens(1, 40)
        torch.testing.assert_close(decoder.logits(decoder(tokens)), reference(tokens).logits, atol=1e-4, rtol=0)
