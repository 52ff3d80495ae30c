"""`mla generate` through the program: what goes where, and which exit code says what."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mla_cli.app import Command, main
from mla_cli.commands.generate import generate
from tests.runtime.stand_ins import CHAT_TEMPLATE, save_tiny_deepseek, save_tiny_with_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (
    "import sys; from mla_cli.app import Command, main; from mla_cli.commands.generate import generate; "
    "sys.exit(main(commands=(Command('generate', generate),)))"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_with_tokenizer(folder)
    return str(folder)


@pytest.fixture
def mla(model: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `mla generate MODEL ...`: exit code, stdout, stderr."""

    def run(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["generate", model, *arguments], commands=(Command("generate", generate),))
        out, err = capfd.readouterr()
        return code, out, err

    return run


def prompt_file(folder: Path, *lines: Any) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


def process(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more.pop("env", {})}
    command = [sys.executable, "-c", PROGRAM, "generate", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=ROOT, **more)


def test_text_goes_to_stdout_and_notes_to_stderr(mla: Any) -> None:
    code, out, err = mla("hello", "--max-new-tokens", "12")
    assert code == 0
    assert out
    assert "float32" in err
    again = mla("hello", "--max-new-tokens", "12", "--quiet")
    assert again == (0, out, "")


def test_json_is_one_object(mla: Any) -> None:
    code, out, err = mla("hello", "--max-new-tokens", "5", "--ignore-eos", "--json", "--quiet")
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["text"] == mla("hello", "--max-new-tokens", "5", "--ignore-eos")[1]
    assert len(value["token_ids"]) == value["completion_tokens"] == 5
    assert value["finish_reason"] == "length"
    assert value["prompt_tokens"] == 6
    assert value["statistics"]["new_tokens"] == 5


def test_stats_are_on_stderr(mla: Any) -> None:
    _, out, err = mla("hello", "--stats", "--quiet", "--max-new-tokens", "4")
    assert "time to first token" in err
    assert "cache bytes per token" in err
    assert out == mla("hello", "--quiet", "--max-new-tokens", "4")[1]


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_stdin_is_the_prompt_without_its_final_newline(mla: Any, ending: bytes) -> None:
    expected = mla("héllo", "--quiet", "--max-new-tokens", "8")
    assert mla("-", "--quiet", "--max-new-tokens", "8", stdin="héllo".encode() + ending) == expected


def test_stdin_that_is_not_utf8_is_named_by_its_offset(mla: Any) -> None:
    code, out, err = mla("-", stdin=b"abc\xff\xfe")
    assert (code, out) == (2, "")
    assert "byte 3" in err


