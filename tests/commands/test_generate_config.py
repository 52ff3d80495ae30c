"""`mla generate --config`: what a file may say, what of it holds, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_cli.app import Command, main
from mla_cli.commands.generate import generate
from mla_cli.converters.convert import convert
from mla_cli.converters.options import ConvertOptions
from mla_cli.model.cache_store import PAGE_TOKENS
from mla_cli.runtime import choices
from tests.commands.test_generate import prompt_file
from tests.runtime.stand_ins import save_byte_tokenizer, save_tiny_with_tokenizer
from tests.tiny import save_text

KV_LORA_RANK = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A source, and what conversions make of it in both forms."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_with_tokenizer(folder / "source")
    save_byte_tokenizer(folder / "source", chat=False)
    found = {"source": str(folder / "source")}
    for form in ("native", "deepseek"):
        options = ConvertOptions(
            calib=str(save_text(folder / "text.txt")), samples=8, seq_len=32, kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=8, format=form, ranks="uniform",
        )  # fmt: skip
        convert(found["source"], folder / form, options, device=torch.device("cpu"), command="mla convert")
        found[form] = str(folder / form)
    return found


@pytest.fixture
def mla(models: dict[str, str], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run `mla generate` on a model with a configuration: exit code, stdout, stderr."""

    def run(config: str | dict[str, Any], *arguments: str, model: str = "native") -> tuple[int, str, str]:
        file = tmp_path / "mla.yaml"
        file.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        capfd.readouterr()
        every = ["generate", models[model], *arguments, "--config", str(file)]
        code = main(every, commands=(Command("generate", generate),))
        out, err = capfd.readouterr()
        return code, out, err

    return run


def shown(run: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = run
    assert (code, err) == (0, "")
    return yaml.safe_load(out)


def test_options_win_over_the_file_and_the_file_over_the_profile(mla: Any) -> None:
    nothing = shown(mla("", "--print-config"))
    assert nothing["runtime"]["max_batch"] == 8
    assert "profile" not in nothing
    edge = shown(mla("profile: edge", "--print-config"))
    assert (edge["profile"], edge["runtime"]["max_batch"], edge["runtime"]["max_context"]) == ("edge", 1, 2048)
    file = "profile: edge\nruntime: {max_batch: 3, threads: 2}\nprecision: {cache: i8}\nsampling: {stop: [a, b]}"
    values = shown(mla(file, "--print-config"))
    assert (values["runtime"]["max_batch"], values["runtime"]["max_context"]) == (3, 2048)
    assert (values["precision"]["cache"], values["sampling"]["stop"]) == ("int8", ["a", "b"])
    options = ["--max-batch", "5", "--kv-dtype", "fp8", "--stop", "c", "--weights", "int8", "--dtype", "bf16"]
    values = shown(mla(file, "--print-config", *options))
    assert (values["runtime"]["max_batch"], values["runtime"]["threads"]) == (5, 2)
    assert values["precision"] == {"projection": "int8", "attention": "bf16", "cache": "fp8"}
    assert values["sampling"]["stop"] == ["c"]
    values = shown(mla(file, "--print-config", "--profile", "consumer"))
    assert (values["profile"], values["precision"]["cache"], values["runtime"]["max_batch"]) == ("consumer", "int8", 3)
    assert values["runtime"]["max_context"] is None
    assert shown(mla("", "--print-config", "--profile", "consumer"))["precision"]["cache"] == "bf16"
    assert shown(mla("", "--profile", "datacenter", "--print-config"))["runtime"]["max_batch"] == 64


SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "profile": st.sampled_from(["datacenter", "consumer", "edge"]),
        "latent_attention": st.fixed_dictionaries(
            {},
            optional={
                "enabled": st.sampled_from([True, False, "auto", None]),
                "latent_dim": st.none() | st.integers(1, 4096),
                "chunk_size": st.integers(1, 64).map(lambda n: 64 * n),
                "prefetch": st.just({"enabled": False, "lookahead": 3, "threshold": 0.7}) | st.none(),
                "memory": st.fixed_dictionaries({}, optional={"pool_size": st.integers(1, 10**6)}),
            },
        ),
        "precision": st.sampled_from(["fp32", "float32", "bf16", "fp16", "auto", "int8"]).flatmap(
            lambda p: st.fixed_dictionaries(
                {},
                optional={
                    "projection": st.just(p),
                    "attention": st.sampled_from(["bf16", "auto"]) if p in ("auto", "int8") else st.just(p),
                    "cache": st.sampled_from(["auto", "bf16", "int8", "fp8_e4m3", "int4"]),
                },
            )
        ),
        "runtime": st.fixed_dictionaries(
            {},
            optional={
                "device": st.sampled_from(["auto", "cpu", "cuda:1"]),
                "threads": st.none() | st.integers(1, 64),
                "latent_strength": st.floats(0.01, 1),
                "max_batch": st.integers(1, 1000),
                "max_context": st.integers(2, 10**6),
            },
        ),
        "sampling": st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.floats(0, 10) | st.integers(0, 3),
                "top_p": st.floats(0.01, 1),
                "max_new_tokens": st.integers(1, 10**9),
                "stop": st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), max_size=3),
                "ignore_eos": st.booleans(),
                "seed": st.integers(0, 2**32 - 1),
            },
        ),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=SECTIONS)
