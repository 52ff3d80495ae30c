"""Structures beyond a plain block: who computes plain blocks alone refuses each, and InternLM2 says what Llama says."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_cli.checkpoint.deepseek_form import why_not_stock
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.model.spec import _UNUSUAL, DecoderSpec
from mla_cli.runtime.cpu_step import why_not
from tests.model.test_parity import FAMILY_CASES
from tests.tiny import random_tokens, save_tiny

PLAIN = {"phi3", "starcoder2", "starcoder2-window", "smollm3", "smollm3-window", "opt"}


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_compiled_steps_take_plain_blocks_alone(tmp_path: Path, case: str) -> None:
    family, changes = FAMILY_CASES[case]
    save_tiny(tmp_path, family, **changes)
    decoder = load_decoder(open_model(str(tmp_path)))
    assert (why_not(decoder) is None) == (case in PLAIN)
    if decoder.spec.unusual() is not None:
        assert why_not_stock(decoder.spec) is not None


def test_every_value_with_a_default_is_told_of() -> None:
    optional = {field.name for field in fields(DecoderSpec) if field.default is not MISSING}
    assert optional - {"learned_positions"} == set(_UNUSUAL)


def test_internlm2_is_llama_under_other_names(tmp_path: Path) -> None:
    source, renamed = tmp_path / "llama", tmp_path / "internlm2"
    reference = save_tiny(source, "llama")
    config = json.loads((source / "config.json").read_text())
    groups, each, d = config["num_key_value_heads"], config["num_attention_heads"] // config["num_key_value_heads"], 8
    found, tensors = load_file(source / "model.safetensors"), {}
    names = {
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output",
    }  # fmt: skip
    for name, tensor in found.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "self_attn" not in name:
            tensors[name] = tensor
    for layer in range(2):
        q, k, v = (found[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
        parts = (q.view(groups, each, d, -1), k.view(groups, 1, d, -1), v.view(groups, 1, d, -1))
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(parts, dim=1).flatten(0, 2)
    renamed.mkdir()
    save_file(tensors, renamed / "model.safetensors", metadata={"format": "pt"})
    kept = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias", "head_dim")}
    kept |= {"model_type": "internlm2", "bias": False, "num_attention_heads": 6, "hidden_size": 48}
    (renamed / "config.json").write_text(json.dumps(kept))
    decoder = load_decoder(open_model(str(renamed)))
    tokens = random_tokens(2, 60)
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(decoder(tokens)), reference(tokens).logits, atol=1e-4, rtol=0)