def test_a_surrogate_in_the_prompt_is_an_error_of_one_line(mla: Any) -> None:
    for bad in ("a\ud800b", "a\udcff"):
        code, out, err = mla(bad)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["hi", "--temperature", "-1"], ["hi", "--temperature", "nan"], ["hi", "--top-p", "0"], ["hi", "--top-p", "1.5"],
        ["hi", "--top-k", "-1"], ["hi", "--min-p", "2"], ["hi", "--repetition-penalty", "0"],
        ["hi", "--max-new-tokens", "0"], ["hi", "--max-new-tokens", "-1"], ["hi", "--max-new-tokens", "99999999999"],
        ["hi", "--stop", ""], ["hi", "--max-batch", "0"], ["hi", "--max-context", "0"], ["hi", "--kv-dtype", "int3"],
        ["hi", "--kv-dtype", "int8"], ["hi", "--backend", "triton"], ["hi", "--backend", "warp"],
        ["hi", "--device", "cuda:99"], ["hi", "--system", "be nice"], ["hi", "--out", "x"], [],
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_a_usage_error_that_names_it(mla: Any, arguments: list[str]) -> None:
    code, out, err = mla(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mla: error: ")
    assert err.count("\n") == 1
    if len(arguments) > 1:
        assert arguments[1] in err
    assert "Traceback" not in err


def test_the_help_lists_every_backend(mla: Any) -> None:
    code, out, _ = mla("--help")
    assert code == 0
    assert all(name in out for name in ("auto", "triton", "cpu", "reference"))
    assert all(name in out for name in ("Input", "Method", "Output", "Runtime", "--kv-dtype", "--stop"))


@pytest.mark.parametrize(
    "arguments", [["--temperature", "1e-8"], ["--top-k", "9999"], ["--max-new-tokens", "1000000000"]]
)
def test_extreme_values_that_are_allowed(mla: Any, arguments: list[str]) -> None:
    assert mla("hi", *arguments, "--stop", "e")[0] == 0


def test_a_prompt_over_the_limit_and_a_cut(mla: Any) -> None:
    code, out, err = mla("x" * 300, "--quiet")
    assert (code, out) == (2, "")
    assert "301" in err
    assert "256" in err
    code, out, err = mla("hi", "--quiet", "--max-context", "8", "--max-new-tokens", "20", "--ignore-eos")
    assert code == 0
    assert "context limit of 8" in err
    value = json.loads(mla("hi", "--max-context", "8", "--json", "--ignore-eos")[1])
    assert (value["finish_reason"], value["completion_tokens"]) == ("length", 5)
    assert "8 tokens" in value["note"]


def test_backends_and_cache_types_agree(mla: Any) -> None:
    expected = mla("hello", "--quiet", "--max-new-tokens", "10")
    for arguments in (["--backend", "cpu"], ["--backend", "reference"], ["--dtype", "float32"], ["--threads", "1"]):
        assert mla("hello", "--quiet", "--max-new-tokens", "10", *arguments) == expected
    full, half = (
        json.loads(mla("hello", "--json", "--kv-dtype", kind)[1])["statistics"]["cache_bytes_per_token"]
        for kind in ("auto", "bf16")
    )
    assert half * 2 == full


def test_a_prompt_file_gives_json_lines_in_its_order(mla: Any, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a long one to begin with", "max_new_tokens": 30, "id": "first"},
        {"prompt": "b", "max_new_tokens": 1},
        "",
        {"messages": [{"role": "user", "content": "hi"}], "max_new_tokens": 3, "temperature": 0.8, "seed": 7},
        {"prompt": "stop", "stop": ["e"], "ignore_eos": True},
    ]
    code, out, _ = mla("--prompts", prompt_file(tmp_path, *lines), "--max-batch", "2", "--max-new-tokens", "4")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(a["index"], a["line"]) for a in answers] == [(0, 1), (1, 2), (2, 4), (3, 5)]
    assert answers[0]["id"] == "first"
    assert answers[1]["completion_tokens"] == 1
    assert "e" not in answers[3]["text"]
    assert answers[1]["text"] == mla("b", "--max-new-tokens", "1")[1]


BAD_LINES = [
    "{broken", "[1]", '"text"', {"text": "x"}, {"promt": "x"}, {"prompt": 1}, {"prompt": "x", "messages": []},
    {"messages": "x"}, {"messages": []}, {"messages": [{"role": "user"}]}, {"prompt": "x", "top_p": 0},
    {"prompt": "x", "max_new_tokens": "9"}, {"prompt": "x", "stop": [1]}, {"prompt": "x" * 300}, {"prompt": "\ud800"},
    '{"prompt": "x", "temperature": NaN}',
]  # fmt: skip


def test_bad_lines_are_reported_by_number_and_the_others_answered(mla: Any, tmp_path: Path) -> None:
    lines = [x for bad in BAD_LINES for x in (bad, {"prompt": "good", "max_new_tokens": 2})]
    code, out, err = mla("--prompts", prompt_file(tmp_path, *lines), "--quiet")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert len(answers) == len(lines)
    assert [a for a in answers[0::2] if "error" not in a or "text" in a] == []
    assert all(a["completion_tokens"] for a in answers[1::2])
    for number in range(1, len(lines), 2):
        assert f"prompts.jsonl:{number}: " in err
    assert f"{len(BAD_LINES)} of {len(lines)} prompts" in err
    assert "did you mean 'prompt'?" in answers[8]["error"]
    assert "Traceback" not in err


