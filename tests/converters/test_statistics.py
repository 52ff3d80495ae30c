"""What latent statistics weigh, against gradients taken by autograd over the whole model."""

from __future__ import annotations

from pathlib import Path

import torch

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches, run
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import open_model
from mla_cli.converters.closed_form import closed_form, gather_source_statistics
from mla_cli.converters.plan import make_plan
from mla_cli.converters.statistics import latent_statistics, tempered
from tests.tiny import random_tokens, save_tiny

BATCHES = Batches(4, 2)


def test_fisher_keeps_its_trace_and_tokens_weigh_once(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    bank = LayerBank(open_model(str(tmp_path)), torch.device("cpu"))
    plan = make_plan(bank.model.spec, form="native", reason="", ratio=2, qk_rope_head_dim=4)
    some = CalibrationTexts(random_tokens(12, 24), torch.tensor([24] * 8 + [17] * 4), "random", 0, 12)
    seen = gather_source_statistics(bank, some, BATCHES)
    wide = closed_form(bank, plan, seen, some, BATCHES, objective="weight").wide
    frame, layer_at = bank.latent_frame(wide), bank.latent_layers(wide)
    found = latent_statistics(frame, layer_at, some.sequences, some.lengths, BATCHES, seed=5)

    inputs: list[list[torch.Tensor]] = [[] for _ in wide]
    gradients: list[list[torch.Tensor]] = [[] for _ in wide]

    def observe(layer: int, record: dict[str, torch.Tensor], gradient: torch.Tensor, valid: torch.Tensor) -> None:
        inputs[layer].append(record["x"][valid].double())
        gradients[layer].append(gradient[valid].double())

    run(frame, layer_at, some.sequences, some.lengths, BATCHES, observe_gradient=observe, seed=5)
    for layer, statistics in enumerate(found):
        x, g = torch.cat(inputs[layer]), torch.cat(gradients[layer])
        size = g.norm(dim=1)
        assert statistics.tokens == len(g) == some.tokens
        mean = (x * size[:, None]).sum(dim=0) / size.sum()
        torch.testing.assert_close(statistics.input_moment[:-1, -1], mean, rtol=1e-3, atol=1e-5)
        trace = float(g.square().sum() / len(g))
        assert abs(float(statistics.fisher.trace()) / trace - 1) < 0.02
        # The direction that matters most is that of the gradients, each counted by its size and not by its square.
        unit = g / size.clamp(min=1e-30).sqrt()[:, None]
        top = torch.linalg.eigh(unit.T @ unit)[1][:, -1]
        ours = torch.linalg.eigh(statistics.fisher)[1][:, -1]
        assert abs(float(top @ ours)) > 0.99


def test_tempering_keeps_directions_order_and_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0]
    values = torch.tensor([0.0, 1e-6, 0.5, 2.0, 300.0], dtype=torch.float64)
    found = tempered((turn * values) @ turn.T, 7.0)
    spectrum = (turn.T @ found @ turn).diagonal()
    torch.testing.assert_close(found.trace(), torch.tensor(7.0, dtype=torch.float64))
    assert bool((spectrum.diff() >= -1e-12).all())
    torch.testing.assert_close(spectrum[4] / spectrum[3], torch.tensor(150.0**0.8, dtype=torch.float64))
    assert not tempered(torch.zeros(3, 3, dtype=torch.float64), 0.0).any()
