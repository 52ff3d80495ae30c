"""`mla bench` through the program: what is timed, in which order, and what a row says."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.app import Command, main
from mla_cli.benchmark import engines, run
from mla_cli.benchmark.engines import OurEngine, TransformersEngine
from mla_cli.benchmark.report import plot
from mla_cli.commands.bench import bench
from mla_cli.kernels.quantized import LatentQuantizer
from tests.runtime.latent import latent_decoder
from tests.runtime.stand_ins import save_tiny_deepseek, save_tiny_with_tokenizer
from tests.tiny import save_tiny

KEYS = {
    "engine", "kv_dtype", "batch", "context", "ms_per_step", "ms_spread", "tokens_per_s", "ttft_ms", "prefill_s",
    "cache_bytes", "peak_rss_bytes", "roofline_share",
}  # fmt: skip
LATENT = 2 * (16 + 4)  # numbers a token: layers, latent, rotary key
KEYS_AND_VALUES = 2 * 2 * 2 * 8  # numbers a token: layers, keys and values, heads, width
SMALL = ("--batch", "1", "--context", "24", "--new-tokens", "2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A latent model, and one with keys and values whose vocabulary is small, also in bfloat16; 256 positions each."""
    root = tmp_path_factory.mktemp("bench")
    save_tiny_deepseek(root / "latent")
    save_tiny(root / "standard")
    save_tiny_with_tokenizer(root / "bfloat16", dtype=torch.bfloat16)
    return {name: str(root / name) for name in ("latent", "standard", "bfloat16")}


