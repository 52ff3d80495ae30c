"""Generation through Triton's kernels, interpreted: what the reference backend gives, whatever the cache is stored in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.evaluation.requests import Request
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.latent_pages import page_layout
from mla_cli.model.spec import QkNormSpec, RotarySpec
from tests.kernels.interpreter import ROOT, Interpreter
from tests.runtime import triton_parts
from tests.runtime.latent import decoder_of, latent, standard
from tests.runtime.stand_ins import byte_ids, save_tiny_deepseek, save_tiny_with_tokenizer

PARTS = "tests.runtime.triton_parts."
KV_DTYPES = ("bf16", "int8", "fp8", "int4")
# The kernels multiply bfloat16 numbers, which the interpreter cuts where a machine rounds. (A decoder that computes in bfloat16
# altogether is up to 1.2 away.)
CLOSE = 0.25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("deepseek")
    save_tiny_deepseek(folder)
    return str(folder)


def check(interpreter: Interpreter, folder: str, prompts: list[Any], tokens: int, **options: Any) -> dict[str, Any]:
    """Triton's tokens are the reference's, and as likely; gives what else is known of the run."""
    found, facts = interpreter(PARTS + "answers", folder, prompts, tokens, backend="triton", **options)
    assert_same(found, triton_parts.answers(folder, prompts, tokens, backend="reference", **options)[0])
    assert any("Triton kernels" in note for note in facts["notes"])
    assert not any("PyTorch" in note for note in facts["notes"])
    return facts  # type: ignore[no-any-return]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], abs=CLOSE)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_ragged_batch_gives_the_tokens_of_the_reference(interpreter: Interpreter, model: str, kv_dtype: str) -> None:
    # With what begins them they end a page of the kernels, begin one, nearly fill one of the pool; the last one waits.
    prompts = ["abcdefghijklmno", "forty and two!!!", "q" * 62, "What is it, it?"]
    check(interpreter, model, prompts, 4, kv_dtype=kv_dtype, max_batch=3)


HYBRID = (LatentQuantizer("int8"), None)
STEPS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "no rotary": ({"qk_rope_head_dim": 0, "rotary": None, "scale": 0.3}, None),
    "halves": ({"interleaved": False}, (LatentQuantizer("int8"),) * 2),
    "chosen frequencies": ({"rotary": RotarySpec(dim=12), "frequencies": (0, 1, 4)}, None),
    "scaled by length": ({"rotary": RotarySpec(6, kind="dynamic", factor=4, original_max_position_embeddings=8)}, None),
    "norm, low-rank queries": ({"norm_eps": 1e-5, "q_lora_rank": 16}, (LatentQuantizer("fp8"),) * 2),
    "window": ({"window": 5}, None),
    "window, soft-cap": ({"window": 3, "softcap": 2.0}, (LatentQuantizer("fp8"),) * 2),
    "one layer at full precision": ({}, HYBRID),
    "clipped": ({}, (LatentQuantizer("int8", clip=0.8), LatentQuantizer("fp8", clip=0.5))),
    "clipped by groups": ({"kv_lora_rank": 40}, (LatentQuantizer("int4", clip=(0.7, 0.4)),) * 2),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_equal_the_formula(interpreter: Interpreter, case: str) -> None:
    changes, quantizers = STEPS[case]
    decoder = decoder_of(latent(**changes), latent(**changes))
    # A ragged prompt with an empty row, a chunk of many and one of few tokens, a step.
    chunks = [[19, 7, 0], [3, 12, 1], [2, 2, 2], [1, 1, 1]]
    found, notes = interpreter(PARTS + "both_ways", decoder, quantizers, chunks)
    assert not any("PyTorch" in note for note in notes)
    for mine, theirs in found:
        assert_close(mine, theirs)


def assert_close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    size = theirs.abs().max()
    assert float((mine - theirs).abs().max() / size) < 0.1
    assert float((mine - theirs).norm() / theirs.norm()) < 0.05


@pytest.mark.parametrize("heads", [1, 3, 6, 12, 28])
def test_any_number_of_heads_in_a_batch(interpreter: Interpreter, heads: int) -> None:
    """KN-03."""
    decoder = decoder_of(latent(num_heads=heads))
    found, _ = interpreter(PARTS + "both_ways", decoder, (LatentQuantizer("int8"),), [[5, 3], [1, 1]])
    for mine, theirs in found:
        assert_close(mine, theirs)


@pytest.mark.parametrize("width", [20, 24, 40, 96])
def test_head_widths_that_are_no_multiples_of_16(interpreter: Interpreter, width: int) -> None:
    """KN-04."""
    changes = {"qk_nope_head_dim": width, "v_head_dim": width, "qk_rope_head_dim": width, "rotary": RotarySpec(width)}
    decoder = decoder_of(latent(**changes, kv_lora_rank=32, num_heads=3, scale=0.1))
    found, _ = interpreter(PARTS + "both_ways", decoder, None, [[17, 3], [1, 1]])
    for mine, theirs in found:
        assert_close(mine, theirs)


def test_a_kernel_that_does_not_start_is_replaced_with_one_notice(interpreter: Interpreter, model: str) -> None:
    """KN-07: e.g. a GPU with too little shared memory."""
    found, notes = interpreter(PARTS + "answers_with_broken_decode", model, "hello", 3)
    told = [note for note in notes if "Triton" in note]
    assert told == [
        "every layer runs through PyTorch instead of Triton's kernels: RuntimeError: out of resource: shared memory"
    ]
    assert_same([found], triton_parts.answers(model, ["hello"], 3, backend="cpu")[0])


def test_a_rank_beyond_a_program_runs_through_pytorch(interpreter: Interpreter) -> None:
    """KN-02."""
    decoder = decoder_of(latent(kv_lora_rank=1032))
    found, notes = interpreter(PARTS + "both_ways", decoder, None, [[3]])
    assert len(notes) == 1
    assert "at most 1024 channels" in notes[0]
    for mine, theirs in found:
        assert_close(mine, theirs)


@pytest.mark.parametrize("alias", ["fp8_e4m3", "e4m3"])
def test_an_alias_of_a_cache_type_is_that_type(interpreter: Interpreter, model: str, alias: str) -> None:
    """KN-08."""
    words = ["generate", model, "hello", "--max-new-tokens", "2", "--ignore-eos", "--json", "--backend", "triton"]
    found = [interpreter(PARTS + "run_mla", *words, "--kv-dtype", name) for name in ("fp8", alias)]
    values = [json.loads(out) for _, out, _ in found]
    assert values[0]["token_ids"] == values[1]["token_ids"]
    sizes = [value["statistics"]["cache_bytes_per_token"] for value in values]
    assert sizes[0] == sizes[1]


def test_layers_that_kernels_cannot_do_run_through_pytorch_and_are_named(interpreter: Interpreter) -> None:
    decoder = decoder_of(latent(), standard(), latent(kv_lora_rank=20))
    found, notes = interpreter(PARTS + "both_ways", decoder, None, [[9, 4], [1, 1]])
    for mine, theirs in found:
        assert_close(mine, theirs)
    told = [note for note in notes if "PyTorch" in note]
    assert told == [
        "layer 1 runs through PyTorch instead of Triton's kernels: it caches keys and values",
        "layer 2 runs through PyTorch instead of Triton's kernels: it has latents of 20 channels, not a multiple of 8",
    ]


@pytest.mark.parametrize(
    ("changes", "quantizer", "why"),
    [
        ({"qk_norm": QkNormSpec(1e-5)}, None, "norms of queries and keys"),
        ({"alibi": (0.5,) * 5}, None, "ALiBi"),
        ({"gate_chunk": 4}, None, "gate"),
        ({"qk_rope_head_dim": 5}, None, "no pairs"),
        ({"rotary": RotarySpec(dim=4)}, None, "part of its rotary keys"),
        ({}, LatentQuantizer("int8", "page"), "page scales"),
        ({}, LatentQuantizer("int8", "static", clip=1.0), "static scales"),
        ({}, LatentQuantizer("int8", rope_dtype="fp8"), "rotary keys in fp8"),
    ],
)
def test_what_the_kernels_would_misread_is_refused_by_name(changes: Any, quantizer: Any, why: str) -> None:
    found = page_layout(latent(**changes), quantizer)
    assert isinstance(found, str)
    assert why in found


def test_a_shared_prefix_is_read_once(interpreter: Interpreter) -> None:
    decoder = decoder_of(latent(num_heads=1), vocab_size=272)
    texts = ["".join(chr(97 + i * i % 26) for i in range(512)) + end for end in ("one", "other")]
    found = {
        backend: interpreter(PARTS + "answers_of", decoder, [byte_ids(text) for text in texts], 2, backend)
        for backend in ("triton", "reference")
    }
    assert found["triton"][1]["shared"] == 512
    assert_same(found["triton"][0], found["reference"][0])


def test_who_gave_its_pages_up_ends_with_the_same_tokens(interpreter: Interpreter, model: str) -> None:
    options = {"kv_dtype": "int8", "pool_tokens": 192, "max_context": 128}
    facts = check(interpreter, model, ["q" * 61, "w" * 61], 5, **options)
    assert facts["preemptions"]


def test_pages_of_who_left_are_used_again(interpreter: Interpreter, model: str) -> None:
    prompts = ["one two three", "four"]
    options = {"kv_dtype": "int8", "pool_tokens": 128, "max_context": 64}
    found = interpreter(PARTS + "answers_after_stopping", model, prompts, 3, backend="triton", **options)
    assert_same(found, triton_parts.answers(model, prompts, 3, backend="reference", **options)[0])


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_broken_sequence_fails_alone_and_leaves_nothing_behind(
    interpreter: Interpreter, model: str, kv_dtype: str
) -> None:
    bad = byte_ids("#")[0]
    options = {"kv_dtype": kv_dtype, "pool_tokens": 128, "max_context": 64}
    prompts = ["good one", "a bad # one"]
    runs = interpreter(PARTS + "answers_beside_a_broken_one", model, prompts, 3, bad, backend="triton", **options)
    expected, _ = triton_parts.answers(model, prompts[:1], 3, backend="reference", **options)
    for good, broken in runs:
        assert_same([good], expected)
        assert "NaN" in broken


def test_the_program_says_the_same(interpreter: Interpreter, model: str) -> None:
    words = ["generate", model, "hello", "--max-new-tokens", "3", "--ignore-eos", "--kv-dtype", "int8", "--json"]
    code, out, err = interpreter(PARTS + "run_mla", *words, "--backend", "triton")
    assert code == 0, err
    assert "Triton kernels" in err
    _, expected, _ = triton_parts.run_mla(*words, "--backend", "reference")
    assert json.loads(out)["token_ids"] == json.loads(expected)["token_ids"]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_an_evaluation_scores_as_the_reference_does(interpreter: Interpreter, model: str, kv_dtype: str) -> None:
    shared = tuple(byte_ids("a context of two and more requests"))
    asked = [(shared, " yes"), (shared, ", or not?"), (tuple(byte_ids("alone")), " in the world"), ((1,), "x")]
    requests = [Request(context, tuple(byte_ids(text))) for context, text in asked]
    found = interpreter(PARTS + "scores", model, requests, "triton", kv_dtype)
    expected = triton_parts.scores(model, requests, "reference", kv_dtype)
    for (logprob, greedy), (right, is_greedy), request in zip(found, expected, requests, strict=True):
        assert logprob == pytest.approx(right, abs=CLOSE * len(request.continuation) ** 0.5)
        assert greedy == is_greedy


def test_the_evaluating_program_says_the_same(interpreter: Interpreter, model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text, of which a window is read by both. " * 2)
    words = ["eval", model, "--tasks", "ppl", "--text", str(text), "--kv-dtype", "int8", "--json"]
    code, out, err = interpreter(PARTS + "run_mla", *words, "--backend", "triton")
    assert code == 0, err
    _, expected, _ = triton_parts.run_mla(*words, "--backend", "reference")
    mine, theirs = json.loads(out), json.loads(expected)
    assert (mine["checkpoint"]["backend"], theirs["checkpoint"]["backend"]) == ("triton", "reference")
    values = [next(iter(each["tasks"]["ppl"].values()))["value"] for each in (mine, theirs)]
    assert values[0] == pytest.approx(values[1], rel=0.05)
    assert values[0] != values[1]


def test_a_model_without_latents_runs_through_pytorch_with_one_notice(interpreter: Interpreter, tmp_path: Path) -> None:
    save_tiny_with_tokenizer(tmp_path)
    words = ["generate", str(tmp_path), "hello", "--max-new-tokens", "3"]
    code, out, err = interpreter(PARTS + "run_mla", *words, "--backend", "triton")
    assert code == 0, err
    assert err.count("Triton") == 1
    assert out == triton_parts.run_mla(*words)[1]


@pytest.mark.parametrize(
    "command", [["generate", "MODEL", "hi"], ["eval", "MODEL", "--tasks", "ppl", "--text", "TEXT"]]
)
def test_without_a_gpu_it_is_a_usage_error_of_one_line(model: str, command: list[str]) -> None:
    """KN-07: no CUDA, and the kernels forced."""
    words = [{"MODEL": model, "TEXT": str(Path(model) / "config.json")}.get(word, word) for word in command]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "mla_cli", *words, "--backend", "triton"],
        cwd=ROOT, env={**environment, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "--backend triton" in done.stderr
    assert "--backend auto" in done.stderr
