"""Inputs at the edge of what statistics can say: layers without gradient, constant text, ragged batches, a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters import convert as conversion
from mla_cli.converters.convert import convert
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.held_out import measure
from mla_cli.converters.options import ConvertOptions
from mla_cli.converters.rotary_split import split_rotary
from mla_cli.converters.statistics import source_statistics
from mla_cli.errors import MlaError, UsageError
from mla_cli.model.attention import StandardAttention
from mla_cli.model.latent_weights import LatentWeights
from tests.model.test_parity import DYNAMIC
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer


def run(tmp_path: Path, *, text: str | None = None, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Convert `tmp_path/source`; gives (output, report)."""
    save_tokenizer(tmp_path / "source")
    file = save_text(tmp_path / "text.txt")
    if text is not None:
        file.write_text(text)
    chosen = ConvertOptions(calib=str(file), samples=8, seq_len=32, **{"ratio": 2.0, **options})
    out = tmp_path / "out"
    return out, convert(str(tmp_path / "source"), out, chosen, device=torch.device("cpu"), command="mla convert")


@pytest.mark.parametrize("form", ["deepseek", "native"])
@pytest.mark.parametrize("what", ["a layer without gradient", "constant text"])
def test_weights_stay_in_range_where_statistics_say_nothing(tmp_path: Path, form: str, what: str) -> None:
    save_tiny(tmp_path / "source")
    text = None
    if what == "constant text":
        text = "a" * 4000
    else:  # as in models grown by blocks that start as the identity
        file = tmp_path / "source" / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
        save_file(tensors, file, metadata={"format": "pt"})
    out, _ = run(tmp_path, text=text, format=form)
    written = load_file(out / "model.safetensors")
    latent = {name: tensor for name, tensor in written.items() if "kv_a_proj_with_mqa.weight" in name}
    assert all(tensor.abs().max() < 1e4 for tensor in latent.values())
    decoder = load_decoder(open_model(str(out)))
    assert torch.isfinite(decoder(random_tokens(2, 50))).all()


def test_each_sequence_of_a_batch_turns_by_its_own_length(tmp_path: Path) -> None:
    # Dynamic scaling looks at the length, and padding is no part of it.
    save_tiny(tmp_path, **{**DYNAMIC, "max_position_embeddings": 16})
    bank = LayerBank(open_model(str(tmp_path)), torch.device("cpu"))
    sequences, lengths = random_tokens(2, 60), torch.tensor([60, 20])
    together, alone = Batches(2, 2), Batches(1, 1)
    stages = {"source": (bank.frame, bank.source_layer)}
    seen = source_statistics(bank.frame, bank.source_layer, sequences, lengths, together)
    one_by_one = source_statistics(bank.frame, bank.source_layer, sequences, lengths, alone)
    for layer in range(2):
        torch.testing.assert_close(seen[layer].input_moment, one_by_one[layer].input_moment, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(seen[layer].mean_turn, one_by_one[layer].mean_turn, atol=1e-5, rtol=1e-4)
    losses = [measure(stages, sequences, lengths, batches)["source"].nll for batches in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_rotary_split_of_a_gpu_model_meets_moments_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(LatentWeights, "with_needed_biases", lambda weights: weights)  # a fake tensor has no values
    save_tiny(tmp_path, "qwen2", bias=1.0)
    spec = open_model(str(tmp_path)).spec.attention[0]
    with FakeTensorMode(), torch.no_grad():
        with torch.device("meta"):
            attention = StandardAttention(spec, 48, 0)  # type: ignore[arg-type]
        for linear in attention.children():
            for name, parameter in list(linear.named_parameters()):
                delattr(linear, name)
                setattr(linear, name, torch.empty(parameter.shape, device="cuda"))
        moment, energy = torch.eye(49, dtype=torch.float64), torch.ones(6, 4, dtype=torch.float64)
        split = split_rotary(attention, moment, energy, (0, 1, 2, 3), turn=torch.ones(6, 4, dtype=torch.complex128))
        for tensor in (split.q, split.down, split.up_k, split.out, split.out_bias):
            assert tensor.device.type == "cpu"


def test_an_output_that_is_not_what_was_computed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "source")
    monkeypatch.setattr(conversion, "VERIFY_NATS", -1.0)
    with pytest.raises(MlaError, match="held-out loss"):
        run(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_rank_or_width_that_the_stock_form_cannot_have_is_written_natively(tmp_path: Path) -> None:
    # Frequencies that change with the length cannot be put into a table.
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    save_tiny(tmp_path / "source", rope_parameters=scaling)
    for shape in ({"kv_lora_rank": 1}, {"kv_lora_rank": 8, "qk_rope_head_dim": 6}):
        _, report = run(tmp_path, force=True, ratio=None, **shape)
        assert report["format"] == "native"
        assert "stock" in report["format_reason"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_attention_without_a_rotary_key_is_written_natively_and_opens(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path / "source", family)
    out, report = run(tmp_path, qk_rope_head_dim=0, heal=HealOptions(mode="none"))
    assert report["format"] == "native"
    assert "without a rotary key" in report["format_reason"]
    assert torch.isfinite(load_decoder(open_model(str(out)))(random_tokens(1, 9))).all()
    with pytest.raises(UsageError, match="cannot express attention without a rotary key"):
        run(tmp_path, qk_rope_head_dim=0, format="deepseek", force=True)