@pytest.fixture
def mla(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `mla bench ...`: exit code, stdout, stderr."""
    monkeypatch.setattr(run, "BANDWIDTH_NUMBERS", 1 << 20)  # half a gigabyte is read otherwise

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["bench", *arguments], commands=(Command("bench", bench, "--batch or --context"),))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def rows_of(result: tuple[int, str, str]) -> list[dict[str, Any]]:
    code, out, err = result
    assert code == 0, err
    return json.loads(out)["rows"]  # type: ignore[no-any-return]


def kinds(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["engine"], row["kv_dtype"]) for row in rows]


def assert_one_line(result: tuple[int, str, str], code: int, *said: str) -> None:
    assert result[:2] == (code, "")
    *_, error = result[2].splitlines()
    assert error.startswith("mla: error: ")
    assert "Traceback" not in result[2]
    for word in said:
        assert word in error, error


def test_rows_say_what_the_contract_names(mla: Any, folders: dict[str, str]) -> None:
    options = ("--batch", "1,3", "--context", "24,70", "--new-tokens", "3", "--json")
    code, out, err = mla(folders["latent"], "--baseline", folders["standard"], *options)
    assert code == 0, err
    assert "timing" in err
    report = json.loads(out)
    rows = report["rows"]
    cached = {
        ("mla", "float32"): 4 * LATENT,
        ("standard", "float32"): 4 * KEYS_AND_VALUES,
        ("transformers", "float32"): 4 * KEYS_AND_VALUES,
        ("transformers", "bfloat16"): 2 * KEYS_AND_VALUES,
    }
    assert kinds(rows) == list(cached) * 4
    assert [(row["batch"], row["context"]) for row in rows[::4]] == [(1, 24), (1, 70), (3, 24), (3, 70)]
    weights = {(each["engine"], each["kv_dtype"]): each["weight_bytes"] for each in report["engines"]}
    assert list(weights) == list(cached)
    for row in rows:
        kind = row["engine"], row["kv_dtype"]
        assert set(row) == KEYS
        assert row["cache_bytes"] == row["batch"] * row["context"] * cached[kind]
        assert row["ms_per_step"] > 0
        assert row["ms_spread"] >= 0
        assert row["tokens_per_s"] == pytest.approx(1000 * row["batch"] / row["ms_per_step"], rel=0.02)
        assert row["ttft_ms"] == pytest.approx(1000 * row["prefill_s"], rel=0.01, abs=0.2)
        assert row["prefill_s"] > 0
        assert row["peak_rss_bytes"] > 10**8  # torch alone
        least = 1000 * (weights[kind] + row["cache_bytes"]) / report["bandwidth_bytes_per_s"]
        assert row["roofline_share"] == pytest.approx(least / row["ms_per_step"], rel=0.05, abs=1e-3)
    assert weights["standard", "float32"] == 2 * weights["transformers", "bfloat16"]
    assert report["threads"] == 1
    assert report["device"] == "cpu"


def test_without_a_baseline_only_the_checkpoint_is_timed(mla: Any, folders: dict[str, str]) -> None:
    code, out, err = mla(folders["latent"], *SMALL, "--json", "--no-prefill")
    (row,) = rows_of((code, out, err))
    assert (row["engine"], row["prefill_s"], row["ttft_ms"]) == ("mla", None, None)
    assert "--baseline" in err
    rows = rows_of(mla(folders["standard"], *SMALL, "--json", "--no-prefill"))
    assert kinds(rows) == [("standard", "float32"), ("transformers", "float32"), ("transformers", "bfloat16")]


def test_only_the_engines_that_are_named_run(mla: Any, folders: dict[str, str]) -> None:
    both = (folders["latent"], "--baseline", folders["standard"], *SMALL, "--no-prefill", "--json", "--engines")
    assert kinds(rows_of(mla(*both, "Standard"))) == [("standard", "float32")]
    assert kinds(rows_of(mla(*both, "standard, mla"))) == [("mla", "float32"), ("standard", "float32")]
    one_type = ("transformers", "--dtype", "bfloat16")
    assert kinds(rows_of(mla(*both, *one_type))) == [("transformers", "bfloat16")]
    alone = rows_of(mla(folders["standard"], *SMALL, "--no-prefill", "--json", "--engines", "standard"))
    assert kinds(alone) == [("standard", "float32")]


def test_an_engine_without_a_model_is_an_error(mla: Any, folders: dict[str, str]) -> None:
    assert_one_line(mla(folders["latent"], *SMALL, "--engines", "standard"), 2, "standard", "--baseline")
    assert_one_line(mla(folders["standard"], *SMALL, "--engines", "mla"), 2, "standard attention", "--engines")


def test_models_that_are_no_checkpoint_and_its_source_are_not_compared(mla: Any, folders: dict[str, str]) -> None:
    twice = mla(folders["standard"], "--baseline", folders["standard"], *SMALL)
    assert_one_line(twice, 2, folders["standard"], "convert")
    assert_one_line(mla(folders["latent"], "--baseline", folders["latent"], *SMALL), 2, "--baseline", "made from")


@pytest.mark.parametrize(("kind", "shown", "size"), [
    ("int8", "int8", 2 * (16 + 4 + 2 * 4)),  # codes, scale, rotary key in bfloat16
    ("fp8_e4m3", "fp8", 2 * (16 + 4 + 2 * 4)),
    ("int4", "int4", 2 * (8 + 2 + 2 * 4)),
    ("bf16", "bfloat16", 2 * LATENT),
    ("auto", "float32", 4 * LATENT),
])  # fmt: skip
def test_latents_are_cached_as_they_are_asked_for(
    mla: Any, folders: dict[str, str], kind: str, shown: str, size: int
) -> None:
    rows = rows_of(mla(folders["latent"], *SMALL, "--no-prefill", "--json", "--kv-dtype", kind))
    assert kinds(rows) == [("mla", shown)]
    assert rows[0]["cache_bytes"] == 24 * size


def test_keys_and_values_are_not_quantised(mla: Any, folders: dict[str, str]) -> None:
    assert_one_line(mla(folders["standard"], *SMALL, "--kv-dtype", "int8"), 2, "--kv-dtype int8")


def test_a_model_in_bfloat16_is_cached_in_bfloat16(mla: Any, folders: dict[str, str]) -> None:
    rows = rows_of(mla(folders["bfloat16"], *SMALL, "--no-prefill", "--json", "--engines", "standard"))
    assert kinds(rows) == [("standard", "bfloat16")]
    assert rows[0]["cache_bytes"] == 24 * 2 * KEYS_AND_VALUES


def test_a_cache_that_the_compiled_kernels_cannot_read_is_named(mla: Any, folders: dict[str, str]) -> None:
    for kind, told in (("int4", True), ("int8", False)):
        code, out, _ = mla(folders["latent"], *SMALL, "--no-prefill", "--json", "--kv-dtype", kind, "--quiet")
        assert code == 0
        notes = " ".join(json.loads(out)["notes"])
        if "without the compiled CPU kernels" in notes and not told:
            pytest.skip("no compiled kernels here")
        assert ("without the compiled CPU kernels" in notes) is told


def test_a_table_for_people_is_all_that_stdout_gets(mla: Any, folders: dict[str, str]) -> None:
    code, out, err = mla(folders["latent"], "--baseline", folders["standard"], *SMALL)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:5] == ["engine", "computes", "cache", "batch", "context"]
    assert [line.split()[:5] for line in lines[2:6]] == [
        [engine, dtype, dtype, "1", "24"]
        for engine, dtype in (
            ("mla", "float32"), ("standard", "float32"), ("transformers", "float32"), ("transformers", "bfloat16"),
        )
    ]  # fmt: skip
    assert lines[2].endswith(" 1.00")  # times mla
    assert "GB/s" in lines[7]
    assert "timing" not in out
    assert "timing" in err
    assert mla(folders["latent"], *SMALL, "--no-prefill", "--quiet")[2] == ""


def test_files_are_written_with_a_plot_of_several_contexts(mla: Any, folders: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    common = (folders["latent"], "--baseline", folders["standard"], "--new-tokens", "2", "--batch", "1", "--no-prefill")
    code, shown, err = mla(*common, "--context", "24,40", "--out", str(out), "--json")
    assert code == 0
    assert sorted(file.name for file in out.iterdir()) == ["mla_bench.json", "mla_bench.md", "mla_bench.png"]
    assert json.loads((out / "mla_bench.json").read_text()) == json.loads(shown)
    markdown = (out / "mla_bench.md").read_text()
    assert "| transformers | bfloat16 | bfloat16 | 1 | 40 |" in markdown
    assert (out / "mla_bench.png").read_bytes().startswith(b"\x89PNG")
    assert "mla_bench.png" in err
    # The plot of an earlier run does not stay beside a report that has none.
    assert mla(*common, "--context", "24", "--out", str(out))[0] == 0
    assert sorted(file.name for file in out.iterdir()) == ["mla_bench.json", "mla_bench.md"]


def test_a_plot_goes_by_context_in_whatever_order_they_were_timed() -> None:
    rows = [
        {"engine": "mla", "kv_dtype": "int8", "batch": batch, "context": context, "ms_per_step": 0.01 * context * batch}
        for batch in (1, 2)
        for context in (64, 32, 128)
    ]
    ordered = plot({"rows": sorted(rows, key=lambda row: row["context"])})
    assert ordered is not None
    assert plot({"rows": rows}) == ordered
    assert plot({"rows": rows[:1]}) is None


@pytest.mark.parametrize("blocked", ["file", "folder"])
def test_an_output_that_cannot_be_written_costs_no_work(mla: Any, tmp_path: Path, blocked: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "mla_bench.json").mkdir(parents=True)
    # The model does not exist: it is never looked for.
    assert_one_line(mla("no-such/model/x", "--out", str(tmp_path / blocked)), 1, blocked, "another")


def test_contexts_beyond_the_positions_are_left_out(mla: Any, folders: dict[str, str]) -> None:
    common = (folders["latent"], "--baseline", folders["standard"], "--new-tokens", "2", "--no-prefill", "--batch", "1")
    code, out, err = mla(*common, "--engines", "mla,standard", "--context", "256,257,24,24", "--json")
    assert [row["context"] for row in rows_of((code, out, err))] == [256, 256, 24, 24]
    assert "257" in err
    assert "256 positions" in err
    assert any("256 positions" in note for note in json.loads(out)["notes"])
    assert_one_line(mla(*common, "--context", "257,1000"), 2, "256 positions", "--context")


@pytest.mark.parametrize(("arguments", "said"), [
    (("--context", "512,34"), ("a context of 34", "32 new tokens", "35")),
    (("--new-tokens", "600"), ("a context of 512", "--new-tokens")),
    (("--new-tokens", "0"), ("--new-tokens",)),
    (("--batch", "0"), ("--batch", "'0'")),
    (("--batch", "1,,2"), ("--batch", "'1,,2'")),
    (("--batch", "-1"), ("--batch", "'-1'")),
    (("--batch", "9" * 5000), ("--batch",)),
    (("--context", "many"), ("--context", "'many'")),
    (("--context", ""), ("--context",)),
    (("--engines", "mla,vllm"), ("--engines", "vllm", "transformers")),
    (("--engines", ""), ("--engines",)),
    (("--kv-dtype", "int3"), ("int3",)),
])  # fmt: skip
def test_a_mistake_costs_no_work(mla: Any, arguments: tuple[str, ...], said: tuple[str, ...]) -> None:
    # The model does not exist: it is never looked for.
    assert_one_line(mla("no-such/model/x", *arguments), 2, *said)


def test_a_model_that_is_not_there(mla: Any, folders: dict[str, str], tmp_path: Path) -> None:
    missing = str(tmp_path / "[v2]" / "model")
    assert_one_line(mla(missing), 2, missing)
    assert_one_line(mla(folders["latent"], "--baseline", missing), 2, missing)


def test_without_transformers_the_others_are_timed(
    mla: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    both = (folders["latent"], "--baseline", folders["standard"], *SMALL, "--no-prefill", "--json")
    code, out, err = mla(*both, "--quiet")
    assert kinds(rows_of((code, out, err))) == [("mla", "float32"), ("standard", "float32")]
    assert err.startswith("warning: transformers is left out: transformers is not installed")
    assert err.count("\n") == 1
    assert "transformers is left out" in " ".join(json.loads(out)["notes"])
    assert_one_line(mla(*both, "--engines", "transformers"), 1, "transformers is not installed", "pip install")


def test_transformers_that_cannot_run_the_model_is_left_out(
    mla: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    class Old:  # as in versions that know no configuration of a cache
        def __init__(self) -> None: ...

    monkeypatch.setattr(transformers, "DynamicCache", Old)
    code, out, err = mla(folders["latent"], "--baseline", folders["standard"], *SMALL, "--no-prefill", "--json")
    assert kinds(rows_of((code, out, err))) == [("mla", "float32"), ("standard", "float32")]
    assert "warning: transformers is left out: " in err


def test_what_does_not_fit_in_memory_leaves_the_rest(
    mla: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = OurEngine.fill

    def too_much(self: OurEngine, batch: int, context: int, room: int) -> None:
        if batch > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        fill(self, batch, context, room)

    monkeypatch.setattr(OurEngine, "fill", too_much)
    common = (folders["latent"], "--context", "24", "--new-tokens", "2", "--no-prefill", "--json")
    code, out, err = mla(*common, "--batch", "2,1")
    assert [row["batch"] for row in rows_of((code, out, err))] == [1]
    assert "warning: batch 2 with a context of 24 is left out: out of memory" in err
    assert_one_line(mla(*common, "--batch", "2"), 1, "out of memory", "--batch or --context")


def test_engines_take_their_steps_in_turn_after_a_warm_up(
    mla: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    for kind, method in ((OurEngine, "step"), (OurEngine, "prefill"), (TransformersEngine, "step"),
                         (TransformersEngine, "prefill")):  # fmt: skip

        def noted(self: Any, *given: Any, real: Any = getattr(kind, method), what: str = method) -> None:
            seen.append((self.name, what))
            real(self, *given)

        monkeypatch.setattr(kind, method, noted)
    both = (folders["latent"], "--baseline", folders["standard"], *SMALL, "--dtype", "float32", "--json")
    rows_of(mla(*both))
    names = ["mla", "standard", "transformers"]
    while seen[0] == ("transformers", "step"):  # whether it runs at all
        del seen[0]
    steps = run.WARM_UP + 2
    assert seen[: 3 * steps] == [(name, "step") for name in names] * steps
    assert seen[3 * steps :] == [(name, "prefill") for name in names] * (1 + run.PREFILL_TURNS)


def test_prompts_that_take_long_are_read_once(
    mla: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, ...]] = []
    prefill = OurEngine.prefill

    def noted(self: OurEngine, prompts: torch.Tensor) -> None:
        read.append(tuple(prompts.shape))
        prefill(self, prompts)

    monkeypatch.setattr(OurEngine, "prefill", noted)
    monkeypatch.setattr(run, "PREFILL_SECONDS", 0.0)
    rows_of(mla(folders["latent"], "--batch", "2", "--context", "100", "--new-tokens", "2", "--json"))
    assert read == [(1, run.WARM_UP_PROMPT), (2, 100)]


def test_the_median_is_what_a_step_takes_and_the_spread_leaves_outliers_out(
    mla: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.001 * i for i in range(1, 21)] + [5.0]
    monkeypatch.setattr(run, "perf_counter", iter([x for s in seconds for x in (0.0, s)]).__next__)
    monkeypatch.setattr(run, "WARM_UP", 0)
    monkeypatch.setattr(run, "measure_bandwidth", lambda device: 1e9)
    options = ("--batch", "2", "--context", "40", "--new-tokens", "21", "--no-prefill", "--json")
    (row,) = rows_of(mla(folders["latent"], *options))
    assert row["ms_per_step"] == 1000 * statistics.median(seconds) == 11
    assert row["ms_spread"] == 19 - 3
    assert row["tokens_per_s"] == round(2 / 0.011, 2)


def test_a_step_of_ours_is_what_decoder_and_cache_compute() -> None:
    for quantizer in (None, LatentQuantizer("int8")):
        decoder = latent_decoder()
        made = []

        def make_cache(*given: Any, decoder: Any = decoder, made: Any = made, **named: Any) -> Any:
            made.append(type(decoder).make_cache(decoder, *given, **named))
            return made[-1]

        decoder.make_cache = make_cache  # type: ignore[method-assign]
        quantizers = None if quantizer is None else (quantizer,) * 2
        engine = OurEngine("mla", decoder, quantizers, None)
        engine.fill(3, 20, 26)
        cache = made[-1]
        room = cache.allocated_bytes()
        per_token = cache.bytes_per_token()
        assert engine.cache_bytes() == 3 * 20 * per_token
        for layer in cache.layers:
            latents = layer.first.read(20, torch.float32)
            assert float(latents.std()) > 0
        copied = cache.select(torch.arange(3))
        tokens = engine.tokens
        for done in range(1, 6):
            engine.step()
            with torch.inference_mode():
                tokens = decoder.logits(decoder(tokens, copied)[:, -1]).argmax(dim=-1, keepdim=True)
            assert torch.equal(engine.tokens, tokens)
            assert cache.host_lengths.tolist() == [20 + done] * 3
            assert engine.cache_bytes() == 3 * (20 + done) * per_token
        for mine, theirs in zip(cache.layers, copied.layers, strict=True):
            for store, other in zip(mine.stores, theirs.stores, strict=True):
                assert torch.equal(store.read(25, torch.float32), other.read(25, torch.float32))
        assert cache.allocated_bytes() == room  # made before, not while a step was timed


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_step_of_transformers_grows_its_cache(tmp_path: Path, family: str) -> None:
    windowed = {"sliding_window": 12} if family == "mistral" else {}
    reference = save_tiny(tmp_path, family, **windowed)
    engine = TransformersEngine(tmp_path, torch.float32, torch.device("cpu"))
    engine.fill(3, 20, 26)
    per_token = 4 * 2 * 2 * (2 * 8 if family != "gpt2" else 32)
    held = [11] * 5 if windowed else [21, 22, 23, 24, 25]  # of a window its last place is the new token's
    for tokens in held:
        engine.step()
        assert engine.cache_bytes() == 3 * tokens * per_token
    tied = family == "gpt2"
    embedding = 0 if tied else reference.get_input_embeddings().weight.nbytes
    assert engine.weight_bytes == sum(p.nbytes for p in reference.parameters()) - embedding


def test_weights_that_a_step_reads_are_counted_in_the_types_they_have(mla: Any, folders: dict[str, str]) -> None:
    common = (folders["bfloat16"], *SMALL, "--no-prefill", "--json", "--engines", "standard")
    sizes = []
    for more in ((), ("--weights", "int8")):
        code, out, err = mla(*common, *more)
        assert code == 0, err
        (engine,) = json.loads(out)["engines"]
        sizes.append(engine["weight_bytes"])
    hidden, inner, vocab = 48, 64, 272
    projections = 2 * (hidden * (48 + 16 + 16) + 48 * hidden + 3 * hidden * inner)
    outputs = 2 * (48 + 16 + 16 + hidden + 2 * inner + hidden)
    norms = 5 * hidden * 4
    assert sizes[0] == 2 * projections + 2 * hidden * vocab + norms
    assert sizes[1] <= projections + 4 * outputs + 2 * hidden * vocab + norms


def test_what_is_filled_is_finite_for_every_cache() -> None:
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        tensor = torch.zeros(500).to(dtype)
        engines.randomize(tensor, torch.Generator().manual_seed(0))
        assert bool(tensor.float().isfinite().all())
        assert len(set(tensor.float().tolist())) > 20
