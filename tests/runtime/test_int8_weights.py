"""INT8 projections: what the formula says, whatever computes it, and the same model at a quarter of the bytes."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mla_cli.app import main
from mla_cli.checkpoint.deepseek_form import free_rank, query_rank, stock_tensors, without_query_detour
from mla_cli.checkpoint.load import load_decoder, load_layer, open_model
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from mla_cli.errors import MlaError
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import Decoder, begin_step
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec
from mla_cli.runtime import int8_weights, loading
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.int8_weights import (
    KERNEL_ROWS,
    PROJECTIONS,
    Int8Linear,
    kernel_works,
    multiply,
    multiply_by_blocks,
    quantize_rows,
    weight_bytes,
    with_int8_weights,
)  # fmt: skip
from mla_cli.runtime.loading import computing_dtype, load_to_run
from tests.runtime.latent import latent_decoder
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer

CPU = torch.device("cpu")
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FORMS = {
    "native gpt2": ("native", "gpt2", 0),
    "stock": ("deepseek", "llama", 8),
    "query bias": ("deepseek", "qwen2", 8),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with biases and layer norms, with gated MLPs, and with latent attention in several forms."""
    found = {}
    for family in ("llama", "gpt2", "qwen2"):
        found[family] = tmp_path_factory.mktemp(family)
        save_tiny(found[family], family, bias=0.5, initializer_range=0.2)  # milder: rounding is not blown up by chance
        save_tokenizer(found[family])
    for name, (form, family, rope) in FORMS.items():
        out = tmp_path_factory.mktemp(family) / "mla"
        options = ConvertOptions(
            calib=str(save_text(out.parent / "text.txt")), samples=8, seq_len=32, kv_lora_rank=20, format=form,
            qk_rope_head_dim=rope, ranks="uniform",
        )  # fmt: skip
        convert(str(found[family]), out, options, device=CPU, command="mla convert")
        found[name] = out
    return found


MODELS = ("llama", "gpt2", "qwen2", *FORMS)


@st.composite
def weights(draw: Any) -> Tensor:
    """`[N, K]` of any size, with outliers and rows of zeros."""
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-12, 4))
    weight[:, 0] *= draw(st.sampled_from([1.0, 50.0]))
    weight[torch.rand(shape[0], generator=generator) < 0.2] = 0
    return weight.to(draw(st.sampled_from(list(EPSILON))))


@given(weights())
@settings(max_examples=100, deadline=None)
def test_no_weight_moves_by_more_than_half_a_step_of_its_own_channel(weight: Tensor) -> None:
    codes, scales = quantize_rows(weight, "w")
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) <= 127
    exact, back = weight.double(), codes.double() * scales.double()[:, None]
    step = exact.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((back - exact).abs() <= 0.5 * step * (1 + EPSILON[weight.dtype])).all())
    assert not bool(back[exact.abs().amax(dim=1) == 0].any())


