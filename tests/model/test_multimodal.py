"""Models that read images too: the text inside Gemma 3 is taken, others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_cli.app import main
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import InputError, UnsupportedError
from tests.tiny import random_tokens, run_convert, save_text, save_tokenizer

TEXT = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.5, "sliding_window": 8,
    "query_pre_attn_scalar": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EYE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    ids = {"boi_token_index": 60, "eoi_token_index": 61, "image_token_index": 62}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=TEXT, vision_config=EYE, mm_tokens_per_image=1, **ids)
    )
    folder = tmp_path / "source"
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    save_text(tmp_path / "text.txt")
    return folder


def expected(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import Gemma3ForConditionalGeneration

    with torch.inference_mode():
        logits: torch.Tensor = Gemma3ForConditionalGeneration.from_pretrained(folder).eval()(tokens).logits
    return logits


def new_names(folder: Path) -> None:
    """The names of the modules since transformers 4.52, which some programs write; it writes the older ones itself."""
    renamed = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        assert name.startswith(("language_model.model.", "vision_tower.", "multi_modal_projector."))
        renamed["model." + name.replace("language_model.model.", "language_model.")] = weight
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("new", [False, True])
def test_the_text_of_gemma3_is_taken(source: Path, new: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = random_tokens(2, 60, vocab=60)
    logits = expected(source, tokens)
    if new:
        new_names(source)
    model = open_model(str(source))
    assert model.spec.model_type == "gemma3_text"
    assert any("reads images too" in note for note in model.notes)
    with torch.inference_mode():
        decoder = load_decoder(model)
        assert torch.allclose(decoder.logits(decoder(tokens)), logits, atol=1e-4)
    assert run_convert(source, "--ratio", 2, "--heal", "none") == 0
    assert "reads images too" in capsys.readouterr().err
    config = json.loads((source.parent / "out" / "config.json").read_text())
    assert config["source_config"]["model_type"] == "gemma3_text"
    assert main(["generate", str(source.parent / "out"), "abc", "--max-new-tokens", "3"]) == 0


def test_a_tensor_that_belongs_to_neither_part_is_refused(source: Path) -> None:
    weights = load_file(source / "model.safetensors")
    weights["model.ear.weight"] = torch.ones(2, 2)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"unused, e\.g\. model\.ear\.weight"):
        open_model(str(source))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, r"'llava'.*text model of type 'llama'"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, r"'mistral3'.*of type 'mistral'"),
        ({"model_type": "qwen2_vl", "vision_config": {}, "text_config": None}, r"'qwen2_vl' is a multimodal model"),
        ({"model_type": "internvl_chat", "text_config": None, "llm_config": {"model_type": "qwen2"}}, r"of type 'qwen2'"),
    ],
)  # fmt: skip
def test_others_are_refused_by_name(source: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedError, match=message):
        open_model(str(source))


def test_without_its_text_config_it_is_refused(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    del config["text_config"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="no text_config"):
        open_model(str(source))
