"""The compiled attention of prompts against the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.kernels.cpu import prompt as prompt_module
from mla_cli.kernels.cpu.build import load_library
from mla_cli.kernels.cpu.prompt import PromptAttention
from mla_cli.model.decoder import Decoder
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec, StandardAttentionSpec

FOUND = load_library(cache_dir() / "kernels", lambda _: None)
pytestmark = pytest.mark.skipif(isinstance(FOUND, str), reason=f"no CPU kernels: {FOUND}")
ERROR = {torch.float32: 5e-6, torch.bfloat16: 6e-3}  # relative; bfloat16: weights and outputs are rounded to 2^-9


def kernel(threads: int | None = None) -> PromptAttention:
    assert not isinstance(FOUND, str)
    return PromptAttention(FOUND, threads)


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    scale: float,
    rope: Any = None,
    window: Any = None,
    softcap: Any = None,
) -> Tensor:
    """Through PyTorch's own attention (or the plain formula, where scores are capped), in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))  # [B, heads, tokens, d]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if rope is not None:
        shared = rope[1].double()[:, None].expand(-1, q.shape[1], -1, -1)
        q, k = torch.cat((q, rope[0].double().transpose(1, 2)), -1), torch.cat((k, shared), -1)
    place, key = first[:, None] + torch.arange(q.shape[2]), torch.arange(k.shape[2])
    seen = key <= place[:, :, None]  # [B, T, S]
    if window is not None:
        seen &= key > place[:, :, None] - window
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
    else:
        scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * scale / softcap)
        out = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
    return out.transpose(1, 2)