def test_what_is_printed_says_the_same_when_it_is_read(mla: Any, config: dict[str, Any]) -> None:
    code, out, err = mla(config, "--print-config")
    assert (code, err) == (0, "")
    assert mla(out, "--print-config") == (0, out, "")
    printed = yaml.safe_load(out)
    for section, keys in config.items():
        for name, value in keys.items() if isinstance(keys, dict) else ():
            if isinstance(value, (int, float)) and not isinstance(value, dict):
                assert printed[section][name] == value


REFUSED = [
    ("runtime: {max_batsch: 2}", "runtime.max_batsch", "did you mean 'runtime.max_batch'?"),
    ("max_batch: 2", "max_batch", "did you mean 'runtime.max_batch'?"),
    ("kv_dtype: int8", "kv_dtype", "did you mean 'precision.cache'?"),
    ("runtime: {weights: int8}", "runtime.weights", "did you mean 'precision.projection'?"),
    ("latent_attention: {pool_size: 3}", "latent_attention.pool_size", "did you mean 'latent_attention.memory.pool_size'?"),
    ("latent_atention: {}", "latent_atention", "did you mean 'latent_attention'?"),
    ("1: 2", "1", "known here: profile, latent_attention, precision"),
    ("runtime: 3", "runtime", "write its keys below it: device, threads"),
    ("runtime: {max_batch: [1]}", "runtime.max_batch", "a whole number from 1"),
    ("runtime: {max_batch: 0}", "runtime.max_batch", "a whole number from 1"),
    ("runtime: {max_batch: 2.5}", "runtime.max_batch", "a whole number from 1"),
    ("runtime: {max_batch: true}", "runtime.max_batch", "a whole number from 1"),
    ("runtime: {max_batch: '2'}", "runtime.max_batch", "a whole number from 1"),
    ("runtime: {backend: warp}", "runtime.backend", "auto, triton, cpu"),
    ("server: {max_queue: -1}", "server.max_queue", "a whole number from 0"),
    ("server: {max_seconds: 0.5}", "server.max_seconds", "a number from 1"),
    ("runtime: {device: tpu}", "runtime.device", "cuda:N"),
    ("runtime: {latent_strength: 0}", "runtime.latent_strength", "above 0"),
    ("profile: laptop", "profile", "datacenter, consumer, edge"),
    ("precision: {cache: int3}", "precision.cache", "auto, bf16, int8"),
    ("precision: {projection: fp16, attention: bf16}", "precision.projection", "set both to bf16"),
    ("latent_attention: {chunk_size: 100}", "latent_attention.chunk_size", "a multiple of 64"),
    ("latent_attention: {enabled: maybe}", "latent_attention.enabled", "true, false, or auto"),
    ("latent_attention: {prefetch: {enabled: 1}}", "latent_attention.prefetch.enabled", "true or false"),
    ("latent_attention: {prefetch: {lookahead: 3}}", "latent_attention.prefetch.lookahead", "alone it does nothing"),
    ("latent_attention: {prefetch: {threshold: 70}}", "latent_attention.prefetch.threshold", "at most 1"),
    ("latent_attention: {fallback: {threshold: 2}}", "latent_attention.fallback.threshold", "at most 1"),
    ("latent_attention: {tiers: {host_size: -1}}", "latent_attention.tiers.host_size", "a whole number from 0"),
    ("latent_attention: {tiers: {file_size: 8}}", "latent_attention.tiers.file_size", "set latent_attention.tiers.file"),
    ("latent_attention: {tiers: {fle: x}}", "latent_attention.tiers.fle", "did you mean 'latent_attention.tiers.file'?"),
    ("latent_attention: {memory: {defrag_interval: 60}}", "latent_attention.memory.defrag_interval", "set it to 0"),
    ("safety: {nan_check: false}", "safety.nan_check", "set it to true"),
    ("safety: {grad_clip: 1.0}", "safety.grad_clip", "leave it out"),
    ("sampling: {top_p: 0}", "sampling.top_p", "above 0 and at most 1"),
    ("sampling: {temperature: .nan}", "sampling.temperature", "greedy"),
    ("sampling: {stop: no}", "sampling.stop", "two"),
    ("sampling: {stop: ['']}", "sampling.stop", "two"),
    ("sampling: {seed: 4294967296}", "sampling.seed", "4294967295"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "key", "advice"), REFUSED)
