"""Latent strength: a part of the latent is a smaller latent, whatever form it was written in and however it is cached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_cli.app import main
from mla_cli.checkpoint.kv_cache import KEY, KvScheme, LayerRange, stored_scheme
from mla_cli.checkpoint.latent_strength import check_latent_strength, kept_channels, narrowed_layer
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from mla_cli.errors import UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import Decoder
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.request import Request
from mla_cli.runtime.sampling_params import SamplingParams
from tests.runtime.stand_ins import save_tiny_deepseek
from tests.tiny import random_tokens, save_text, save_tiny, save_tokenizer, with_latent_strength

# Form, family, latent channels that hold something (the stock form has constant ones beside them).
FORMS = {
    "native": ("native", "llama", {}, 20),
    "native-biases": ("native", "qwen2", {"bias": 1.0}, 20),
    "stock": ("deepseek", "llama", {}, 18),
    "stock-query-bias": ("deepseek", "qwen2", {"bias": 1.0}, 18),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A converted checkpoint of each form, latents of 20 numbers beside rotary keys of 8."""
    found = {}
    for name, (form, family, changes, _) in FORMS.items():
        folder = tmp_path_factory.mktemp(name)
        save_tiny(folder / "source", family, **changes)
        save_tokenizer(folder / "source")
        options = ConvertOptions(
            calib=str(save_text(folder / "text.txt")), samples=16, seq_len=32, kv_lora_rank=20, qk_rope_head_dim=8,
            format=form, ranks="uniform",
        )  # fmt: skip
        convert(str(folder / "source"), folder / "mla", options, device=torch.device("cpu"), command="mla convert")
        found[name] = folder / "mla"
    return found


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(open_model(str(folder)), dtype=dtype)


def without_tail(decoder: Decoder, channels: int, fitted: int) -> Decoder:
    """The decoder with no weight on the latent channels from `channels` to `fitted`."""
    for layer in decoder.layers:
        assert isinstance(layer.self_attn, LatentAttention)
        layer.self_attn.kv_b_proj.weight[:, channels:fitted] = 0
    return decoder


