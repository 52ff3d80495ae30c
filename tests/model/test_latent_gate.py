"""The chunk gate: it is what it is defined to be, however a sequence is cut into steps, batched and cached."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_cli.app import main
from mla_cli.checkpoint.deepseek_form import stock_tensors
from mla_cli.checkpoint.latent_strength import narrowed_layer
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters.choose import plan_conversion
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from mla_cli.converters.write import write_checkpoint
from mla_cli.errors import InputError, MlaError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import Decoder, begin_step
from mla_cli.model.latent_gate import LatentGate, gate_shapes
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.request import Request
from mla_cli.runtime.sampling_params import SamplingParams
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer, with_latent_strength

RANK = 12
ATTENTION = LatentAttentionSpec(
    num_heads=3, kv_lora_rank=RANK, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, scale=10**-0.5,
    rotary=RotarySpec(dim=4),
)  # fmt: skip


def half_open(gate: LatentGate) -> LatentGate:
    """Random weights whose shares are neither all 0 nor all 1."""
    for name, parameter in gate.named_parameters():
        parameter.data.normal_(0, 0.3 if name.startswith("0") else 0.06)
    return gate


def decoder_with(*chunks: int | None, dtype: torch.dtype = torch.float64) -> Decoder:
    """A random decoder with a layer for each entry, gated over chunks of so many tokens."""
    attention = tuple(replace(ATTENTION, gate_chunk=chunk) for chunk in chunks)
    spec = DecoderSpec("tiny", 64, 24, 32, 128, "rms", 1e-5, "silu", True, False, True, attention)
    torch.manual_seed(0)
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    for layer in decoder.layers:
        if layer.self_attn.spec.gate_chunk is not None:
            half_open(layer.self_attn.latent_gate)
    return decoder.to(dtype).requires_grad_(False).eval()


def defined(c: Tensor, gate: dict[str, Tensor], chunk: int) -> Tensor:
    """The definition, token by token."""
    gated: list[Tensor] = []
    for t, own in enumerate(c):
        k = t // chunk
        if k == 0:
            gated.append(own)
            continue
        h = gated[k * chunk - 1]
        inner = gate["0.weight"] @ torch.cat((h, own)) + gate["0.bias"]
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        g = 1 / (1 + torch.exp(-(gate["2.weight"][0] @ inner + gate["2.bias"])))
        gated.append(g * h + (1 - g) * own)
    return torch.stack(gated)


@pytest.mark.parametrize("chunk", [1, 4, 7, 16, 17, 18, 100])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_it_is_what_it_is_defined_to_be(chunk: int, backend: str) -> None:
    decoder = decoder_with(chunk)
    layer = decoder.layers[0].self_attn
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    record: dict[str, Tensor] = {}
    layer(x, begin_step(decoder.spec, x.shape[:2], x.device, backend=backend), record)
    raw = layer.kv_a_proj_with_mqa(x)[..., :RANK]
    gate = {name.removeprefix("latent_gate."): t for name, t in layer.state_dict().items() if "latent_gate" in name}
    assert {name: tuple(tensor.shape) for name, tensor in gate.items()} == gate_shapes(RANK)
    expected = torch.stack([defined(row, gate, chunk) for row in raw])
    torch.testing.assert_close(record["latent"], expected)
    assert torch.equal(record["latent"][:, :chunk], raw[:, :chunk])
    if chunk < 17:
        assert (record["latent"] - raw)[:, chunk:].abs().mean() > 0.05
    # Attention reads the gated latents, and nothing else of the layer has changed.
    plain = decoder_with(None).layers[0].self_attn
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if "latent_gate" not in name})
    kv = (expected @ plain.kv_b_proj.weight.T).unflatten(-1, (3, 11))  # [B, T, H, nope+v]
    cos, sin = begin_step(decoder.spec, x.shape[:2], x.device).rotary(ATTENTION.rotary)

    def turned(pairs: Tensor) -> Tensor:  # [B, T, H, 4]: adjacent numbers are a pair
        turns = torch.view_as_complex(pairs.unflatten(-1, (2, 2)).contiguous()) * torch.complex(cos, sin)[:, :, None]
        return torch.view_as_real(turns).flatten(-2)

    k_rope = turned(plain.kv_a_proj_with_mqa(x)[..., None, RANK:]).expand(-1, -1, 3, -1)
    q = plain.q_proj(x).unflatten(-1, (3, 10))
    q = torch.cat((q[..., :6], turned(q[..., 6:])), dim=-1)
    scores = torch.einsum("bthn,bshn->bhts", q, torch.cat((kv[..., :6], k_rope), dim=-1)) * ATTENTION.scale
    causal = torch.ones(17, 17, dtype=torch.bool).tril()
    heads = torch.einsum("bhts,bshv->bthv", scores.masked_fill(~causal, -math.inf).softmax(-1), kv[..., 6:])
    torch.testing.assert_close(record["heads"], heads)


QUANTIZERS = {
    "plain": None, "int8": LatentQuantizer("int8"), "fp8": LatentQuantizer("fp8"),
    "static": LatentQuantizer("int8", "static", 4.0),
}  # fmt: skip


@torch.inference_mode()
def in_one_pass(decoder: Decoder, tokens: Tensor, **cache: Any) -> Tensor:
    return decoder(tokens, decoder.make_cache(tokens.shape[0], tokens.shape[1], **cache))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("chunks", [(4, None, 7), (1, 3, 64)])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_single_tokens_and_pieces_equal_one_pass(backend: str, chunks: tuple[int | None, ...], kind: str) -> None:
    decoder, tokens = decoder_with(*chunks), random_tokens(2, 30)
    quantizer = QUANTIZERS[kind]
    quantizers = None if quantizer is None else (quantizer,) * 3
    decoder.backend = backend
    expected = in_one_pass(decoder, tokens, quantizers=quantizers)
    if quantizers is None:
        with torch.inference_mode():
            torch.testing.assert_close(decoder(tokens), expected)
    for pieces in ([1] * 30, [7, 1, 1, 13, 8], [3, 27], [29, 1]):
        cache, hidden = decoder.make_cache(2, 30, quantizers), []
        with torch.inference_mode():
            for piece in pieces:
                start = cache.longest
                hidden.append(decoder(tokens[:, start : start + piece], cache))
        torch.testing.assert_close(torch.cat(hidden, dim=1), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_rows_that_stand_at_different_places(kind: str) -> None:
    decoder, tokens = decoder_with(4, 7, None), random_tokens(4, 60)
    quantizer = QUANTIZERS[kind]
    quantizers = None if quantizer is None else (quantizer,) * 3
    expected = in_one_pass(decoder, tokens, quantizers=quantizers)
    cache = decoder.make_cache(4, 60, quantizers)
    at = torch.zeros(4, dtype=torch.int64)
    counts = [[5, 13, 9, 1], [6, 0, 11, 2], [0, 9, 1, 1], *[[1] * 4] * 10, [16, 3, 0, 15], *[[1] * 4] * 3]
    with torch.inference_mode():
        for step in counts:
            new = torch.zeros(4, max(step), dtype=torch.int64)
            for row, count in enumerate(step):
                new[row, :count] = tokens[row, at[row] : at[row] + count]
            hidden = decoder(new, cache, torch.tensor(step))
            for row, count in enumerate(step):
                truth = expected[row, at[row] : at[row] + count]
                torch.testing.assert_close(hidden[row, :count], truth, atol=1e-6, rtol=0)
            at += torch.tensor(step)
    # Rows are copied, dropped and cut back as before: the gate keeps nothing beside the cache.
    cache = cache.select(torch.tensor([2, 2, 0]))
    cache.truncate(torch.tensor([20, 17, 30]))
    with torch.inference_mode():
        again = torch.stack([tokens[2, 20:22], tokens[2, 17:19], tokens[0, 30:32]])
        hidden = decoder(again, cache)
    for row, (source, place) in enumerate(((2, 20), (2, 17), (0, 30))):
        torch.testing.assert_close(hidden[row], expected[source, place : place + 2], atol=1e-6, rtol=0)


def test_a_closed_gate_is_no_gate_and_an_open_one_repeats() -> None:
    gated, plain, tokens = decoder_with(4, 7), decoder_with(None, None), random_tokens(2, 30)
    state = {name: tensor for name, tensor in gated.state_dict().items() if "latent_gate" not in name}
    plain.load_state_dict(state)
    for layer in gated.layers:
        layer.self_attn.latent_gate[2].bias.fill_(-math.inf)
    assert torch.equal(in_one_pass(gated, tokens), in_one_pass(plain, tokens))
    for layer in gated.layers:
        layer.self_attn.latent_gate[2].bias.fill_(math.inf)
    cache = gated.make_cache(2, 30)
    with torch.inference_mode():
        gated(tokens, cache)
    first, _ = cache.read(0, 30, torch.float64)
    assert torch.equal(first[:, 4:], first[:, 3:4].expand(-1, 26, -1))


def test_in_half_precision_the_cache_decides_what_is_read() -> None:
    decoder, tokens = decoder_with(4, 7, dtype=torch.float32), random_tokens(2, 30)
    expected = in_one_pass(decoder, tokens, dtype=torch.bfloat16)
    cache = decoder.make_cache(2, 30, dtype=torch.bfloat16)
    with torch.inference_mode():
        steps = [decoder(tokens[:, i : i + 1], cache) for i in range(30)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=2e-2, rtol=0)
    half = decoder_with(4, 7, dtype=torch.bfloat16)
    assert bool(torch.isfinite(in_one_pass(half, tokens)).all())


def test_gradients_pass_through_the_chunks() -> None:
    decoder = decoder_with(4)
    layer = decoder.layers[0].self_attn
    x = torch.randn(1, 11, 24, dtype=torch.float64, requires_grad=True)
    gate = layer.latent_gate.requires_grad_(True)
    target = torch.randn(1, 11, 24, dtype=torch.float64)

    def loss() -> Tensor:
        return ((layer(x, begin_step(decoder.spec, x.shape[:2], x.device)) - target) ** 2).sum()

    parameters = [x, *gate.parameters()]
    gradients = torch.autograd.grad(loss(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction = torch.randn_like(parameter)
        slopes = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter += step * direction
                slopes.append(loss().item())
                parameter -= step * direction
        assert float((gradient * direction).sum()) == pytest.approx((slopes[0] - slopes[1]) / 2e-6, rel=1e-5)


# --- files ---------------------------------------------------------------------------------------------------------------


def gate_of(rank: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return half_open(LatentGate(rank)).state_dict()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A converted checkpoint in the native form, and the same with a gate in the first of its two layers."""
    folder = tmp_path_factory.mktemp("gate")
    save_tiny(folder / "source", "llama")
    save_tokenizer(folder / "source")
    options = ConvertOptions(
        calib=str(save_text(folder / "text.txt")), samples=16, seq_len=32, kv_lora_rank=20, qk_rope_head_dim=8,
        format="native", ranks="uniform",
    )  # fmt: skip
    convert(str(folder / "source"), folder / "plain", options, device=torch.device("cpu"), command="mla convert")
    layers = [LatentWeights.of(layer.self_attn) for layer in load_decoder(open_model(str(folder / "plain"))).layers]
    layers[0] = layers[0].with_gate(8, gate_of(20, seed=3))
    source = open_model(str(folder / "source"))
    (plan,) = plan_conversion(source, options)
    write_checkpoint(source, plan, layers, folder / "gated", dtype=torch.float32, max_shard_bytes=1 << 30, force=False)
    return folder / "plain", folder / "gated"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def test_a_native_file_keeps_the_gate(checkpoints: tuple[Path, Path]) -> None:
    plain, gated = (load_decoder(open_model(str(folder))) for folder in checkpoints)
    assert [a.gate_chunk for a in gated.spec.attention] == [8, None]  # type: ignore[union-attr]
    attention = gated.layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    for name, tensor in gate_of(20, seed=3).items():
        assert torch.equal(attention.state_dict()[f"latent_gate.{name}"], tensor)
    # Without a gate the file is as it was before gates were known.
    assert all("gate_chunk" not in entry for entry in config_of(checkpoints[0])["mla"]["layers"])
    assert ["gate_chunk" in entry for entry in config_of(checkpoints[1])["mla"]["layers"]] == [True, False]
    gates = [name for name in load_file(checkpoints[1] / "model.safetensors") if "latent_gate" in name]
    assert sorted(gates) == [f"model.layers.0.self_attn.latent_gate.{name}" for name in sorted(gate_shapes(20))]
    tokens = random_tokens(2, 40)
    with torch.inference_mode():
        difference = (gated(tokens) - plain(tokens)).abs().mean(dim=(0, 2))
        rebuilt = LatentWeights.of(attention).module(0)
        x = torch.randn(2, 40, 48)
        step = begin_step(gated.spec, x.shape[:2], x.device)
        assert torch.equal(rebuilt(x, step), attention(x, step))
    assert float(difference[:8].max()) == 0
    assert float(difference[8:].min()) > 1e-3