def test_a_file_of_bytes_that_are_not_utf8(mla: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a\xff"}\n\xef\xbb\xbf{"prompt": "b", "max_new_tokens": 1}\n')
    code, out, _ = mla("--prompts", str(file))
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 1
    assert "byte 13" in first["error"]
    assert "text" in second


def test_an_empty_or_missing_prompt_file(mla: Any, tmp_path: Path) -> None:
    code, out, err = mla("--prompts", prompt_file(tmp_path))
    assert (code, out) == (2, "")
    assert "no prompts" in err
    assert mla("--prompts", str(tmp_path / "none.jsonl"))[0] == 2


def test_results_go_to_a_file_that_is_not_overwritten(mla: Any, tmp_path: Path) -> None:
    file, out_file = prompt_file(tmp_path, {"prompt": "ab"}, {"prompt": "c"}), tmp_path / "out.jsonl"
    code, out, _ = mla("--prompts", file, "--max-new-tokens", "3", "--out", str(out_file))
    assert (code, out) == (0, "")
    assert len(out_file.read_text().splitlines()) == 2
    code, _, err = mla("--prompts", file, "--out", str(out_file))
    assert code == 1
    assert "--force" in err
    assert mla("--prompts", file, "--max-new-tokens", "3", "--out", str(out_file), "--force")[0] == 0
    assert mla("--prompts", file, "--out", str(tmp_path / "no" / "out.jsonl"))[0] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_results_that_cannot_be_written_cost_no_work(mla: Any, tmp_path: Path) -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc, where nobody can create anything, root neither")
    code, out, err = mla("--prompts", prompt_file(tmp_path, {"prompt": "ab"}), "--out", "/proc/out.jsonl")
    assert (code, out) == (1, "")
    assert "cannot be written to" in err
    assert "running on" not in err


def test_a_prompt_file_as_one_object(mla: Any, tmp_path: Path) -> None:
    code, out, _ = mla("--prompts", prompt_file(tmp_path, {"prompt": "ab"}, {"promt": 1}), "--json")
    value = json.loads(out)
    assert code == 1
    assert [sorted(a)[0] for a in value["completions"]] == ["completion_tokens", "error"]


def test_one_turn_of_a_conversation(mla: Any, tmp_path: Path) -> None:
    import jinja2

    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    text = jinja2.Template(CHAT_TEMPLATE).render(messages=messages, bos_token="", add_generation_prompt=True)
    expected = mla(text, "--quiet", "--max-new-tokens", "6")
    assert mla("hi", "--chat", "--system", "S", "--quiet", "--max-new-tokens", "6") == expected
    assert mla("--chat", "--system", "S", "--quiet", "--max-new-tokens", "6", stdin=b"hi\n") == expected
    line = prompt_file(tmp_path, {"messages": messages, "max_new_tokens": 6}, {"prompt": "hi", "max_new_tokens": 6})
    answers = mla("--prompts", line, "--chat", "--system", "S", "--quiet")[1].splitlines()
    assert [json.loads(answer)["text"] for answer in answers] == [expected[1]] * 2
    value = json.loads(mla("hi", "--chat", "--json")[1])
    assert value["prompt_tokens"] == 1 + len("user:hi\nassistant:")  # one BOS, not two


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_a_conversation_at_the_terminal(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(b"hi\n\n" + b"x" * 300 + b"\nand\n")))
    code, out, err = mla("--chat", "--max-new-tokens", "3", "--ignore-eos", "--quiet")
    assert code == 0
    assert out.count("> ") == 5
    assert "context" in err  # the long turn failed, and the conversation went on


def test_a_model_without_a_chat_template_is_known_before_anybody_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_with_tokenizer(tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    del known["chat_template"]
    settings.write_text(json.dumps(known))
    file = prompt_file(tmp_path, {"prompt": "hi"}, {"prompt": "ho"})
    capfd.readouterr()
    for more in ([], ["hi"], ["--prompts", file]):
        monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(b"hi\n")))
        code = main(["generate", str(tmp_path / "model"), "--chat", *more], commands=(Command("generate", generate),))
        out, err = capfd.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "no chat template" in err


