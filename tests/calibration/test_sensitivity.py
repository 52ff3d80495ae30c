"""How much the loss minds errors in latents: it foretells what is measured, and depends on nothing but text and model."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_cli.calibration.clipping import UNCLIPPED, group_losses
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.passes import watch_latents
from mla_cli.calibration.rotate import rotation
from mla_cli.calibration.rotate_model import norm_shares, turned_file_tensors
from mla_cli.calibration.sensitivity import Sensitivity, by_content, measure_sensitivity
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.inplace import replace_files
from mla_cli.checkpoint.load import ModelSource, load_decoder, open_model
from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import LatentQuantizer, group_of
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import begin_step
from tests.calibration.support import CPU, RAGGED, edit_weights, measure_cost, read, texts_of
from tests.tiny import random_tokens


def measured(model: ModelSource, texts: CalibrationTexts, seed: int = 0) -> list[Sensitivity]:
    found = measure_sensitivity(model, texts, compute=torch.float32, device=CPU, seed=seed)
    assert all(layer is not None for layer in found)
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module", params=["stock", "native"])
def weighed(
    request: pytest.FixtureRequest, pristine: Path, pristine_native: Path
) -> tuple[ModelSource, CalibrationTexts, list[Sensitivity]]:
    model = open_model(str(pristine if request.param == "stock" else pristine_native))
    texts = texts_of(random_tokens(24, 40).tolist())
    return model, texts, measured(model, texts)


def latents_of(model: ModelSource, tokens: Tensor) -> list[Tensor]:
    """Of each layer, `[B, T, r]` float64."""
    decoder, step = load_decoder(model, dtype=torch.float64), begin_step(model.spec, tokens.shape, CPU)
    x, latents = decoder.embed(tokens, step.positions), []
    for layer in decoder.layers:
        record: dict[str, Tensor] = {}
        x = layer(x, step, record)
        latents.append(record["latent"])
    return latents


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_the_second_order_foretells_what_an_error_costs(weighed: Any, dtype: Any, layer: int) -> None:
    model, texts, sensitivity = weighed
    quantizer, latents = LatentQuantizer(dtype), latents_of(model, texts.sequences)[layer].flatten(0, 1)
    error = quantizer.rounded(latents) - latents
    foretold = 0.5 * float(((error @ sensitivity[layer].fisher) * error).sum(dim=-1).mean())
    quantizers = [quantizer if index == layer else None for index in range(2)]
    assert 0.6 < foretold / measure_cost(model, texts, quantizers, torch.float64).kl < 1.4
    # And from what an observer counts of the latents, with the diagonal alone.
    observer = watch_latents(model, texts, dtype=torch.float32, device=CPU, kv_dtype=dtype)[layer]
    seen = observer.result()
    losses = group_losses(seen, sensitivity[layer].weights(seen, group_of(dtype)), dtype, "token")
    estimate = sum(loss.at(UNCLIPPED) for loss in losses)
    assert 0.6 < estimate / foretold < 1.4


def test_narrow_products_are_nothing_to_warn_of(pristine: Path) -> None:
    model = open_model(str(pristine))  # its latents have a norm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure_sensitivity(model, texts_of(RAGGED), compute=torch.bfloat16, device=CPU, seed=0)
    for exact, narrow in zip(measured(model, texts_of(RAGGED)), found, strict=True):
        assert narrow is not None
        torch.testing.assert_close(narrow.moment, exact.moment, rtol=0.05, atol=0.02 * float(exact.moment.abs().max()))


def test_moments_are_those_of_the_latents(weighed: Any) -> None:
    model, texts, sensitivity = weighed
    for seen, latents in zip(sensitivity, latents_of(model, texts.sequences), strict=True):
        flat = latents.flatten(0, 1)
        torch.testing.assert_close(seen.moment, flat.T @ flat / len(flat), rtol=1e-3, atol=1e-4)
        assert seen.tokens == texts.tokens == len(flat)
        # What is kept of some tokens stands for all.
        assert float(seen.shares.sum()) == pytest.approx(seen.tokens)
        kept = ((seen.latents.double().square().sum(dim=1)) * seen.shares).sum() / seen.shares.sum()
        assert float(kept) == pytest.approx(float(seen.moment.trace()), rel=0.02)


def assert_alike(one: Sensitivity, other: Sensitivity, tolerance: float) -> None:
    assert one.tokens == other.tokens
    for name in ("moment", "fisher", "latents", "gradients", "shares"):
        ours, theirs = getattr(one, name), getattr(other, name)
        size = float(theirs.double().norm())
        assert float((ours - theirs).double().norm()) <= tolerance * size, name
        assert size > 0


def test_neither_batches_nor_the_order_of_samples_matter(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(str(pristine))
    texts, turned_round = by_content(texts_of(RAGGED)), by_content(texts_of(RAGGED[::-1], pad=7))
    whole = measured(model, texts)
    for one, other in zip(measured(model, turned_round), whole, strict=True):
        assert_alike(one, other, 0.0)
    monkeypatch.setattr(Batches, "fit", staticmethod(lambda *_, **__: Batches(4, 1)))
    for one, other in zip(measured(model, texts), whole, strict=True):
        assert_alike(one, other, 1e-4)
    assert float((measured(model, texts, seed=1)[0].fisher - whole[0].fisher).norm()) > 0  # other labels


def uneven_norm(tensors: dict[str, Tensor]) -> None:
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        factor = torch.linspace(0.25, 2, 20)
        tensors[prefix + "kv_a_layernorm.weight"][:20] *= factor
        tensors[prefix + "kv_b_proj.weight"][:, :20] /= factor


@pytest.mark.parametrize("form", ["native", "stock", "stock with another norm"])
@pytest.mark.parametrize("channels", [21, 10])
def test_a_turn_is_foretold(checkpoint: Path, native: Path, form: str, channels: int) -> None:
    folder, texts = native if form == "native" else checkpoint, texts_of(RAGGED)
    if form == "stock with another norm":
        edit_weights(folder, uneven_norm)
    model, turn = open_model(str(folder)), rotation(channels, "hadamard")
    norms = [
        None if form == "native" else model.tensor(f"model.layers.{i}.self_attn.kv_a_layernorm.weight")
        for i in range(2)
    ]
    foretold = [
        seen.turned(turn, None if norm is None else norm_shares(norm, 21))
        for seen, norm in zip(measured(model, texts), norms, strict=True)
    ]
    before = measured(model, texts)
    replace_files(folder, {}, {**turned_file_tensors(model, 0, turn), **turned_file_tensors(model, 1, turn)})
    for one, other, old in zip(foretold, measured(open_model(str(folder)), texts), before, strict=True):
        assert_alike(one, other, 5e-3)
        assert float((other.fisher - old.fisher).norm()) > 0.1 * float(old.fisher.norm())


def test_a_part_of_a_latent_is_foretold(native: Path, tmp_path: Path) -> None:
    # Channels that nothing reads: without them the model is the same.
    def mute(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("kv_b_proj.weight"):
                tensor[:, 15:] = 0

    def drop(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith("kv_b_proj.weight"):
                tensors[name] = tensor[:, :15].contiguous()
            if "kv_a_proj_with_mqa" in name:
                tensors[name] = torch.cat((tensor[:15], tensor[24:]))

    texts = texts_of(RAGGED)
    edit_weights(native, mute)
    foretold = [seen.narrowed(15) for seen in measured(open_model(str(native)), texts)]
    edit_weights(native, drop)
    config = read(native / "config.json")
    for layer in config["mla"]["layers"]:
        layer["kv_lora_rank"] = 15
    (native / "config.json").write_text(json.dumps(config))
    for one, other in zip(foretold, measured(open_model(str(native)), texts), strict=True):
        assert_alike(one, other, 1e-4)


def test_weights_are_those_of_tokens_of_that_size(weighed: Any) -> None:
    model, texts, sensitivity = weighed
    observer = watch_latents(model, texts, dtype=torch.float32, device=CPU)[0]
    seen, layer = observer.result(), sensitivity[0]
    flat = layer.weights(seen, None, by_size=False)
    assert flat.tolist() == pytest.approx([float(layer.fisher.diagonal().mean())] * len(seen.rows))
    # Gradients of the largest tokens a hundred times smaller: only their rows weigh less.
    size = layer.latents.abs().amax(dim=1)
    large = size.log2().floor() == size.log2().floor().max()
    quiet = torch.where(large[:, None], layer.gradients / 100, layer.gradients)
    share = layer.shares[:, None].float()
    fisher = (quiet * share).T @ quiet / share.sum()
    found = replace(layer, gradients=quiet, fisher=fisher.double()).weights(seen, None)
    top = seen.rows >= 2 ** float(size.log2().floor().max())
    usual = layer.weights(seen, None)
    assert bool(top.any())
    assert bool((~top).any())
    assert float(found[~top].mean() / usual[~top].mean()) == pytest.approx(1, rel=0.25)
    assert float(found[top].mean()) < 0.7 * float(usual[top].mean())


def test_a_latent_that_is_not_finite_names_its_layer(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LatentAttention.forward

    def broken(self: LatentAttention, x: Any, step: Any, record: Any = None) -> Any:
        out = forward(self, x, step, record)
        if record is not None and self.layer == 1 and x.requires_grad:
            record["latent"] = record["latent"] * float("inf")
            return out + 0 * record["latent"].nan_to_num(posinf=0, neginf=0).sum()
        return out

    monkeypatch.setattr(LatentAttention, "forward", broken)
    with pytest.raises(MlaError, match="latents of layer 1"):
        measured(open_model(str(pristine)), texts_of(RAGGED))