@pytest.mark.parametrize("wrong", [0, -1, True, "8", 2.5, [8]])
def test_a_chunk_that_is_none_is_refused(checkpoints: tuple[Path, Path], tmp_path: Path, wrong: object) -> None:
    config = config_of(checkpoints[1])
    config["mla"]["layers"][0]["gate_chunk"] = wrong
    copy_with(checkpoints[1], tmp_path / "copy", config)
    with pytest.raises(InputError, match="gate_chunk"):
        open_model(str(tmp_path / "copy"))


def test_entry_and_tensors_belong_together(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    config = config_of(checkpoints[1])
    del config["mla"]["layers"][0]["gate_chunk"]
    copy_with(checkpoints[1], tmp_path / "unused", config)
    with pytest.raises(InputError, match="latent_gate"):
        open_model(str(tmp_path / "unused"))
    config["mla"]["layers"][1]["gate_chunk"] = 8
    copy_with(checkpoints[0], tmp_path / "missing", config)
    with pytest.raises(InputError, match="latent_gate"):
        open_model(str(tmp_path / "missing"))
    config["mla"]["layers"][1] = {**config_of(checkpoints[1])["mla"]["layers"][1], "gate_width": 8}
    copy_with(checkpoints[0], tmp_path / "unknown", config)
    with pytest.raises(InputError, match="gate_width"):
        open_model(str(tmp_path / "unknown"))
    null = config_of(checkpoints[0])
    null["mla"]["layers"][0]["gate_chunk"] = None
    copy_with(checkpoints[0], tmp_path / "null", null)
    assert open_model(str(tmp_path / "null")).spec == open_model(str(checkpoints[0])).spec


def copy_with(folder: Path, copy: Path, config: dict[str, Any]) -> None:
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), copy / "model.safetensors", {"format": "pt"})