def test_what_cannot_be_used_is_named_with_its_place(mla: Any, content: str, key: str, advice: str) -> None:
    code, out, err = mla(content, "hello")
    assert (code, out) == (2, "")
    assert err.startswith("mla: error: ")
    assert f"mla.yaml:{key}]" in err
    assert advice in err
    assert err.count("\n") == 1


LAUGHS = "".join(f"    - &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 20))
BOMB = f"sampling:\n  top_k:\n    - &l0 [ha]\n{LAUGHS}"


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("runtime:\n  max_batch: 2\n  max_batch: 3\n", "mla.yaml:3"),
        ("runtime: {max_batch: 2}\nsampling: {}\nruntime: {}\n", "mla.yaml:3"),
        ("runtime: [", "mla.yaml:"),
        ("runtime: {? [a] : b}", "mla.yaml:1"),
        ("a: 1\n---\nb: 2\n", "mla.yaml:"),
        ("- profile", "mla.yaml"),
        ("profile: !!python/object/apply:os.system ['true']", "mla.yaml:1"),
        ("a: &a {b: *a}", "mla.yaml"),
        ("sampling: {stop: &a [*a]}", "mla.yaml:1"),
        (BOMB, "mla.yaml:sampling.top_k"),
        ("[" * 3000, "mla.yaml"),
        ("#" * (1 << 20) + "\n", "mla.yaml"),
        ("x: \x00", "mla.yaml"),
    ],
)
def test_a_file_that_is_no_configuration(mla: Any, content: str, place: str) -> None:
    code, out, err = mla(content, "hello")
    assert (code, out) == (2, "")
    assert place in err
    assert "internal error" not in err
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_read(models: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"profile: \xe9dge")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin.yaml"):
        arguments = ["generate", models["source"], "hi", "--config", str(path)]
        assert main(arguments, commands=(Command("generate", generate),)) == 2
        err = capfd.readouterr().err
        assert str(path) in err
        assert err.count("\n") == 1


def test_what_the_file_says_is_what_runs(mla: Any, tmp_path: Path) -> None:
    options = ["--max-new-tokens", "7", "--temperature", "1.5", "--seed", "5", "--ignore-eos", "--kv-dtype", "int8"]
    sampling = {"max_new_tokens": 7, "temperature": 1.5, "seed": 5, "ignore_eos": True}
    code, out, _ = mla({"sampling": sampling, "precision": {"cache": "int8"}}, "hello", "--json")
    expected = json.loads(mla("", "hello", "--json", *options)[1])
    found = json.loads(out)
    assert code == 0
    assert found["token_ids"] == expected["token_ids"]
    assert found["statistics"]["cache_bytes_per_token"] == expected["statistics"]["cache_bytes_per_token"]
    assert found["completion_tokens"] == 7
    # The pool: two chunks of 64 tokens hold a context of 128.
    memory = {"chunk_size": 64, "memory": {"pool_size": 2}}
    code, _, err = mla({"latent_attention": memory}, "x" * 140, "--quiet")
    assert code == 2
    assert "limited to 128" in err
    assert mla({"latent_attention": {**memory, "chunk_size": 128}}, "x" * 140, "--quiet")[0] == 0
    prompts = prompt_file(tmp_path, {"prompt": "abc"}, {"prompt": "abc", "max_new_tokens": 2})
    out = mla({"sampling": sampling}, "--prompts", prompts)[1]
    assert [json.loads(line)["completion_tokens"] for line in out.splitlines()] == [7, 2]