@given(weights(), st.integers(1, 20), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_an_output_is_off_by_what_its_channel_was_rounded_by(weight: Tensor, rows: int, seed: int) -> None:
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(weight.dtype)
    codes, scales = quantize_rows(weight, "w")
    found, expected = multiply(x, codes, scales).double(), x.double() @ weight.double().T  # [M, N]
    assert found.shape == expected.shape
    step = weight.double().abs().amax(dim=1) / 127  # [N]
    size = x.double().abs().sum(dim=1, keepdim=True)  # [M, 1]
    # Half a step a weight, and the rounding of the sum and of what it is scaled to.
    bound = size * step * (0.5 + 127 * 4 * EPSILON[weight.dtype])
    assert bool(((found - expected).abs() <= bound + 1e-6).all())


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_blocks_are_cut_anywhere(dtype: torch.dtype, block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    codes, scales = quantize_rows(torch.randn(33, 48, generator=generator).to(dtype), "w")
    x = torch.randn(5, 48, generator=generator).to(dtype)
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    found = multiply_by_blocks(x, codes, scales, block).double()
    torch.testing.assert_close(found, expected, rtol=4 * EPSILON[dtype], atol=40 * EPSILON[dtype])


def test_sums_of_codes_do_not_overflow_float16() -> None:
    x = torch.full((1, 4096), 4.0, dtype=torch.float16)
    codes, scales = quantize_rows(torch.full((2, 4096), 2.0**-10, dtype=torch.float16), "w")
    torch.testing.assert_close(multiply(x, codes, scales).float(), torch.full((1, 2), 16.0), rtol=1e-2, atol=0)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows, inputs, outputs of each call of PyTorch's kernel, which ends the process where they do not suit it."""
    calls: list[tuple[int, ...]] = []
    kernel_works()
    honest = torch._weight_int8pack_mm

    def watched(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        assert x.dtype == scales.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.data_ptr() % 32 == codes.data_ptr() % 16 == 0
        calls.append((x.shape[0], x.shape[1], codes.shape[0]))
        return honest(x, codes, scales)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", watched)
    return calls


def test_the_kernel_gets_only_what_it_can_do(kernel_calls: list[tuple[int, ...]]) -> None:
    if not kernel_works():
        pytest.skip("this PyTorch has no such kernel for the CPU")
    generator = torch.Generator().manual_seed(0)
    for inputs in (1, 15, 16, 17, 24, 48, 126, 128):
        for outputs in (1, 3, 4, 20, 33):
            codes, scales = quantize_rows(torch.randn(outputs, inputs, generator=generator).bfloat16(), "w")
            for rows in (1, 3, KERNEL_ROWS - 1, KERNEL_ROWS, 40):
                x = torch.randn(rows, inputs + 1, generator=generator).bfloat16()
                for given_x in (x[:, :-1], x[:, 1:], x.flatten()[1 : 1 + rows * inputs].view(rows, inputs)):
                    expected = given_x.double() @ (codes.double() * scales.double()[:, None]).T
                    found = multiply(given_x, codes, scales).double()
                    torch.testing.assert_close(found, expected, rtol=2**-6, atol=0.1)
    assert kernel_calls
    assert all(rows < KERNEL_ROWS and i % 16 == 0 and o % 4 == 0 for rows, i, o in kernel_calls)


@pytest.mark.parametrize("failure", ["absent", "refuses", "wrong"])
def test_without_a_kernel_that_works_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    def broken(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        if failure == "refuses":
            raise RuntimeError("not implemented for this CPU")
        return x @ codes.to(x.dtype).T  # forgets the scales

    codes, scales = quantize_rows(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16(), "w")
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    if failure == "absent":
        monkeypatch.delattr(torch, "_weight_int8pack_mm")
    else:
        monkeypatch.setattr(torch, "_weight_int8pack_mm", broken)
    kernel_works.cache_clear()
    try:
        torch.testing.assert_close(multiply(x, codes, scales).double(), expected, rtol=2**-6, atol=0.05)
    finally:
        kernel_works.cache_clear()


@pytest.mark.parametrize("dtype", EPSILON)
def test_rows_of_zeros_give_the_bias_exactly(dtype: torch.dtype) -> None:
    linear = nn.Linear(32, 8).to(dtype)
    linear.weight.data[2:5] = 0
    out = Int8Linear.of(linear, "w")(torch.randn(2, 3, 32).to(dtype) * 1000)
    assert torch.equal(out[..., 2:5], linear.bias[2:5].expand(2, 3, 3))
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float) -> None:
    layer = latent_decoder().layers[1]
    layer.mlp.down_proj.weight.data[3, 5] = value
    with pytest.raises(MlaError, match="NaN or infinity") as caught:
        with_int8_weights(layer)  # type: ignore[arg-type]
    assert caught.value.where == "model.layers.1.mlp.down_proj"


def rounded_to_int8(decoder: Decoder) -> Decoder:
    """The decoder with each projection's weight rounded by the formula (in float32, so that ties fall alike)."""
    for layer in decoder.layers:
        attention = layer.self_attn
        if isinstance(attention, LatentAttention):
            layer.self_attn = without_query_detour(attention)
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in PROJECTIONS:
                step = (module.weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
                module.weight.data = (module.weight / step).round() * step
    return decoder


@torch.inference_mode()
def logits(decoder: Decoder, tokens: Tensor, prompt: int) -> Tensor:
    """Of a prompt in one pass, then token by token through the cache."""
    cache = decoder.make_cache(*tokens.shape)
    hidden = [decoder(tokens[:, :prompt], cache)]
    hidden += [decoder(tokens[:, i : i + 1], cache) for i in range(prompt, tokens.shape[1])]
    return decoder.logits(torch.cat(hidden, dim=1)).float()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_one_with_rounded_weights(folders: dict[str, Path], name: str) -> None:
    model, tokens = open_model(str(folders[name])), random_tokens(2, 40)
    found = load_to_run(model, dtype=torch.float32, weights="int8")
    kept = {n.rpartition(".")[2] for n, module in found.layers.named_modules() if isinstance(module, nn.Linear)}
    assert kept <= {"kv_b_proj"}
    torch.testing.assert_close(
        logits(found, tokens, 24), logits(rounded_to_int8(load_decoder(model)), tokens, 24), rtol=1e-3, atol=2e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_tokens_stay(folders: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model, tokens = open_model(str(folders[name])), random_tokens(4, 60)
    plain = logits(load_decoder(model), tokens, 50)
    found = logits(load_to_run(model, dtype=dtype, weights="int8"), tokens, 50)
    assert float((found - plain).norm() / plain.norm()) < 0.05
    assert float((found.argmax(-1) == plain.argmax(-1)).float().mean()) > 0.93  # the others were close calls


def test_the_detour_of_a_query_bias_is_no_part_of_the_model(folders: dict[str, Path]) -> None:
    model, tokens = open_model(str(folders["query bias"])), random_tokens(2, 20)
    plain = load_decoder(model)
    expected = logits(plain, tokens, 12)
    for layer in plain.layers:
        assert isinstance(layer.self_attn, LatentAttention)
        assert layer.self_attn.spec.q_lora_rank is not None
        layer.self_attn = without_query_detour(layer.self_attn)
        assert layer.self_attn.spec.q_lora_rank is None
    torch.testing.assert_close(logits(plain, tokens, 12), expected, rtol=1e-4, atol=1e-4)


def test_a_large_query_bias_does_not_coarsen_the_weights_beside_it() -> None:
    hidden, heads, rank = 32, 2, 20
    spec = LatentAttentionSpec(
        num_heads=heads, kv_lora_rank=free_rank(rank), qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        scale=12**-0.5, rotary=RotarySpec(dim=4), interleaved=True, q_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    r = spec.kv_lora_rank
    plain = LatentWeights(
        spec, torch.randn(heads, 12, hidden) * 0.3, torch.full((heads, 12), 40.0), torch.randn(r + 4, hidden) * 0.3,
        torch.zeros(r + 4), torch.randn(heads, 8, r) * 0.1, torch.randn(heads, 8, r) * 0.1,
        torch.randn(hidden, heads * 8) * 0.3, torch.zeros(hidden),
    )  # fmt: skip
    stock = replace(
        spec,
        kv_lora_rank=rank,
        q_lora_rank=query_rank(hidden),
        norm_eps=1e-6,
        q_bias=False,
        kv_a_bias=True,
        o_bias=True,
    )
    decoder_spec = DecoderSpec("tiny", 64, hidden, 32, 64, "rms", 1e-5, "silu", True, False, True, (stock,))
    decoder = Decoder(decoder_spec).requires_grad_(False)
    state = {name: tensor.float() for name, tensor in stock_tensors(plain, rank, query_bias=True).items()}
    decoder.layers[0].self_attn.load_state_dict(state, assign=True)
    x = torch.randn(1, 10, hidden)
    expected = decoder.layers[0].self_attn(x, begin_step(decoder_spec, x.shape[:2], CPU))
    found = with_int8_weights(decoder.layers[0]).self_attn(x, begin_step(decoder_spec, x.shape[:2], CPU))  # type: ignore[arg-type]
    assert float((found - expected).norm() / expected.norm()) < 0.02


def wide(folder: Path) -> Path:
    """A model whose layers are most of it."""
    save_tiny(folder, hidden_size=192, intermediate_size=512, num_hidden_layers=4, dtype=torch.bfloat16)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.30), (torch.bfloat16, 0.56)])
def test_the_memory_of_the_weights_falls(tmp_path: Path, dtype: torch.dtype, share: float) -> None:
    model = open_model(str(wide(tmp_path)))
    plain, small = (load_to_run(model, dtype=dtype, weights=weights) for weights in ("float", "int8"))
    assert weight_bytes(small) < share * weight_bytes(plain)
    assert weight_bytes(plain) == sum(p.nbytes for p in plain.parameters())


def test_a_layer_is_made_small_before_the_next_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watched(*given_layer: Any, **more: Any) -> Any:
        gc.collect()
        assert not [tensor for tensor in alive if tensor() is not None]  # the layers before, in floating point
        layer = load_layer(*given_layer, **more)
        alive.extend(weakref.ref(module.weight) for module in layer.modules() if isinstance(module, nn.Linear))
        return layer

    monkeypatch.setattr(loading, "load_layer", watched)
    load_to_run(open_model(str(wide(tmp_path))), dtype=torch.float32, weights="int8")
    assert len(alive) == 4 * 7


def test_the_latent_strength_comes_before_the_rounding(folders: dict[str, Path]) -> None:
    model = open_model(str(folders["stock"]))
    decoder = load_to_run(model, dtype=torch.float32, latent_strength=0.5, weights="int8")
    narrow = load_to_run(model, dtype=torch.float32, latent_strength=0.5)
    assert decoder.spec == narrow.spec
    tokens = random_tokens(1, 20)
    torch.testing.assert_close(
        logits(decoder, tokens, 12), logits(rounded_to_int8(narrow), tokens, 12), rtol=1e-3, atol=2e-3
    )


def test_the_type_to_compute_in_is_the_machines_and_the_users(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(str(folders["llama"]))
    for has, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has, raising=False)
        assert computing_dtype(model, None, CPU, "int8") == expected
        assert computing_dtype(model, None, CPU, "float") == torch.float32
    assert computing_dtype(model, torch.float16, CPU, "int8") == torch.float16
    assert computing_dtype(model, None, torch.device("cuda"), "int8") == model.stored_dtype


def test_generate_and_eval_take_the_option(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = str(folders["stock"])
    assert main(["generate", where, "abc", "--weights", "int8", "--max-new-tokens", "4", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    assert len(out.strip("\n")) == 4
    assert "projections in int8" in err
    text = save_text(tmp_path / "text.txt")
    command = ["eval", where, "--tasks", "ppl", "--text", str(text), "--limit", "2", "--json", "--dtype", "float32"]
    found = {}
    for weights in ("float", "int8"):
        assert main([*command, "--weights", weights]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["checkpoint"]["weights"] == weights
        found[weights] = report["tasks"]["ppl"]["ppl"]["value"]
    assert found["int8"] != found["float"]
    assert found["int8"] == pytest.approx(found["float"], rel=0.05)
    assert main(["generate", where, "abc", "--weights", "int4"]) == 2
    assert "not one of float, int8" in capsys.readouterr().err


def test_the_engine_says_what_it_holds(folders: dict[str, Path]) -> None:
    engine = open_engine(str(folders["gpt2"]), weights="int8", dtype=torch.float32)
    held = weight_bytes(engine.generator.decoder)
    assert f"projections in int8: {held / 2**20:,.0f} MiB of weights in memory" in engine.notes
    assert int8_weights.weight_bytes(load_decoder(engine.model)) > held
