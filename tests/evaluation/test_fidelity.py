"""Perplexity and divergence against the formulas on transformers' logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import InputError, MlaError
from mla_cli.evaluation import fidelity
from mla_cli.evaluation.fidelity import kl_divergence, perplexity, windows
from tests.tiny import random_tokens, save_tiny

TEXT = random_tokens(1, 500)[0].tolist()


def saved(folder: Path, seed: int = 0, **changes: int):  # type: ignore[no-untyped-def]
    reference = save_tiny(folder, seed=seed, **changes)
    return reference, load_decoder(open_model(str(folder)))


def logprobs(model, window: tuple[int, ...]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        return model(torch.tensor([window])).logits[0].double().log_softmax(dim=-1)


def test_windows_do_not_overlap_and_hold_the_whole_text() -> None:
    cut = windows(TEXT, max_length=256, size=100)
    assert [token for window in cut for token in window] == TEXT
    assert [len(window) for window in cut] == [100] * 5
    assert windows(TEXT[:201], max_length=256, size=100) == windows(TEXT[:200], max_length=256, size=100)  # 1 left over
    assert len(windows(TEXT, max_length=60)[0]) == 60
    assert len(windows(TEXT, max_length=256, size=100, limit=2)) == 2
    with pytest.raises(InputError, match="too short"):
        windows([5], max_length=256)


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_every_token_but_a_window_s_first_is_scored(tmp_path: Path, batch_size: int | None) -> None:
    reference, decoder = saved(tmp_path)
    cut = windows(TEXT, max_length=256, size=90)
    losses = list(perplexity(decoder, cut, batch_size=batch_size))
    assert [loss.tokens for loss in losses] == [len(window) - 1 for window in cut]
    for loss, window in zip(losses, cut, strict=True):
        scores, following = logprobs(reference, window)[:-1], torch.tensor(window[1:])
        assert loss.nll == pytest.approx(-float(scores.gather(-1, following[:, None]).sum()), rel=1e-5)
        assert loss.hits == int((scores.argmax(-1) == following).sum())


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_text_that_the_model_wrote_greedily_is_all_hits(tmp_path: Path, batch_size: int | None) -> None:
    reference, decoder = saved(tmp_path)
    written = reference.generate(
        torch.tensor([TEXT[:8]]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    start, whole = tuple(TEXT[:8]), tuple(written)
    first, second = perplexity(decoder, [start, whole], batch_size=batch_size)
    assert second.tokens == 47
    assert second.hits - first.hits == 40
    assert first.hits < first.tokens


def test_divergence_is_the_mean_over_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "LOGITS_BLOCK", 64 * 2 * 7)  # blocks of 7 positions
    (reference, source), (other, ours) = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1)
    cut = windows(TEXT, max_length=256, size=90, limit=2)
    for found, window in zip(kl_divergence(source, ours, cut), cut, strict=True):
        p, q = logprobs(reference, window), logprobs(other, window)
        assert found.positions == len(window)
        assert found.divergence == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
        assert found.agreed == int((p.argmax(-1) == q.argmax(-1)).sum())
        for loss, (alone,) in ((found.source, perplexity(source, [window])), (found.ours, perplexity(ours, [window]))):
            assert loss.nll == pytest.approx(alone.nll, rel=1e-5)
            assert (loss.hits, loss.tokens) == (alone.hits, alone.tokens)


def test_a_model_does_not_diverge_from_itself(tmp_path: Path) -> None:
    _, decoder = saved(tmp_path)
    (found,) = kl_divergence(decoder, decoder, windows(TEXT, max_length=256, size=90, limit=1))
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.agreed == found.positions


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    _, decoder = saved(tmp_path / "a")
    _, wider = saved(tmp_path / "b", vocab_size=70)
    with pytest.raises(InputError, match="one vocabulary"):
        list(kl_divergence(decoder, wider, [TEXT[:9]]))
    decoder.norm.weight[0] = math.nan
    with pytest.raises(MlaError, match="NaN"):
        list(kl_divergence(decoder, decoder, [TEXT[:9]]))
    with pytest.raises(MlaError, match="NaN"):
        list(perplexity(decoder, [TEXT[:9]]))