def test_attention_is_of_the_kind_that_the_checkpoint_has(mla: Any) -> None:
    on, off = ({"latent_attention": {"enabled": value}} for value in (True, False))
    for model, sound, wrong, advice in (("source", off, on, "mla convert"), ("native", on, off, "converted from")):
        assert mla(sound, "hello", "--quiet", "--max-new-tokens", "2", model=model)[0] == 0
        code, out, err = mla(wrong, "hello", "--quiet", model=model)
        assert (code, out) == (2, "")
        assert "mla.yaml:latent_attention.enabled" in err
        assert advice in err


@pytest.mark.parametrize("form", ["native", "deepseek"])
def test_the_width_of_the_latents(mla: Any, form: str) -> None:
    def cached(width: int, *options: str) -> Any:
        arguments = ["hello", "--json", "--quiet", "--max-new-tokens", "2", *options]
        return mla({"latent_attention": {"latent_dim": width}}, *arguments, model=form)

    whole = json.loads(mla("", "hello", "--json", "--quiet", model=form)[1])["statistics"]["cache_bytes_per_token"]
    code, out, _ = cached(KV_LORA_RANK)
    assert (code, json.loads(out)["statistics"]["cache_bytes_per_token"]) == (0, whole)
    code, out, _ = cached(8)  # two layers, eight channels of the latent and eight of the rotary key, in float32
    assert (code, json.loads(out)["statistics"]["cache_bytes_per_token"]) == (0, 2 * (8 + 8) * 4)
    code, out, err = cached(KV_LORA_RANK + 1)
    assert (code, out) == (2, "")
    assert "mla.yaml:latent_attention.latent_dim" in err
    code, out, err = cached(8, "--latent-strength", "0.9")
    assert (code, out) == (2, "")
    assert "latent_dim" in err
    code, out, err = mla({"latent_attention": {"latent_dim": 8}}, "hello", "--quiet", model="source")
    assert (code, out) == (2, "")
    assert "latent_dim" in err