@torch.inference_mode()
def steps(decoder: Decoder, tokens: torch.Tensor, prompt: int, quantizers: Any = None) -> torch.Tensor:
    """Logits of a prompt in one pass, then token by token."""
    cache = decoder.make_cache(tokens.shape[0], tokens.shape[1], quantizers)
    hidden = [decoder(tokens[:, :prompt], cache)]
    hidden += [decoder(tokens[:, i : i + 1], cache) for i in range(prompt, tokens.shape[1])]
    return decoder.logits(torch.cat(hidden, dim=1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [0.04, 0.3, 0.5, 0.99])
def test_it_equals_the_model_whose_other_channels_are_never_read(
    folders: dict[str, Path], form: str, strength: float
) -> None:
    fitted = FORMS[form][3]
    tokens = random_tokens(2, 40)
    narrow = with_latent_strength(load(folders[form], torch.float64), strength)
    zeroed = without_tail(load(folders[form], torch.float64), kept_channels(fitted, strength), fitted)
    assert [a.kv_lora_rank for a in narrow.spec.attention] == [kept_channels(fitted, strength)] * 2
    for backend in ("torch", "reference"):
        narrow.backend = backend
        torch.testing.assert_close(steps(narrow, tokens, 24), steps(zeroed, tokens, 24), atol=2e-5, rtol=0)
    single = with_latent_strength(load(folders[form]), strength)
    expected = without_tail(load(folders[form]), kept_channels(fitted, strength), fitted)
    torch.testing.assert_close(steps(single, tokens, 24), steps(expected, tokens, 24), atol=2e-3, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_full_strength_is_the_model_itself(folders: dict[str, Path], form: str) -> None:
    decoder = load(folders[form])
    assert all(narrowed_layer(layer, 1.0) is layer for layer in decoder.layers)  # type: ignore[arg-type]
    nearly = with_latent_strength(decoder, 0.9999)  # the same channels, without the stock form's constant ones
    tokens = random_tokens(2, 40)
    torch.testing.assert_close(steps(nearly, tokens, 24), steps(decoder, tokens, 24), atol=1e-3, rtol=0)


def test_more_of_the_latent_is_closer_to_the_whole(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        decoder, tokens = load(folder), random_tokens(4, 60)
        whole = steps(decoder, tokens, 60).log_softmax(-1)
        divergences = []
        for strength in (0.1, 0.6, 0.999):
            part = steps(with_latent_strength(decoder, strength), tokens, 60).log_softmax(-1)
            divergences.append(float((whole.exp() * (whole - part)).sum(-1).mean()))
        assert divergences == sorted(divergences, reverse=True)


@pytest.mark.parametrize("form", ["native", "stock"])
def test_a_batch_through_a_quantised_cache(folders: dict[str, Path], form: str) -> None:
    fitted = FORMS[form][3]
    tokens, lengths = random_tokens(3, 30), torch.tensor([30, 11, 23])
    narrow, zeroed = (
        with_latent_strength(load(folders[form]), 0.5),
        without_tail(load(folders[form]), fitted // 2, fitted),
    )
    plain = steps(narrow, tokens, 20)
    for quantizer in (LatentQuantizer("int8"), LatentQuantizer("fp8"), LatentQuantizer("int8", "static", 30.0)):
        both = (quantizer, quantizer)
        near = steps(narrow, tokens, 20, both)
        assert 0 < float((near - plain).abs().mean()) < 0.5 * float(plain.std())
        if quantizer.granularity == "static":
            # One range for all: the codes of a part are the codes of the whole.
            torch.testing.assert_close(near, steps(zeroed, tokens, 20, both), atol=5e-2, rtol=0)
    with torch.inference_mode():
        cache = narrow.make_cache(3, 40, (LatentQuantizer("int8"),) * 2)
        assert cache.bytes_per_token() == 2 * (fitted // 2 + 2 * 8 + 4)
        rows = narrow(tokens, cache, lengths)
        for row, length in enumerate(lengths.tolist()):
            cache = narrow.make_cache(1, 40, (LatentQuantizer("int8"),) * 2)
            alone = narrow(tokens[row : row + 1, :length], cache)
            torch.testing.assert_close(rows[row, :length], alone[0], atol=2e-2, rtol=0)


def test_the_generator_caches_less_and_answers_in_batches(folders: dict[str, Path]) -> None:
    requests = [Request(text, SamplingParams(max_new_tokens=8, ignore_eos=True)) for text in ("hello", "a", "the end")]
    for form, (_, _, _, fitted) in FORMS.items():
        engine = open_engine(str(folders[form]), latent_strength=0.5)
        assert engine.generator.statistics.summary()["cache_bytes_per_token"] == 2 * 4 * (fitted // 2 + 8)
        assert any("latent strength 0.5" in note for note in engine.notes)
        together = [answer.token_ids for answer in engine.generator.generate(requests)]  # type: ignore[union-attr]
        alone = [answer.token_ids for r in requests for answer in engine.generator.generate([r])]  # type: ignore[union-attr]
        assert together == alone
        again = open_engine(str(folders[form]), latent_strength=0.5, backend="reference").generator.generate(requests)
        assert [answer.token_ids for answer in again] == together  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("strength", "channels"), [(1.0, 10), (0.7, 7), (0.71, 8), (0.1, 1), (0.001, 1), (0.30000000000000004, 3)]
)
def test_how_many_channels_are_kept(strength: float, channels: int) -> None:
    assert kept_channels(10, strength) == channels


def test_the_commands(folders: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*words: object) -> tuple[int, Any, str]:
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out.startswith("{") else out, err

    folder = folders["stock"]
    sizes, texts = {}, {}
    for strength in (None, 1.0, 0.5):
        more = () if strength is None else ("--latent-strength", strength)
        code, said, _ = run("generate", folder, "hello", "--json", "--max-new-tokens", 8, *more)
        assert code == 0
        sizes[strength], texts[strength] = said["statistics"]["cache_bytes_per_token"], said["text"]
    assert sizes == {None: 2 * 4 * 28, 1.0: 2 * 4 * 28, 0.5: 2 * 4 * 17}
    assert texts[None] == texts[1.0]
    _, _, err = run("generate", folder, "hello", "--stats", "--max-new-tokens", 2, "--latent-strength", 0.5)
    assert "136" in err

    text = save_text(tmp_path / "text.txt", 1200, seed=5)
    losses = {}
    for strength in (1.0, 0.5):
        words = ("eval", folder, "--tasks", "ppl", "--text", text, "--json", "--latent-strength", strength)
        code, report, _ = run(*words)
        assert code == 0
        assert report["checkpoint"]["latent_strength"] == strength
        losses[strength] = report["tasks"]["ppl"]["ppl"]["value"]
    assert report["checkpoint"]["cache_bytes_per_token"] == 2 * 4 * 17
    assert losses[1.0] != losses[0.5]
    whole = folder.parent / "source"
    words = ("eval", folder, "--tasks", "kl,ppl", "--baseline", whole, "--text", text, "--max-drop", 1e9)
    code, table, err = run(*words, "--latent-strength", 0.5)
    assert code == 0, err
    assert table.count("latent strength 0.5") == 1  # the baseline is used whole


def calibrated(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a checkpoint that was calibrated for INT4, for half of each latent."""
    layers = (LayerRange("int4", 8.0, 9.0), LayerRange("int4", (8.0,), 9.0))
    scheme = KvScheme("int4", "token", layers, 8, 256, "files: a.txt", strength=0.5)
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config[KEY] = stored_scheme(replace(scheme, **changes))
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("form", ["native", "stock"])
def test_a_checkpoint_calibrated_for_a_part_of_its_latents_runs_on_that_part(
    folders: dict[str, Path], tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = FORMS[form][3] // 2
    folder = calibrated(folders[form], tmp_path / "half")
    engine = open_engine(str(folder))
    size = (kept + 1) // 2 + 2 + 2 * 8  # two codes a byte, one scale, a rotary key in bfloat16
    assert engine.generator.statistics.summary()["cache_bytes_per_token"] == 2 * size
    assert any("latent strength 0.5" in note for note in engine.notes)
    request = [Request("hello", SamplingParams(max_new_tokens=12, ignore_eos=True))]
    (found,) = engine.generator.generate(request)
    narrow = with_latent_strength(load(folder), 0.5)
    quantizers = (LatentQuantizer("int4", "token", 8.0),) * 2
    tokens = torch.tensor([[*engine.tokenizer.encode("hello"), *found.token_ids[:-1]]])  # type: ignore[union-attr]
    logits = steps(narrow, tokens, tokens.shape[1] - 11, quantizers)
    assert logits[0, -12:].argmax(-1).tolist() == list(found.token_ids)  # type: ignore[union-attr]

    text = save_text(tmp_path / "text.txt", 1200, seed=5)
    facts = {}
    for name, more in (("auto", ()), ("bf16", ("--kv-dtype", "bf16")), ("less", ("--latent-strength", "0.25"))):
        assert main(["eval", str(folder), "--tasks", "ppl", "--text", str(text), "--json", *more]) == 0
        facts[name] = json.loads(capfd.readouterr().out)["checkpoint"]
    assert (facts["auto"]["kv_dtype"], facts["auto"]["latent_strength"]) == ("int4", 0.5)
    assert facts["auto"]["cache_bytes_per_token"] == 2 * size
    # As never calibrated: the whole latent.
    assert (facts["bf16"]["kv_dtype"], facts["bf16"]["latent_strength"]) == ("float32", 1.0)
    assert (facts["less"]["kv_dtype"], facts["less"]["latent_strength"]) == ("int4", 0.25)


def test_channels_that_were_turned_together_are_kept_together(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = calibrated(folders["native"], tmp_path / "turned", rotation="hadamard")
    open_engine(str(folder))
    open_engine(str(folder), latent_strength=0.5)
    with pytest.raises(UsageError, match="turned"):
        open_engine(str(folder), latent_strength=0.25)


@pytest.mark.parametrize("command", [("generate", "hi"), ("eval", "--tasks", "ppl")])
@pytest.mark.parametrize("strength", ["0", "-0.5", "1.01", "nan", "inf"])
def test_what_is_no_share_costs_no_work(
    command: tuple[str, ...], strength: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], "no/such/folder", *command[1:], "--latent-strength", strength]) == 2
    err = capfd.readouterr().err
    assert f"--latent-strength {strength}" in err
    assert "no/such/folder" not in err


def edited(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint with other attention tensors in each layer."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        change({name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)})
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def keys_then_values(tensors: dict[str, torch.Tensor]) -> None:
    """A latent as the rotary split leaves it."""
    up = tensors["kv_b_proj.weight"].view(6, 16, 20)  # [H, nope+v, r]
    up[:, :8, 10:] = 0
    up[:, 8:, :10] = 0


def test_models_without_ordered_latents_are_refused(
    folders: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny_deepseek(tmp_path / "foreign")
    source = folders["native"].parent / "source"
    changed = edited(folders["stock"], tmp_path / "changed", lambda t: t["kv_a_layernorm.weight"].mul_(1.01))
    whole = edited(folders["native"], tmp_path / "whole", keys_then_values)
    for folder, message in (
        (source, "keys and values"), (tmp_path / "foreign", "no known order"), (changed, "no known order"),
        (whole, "not ordered"),
    ):  # fmt: skip
        model = open_model(str(folder))
        check_latent_strength(model, 1.0)
        with pytest.raises(UsageError, match=message):
            check_latent_strength(model, 0.5)
        if model.spec.is_latent:
            with pytest.raises(UsageError, match=message):
                with_latent_strength(load_decoder(model), 0.5)
        assert main(["generate", str(folder), "hi", "--latent-strength", "0.5"]) == 2
        err = capfd.readouterr().err
        assert message in err
        assert "Traceback" not in err
        assert main(["eval", str(folder), "--tasks", "ppl", "--latent-strength", "0.5"]) == 2
        assert message in capfd.readouterr().err