def test_what_cannot_carry_a_gate_refuses_it(checkpoints: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    decoder = load_decoder(open_model(str(checkpoints[1])))
    weights = LatentWeights.of(decoder.layers[0].self_attn)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="stock DeepSeek form cannot express a gate"):
        stock_tensors(weights, 22, query_bias=False)
    with pytest.raises(UsageError, match="gate"):
        with_latent_strength(decoder, 0.5)
    assert all(narrowed_layer(layer, 1.0) is layer for layer in decoder.layers)  # type: ignore[arg-type]
    assert main(["generate", str(checkpoints[1]), "hi", "--latent-strength", "0.5"]) == 2
    assert "gate" in capfd.readouterr().err
    with pytest.raises(ValueError, match="gate"):
        replace(weights, gate=None)
    with pytest.raises(ValueError, match="gate"):
        weights.with_gate(8, gate_of(19, seed=0))


# --- through the program -------------------------------------------------------------------------------------------------


def test_the_generator_answers_in_batches_as_alone(checkpoints: tuple[Path, Path]) -> None:
    lengths = (3, 20, 9, 41, 8)
    requests = [
        Request(
            tuple(random_tokens(1, n, seed=n)[0].tolist()), SamplingParams(max_new_tokens=30 - n // 2, ignore_eos=True)
        )
        for n in lengths
    ]
    for options in ({}, {"kv_dtype": "int8"}, {"backend": "reference"}):
        engine = open_engine(str(checkpoints[1]), max_batch=3, **options)  # type: ignore[arg-type]
        together = engine.generator.generate(requests)
        assert not any(isinstance(answer, MlaError) for answer in together)
        alone = [engine.generator.complete(request) for request in requests]
        assert [a.token_ids for a in together] == [a.token_ids for a in alone]  # type: ignore[union-attr]
    plain = open_engine(str(checkpoints[0])).generator.generate(requests)
    assert [a.token_ids for a in plain] != [a.token_ids for a in together]  # type: ignore[union-attr]


def test_every_command_takes_a_gated_checkpoint(
    checkpoints: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = save_text(tmp_path / "text.txt", 6000, seed=4)

    def run(*words: object) -> Any:
        assert main([str(word) for word in words]) == 0, capfd.readouterr().err
        return json.loads(capfd.readouterr().out)

    losses = {}
    for name, folder in zip(("plain", "gated"), checkpoints, strict=True):
        for kind in ("auto", "int8"):
            report = run("eval", folder, "--tasks", "ppl", "--text", text, "--limit", 8, "--json", "--kv-dtype", kind)
            losses[name, kind] = report["tasks"]["ppl"]["ppl"]["value"]
    assert losses["gated", "int8"] == pytest.approx(losses["gated", "auto"], rel=0.2)
    assert losses["gated", "auto"] != losses["plain", "auto"]
    calibrated = run(
        "calibrate",
        checkpoints[1],
        "--out",
        tmp_path / "int8",
        "--calib",
        text,
        "--samples",
        32,
        "--seq-len",
        32,
        "--json",
    )
    assert calibrated["checkpoint"] == str(tmp_path / "int8")
    assert run("generate", tmp_path / "int8", "hello", "--json", "--max-new-tokens", 12)["completion_tokens"]
    facts = run("inspect", checkpoints[1], "--json")
    assert [layer.get("gate_chunk") for layer in facts["latent_layers"]] == [8, None]
    assert main(["inspect", str(checkpoints[1])]) == 0
    assert "over chunks of 8 tokens" in capfd.readouterr().out
