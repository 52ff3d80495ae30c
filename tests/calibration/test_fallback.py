"""Layers that stay in bfloat16: the worst first, no more than it takes, found in few measurements, and stored as chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_cli.calibration.calibrate import CalibrateOptions, calibrate
from mla_cli.calibration.fallback import Fallback, fall_back, without
from mla_cli.calibration.passes import HeldOutCost
from mla_cli.checkpoint.kv_cache import KEY, Quantizers, cache_plan
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.cache import Cache
from mla_cli.report.charts import charts
from mla_cli.runtime.engine import open_engine
from tests.calibration.support import CPU, edit_weights, options, read
from tests.tiny import random_tokens

INT8 = LatentQuantizer("int8")


def cost_of(percent: float) -> HeldOutCost:
    return HeldOutCost(2.0, 2.0 + math.log1p(percent / 100), percent / 1000, 100)


class Model:
    """A model whose layers cost so many percent each, and that counts how often it is measured."""

    def __init__(self, costs: Sequence[float], total: Callable[[list[float]], float] = sum) -> None:
        self.costs, self.total, self.measured = costs, total, 0
        self.quantizers: Quantizers = (INT8,) * len(costs)

    def cost(self, quantizers: Quantizers) -> HeldOutCost:
        return cost_of(self.total([c for c, q in zip(self.costs, quantizers, strict=True) if q is not None]))

    def measure(self, quantizers: Quantizers) -> HeldOutCost:
        self.measured += 1
        return self.cost(quantizers)

    def fall_back(self, max_loss: float | None, losses: Sequence[float] | None = None) -> Fallback:
        return fall_back(self.quantizers, losses or self.costs, self.cost(self.quantizers), max_loss, self.measure)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=40), st.floats(0, 30))
def test_the_worst_go_first_and_no_more_than_it_takes(costs: list[float], max_loss: float) -> None:
    model = Model(costs)
    found = model.fall_back(max_loss)
    kept = found.chosen.layers
    assert found.chosen.cost.change_percent <= max_loss
    assert all(costs[layer] >= costs[other] for layer in kept for other in set(range(len(costs))) - set(kept))
    if kept:  # one layer fewer would not have done
        fewer = sorted(kept, key=lambda layer: (-costs[layer], layer))[:-1]
        assert model.cost(without(model.quantizers, fewer)).change_percent > max_loss
    assert found.quantizers == without(model.quantizers, kept)
    assert model.measured <= 2 * math.log2(len(costs) + 1) + 2
    assert model.measured == len(found.trade) - 2  # nothing twice, and not what is known: both ends
    assert [len(point.layers) for point in found.trade] == sorted({len(point.layers) for point in found.trade})
    for point in found.trade:
        assert point.cost.change_percent == pytest.approx(model.cost(point.quantizers).change_percent)
        assert [layer for layer, q in enumerate(point.quantizers) if q is None] == list(point.layers)


def test_one_ruined_layer_among_many_takes_one_measurement() -> None:
    model = Model([0.01] * 17 + [8.0] + [0.01] * 14)
    assert model.fall_back(1.0).chosen.layers == (17,)
    assert model.measured == 1


def test_what_is_small_enough_is_left_as_it_is() -> None:
    model = Model([0.1] * 4)
    assert model.fall_back(1.0).chosen.layers == ()
    assert model.fall_back(0.4 + 1e-9).quantizers == model.quantizers
    assert model.measured == 0


def test_without_a_limit_nothing_is_left_out() -> None:
    model = Model([50.0, 60.0])
    found = model.fall_back(None)
    assert (found.chosen.layers, found.quantizers, model.measured) == ((), model.quantizers, 0)


def test_all_layers_if_nothing_else_does() -> None:
    model = Model([3.0] * 9, total=lambda costs: 50.0 if costs else 0.0)  # any one is too much
    found = model.fall_back(1.0)
    assert found.chosen.layers == tuple(range(9))
    assert found.quantizers == (None,) * 9
    assert found.chosen.cost.change_percent == pytest.approx(0)
    assert 0 < model.measured <= 6


def test_what_a_turn_alone_costs_is_measured_where_all_layers_stay_unquantised() -> None:
    model = Model([3.0] * 4, total=lambda costs: 50.0 if costs else 0.25)
    quantizers, cost = model.quantizers, model.cost(model.quantizers)
    told = fall_back(quantizers, model.costs, cost, 0.1, model.measure, exact=False)
    assert told.chosen.layers == (0, 1, 2, 3)
    assert told.chosen.cost.change_percent == pytest.approx(0.25)
    assert told.trade[-1] == told.chosen


def test_what_is_measured_counts_and_not_what_was_expected() -> None:
    # The order is by what was foretold; how many it takes, by measurement, even where costs do not add up.
    model = Model([5.0, 0.2, 5.0, 0.2], total=max)
    found = model.fall_back(1.0, losses=[0.3, 0.1, 0.2, 0.4])
    assert found.chosen.layers == (0, 2, 3)
    assert found.chosen.cost.change_percent <= 1.0


def test_layers_without_latents_stay_out_of_it() -> None:
    model = Model([0.0, 4.0, 0.0, 4.0])
    model.quantizers = (None, INT8, None, INT8)
    assert model.fall_back(0.0).chosen.layers == (1, 3)
    assert model.fall_back(4.0).chosen.layers == (1,)


# --- the whole -----------------------------------------------------------------------------------------------------------


def ruin(tensors: dict[str, Tensor], layer: int = 0) -> None:
    """A channel of a layer that takes the range from all others, though hardly anything reads it."""
    attention = f"model.layers.{layer}.self_attn."
    tensors[attention + "kv_a_proj_with_mqa.bias"][3] += 3000
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        tensors[attention + name][:3] /= 16
    tensors[attention + "kv_b_proj.weight"][:, 3] = 0
    tensors[attention + "kv_b_proj.weight"][:, :3] *= 16


def written(checkpoint: Path, **changes: Any) -> CalibrateOptions:
    """On what the model writes itself: there, what is ruined shows in its perplexity."""
    return options(checkpoint, calib="self", **changes)


@pytest.fixture
def ruined(native: Path) -> Path:
    edit_weights(native, ruin)
    return native


@pytest.mark.parametrize("scales", ["token", "static"])
def test_a_ruined_layer_stays_in_bfloat16(ruined: Path, scales: Any) -> None:
    report = calibrate(str(ruined), None, written(ruined, rotation="none", scales=scales, max_loss=0.5), CPU)
    model, stored = open_model(str(ruined)), read(ruined / "config.json")[KEY]
    assert [layer["dtype"] for layer in stored["layers"]] == ["bf16", "int8"]
    assert [layer["dtype"] for layer in report["layers"]] == ["bf16", "int8"]
    assert stored["max_loss"] == report["max_loss_percent"] == 0.5
    assert report["layers"][0]["amax"] > 2900
    assert report["layers"][0]["clip"] is None
    quantizers = cache_plan(model.source.config, model.spec, "auto").quantizers
    assert quantizers is not None
    assert [quantizer is None for quantizer in quantizers] == [True, False]
    # The trade: everything that was tried, which of it is stored, and what it costs to lose nothing.
    every, chosen, nothing = report["trade"]
    assert (nothing["bf16_layers"], nothing["ppl_change_percent"], nothing["kl"]) == ([0, 1], 0, 0)
    assert nothing["bytes_per_token"] == report["bytes_per_token"]["unquantised"]
    assert (every["bf16_layers"], every["chosen"]) == ([], False)
    assert (chosen["bf16_layers"], chosen["chosen"]) == ([0], True)
    assert every["ppl_change_percent"] > 0.5 >= chosen["ppl_change_percent"]
    assert chosen["ppl_change_percent"] == report["heldout"]["ppl_change_percent"]
    assert chosen["kl"] < 0.1 * every["kl"]
    small, raw = 24 + 2 * 8 + (4 if scales == "token" else 0), 4 * (24 + 8)
    assert every["bytes_per_token"] == 2 * small
    assert chosen["bytes_per_token"] == report["bytes_per_token"]["quantised"] == small + raw
    assert Cache(model.spec, 3, 100, dtype=torch.float32, quantizers=quantizers).bytes_per_token() == small + raw
    assert any(chart.key == "trade" for chart in charts({"calibration_kv": report}))
    assert any("1 of 2 layers stay unquantised, to cost at most 0.5 % perplexity: 0 (" in w for w in report["warnings"])
    engine = open_engine(str(ruined))
    assert engine.generator.statistics.summary()["cache_bytes_per_token"] == small + raw


def test_a_layer_left_in_bfloat16_is_exact_in_the_cache(ruined: Path) -> None:
    calibrate(str(ruined), None, written(ruined, rotation="none", max_loss=0.5), CPU)
    model, tokens = open_model(str(ruined)), random_tokens(2, 30)
    decoder = load_decoder(model)
    caches = [
        decoder.make_cache(2, 30, q) for q in (cache_plan(model.source.config, model.spec, "auto").quantizers, None)
    ]
    with torch.inference_mode():
        for cache in caches:
            decoder(tokens, cache)
    (first, _), (plain, _) = (cache.read(0, 30, torch.float32) for cache in caches)
    assert torch.equal(first, plain)
    assert float(plain.abs().max()) > 2900
    (second, _), (plain, _) = (cache.read(1, 30, torch.float32) for cache in caches)
    assert 0 < float((second - plain).abs().max()) < float(plain.abs().max()) / 200


def test_a_limit_that_nothing_meets_leaves_all_layers(native: Path) -> None:
    for layer in (0, 1):
        edit_weights(native, partial(ruin, layer=layer))
    report = calibrate(str(native), None, written(native, kv_dtype="int4", rotation="none", max_loss=0.0), CPU)
    told = report["heldout"]
    assert told["ppl_change_percent"] <= 0
    assert [layer["dtype"] for layer in report["layers"]] == ["bf16", "bf16"]
    assert told["kl"] == 0
    model = open_model(str(native))
    quantizers = cache_plan(model.source.config, model.spec, "auto").quantizers
    assert report["bytes_per_token"]["quantised"] == Cache(
        model.spec, 1, 1, dtype=torch.float32, quantizers=quantizers
    ).bytes_per_token()  # fmt: skip


def test_the_limit_is_one_percent_unless_it_is_given(ruined: Path) -> None:
    report = calibrate(str(ruined), None, written(ruined, rotation="none"), CPU)
    assert report["max_loss_percent"] == 1.0
    assert report["heldout"]["ppl_change_percent"] <= 1.0
    loose = calibrate(str(ruined), None, written(ruined, rotation="none", max_loss=1e6), CPU)
    assert [layer["dtype"] for layer in loose["layers"]] == ["int8", "int8"]
    assert [point["bf16_layers"] for point in loose["trade"]] == [[], [0, 1]]
    assert any("attention output a lot in layer: 0 (" in warning for warning in loose["warnings"])


def test_a_turn_rescues_what_would_have_stayed(ruined: Path) -> None:
    report = calibrate(str(ruined), None, written(ruined, max_loss=0.5), CPU)
    measured = {one["rotation"]: one for one in report["rotation"]["measured"]}
    assert set(measured) == {"none", "hadamard", "learned"}  # asked for, because int8 alone costs more than the limit
    assert min(measured, key=lambda kind: measured[kind]["kl"]) == report["rotation"]["kind"]
    assert report["heldout"]["ppl_change_percent"] <= 0.5
