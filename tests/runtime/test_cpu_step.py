"""The compiled step of one token: what it computes and stores is what the decoder's own layers do, in float64."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.errors import InputError, MlaError
from mla_cli.kernels.cpu.build import CpuLibrary, load_library
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.cache import Cache
from mla_cli.model.cache_store import TokenStore
from mla_cli.model.decoder import ACTIVATIONS, Decoder
from mla_cli.model.kept_linear import KeptLinear, keep_linears, keep_tables
from mla_cli.model.spec import RotarySpec
from mla_cli.runtime.cpu_step import CpuStep, why_not
from mla_cli.runtime.int8_weights import with_int8_weights
from mla_cli.runtime.loading import add_fast_step
from tests.runtime.latent import POSITIONS, decoder_of, latent, latent_decoder, standard
from tests.runtime.latent import SMALL_VOCAB as VOCAB
from tests.runtime.stand_ins import save_tiny_with_tokenizer

FOUND = load_library(cache_dir() / "kernels", lambda _: None)
needs_compiler = pytest.mark.skipif(isinstance(FOUND, str), reason=f"no CPU kernels: {FOUND}")
pytestmark = needs_compiler


def library() -> CpuLibrary:
    assert isinstance(FOUND, CpuLibrary)
    return FOUND


def filled(decoder: Decoder, lengths: list[int], quantizers: Any = None, dtype: Any = None) -> Cache:
    """A cache that holds random sequences of these lengths."""
    tokens = torch.randint(0, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(7))
    cache = decoder.make_cache(len(lengths), POSITIONS, quantizers, dtype)
    for start in range(0, tokens.shape[1], 500):
        counts = (torch.tensor(lengths) - start).clamp(0, 500)
        decoder(tokens[:, start : start + 500], cache, counts)
    return cache


def assert_steps_agree(
    decoder: Decoder, lengths: list[int], *, threads: int = 2, steps: int = 3, **cached: Any
) -> None:
    """Some steps from the same cache: by the kernels, and in float64 by the decoder."""
    exact = copy.deepcopy(decoder).double()
    exact.computes_in = None
    with torch.inference_mode():
        reference = filled(exact, lengths, cached.get("quantizers"), cached.get("dtype", torch.float64))
        cache = filled(decoder, lengths, **cached)
        for mine, theirs in zip(cache.layers, reference.layers, strict=True):
            for store, source in zip(mine.stores, theirs.stores, strict=True):
                for name in store.parts:
                    getattr(store, name).copy_(getattr(source, name))
        step = CpuStep(decoder, library(), threads)
        assert step.takes(cache)
        tokens = torch.arange(len(lengths))[:, None] % VOCAB
        for _ in range(steps):
            found = step(decoder, tokens, cache)
            expected = exact(tokens, reference)
            assert found.shape == expected.shape
            assert cache.host_lengths.tolist() == reference.host_lengths.tolist()
            bound = 2e-4 if "quantizers" not in cached else 2e-2  # a code may fall to the other side
            if decoder.dtype == torch.bfloat16:
                bound = 2e-2
            torch.testing.assert_close(found.double(), expected, atol=bound * float(expected.abs().max()), rtol=0)
            scores = step.logits(found[:, 0])
            torch.testing.assert_close(
                scores.double(), exact.logits(found[:, 0].double()), atol=1e-3 * float(scores.abs().max()), rtol=0
            )
            assert_cached_alike(cache, reference)
            tokens = expected.argmax(dim=-1) % VOCAB


def assert_cached_alike(cache: Cache, reference: Cache) -> None:
    for mine, theirs in zip(cache.layers, reference.layers, strict=True):
        for store, source in zip(mine.stores, theirs.stores, strict=True):
            for row, length in enumerate(cache.host_lengths.tolist()):
                found = store.read(cache.longest, torch.float64)[row, :length]
                expected = source.read(cache.longest, torch.float64)[row, :length]
                if not expected.numel():
                    continue
                # A code or a bfloat16 number may be the next one.
                coarse = max(1.0, float(expected.abs().max())) * (0.1 if store.__class__ is TokenStore else 1e-2)
                torch.testing.assert_close(found, expected, atol=coarse, rtol=0)


LATENTS = {
    "plain": latent(),
    "one head": latent(num_heads=1),
    "nineteen heads": latent(num_heads=19),
    "narrow": latent(kv_lora_rank=3, qk_nope_head_dim=1, v_head_dim=1, qk_rope_head_dim=2, rotary=RotarySpec(dim=2)),
    "wide": latent(kv_lora_rank=200, qk_rope_head_dim=34, rotary=RotarySpec(dim=34)),
    "in halves": latent(interleaved=False),
    "frequencies": latent(rotary=RotarySpec(dim=16), frequencies=(0, 0, 7)),
    "no rotary key": latent(qk_rope_head_dim=0),
    "no rotation": latent(rotary=None),
    "norms": latent(norm_eps=1e-6, q_lora_rank=20),
    "biases": latent(q_bias=True, kv_a_bias=True, o_bias=True),
    "window": latent(window=37),
    "soft cap": latent(softcap=3.0),
    "scaled by length": latent(
        rotary=RotarySpec(dim=6, kind="dynamic", factor=2.0, original_max_position_embeddings=64)
    ),
}
STANDARDS = {
    "grouped": standard(),
    "as many keys": standard(num_kv_heads=6),
    "one key": standard(num_kv_heads=1),
    "biases": standard(q_bias=True, kv_bias=True, o_bias=True),
    "window": standard(window=37),
    "soft cap": standard(softcap=3.0),
    "no rotation": standard(rotary=None),
}


@pytest.mark.parametrize("kind", LATENTS)
def test_latent_layers(kind: str) -> None:
    assert_steps_agree(decoder_of(LATENTS[kind], LATENTS["plain"]), [1, 600, 41, 16])


@pytest.mark.parametrize("changes", [
    {"kv_lora_rank": 64}, {"kv_lora_rank": 53, "num_heads": 3}, {"kv_lora_rank": 128, "num_heads": 9},
    {"kv_lora_rank": 512, "num_heads": 2, "qk_rope_head_dim": 64, "rotary": RotarySpec(dim=64)},
    {"kv_lora_rank": 64, "num_heads": 1, "softcap": 3.0}, {"kv_lora_rank": 64, "window": 37},
    {"kv_lora_rank": 64, "qk_rope_head_dim": 0}, {"kv_lora_rank": 64, "scale": 1.0},
    {"kv_lora_rank": 100, "num_heads": 35, "softcap": 2.0}, {"kv_lora_rank": 128, "num_heads": 16, "window": 200},
])  # fmt: skip
def test_int8_latents_of_any_width_are_multiplied_as_codes(changes: dict[str, Any]) -> None:
    decoder = decoder_of(latent(**changes))
    assert_steps_agree(decoder, [1, 600, 41, 64, 65, 16], quantizers=(LatentQuantizer("int8"),), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", STANDARDS)
def test_standard_layers(kind: str) -> None:
    assert_steps_agree(decoder_of(STANDARDS[kind], STANDARDS["grouped"]), [1, 600, 41, 16])


def test_layers_of_both_kinds_in_one_decoder() -> None:
    assert_steps_agree(decoder_of(standard(window=20), latent(), standard()), [5, 300])


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("gated", [True, False])
def test_every_activation(activation: str, gated: bool) -> None:
    assert_steps_agree(decoder_of(latent(), activation=activation, gated_mlp=gated, mlp_bias=not gated), [9])


def test_layer_norm_learned_positions_and_a_head_of_its_own() -> None:
    assert_steps_agree(decoder_of(standard(rotary=None), norm="layer", learned_positions=True, tied=False), [9, 30])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_rows_and_threads(rows: int, threads: int) -> None:
    assert_steps_agree(decoder_of(latent(), standard()), [3 + 40 * row for row in range(rows)], threads=threads)


@pytest.mark.parametrize("place", [15, 16, 17, 255, 256, 257, 1500])
def test_wherever_a_sequence_stands(place: int) -> None:
    # The ends of tiles, of splits, and of what a cache holds before it grows.
    assert_steps_agree(decoder_of(latent(), standard()), [place])


@pytest.mark.parametrize("quantizer", [
    LatentQuantizer("int8"), LatentQuantizer("fp8"), LatentQuantizer("int8", "token", 1.5),
    LatentQuantizer("fp8", "token", 1.5, rope_dtype="fp8"), LatentQuantizer("int8", rope_dtype="int8"),
])  # fmt: skip
def test_quantised_latents(quantizer: LatentQuantizer) -> None:
    assert_steps_agree(decoder_of(latent(), latent(kv_lora_rank=50)), [1, 300, 33], quantizers=(quantizer,) * 2)


@pytest.mark.parametrize("attention", [latent(), standard()])
def test_a_bfloat16_cache(attention: Any) -> None:
    assert_steps_agree(decoder_of(attention), [40, 7], dtype=torch.bfloat16, quantizers=None)


def test_weights_in_bfloat16() -> None:
    assert_steps_agree(decoder_of(latent(), standard()).bfloat16(), [40, 7])


def test_weights_that_are_kept_in_bfloat16_give_float32_results() -> None:
    decoder = decoder_of(latent(), standard()).bfloat16().float()
    tokens = torch.arange(6)[None]
    before = decoder(tokens), decoder.logits(decoder(tokens)[0])
    for layer in decoder.layers:
        keep_linears(layer)  # type: ignore[arg-type]
    keep_tables(decoder)
    assert type(decoder.layers[0].mlp.up_proj) is KeptLinear
    assert decoder.embed_tokens.weight.dtype == torch.bfloat16
    assert decoder.dtype == torch.float32
    after = decoder(tokens), decoder.logits(decoder(tokens)[0])
    for found, expected in zip(after, before, strict=True):
        assert torch.equal(found, expected)
    assert_steps_agree(decoder, [40, 7])


def test_what_bfloat16_cannot_hold_is_kept_wide() -> None:
    decoder = decoder_of(latent())
    keep_linears(decoder.layers[0])  # type: ignore[arg-type]
    keep_tables(decoder)
    assert type(decoder.layers[0].mlp.up_proj) is torch.nn.Linear
    assert decoder.embed_tokens.weight.dtype == torch.float32


def test_int8_weights() -> None:
    decoder = decoder_of(latent(), standard())
    decoder = decoder.with_layers([with_int8_weights(layer) for layer in decoder.layers])  # type: ignore[arg-type]
    assert_steps_agree(decoder, [40, 7, 300, 20, 1])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 24), rank=st.integers(1, 80), nope=st.integers(1, 40), pairs=st.integers(0, 20),
    values=st.integers(1, 40), hidden=st.integers(1, 80), inner=st.integers(1, 80),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6), threads=st.integers(1, 3), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_shape(
    heads: int, rank: int, nope: int, pairs: int, values: int, hidden: int, inner: int, lengths: list[int], threads: int,
    seed: int,
) -> None:  # fmt: skip
    attention = latent(
        num_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=2 * pairs, v_head_dim=values,
        rotary=RotarySpec(dim=2 * pairs) if pairs else None, scale=(nope + 2 * pairs) ** -0.5,
    )  # fmt: skip
    decoder = decoder_of(attention, hidden_size=hidden, intermediate_size=inner, seed=seed)
    assert_steps_agree(decoder, lengths, threads=threads, steps=2)


def test_what_lies_in_free_places_is_never_read() -> None:
    decoder = decoder_of(latent(), standard())
    step = CpuStep(decoder, library(), 2)
    with torch.inference_mode():
        clean = filled(decoder, [30, 300])
        dirty = clean.select(torch.arange(2))
        for layer in dirty.layers:
            for store in layer.stores:
                store.values[0, 31:] = float("nan")  # type: ignore[attr-defined]
                store.values[1, 301:] = float("nan")  # type: ignore[attr-defined]
        tokens = torch.tensor([[3], [4]])
        assert torch.equal(step(decoder, tokens, clean), step(decoder, tokens, dirty))


def test_a_step_is_the_same_every_time_and_with_any_number_of_threads() -> None:
    decoder = decoder_of(latent(), standard())
    with torch.inference_mode():
        cache = filled(decoder, [700, 20])
        tokens = torch.tensor([[3], [4]])
        found: list[Tensor] = []
        for threads in (1, 1, 2, 2, 8, 8, 8):
            again = cache.select(torch.arange(2))
            found.append(CpuStep(decoder, library(), threads)(decoder, tokens, again))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("quantizer", [None, LatentQuantizer("int8")])
def test_a_sequence_is_computed_alike_beside_any_others(quantizer: LatentQuantizer | None) -> None:
    attention = latent(kv_lora_rank=64, num_heads=6)
    decoder = decoder_of(attention, hidden_size=64, intermediate_size=96).bfloat16()
    lengths = [70, 3, 129, 40, 7, 300, 64, 1, 19, 5, 33, 90, 128, 2, 17, 66, 11, 257, 63]
    with torch.inference_mode():
        cache = filled(decoder, lengths, quantizer and (quantizer,), torch.bfloat16)
        tokens = torch.arange(len(lengths))[:, None] % VOCAB
        step = CpuStep(decoder, library(), 2)
        together = step(decoder, tokens, cache.select(torch.arange(len(lengths))))
        for rows in ([0], [5, 2], [17, 18, 3, 4, 1], list(range(16))):
            alone = step(decoder, tokens[rows], cache.select(torch.tensor(rows)))
            assert torch.equal(alone, together[rows])


@pytest.mark.slow
@pytest.mark.parametrize("without", ["amx-tile", "avx512vnni", "avx512bf16", "avx512f"])
def test_processors_that_can_less(tmp_path: Path, without: str) -> None:
    # These tests again, with a library that makes no use of some instructions.
    environment = {**os.environ, "CXX": f"g++ -mno-{without}", "MLA_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    if without == "avx512vnni":  # then they are multiplied as bfloat16, with queries that are rounded to it
        command += ["-k", "not multiplied_as_codes"]
    root = Path(__file__).parents[2]
    told = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert told.returncode == 0, told.stdout[-2000:]
    assert "skipped" not in told.stdout


def test_errors_are_the_decoders_own() -> None:
    decoder = decoder_of(latent(), latent())
    assert add_fast_step(decoder) is None
    cache = decoder.make_cache(1, 20, (LatentQuantizer("int8"),) * 2)
    with torch.inference_mode():
        decoder(torch.tensor([[1, 2, 3]]), cache)
        with pytest.raises(InputError, match="outside the model's embedding table"):
            decoder(torch.tensor([[VOCAB]]), cache)
        assert cache.host_lengths.tolist() == [3]
        decoder.layers[1].self_attn.kv_a_proj_with_mqa.weight[0, 0] = float("nan")  # type: ignore[union-attr, index]
        with pytest.raises(MlaError, match="latents of layer 1 hold NaN"):
            decoder(torch.tensor([[4]]), cache)
        full = decoder.make_cache(1, 1)
        decoder(torch.tensor([[1]]), full)
        with pytest.raises(MlaError, match="holds at most 1 tokens"):
            decoder(torch.tensor([[1]]), full)


def test_nan_weights_reach_the_logits() -> None:
    decoder = decoder_of(latent(), standard())
    decoder.layers[0].self_attn.q_proj.weight[0, 0] = float("nan")  # type: ignore[union-attr, index]
    with torch.inference_mode():
        cache = decoder.make_cache(1, 20)
        found = CpuStep(decoder, library())(decoder, torch.tensor([[1]]), cache)
    assert not torch.isfinite(found).all()


@pytest.mark.parametrize("quantizer", [
    LatentQuantizer("int4"), LatentQuantizer("int8", "page"), LatentQuantizer("int8", "static", 3.0),
])  # fmt: skip
def test_caches_of_other_kinds_are_left_to_pytorch(quantizer: LatentQuantizer) -> None:
    decoder = latent_decoder()
    cache = decoder.make_cache(2, 50, (quantizer,) * 2)
    again = decoder.make_cache(2, 50, (quantizer,) * 2)
    tokens = torch.tensor([[5], [6]])
    with torch.inference_mode():
        expected = decoder(tokens, again)
        assert add_fast_step(decoder) is None
        assert torch.equal(decoder(tokens, cache), expected)


def test_decoders_that_the_kernels_do_not_know() -> None:
    assert "gate" in str(why_not(decoder_of(latent(gate_chunk=8))))
    assert "float16" in str(why_not(decoder_of(latent()).half()))
    assert "300 heads" in str(why_not(decoder_of(latent(num_heads=300))))
    assert why_not(decoder_of(standard(num_heads=300, num_kv_heads=150))) is None


def test_a_child_process_computes_too() -> None:
    # It has none of the threads that its parent made.
    code = (
        "import os, sys, torch\n"
        "from tests.runtime.test_cpu_step import CpuStep, decoder_of, filled, latent, library\n"
        "decoder = decoder_of(latent()); cache = filled(decoder, [9]); tokens = torch.tensor([[1]])\n"
        "step = CpuStep(decoder, library(), 2)\n"
        "with torch.inference_mode():\n"
        "    here = step(decoder, tokens, cache.select(torch.arange(1)))\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        torch.set_num_threads(1)  # PyTorch's own are not here either, and it waits for them\n"
        "        same = torch.equal(step(decoder, tokens, cache.select(torch.arange(1))), here)\n"
        "        os._exit(0 if same else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(("environment", "why"), [
    ({"MLA_CPU_KERNELS": "off"}, "switched off by MLA_CPU_KERNELS"),
    ({"PATH": "/nonexistent", "CXX": ""}, "no C++ compiler found"),
    ({"CXX": "false"}, "cannot compile them"),
])  # fmt: skip
def test_without_the_kernels_pytorch_computes_and_says_why(
    tmp_path: Path, environment: dict[str, str], why: str
) -> None:
    save_tiny_with_tokenizer(tmp_path / "model")
    command = [sys.executable, "-m", "mla_cli", "generate", str(tmp_path / "model"), "abc", "--max-new-tokens", "4"]
    root = Path(__file__).parents[2]
    base = {**os.environ, "MLA_CACHE": str(tmp_path / "cache")}
    told = subprocess.run(
        command, cwd=root, env={**base, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    plain = subprocess.run(
        [*command, "--backend", "reference"],
        cwd=root,
        env={**base, "MLA_CPU_KERNELS": "off"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (told.returncode, plain.returncode) == (0, 0), told.stderr
    assert why in told.stderr
    assert told.stdout == plain.stdout
    assert not list((tmp_path / "cache").glob("kernels/*.so"))