def problem(seed: int, b: int, t: int, s: int, heads: int, groups: int, d: int, d_rope: int, d_v: int) -> Any:
    """Random inputs as views with odd strides, as projections leave them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)[..., 1 : shape[-1] + 1]

    rope = (random(b, t, heads, d_rope), random(b, s, d_rope)) if d_rope else None
    return random(b, t, heads, d), random(b, s, groups, d), random(b, s, groups, d_v), rope


def check(inputs: Any, first: Tensor, dtype: torch.dtype, threads: int | None = None, **options: Any) -> None:
    q, k, v, rope = inputs
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    rope = None if rope is None else (rope[0].to(dtype), rope[1].to(dtype))
    width = q.shape[-1] + (0 if rope is None else rope[0].shape[-1])
    scale = 1.5 / width**0.5
    attend = kernel(threads)
    assert attend.takes(q, k, v, *(rope or ()))
    found = attend(q, k, v, first, scale, rope=rope, **options)
    assert found.dtype == dtype
    expected = formula(q, k, v, first, scale, rope, **options)
    error = (found.double() - expected).abs().amax() / expected.abs().amax()
    assert error < ERROR[dtype], float(error)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 3),
    t=st.integers(1, 130),
    past=st.integers(0, 150),
    grouped=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    d=st.sampled_from([1, 5, 16, 33, 64]),
    d_rope=st.sampled_from([0, 2, 16, 40]),
    d_v=st.sampled_from([1, 16, 40, 64, 96]),
    window=st.sampled_from([None, 1, 7, 64, 100, 1000]),
    softcap=st.sampled_from([None, None, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape(
    seed: int,
    b: int,
    t: int,
    past: int,
    grouped: Any,
    d: int,
    d_rope: int,
    d_v: int,
    window: Any,
    softcap: Any,
    dtype: Any,
) -> None:
    first = torch.randint(0, past + 1, (b,), generator=torch.Generator().manual_seed(seed))
    inputs = problem(seed, b, t, past + t, *grouped, d, d_rope, d_v)
    check(inputs, first, dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(dtype: torch.dtype, threads: int) -> None:
    check(problem(1, 2, 300, 340, 5, 5, 64, 32, 64), torch.tensor([40, 7]), dtype, threads)


def test_more_keys_than_lie_arranged_at_a_time() -> None:
    # 9 groups of 24,576 keys of 128 + 128 numbers in float32 are 226 MB; 64 MiB lie arranged at a time.
    check(problem(2, 1, 3, 24576, 9, 9, 128, 8, 128), torch.tensor([24570]), torch.float32)


def test_what_no_query_sees_does_not_matter() -> None:
    q, k, v, _ = problem(3, 2, 20, 90, 4, 2, 16, 0, 16)
    first = torch.tensor([0, 70])
    clean = kernel()(q, k, v, first, 0.4)
    k, v = k.clone(), v.clone()
    k[0, 20:] = 1e30  # finite: a cache never holds anything else
    v[0, 20:] = -1e30
    torch.testing.assert_close(kernel()(q, k, v, first, 0.4), clean, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    q, k, v, _ = problem(4, 1, 100, 100, 2, 2, 16, 0, 16)
    # Of whole numbers, so that scores of some hundred thousand are still exact.
    q, k = (q * 8).round() * 8, (k * 8).round() * 8
    check((q, k, v, None), torch.zeros(1, dtype=torch.int64), dtype)
    check((q, -k, v, None), torch.zeros(1, dtype=torch.int64), dtype)


def test_damaged_numbers_are_not_hidden() -> None:
    q, k, v, _ = problem(5, 1, 80, 80, 2, 2, 16, 0, 16)
    k = k.clone()
    k[0, 40, 0] = float("nan")
    out = kernel()(q, k, v, torch.zeros(1, dtype=torch.int64), 0.3)
    assert out[0, 40:, 0].isnan().all()
    assert out[0, :40].isfinite().all()
    assert out[0, :, 1].isfinite().all()


def test_what_it_leaves_to_pytorch() -> None:
    q, k, v, _ = problem(6, 1, 5, 5, 2, 2, 8, 0, 8)
    attend = kernel()
    assert attend.takes(q, k, v)
    assert not attend.takes(q.double(), k.double(), v.double())
    assert not attend.takes(q, k.bfloat16(), v)
    assert not attend.takes(q, k, v.transpose(-1, -2))
    assert not attend.takes(q, k, v.clone().requires_grad_())
    with torch.no_grad():
        assert attend.takes(q, k, v.clone().requires_grad_())


def decoder_of(*attention: Any) -> Decoder:
    torch.manual_seed(0)
    spec = DecoderSpec(
        model_type="tiny", vocab_size=97, hidden_size=40, intermediate_size=56, max_position_embeddings=4096, norm="rms",
        norm_eps=1e-5, activation="silu", gated_mlp=True, mlp_bias=False, tied=True, attention=attention,
    )  # fmt: skip
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.3) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    return decoder.requires_grad_(False).eval()


LATENT = LatentAttentionSpec(
    num_heads=5,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=6,
    v_head_dim=8,
    scale=0.2,
    rotary=RotarySpec(dim=6),
)
STANDARD = StandardAttentionSpec(
    num_heads=6, num_kv_heads=2, head_dim=10, scale=0.3, rotary=RotarySpec(dim=10), window=90
)


def test_a_decoder_reads_prompts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of ragged prompts, from a cache too: as the decoder computes without it, in float64."""
    plain = decoder_of(LATENT, STANDARD)
    fast = decoder_of(LATENT, STANDARD)
    fast.fast_attention = kernel()
    called = []
    real = prompt_module.PromptAttention.__call__
    monkeypatch.setattr(
        prompt_module.PromptAttention, "__call__", lambda *a, **k: (called.append(a[1].shape), real(*a, **k))[1]
    )
    plain.double()
    tokens = torch.randint(0, 97, (3, 300), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([300, 217, 150])
    caches = [decoder.make_cache(3, 300) for decoder in (plain, fast)]
    for start in (0, 150):
        counts = (lengths - start).clamp(0, 150)
        expected, found = (
            decoder(tokens[:, start : start + 150], cache, counts)
            for decoder, cache in zip((plain, fast), caches, strict=True)
        )
        for row, count in enumerate(counts.tolist()):
            torch.testing.assert_close(found[row, :count].double(), expected[row, :count], atol=2e-4, rtol=1e-4)
    assert len(called) == 4  # two layers, two chunks
