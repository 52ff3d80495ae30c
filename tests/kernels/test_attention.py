"""Attention over a latent cache: the PyTorch path against the float64 formula, and what the formula itself must hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.kernels import reference, torch_ops


def problem(seed: int, b: int, t: int, h: int, r: int, d: int, s: int) -> tuple[torch.Tensor, ...]:
    """Random queries, latents and rotary keys."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, t, h, r), (b, t, h, d), (b, s, r), (b, s, d))
    return tuple(torch.randn(shape, generator=g) for shape in shapes)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 3),
    t=st.integers(1, 4),
    h=st.sampled_from([1, 3, 6, 9]),
    r=st.sampled_from([8, 48, 64]),
    d=st.sampled_from([0, 2, 8]),
    past=st.integers(0, 40),
    window=st.sampled_from([None, 1, 7, 1000]),
    softcap=st.sampled_from([None, 5.0]),
)
def test_torch_path_equals_the_formula(
    seed: int, b: int, t: int, h: int, r: int, d: int, past: int, window: int | None, softcap: float | None
) -> None:
    inputs = problem(seed, b, t, h, r, d, past + t)
    lengths = torch.randint(0, past + 1, (b,), generator=torch.Generator().manual_seed(seed))
    positions = lengths[:, None] + torch.arange(t)
    visible = reference.visible_keys(positions, past + t, window)
    expected, _ = reference.latent_attention(*inputs, visible, 0.3, softcap)
    found = torch_ops.latent_attention(*inputs, visible, 0.3, softcap)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


def test_float64_stays_float64() -> None:
    inputs = [x.double() for x in problem(0, 2, 3, 4, 16, 4, 9)]
    visible = reference.visible_keys(torch.tensor([[4, 5, 6], [6, 7, 8]]), 9, None)
    for softcap in (None, 5.0):
        expected, _ = reference.latent_attention(*inputs, visible, 0.3, softcap)
        torch.testing.assert_close(
            torch_ops.latent_attention(*inputs, visible, 0.3, softcap), expected, atol=1e-14, rtol=0
        )


def test_what_nobody_sees_does_not_matter() -> None:
    q, qr, c, k = problem(0, 2, 1, 3, 8, 4, 10)
    visible = reference.visible_keys(torch.tensor([[4], [9]]), 10, None)
    clean, _ = reference.latent_attention(q, qr, c, k, visible, 1.0)
    c[0, 5:], k[0, 5:] = float("nan"), float("inf")
    dirty, _ = reference.latent_attention(q, qr, c, k, visible, 1.0)
    torch.testing.assert_close(dirty, clean)


def test_a_query_without_keys_gives_zeros() -> None:
    q, qr, c, k = problem(0, 1, 2, 3, 8, 4, 5)
    visible = torch.zeros(1, 2, 5, dtype=torch.bool)
    visible[0, 1, :2] = True
    out, lse = reference.latent_attention(q, qr, c, k, visible, 1.0)
    assert (out[0, 0] == 0).all()
    assert (lse[0, 0] == float("-inf")).all()
    assert torch.isfinite(out[0, 1]).all()


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("cuts", [(3,), (0, 3), (2, 2, 7), (12,)])
def test_parts_merge_to_the_whole(cuts: tuple[int, ...], scale: float) -> None:
    q, qr, c, k = problem(1, 2, 1, 3, 8, 4, 12)
    whole, whole_lse = reference.latent_attention(q, qr, c, k, torch.ones(2, 1, 12, dtype=torch.bool), scale)
    bounds = [0, *cuts, 12]
    parts = []
    for begin, end in itertools.pairwise(bounds):  # some are empty
        part = torch.zeros(2, 1, 12, dtype=torch.bool)
        part[..., begin:end] = True
        parts.append(reference.latent_attention(q, qr, c, k, part, scale))
    merged, lse = reference.merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)
    if len(parts) == 2 and all(torch.isfinite(p[1]).all() for p in parts):
        (a, la), (b, lb) = parts
        gate = torch.sigmoid(la - lb)[..., None]  # merging two parts is a gate
        torch.testing.assert_close(gate * a + (1 - gate) * b, whole)


def test_merging_nothing_gives_nothing() -> None:
    out, lse = reference.merge(torch.zeros(2, 3, 8), torch.full((2, 3), float("-inf")))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_standard_attention_by_hand(heads: int, groups: int, tokens: int, softcap: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, m, w, generator=g) for n, m, w in ((tokens, heads, 8), (9, groups, 8), (9, groups, 6)))
    visible = reference.visible_keys(torch.tensor([[3], [8]]) - tokens + 1 + torch.arange(tokens), 9, None)
    visible = visible | (torch.arange(9) == 0)  # every query sees something
    found = torch_ops.attention(q, k, v, visible, 0.5, softcap)
    for head in range(heads):
        group = head // (heads // groups)
        scores = torch.einsum("btd,bsd->bts", q[:, :, head], k[:, :, group]) * 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        torch.testing.assert_close(found[:, :, head], weights @ v[:, :, group], atol=1e-5, rtol=1e-4)