def test_chunks_are_whole_pages() -> None:
    assert choices.PAGE_TOKENS == PAGE_TOKENS
    assert choices.CHUNK_TOKENS % PAGE_TOKENS == 0


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that reads more than one chunk."""
    folder = tmp_path_factory.mktemp("long")
    save_tiny_with_tokenizer(folder, max_position_embeddings=4096)
    return str(folder)


def test_beginnings_that_are_read_ahead(long_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mla.yaml"

    def run(warmup: list[Any], *arguments: str, size: int = 128) -> tuple[dict[str, Any], str]:
        file.write_text(json.dumps({"warmup": warmup, "latent_attention": {"memory": {"pool_size": size}}}))
        capfd.readouterr()
        every = ["generate", long_model, *arguments, "--json", "--config", str(file), "--max-new-tokens", "20"]
        assert main([*every, "--ignore-eos"], commands=(Command("generate", generate),)) == 0
        out, err = capfd.readouterr()
        return json.loads(out), err

    prompt = "s" * 1200 + "and then"
    plain, _ = run([], prompt)
    assert plain["statistics"]["shared_prompt_tokens"] == 0
    for text, kept in (("s" * 511, 512), ("s" * 600, 512), ("s" * 1100, 1088), ("t" * 600, 0)):
        warm, err = run([text], prompt)
        assert warm["token_ids"] == plain["token_ids"]
        assert warm["statistics"]["shared_prompt_tokens"] == kept
        assert warm["statistics"]["prompt_tokens"] == 1209 - kept
        assert "warning" not in err
    warm, err = run(["s" * 62, "s" * 600], prompt)
    assert "nothing of warmup entry 1 (63 tokens) is kept: beginnings are kept from 64 tokens on" in err
    assert warm["statistics"]["shared_prompt_tokens"] == 512
    # A twentieth of the pool: 1,638 of 32,768 tokens, of which the first beginning takes 1,024.
    _, err = run(["s" * 1100, "t" * 600, "u" * 600], prompt)
    assert "entry 2" not in err.replace("of the 601 tokens of warmup entry 2", "")
    assert "nothing of warmup entry 3 (601 tokens) is kept: there is no room" in err
    assert "no room" in run(["s" * 600], prompt, size=16)[1]
    conversation = {"messages": [{"role": "system", "content": "s" * 700}]}
    arguments = ["hello", "--chat", "--system", "s" * 700]
    plain, _ = run([], *arguments)
    warm, _ = run([conversation], *arguments)
    assert warm["token_ids"] == plain["token_ids"]
    assert warm["statistics"]["shared_prompt_tokens"] == 704


def test_kept_prompts_outside_the_pool(long_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a run leaves in the file spares the next one reading it, and changes no token."""
    config, kept, prompts = tmp_path / "mla.yaml", tmp_path / "kept", tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter * 600}) + "\n" for letter in "stust"))

    def run(tiers: dict[str, Any], **more: Any) -> tuple[list[Any], dict[str, Any], str]:
        keys = {"latent_attention": {"memory": {"pool_size": 5}, "tiers": tiers, **more}, "runtime": {"max_batch": 1}}
        config.write_text(json.dumps(keys))
        capfd.readouterr()
        options = [
            "--max-new-tokens",
            "5",
            "--ignore-eos",
            "--config",
            str(config),
            "--metrics",
            str(tmp_path / "m.prom"),
        ]
        every = ["generate", long_model, "--prompts", str(prompts), "--json", "--stats", *options]
        assert main(every, commands=(Command("generate", generate),)) == 0
        out, err = capfd.readouterr()
        found = json.loads(out)
        return [answer["token_ids"] for answer in found["completions"]], found["statistics"], err

    plain, statistics, err = run({})
    assert statistics["chunks_from_host"] is None
    assert "chunks" not in err
    assert "mla_tier" not in (tmp_path / "m.prom").read_text()
    answers, statistics, err = run({"host_size": 8})
    assert answers == plain
    assert statistics["chunks_from_host"] + statistics["chunks_from_pool"] == 2 * 2
    assert statistics["chunks_read"] == 3 * 2
    assert "kept in host memory" in err
    for read in (6, 0):
        answers, statistics, err = run({"file": str(kept), "file_size": 12}, prefetch={"enabled": True})
        assert answers == plain
        assert statistics["chunks_read"] == read
        assert statistics["chunks_damaged"] == 0
    text = (tmp_path / "m.prom").read_text()
    assert 'mla_tier_chunks_total{tier="none"} 0.0' in text
    assert "mla_prefetch_fallbacks_total 0.0" in text
    answers, statistics, err = run({"file": str(kept), "file_size": 12}, chunk_size=128, memory={"pool_size": 10})
    assert "is emptied: it held prompts of another slots" in err
    assert answers == plain
    assert run({"file": str(kept), "keep_file": False})[0] == plain
    assert not kept.exists()
    kept.write_text("mine")
    assert main(["generate", long_model, "hi", "--config", str(config)], commands=(Command("generate", generate),)) == 2
    err = capfd.readouterr().err
    assert f"something else than kept prompts [{kept}]" in err
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    "warmup",
    ["text", [""], [3], [{"messages": []}], [{"messages": [{"role": "system"}]}], [{"prompt": "x"}], ["x"] * 21],
)
def test_what_is_no_beginning(mla: Any, warmup: Any) -> None:
    code, out, err = mla({"warmup": warmup}, "hello")
    assert (code, out) == (2, "")
    assert "mla.yaml:warmup]" in err


def test_a_conversation_to_begin_with_needs_a_chat_template(mla: Any) -> None:
    code, out, err = mla({"warmup": [{"messages": [{"role": "system", "content": "x"}]}]}, "hello", model="source")
    assert (code, out) == (2, "")
    assert "mla.yaml:warmup, entry 1]" in err