def test_a_sampled_answer_depends_on_the_seed(mla: Any) -> None:
    texts = [mla("hi", "--quiet", "--temperature", "1.5", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_no_locale_breaks_prompt_or_output(mla: Any, model: str, tmp_path: Path) -> None:
    common = ["👍é", "--temperature", "3", "--max-new-tokens", "40", "--ignore-eos", "--quiet"]
    text = mla(*common)[1]
    assert not text.isascii()
    lines = prompt_file(tmp_path, {"prompt": "a", "id": "é👍", "max_new_tokens": 1})
    program = (
        "import sys; from mla_cli.app import Command, main; from mla_cli.commands.generate import generate\n"
        "commands, (model, lines, *rest) = (Command('generate', generate),), sys.argv[1:]\n"
        "for arguments in (rest, [*rest, '--json'], ['--prompts', lines]):\n"
        "    assert main(['generate', model, *arguments], commands=commands) == 0; print('\\0', end='')"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, model, lines, *common]
    run = subprocess.run(command, capture_output=True, env=env, cwd=ROOT)
    assert (run.returncode, b"Error" in run.stderr) == (0, False), run.stderr
    plain, as_object, as_line = run.stdout.decode("ascii").split("\0")[:3]
    assert plain == text.encode("ascii", "backslashreplace").decode()
    assert json.loads(as_object)["text"] == text
    assert json.loads(as_line)["id"] == "é👍"


@pytest.mark.parametrize("to_file", [False, True])
def test_an_interruption_leaves_nothing_half_done(tmp_path: Path, to_file: bool) -> None:
    folder = tmp_path / "model"
    save_tiny_with_tokenizer(folder, max_position_embeddings=50_000, num_hidden_layers=8)
    file = prompt_file(tmp_path, *[{"prompt": "x", "max_new_tokens": 40_000, "ignore_eos": True}] * 3)
    common = ["x", "--max-new-tokens", "40000", "--ignore-eos"]
    extra = ["--prompts", file, "--out", str(tmp_path / "out.jsonl")] if to_file else common
    run = process(str(folder), *extra)
    assert run.stderr is not None
    assert run.stderr.readline()  # the note that comes before the first token
    time.sleep(1.0)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert b"Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "prompts.jsonl"]


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny_with_tokenizer(folder, max_position_embeddings=50_000)
    run = process(str(folder), "x", "--max-new-tokens", "40000", "--ignore-eos", "--temperature", "1", "--quiet")
    assert run.stdout is not None
    assert run.stdout.read(1)
    run.stdout.close()
    assert run.stderr is not None
    assert run.stderr.read() == b""
    assert run.wait(timeout=60) == 141


def test_nothing_heavy_is_imported_for_the_help() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'jinja2'}"
    code = f"import sys; import mla_cli.commands.generate; print({heavy} & set(sys.modules) or 'none')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True).stdout == b"none\n"


def test_a_terminal_gets_a_closing_newline(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mla("hello", "--quiet", "--max-new-tokens", "6")[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert mla("hello", "--quiet", "--max-new-tokens", "6")[1] == expected + "\n"


def test_a_latent_checkpoint_with_every_cache_type(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mla_cli.checkpoint.kv_cache")
    save_tiny_deepseek(tmp_path)
    sizes, texts = {}, {}
    for kind in ("auto", "bf16", "int8", "fp8", "fp8_e4m3", "int4"):
        arguments = ["generate", str(tmp_path), "hello", "--json", "--kv-dtype", kind, "--max-new-tokens", "8"]
        assert main(arguments, commands=(Command("generate", generate),)) == 0
        out, err = capfd.readouterr()
        value = json.loads(out)
        sizes[kind], texts[kind] = value["statistics"]["cache_bytes_per_token"], value["text"]
        if "without the compiled CPU kernels" not in err:
            assert ("PyTorch computes steps on this cache" in err) == (kind == "int4")
    assert sizes == {"auto": 2 * 4 * 20, "bf16": 2 * 2 * 20, "int8": 2 * 28, "fp8": 2 * 28, "fp8_e4m3": 2 * 28,
                     "int4": 2 * (8 + 2 + 8)}  # fmt: skip
    assert texts["fp8"] == texts["fp8_e4m3"]


def test_what_a_checkpoint_was_calibrated_for_is_what_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from mla_cli.checkpoint.kv_cache import KEY, KvScheme, LayerRange, stored_scheme

    save_tiny_deepseek(tmp_path)
    layers = (LayerRange("int8", 4.0, 4.0, 2.0), LayerRange("int8", 4.0, 4.0, 2.0))
    sizes, drifts = {}, {}
    for name, scheme in (
        ("static", KvScheme("int8", "static", layers, 8, 256, "a", every=20)),
        ("page", KvScheme("int8", "page", layers, 8, 256, "a")),
        ("rope", KvScheme("int8", "static", layers, 8, 256, "a", rope_dtype="fp8")),
        ("part", KvScheme("int8", "static", (layers[0], LayerRange("bf16", None, 4.0)), 8, 256, "a")),
    ):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, KEY: stored_scheme(scheme)}))
        arguments = ["generate", str(tmp_path), "hello", "--json", "--stats", "--max-new-tokens", "60", "--ignore-eos"]
        assert main(arguments, commands=(Command("generate", generate),)) == 0
        out, err = capfd.readouterr()
        statistics = json.loads(out)["statistics"]
        sizes[name], drifts[name] = statistics["cache_bytes_per_token"], statistics["latent_range_drift"]
        assert ("latent range drift" in err) == (name != "page")
        assert "PyTorch computes steps on this cache" in err or "without the compiled CPU kernels" in err
    assert sizes == {"static": 2 * 24, "page": 2 * 24 + 1, "rope": 2 * (16 + 4 + 4), "part": 24 + 4 * 20}
    assert drifts["page"] is None
    assert drifts["static"] > 0


def test_results_never_replace_the_prompts(mla: Any, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, {"prompt": "abc", "max_new_tokens": 2})
    before = Path(prompts).read_bytes()
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for out in (prompts, str(tmp_path / "link.jsonl")):
        code, _, err = mla("--prompts", prompts, "--out", out, "--force")
        assert (code, Path(prompts).read_bytes()) == (2, before)
        assert "prompts" in err
