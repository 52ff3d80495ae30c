"""Turns of a latent: orthogonal for any width, no dearer than they must be, and nothing that a model computes changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_cli.calibration.rotate import expected_cost, hadamard, hadamard_blocks, rotation
from mla_cli.calibration.rotate_model import turned_channels, turned_file_tensors, turned_layer
from mla_cli.checkpoint.deepseek_form import constant_channels, weights_of_stock
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.checkpoint.writer import replace_files
from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import Decoder, DecoderLayer
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec
from tests.calibration.support import converted
from tests.tiny import random_tokens

EYE = torch.eye(126, dtype=torch.float64)


def heavy_tailed(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Independent values, now and then a large one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, channels, generator=generator).double()
    return values * (torch.rand(tokens, channels, generator=generator).double() + 0.02).rsqrt()


def damage(latents: Tensor, fisher: Tensor, turn: Tensor, dtype: Any = "int4") -> float:
    """What caching turned latents costs, by the weights `fisher` of errors."""
    turned = latents @ turn.T
    error = (LatentQuantizer(dtype).rounded(turned) - turned) @ turn
    return float(((error @ fisher) * error).sum() / len(latents))


# --- the matrices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 28, 64, 124, 128, 512])
def test_hadamard_matrices_of_many_sizes(size: int) -> None:
    matrix = hadamard(size)
    assert matrix is not None
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


def test_other_widths_are_cut_into_hadamard_blocks() -> None:
    assert all(hadamard(size) is None for size in (3, 6, 126, 254))
    assert hadamard_blocks(126) == (124, 2)
    assert hadamard_blocks(511) == (504, 4, 2, 1)
    assert all(sum(hadamard_blocks(width)) == width for width in range(1, 130))


@pytest.mark.parametrize("kind", ["none", "hadamard", "learned"])
@pytest.mark.parametrize("width", [1, 2, 3, 24, 30, 33, 126])
def test_a_turn_of_any_width_is_orthogonal_and_the_same_each_time(kind: Any, width: int) -> None:
    latents, gradients = heavy_tailed(50, width), heavy_tailed(50, width, seed=1)
    moments = {"moment": latents.T @ latents, "fisher": gradients.T @ gradients}
    turn = rotation(width, kind, **moments)
    torch.testing.assert_close(turn @ turn.T, torch.eye(width, dtype=torch.float64), atol=1e-10, rtol=0)
    assert torch.equal(turn, rotation(width, kind, **moments))
    assert kind != "none" or torch.equal(turn, torch.eye(width, dtype=torch.float64))


def test_a_constant_direction_becomes_no_outlier() -> None:
    for pattern in (torch.ones(128).double(), hadamard(128)[5]):  # type: ignore[index]
        turned = rotation(128, "hadamard") @ pattern
        assert float(turned.abs().max()) < 0.5 * 128**0.5


@pytest.mark.parametrize("kind", ["hadamard", "learned"])
@pytest.mark.parametrize("silent", ["moment", "fisher", "both"])
def test_a_silent_layer_gets_a_turn_too(kind: Any, silent: str) -> None:
    moments = {"moment": EYE.clone(), "fisher": EYE.clone()}
    for name in ("moment", "fisher") if silent == "both" else (silent,):
        moments[name] = torch.zeros(126, 126, dtype=torch.float64)
    turn = rotation(126, kind, **moments)
    torch.testing.assert_close(turn @ turn.T, EYE, atol=1e-10, rtol=0)


def test_spreading_outliers_saves_int4_latents() -> None:
    latents = heavy_tailed(2000, 126) * torch.logspace(0, -2, 126).double().sqrt()
    latents[:, 3] *= 30
    assert damage(latents, EYE, rotation(126, "hadamard")) < 0.7 * damage(latents, EYE, EYE)


def test_a_learned_turn_keeps_apart_what_is_large_and_what_matters() -> None:
    size = torch.logspace(0, -2, 126).double()
    latents = heavy_tailed(2000, 126) * size.sqrt()
    basis = torch.linalg.qr(heavy_tailed(126, 126, seed=2)).Q
    for fisher in (torch.diag(1 / size), basis @ torch.diag(size) @ basis.T):
        moment = latents.T @ latents / len(latents)
        learned = rotation(126, "learned", moment=moment, fisher=fisher)
        mixed = rotation(126, "hadamard")
        assert damage(latents, fisher, learned) < 0.7 * damage(latents, fisher, mixed)
        assert damage(latents, fisher, learned) < 0.7 * damage(latents, fisher, EYE)
        # What it was fitted to is what it brings: within the heavy tails' share, which moments do not see.
        told = expected_cost(learned, moment, fisher) / expected_cost(mixed, moment, fisher)
        assert damage(latents, fisher, learned) / damage(latents, fisher, mixed) == pytest.approx(told, rel=0.2)


def test_where_mixing_is_best_a_learned_turn_mixes() -> None:
    size = torch.logspace(0, -2, 126).double()
    latents = heavy_tailed(2000, 126) * size.sqrt()
    for fisher in (torch.diag(size), EYE):  # as a conversion leaves a latent: what is large matters as much
        learned = rotation(126, "learned", moment=latents.T @ latents / len(latents), fisher=fisher)
        assert damage(latents, fisher, learned) < 1.05 * damage(latents, fisher, rotation(126, "hadamard"))


def test_a_learned_turn_without_groups_levels_all_channels() -> None:
    size = torch.logspace(0, -3, 124).double()
    turn = rotation(124, "learned", moment=torch.diag(size), fisher=torch.eye(124, dtype=torch.float64), group=None)
    variances = (turn @ torch.diag(size) * turn).sum(dim=1)
    assert float(variances.max() / variances.min()) == pytest.approx(1)


# --- in the weights ------------------------------------------------------------------------------------------------------


SPEC = LatentAttentionSpec(
    num_heads=3, kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=5, scale=0.3, rotary=RotarySpec(dim=4),
    kv_a_bias=True, o_bias=True,
)  # fmt: skip


def random_decoder(attention: LatentAttentionSpec) -> Decoder:
    spec = DecoderSpec("tiny", 64, 24, 32, 256, "rms", 1e-5, "silu", True, False, True, (attention,) * 2)
    torch.manual_seed(0)
    decoder = Decoder(spec).double()
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.4).add_(1.0 if parameter.dim() == 1 else 0.0)
    return decoder.requires_grad_(False).eval()


def attention_of(layer: Any) -> LatentAttention:
    assert isinstance(layer.self_attn, LatentAttention)
    return layer.self_attn


def turned(decoder: Decoder, turn: Tensor) -> Decoder:
    layers: list[DecoderLayer] = [turned_layer(layer, turn, torch.float64) for layer in decoder.layers]  # type: ignore[arg-type]
    return decoder.with_layers(layers)


def outputs(decoder: Decoder) -> Tensor:
    tokens = random_tokens(2, 20)
    with torch.inference_mode():
        at_once = decoder.logits(decoder(tokens))
        cache = decoder.make_cache(2, 20)
        steps = torch.cat([decoder(tokens[:, i : i + 1], cache) for i in range(20)], dim=1)
    return torch.stack((at_once, decoder.logits(steps)))


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, kv_a_bias=False, norm_eps=1e-3),
        replace(SPEC, gate_chunk=4),
        replace(SPEC, gate_chunk=4, norm_eps=1e-3),
        replace(SPEC, q_lora_rank=7, norm_eps=1e-6),
    ],
    ids=["plain", "norm", "gate", "norm and gate", "genuine deepseek"],
)
@pytest.mark.parametrize("channels", [10, 6])
def test_a_turn_changes_what_is_cached_and_nothing_that_is_computed(spec: LatentAttentionSpec, channels: int) -> None:
    decoder, turn = random_decoder(spec), rotation(channels, "hadamard")
    other = turned(decoder, turn)
    torch.testing.assert_close(outputs(other), outputs(decoder), atol=1e-9, rtol=1e-9)
    latents = []
    for model in (decoder, other):
        cache = model.make_cache(2, 20)
        model(random_tokens(2, 20), cache)
        latents.append((cache.read(0, 20, torch.float64), model))
    (before, rope_before), (after, rope_after) = latents[0][0], latents[1][0]
    assert torch.equal(rope_before, rope_after)
    assert float((after - before)[..., :channels].abs().max()) > 0.05
    if spec.norm_eps is None:
        torch.testing.assert_close(after[..., :channels], before[..., :channels] @ turn.T, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(after[..., channels:], before[..., channels:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("form", ["native", "deepseek"])
@pytest.mark.parametrize("kind", ["hadamard", "learned"])
def test_both_forms_compute_the_same_in_full_precision(tmp_path: Path, form: str, kind: Any) -> None:
    model = open_model(str(converted(tmp_path, form=form)))
    decoder = load_decoder(model, dtype=torch.float64)
    attention = attention_of(decoder.layers[0])
    width = turned_channels(attention.spec, attention.kv_a_layernorm.weight if form == "deepseek" else None)
    assert width == 24 - (len(constant_channels(24)) if form == "deepseek" else 0)
    moments = [heavy_tailed(100, width, seed=seed) for seed in (0, 1)]
    turn = rotation(width, kind, moment=moments[0].T @ moments[0], fisher=moments[1].T @ moments[1])
    other = turned(decoder, turn)
    torch.testing.assert_close(outputs(other), outputs(decoder), atol=1e-9, rtol=1e-9)
    if form == "deepseek":
        for layer in other.layers:
            assert weights_of_stock(attention_of(layer)) is not None


def test_a_turn_of_constant_channels_is_refused(tmp_path: Path) -> None:
    decoder = load_decoder(open_model(str(converted(tmp_path, form="deepseek"))))
    with pytest.raises(MlaError, match="constant channels"):
        turned(decoder, rotation(24, "hadamard"))


@pytest.mark.parametrize(("family", "bias"), [("llama", None), ("qwen2", 0.5)])
def test_transformers_reads_a_turned_checkpoint_as_before(tmp_path: Path, family: str, bias: float | None) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = converted(tmp_path, family, form="deepseek", **({} if bias is None else {"bias": bias}))
    tokens = random_tokens(2, 40)

    def logits() -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        with torch.inference_mode():
            return model(tokens).logits

    before, model = logits(), open_model(str(checkpoint))
    changed: dict[str, Tensor] = {}
    for index in range(model.spec.num_layers):
        turn = rotation(24 - len(constant_channels(24)), "hadamard")
        changed |= turned_file_tensors(model, index, turn)
    assert all("kv_a_layernorm" not in name for name in changed)  # neutral before and after
    replace_files(checkpoint, {}, changed)
    torch.testing.assert_close(logits(), before, atol=2e-4, rtol=1e-4)
    decoder = load_decoder(open_model(str(checkpoint)))
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(decoder(tokens)), before, atol=2e-4, rtol=1e-4)


def test_weights_are_turned_as_they_are_written(tmp_path: Path) -> None:
    """A layer that is measured is the layer that will be read back, rounding included."""
    checkpoint = converted(tmp_path, form="deepseek", dtype=torch.bfloat16)
    model, turn = open_model(str(checkpoint)), rotation(24 - len(constant_channels(24)), "hadamard")
    measured = turned_layer(load_decoder(model).layers[1], turn, torch.bfloat16)  # type: ignore[arg-type]
    replace_files(checkpoint, {}, turned_file_tensors(model, 1, turn))
    written = load_decoder(open_model(str(checkpoint))).layers[1]
    for name, tensor in measured.state_dict().items():
        assert torch.equal(tensor, written.state_dict()[name]), name
