"""What calibration sees of latents: every token once and no padding, whatever the batches and the order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_cli.calibration.observers import LatentObserver, LatentRange, check_complete
from mla_cli.calibration.passes import watch_latents
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import LatentQuantizer
from tests.calibration.support import CPU, RAGGED, converted, edit_weights, measure_cost, texts_of
from tests.tiny import random_tokens


def latents_with_outliers(tokens: int = 400, rank: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp2(torch.rand(tokens, 1, generator=generator) * 6 - 3)
    return torch.randn(tokens, rank, generator=generator) * spread


def assert_same(one: LatentRange, other: LatentRange) -> None:
    assert (one.tokens, one.amax, one.token_amax) == (other.tokens, other.amax, other.token_amax)
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.counts, other.counts)


def test_an_observer_depends_on_neither_order_nor_batches() -> None:
    latents = latents_with_outliers()
    whole = LatentObserver(0)
    whole.add(latents)
    order = torch.randperm(len(latents), generator=torch.Generator().manual_seed(0))
    for size in (1, 7, 399):
        parts = LatentObserver(0)
        for part in latents[order].split(size):
            parts.add(part)
        parts.add(latents[:0])
        assert_same(parts.result(), whole.result())
    assert int(whole.result().counts.sum()) == latents.numel()
    largest = latents.abs().amax(dim=-1).double().sort().values
    assert whole.result().token_amax == pytest.approx([float(largest[i]) for i in (200, 360, 396, 399)], rel=0.04)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_an_outlier_of_any_sample_shows(place: int) -> None:
    observer = LatentObserver(0)
    for sample in range(8):
        latents = torch.ones(5 + sample, 4)
        if sample == place:
            latents[2, 1] = -50.0
        observer.add(latents)
    seen = observer.result()
    assert seen.amax == 50
    assert seen.tokens == sum(range(5, 13))
    assert seen.token_amax == pytest.approx((1, 1, 50, 50), rel=0.04)


def test_zeros_and_tiny_latents_are_counted() -> None:
    observer = LatentObserver(0)
    observer.add(torch.zeros(5, 4))
    assert observer.result().amax == 0
    observer.add(torch.full((3, 4), 1e-7))
    observer.add(torch.full((1, 4), 1e-42))
    seen = observer.result()
    assert seen.tokens == 9
    assert seen.amax == pytest.approx(1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_latent_that_is_not_finite_names_its_layer(value: float) -> None:
    latents = torch.zeros(4, 8)
    latents[2, 3] = value
    with pytest.raises(MlaError, match="layer 7 hold NaN or infinity"):
        LatentObserver(7).add(latents)


def test_layers_that_missed_tokens_are_listed() -> None:
    observers = [LatentObserver(layer) for layer in range(4)]
    for observer, tokens in zip(observers, (10, 9, 10, 0), strict=True):
        observer.add(torch.ones(tokens, 3))
    check_complete(observers[:1], 10)
    with pytest.raises(MlaError, match=r"all 10 calibration tokens.*1 \(9\), 3 \(0\)"):
        check_complete(observers, 10)


def test_each_layer_sees_each_token_once_and_no_padding(checkpoint: Path) -> None:
    def loud_padding(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][63] *= 1e4

    edit_weights(checkpoint, loud_padding)
    model = open_model(str(checkpoint))
    rows = [[token for token in row if token != 63] for row in RAGGED]
    quiet, loud = (
        [o.result() for o in watch_latents(model, texts_of(rows, pad), dtype=torch.float32, device=CPU)]
        for pad in (0, 63)
    )
    for one, other in zip(quiet, loud, strict=True):
        assert one.tokens == other.tokens == sum(map(len, rows))
        assert_same(one, other)
    decoder = load_decoder(model)
    cache = decoder.make_cache(1, 64)
    largest = [0.0] * len(quiet)
    with torch.inference_mode():
        for row in rows:
            cache.advance(torch.tensor([0]))
            decoder(torch.tensor([row]), cache)
            for i in range(len(largest)):
                latents, _ = cache.read(i, len(row), torch.float32)
                largest[i] = max(largest[i], float(latents.abs().max()))
    assert [seen.amax for seen in quiet] == pytest.approx(largest, rel=1e-5)


def test_layers_of_different_ranks_show_their_own_channels_only(tmp_path: Path) -> None:
    checkpoint, texts = converted(tmp_path, num_hidden_layers=3, rank=16), texts_of(RAGGED)
    model = open_model(str(checkpoint))
    ranks = [attention.kv_lora_rank for attention in model.spec.attention]  # type: ignore[union-attr]
    assert len(set(ranks)) > 1
    for group in ("int8", "int4"):
        found = watch_latents(model, texts, dtype=torch.float32, device=CPU, kv_dtype=group)  # type: ignore[arg-type]
        assert [int(observer.result().counts.sum()) for observer in found] == [texts.tokens * rank for rank in ranks]
        assert [len(observer.result().group_amax) for observer in found] == [1, 1, 1]  # none reaches 32 channels


def test_dynamic_rotation_goes_by_each_sequences_own_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    checkpoint = converted(tmp_path, max_position_embeddings=16, rope_parameters=rope)
    model = open_model(str(checkpoint))
    short, long = random_tokens(1, 12)[0].tolist(), random_tokens(1, 40, seed=5)[0].tolist()

    def spread(rows: list[list[int]]) -> torch.Tensor:
        """How each layer's values spread below their token's largest."""
        seen = [o.result() for o in watch_latents(model, texts_of(rows), dtype=torch.float64, device=CPU)]
        return torch.stack([s.counts.sum(dim=0) for s in seen])

    assert torch.equal(spread([short, long]), spread([short]) + spread([long]))


def test_rounds_and_batches_change_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = open_model(str(checkpoint)), texts_of(RAGGED)
    quantizers = (LatentQuantizer("int8"),) * 2
    everything = watch_latents(model, texts, dtype=torch.float64, device=CPU)
    cost = measure_cost(model, texts, quantizers, torch.float64)
    monkeypatch.setattr("mla_cli.calibration.passes.MEMORY", 3 * 38 * 48 * 8)
    monkeypatch.setattr("mla_cli.calibration.passes.MICRO_TOKENS", 64)
    for one, other in zip(everything, watch_latents(model, texts, dtype=torch.float64, device=CPU), strict=True):
        assert_same(one.result(), other.result())
    again = measure_cost(model, texts, quantizers, torch.float64)
    assert again.tokens == cost.tokens == sum(len(row) - 1 for row in RAGGED)
    assert (again.plain_nll, again.quantised_nll) == pytest.approx((cost.plain_nll, cost.quantised_nll), rel=1e-6)
