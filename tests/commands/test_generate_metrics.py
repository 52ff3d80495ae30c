"""`mla generate --metrics`, `--stats`, `--watch` and alerts: what is counted, where it goes, and when something is said."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mla_cli.app import Command, main
from mla_cli.commands.generate import generate
from tests.commands.test_generate import PROGRAM, ROOT, process, prompt_file
from tests.runtime.stand_ins import save_tiny_with_tokenizer

LONG = {"max_new_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_with_tokenizer(folder, max_position_embeddings=2048)
    return str(folder)


@pytest.fixture
def mla(model: str, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `mla generate MODEL ...`: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["generate", model, *arguments], commands=(Command("generate", generate),))
        out, err = capfd.readouterr()
        return code, out, err

    return run


Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(text: str) -> Samples:
    """Values by name and labels, read by Prometheus's own parser."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found[sample.name, tuple(sample.labels.values())] = sample.value
    return found


def test_the_figures_are_those_of_the_run(mla: Any, tmp_path: Path) -> None:
    shared = "s" * 600  # 601 tokens, of which the first 576 are read once
    lines = [{"prompt": shared + str(i), "max_new_tokens": 3 + i, "ignore_eos": True} for i in range(4)]
    prompts = prompt_file(tmp_path, *lines, {"prompt": "x" * 3000})
    file, out = tmp_path / "mla.prom", tmp_path / "out.jsonl"
    code, _, err = mla("--prompts", prompts, "--out", str(out), "--metrics", str(file), "--stats", "--max-batch", "2")
    assert code == 1
    found = samples(file.read_text())
    answers = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    new = sum(answer.get("completion_tokens", 0) for answer in answers)
    assert new == 3 + 4 + 5 + 6
    assert found["mla_requests_total", ("completed",)] == 4
    assert found["mla_requests_total", ("failed",)] == 1
    assert found["mla_generated_tokens_total", ()] == new
    assert found["mla_prompt_tokens_total", ("prefix_cache",)] == 3 * 576
    assert found["mla_prompt_tokens_total", ("read",)] == 4 * 602 - 3 * 576
    assert found["mla_admissions_total", ()] == 4
    assert found["mla_prefix_hits_total", ()] == 2  # the first two come in together, before anything is kept
    assert found["mla_preemptions_total", ()] == 0
    assert found["mla_cache_pages", ("used",)] == found["mla_requests_running", ()] == 0
    assert found["mla_cache_pages", ("kept",)] == 576 // 64
    assert found["mla_cache_pages_limit", ()] == 2 * 2048 // 64
    for name, count in (("mla_time_to_first_token", 4), ("mla_time_per_token", new - 4)):
        buckets = [value for (key, _), value in found.items() if key == f"{name}_seconds_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"{name}_seconds_count", ()] == count
        least, middle, most = (found[f"{name}_quantile_seconds", (share,)] for share in ("0.5", "0.9", "0.99"))
        assert 0 < least <= middle <= most <= found[f"{name}_seconds_sum", ()]
    for shown in ("requests answered", "time to first token, 99 %", "cache in use at most", "fragmentation at most"):
        assert shown in err
    assert re.search(r"requests that found a beginning\s+50.0%", err)
    assert [p.name for p in tmp_path.iterdir() if "prom" in p.name and p.suffix != ".jsonl"] == ["mla.prom"]


def test_requests_that_were_pushed_out_are_counted(mla: Any, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, *[{"prompt": "p", "max_new_tokens": 300, "ignore_eos": True}] * 3)
    file = tmp_path / "mla.prom"
    options = ["--max-context", "320", "--pool-size", "2", "--quiet", "--metrics", str(file)]
    assert mla("--prompts", prompts, *options)[0] == 0
    found = samples(file.read_text())
    assert found["mla_preemptions_total", ()] > 0
    assert found["mla_admissions_total", ()] == 3 + found["mla_preemptions_total", ()]
    assert found["mla_requests_total", ("completed",)] == 3
    assert found["mla_cache_pages_limit", ()] == 8


def read_until(run: Any, pattern: str) -> re.Match[str]:
    """The first line of a program's stderr that matches."""
    for line in run.stderr:
        match = re.search(pattern, line.decode())
        if match:
            return match
    raise AssertionError(f"nothing said {pattern}")


@pytest.mark.parametrize("address", [":0", "localhost:0"])
def test_figures_are_served_while_it_runs(model: str, tmp_path: Path, address: str) -> None:
    prompts = prompt_file(tmp_path, *[{"prompt": str(i), **LONG} for i in range(300)])
    run = process(model, "--prompts", prompts, "--out", str(tmp_path / "out.jsonl"), "--metrics", address)
    try:
        url = read_until(run, r"metrics at (http://\S+/metrics)")[1]
        assert re.match(r"http://(127\.0\.0\.1|localhost):\d+/", url)
        tokens, until = 0.0, time.monotonic() + 60
        found: Samples = {}
        while (tokens < 10 or ("mla_requests_running", ()) not in found) and time.monotonic() < until:
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.headers["content-type"].startswith("text/plain")
                found = samples(answer.read().decode())
            tokens = found.get(("mla_generated_tokens_total", ()), 0)
            time.sleep(0.05)
        assert tokens >= 10
        assert found["mla_requests_running", ()] > 0
        assert 0 < found["mla_cache_use_ratio", ()] <= 1
        assert 0 < found["mla_cached_tokens", ()] <= 64 * found["mla_cache_pages", ("used",)]
    finally:
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert b"Traceback" not in err


def test_a_port_that_is_taken_costs_no_work(mla: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = mla("hello", "--metrics", f":{taken.getsockname()[1]}")
    assert (code, out) == (1, "")
    assert "cannot listen" in err
    assert "running on" not in err
    assert mla("hello", "--metrics", ":99999")[0] == 2


def test_a_file_that_is_no_metrics_is_not_replaced(mla: Any, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, {"prompt": "a", "max_new_tokens": 1})
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for file, code in ((mine, 1), (tmp_path, 1), (tmp_path / "no" / "x.prom", 1), (Path(prompts), 2)):
        more = ["--force"] if file == Path(prompts) else []
        found, out, err = mla("--prompts", prompts, "--metrics", str(file), *more)
        assert (found, out) == (code, "")
        assert err.startswith("mla: error: ")
        assert "running on" not in err
    assert mla("--prompts", prompts, "--out", str(tmp_path / "o"), "--metrics", str(tmp_path / "o"))[0] == 2
    assert mine.read_text() == "mine"
    for _ in range(2):  # the second time it is a file of metrics
        assert mla("--prompts", prompts, "--metrics", str(tmp_path / "x.prom"))[0] == 0
    assert mla("--prompts", prompts, "--metrics", str(mine), "--force")[0] == 0
    assert samples(mine.read_text())["mla_requests_total", ("completed",)] == 1


def test_an_alert_is_said_once_and_shown(mla: Any, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, *[{"prompt": "a", "max_new_tokens": 100, "ignore_eos": True}] * 6)
    config, file = tmp_path / "mla.yaml", tmp_path / "x.prom"
    arguments = ["--prompts", prompts, "--config", str(config), "--max-batch", "2", "--quiet"]
    config.write_text("metrics: {alerts: {ttft_p99_ms: 0.001, cache_use: 0.001}}")
    for more in ([], ["--metrics", str(file)]):
        code, _, err = mla(*arguments, *more)
        assert code == 0
        assert [line.count("time to the first token") for line in err.splitlines()].count(1) == 1
        assert err.count("the share of the cache in use") == 1
    found = samples(file.read_text())
    assert found["mla_alert", ("ttft_p99_ms",)] == 1
    assert found["mla_alert", ("cache_use",)] == 0  # at the end nothing runs any more
    config.write_text(f"metrics: {{to: '{file}', alerts: {{ttft_p99_ms: .inf, cache_use: 1}}}}")
    assert mla(*arguments)[2] == ""
    assert samples(file.read_text())["mla_alert", ("ttft_p99_ms",)] == 0
    config.write_text("metrics: {alerts: {ttft_p99_ms: -1}}")
    code, _, err = mla(*arguments)
    assert code == 2
    assert "mla.yaml:metrics.alerts.ttft_p99_ms" in err
    config.write_text("")
    assert "beyond" not in mla(*arguments, "--stats")[2]


def test_metrics_that_cannot_be_written_any_more_cost_no_answer(
    mla: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompt_file(tmp_path, *[{"prompt": "a", "max_new_tokens": 2}] * 3)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mla_cli.runtime.prometheus.write_to_textfile", full)
    code, out, err = mla("--prompts", prompts, "--metrics", str(tmp_path / "x.prom"), "--quiet")
    assert (code, len(out.splitlines())) == (0, 3)
    assert err.count("no more metrics are written") == 1


def test_an_interruption_leaves_the_last_figures(model: str, tmp_path: Path) -> None:
    file = tmp_path / "x.prom"
    prompts = prompt_file(tmp_path, *[{"prompt": str(i), **LONG} for i in range(300)])
    run = process(model, "--prompts", prompts, "--out", str(tmp_path / "out.jsonl"), "--metrics", str(file))
    until = time.monotonic() + 60
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    assert samples(file.read_text())["mla_generated_tokens_total", ()] > 0
    assert [p for p in tmp_path.iterdir() if p.name.startswith("x.prom.")] == []


def test_energy_where_the_machine_counts_it(mla: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("1000000000\n")
    (zone / "energy_uj").write_text("5000000\n")
    monkeypatch.setattr("mla_cli.runtime.energy.POWERCAP", tmp_path / "powercap")
    file = tmp_path / "x.prom"
    original = Path.read_text
    reads = 0

    def counting(path: Path, *more: Any, **options: Any) -> str:
        nonlocal reads
        if path.name == "energy_uj":
            reads += 1
            return str(5_000_000 + 3_000_000 * reads)
        return original(path, *more, **options)

    monkeypatch.setattr(Path, "read_text", counting)
    arguments = ["hello", "--max-new-tokens", "6", "--ignore-eos", "--quiet", "--stats", "--metrics", str(file)]
    code, _, err = mla(*arguments)
    monkeypatch.undo()
    joules = samples(file.read_text())["mla_energy_joules_total", ()]
    assert code == 0
    assert joules == 3.0 * (reads - 1)
    assert re.search(rf"joules per new token\s+{joules / 6:.2f}", err)


def test_no_view_where_nobody_looks(mla: Any, tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, {"prompt": "a", "max_new_tokens": 2})
    assert mla("--prompts", prompts, "--watch", "--quiet")[::2] == (0, "")
    code, out, err = mla("hello", "--watch")
    assert (code, out) == (2, "")
    assert "--watch" in err


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo terminals")
def test_a_view_at_the_terminal(model: str, tmp_path: Path) -> None:
    lines = [{"prompt": str(i), "max_new_tokens": 500, "ignore_eos": True} for i in range(10)]
    prompts = prompt_file(tmp_path, *lines, "{bad")
    terminal, end = os.openpty()
    out = tmp_path / "out.jsonl"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", PROGRAM, "generate", model, "--prompts", prompts, "--out", str(out), "--watch"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env=env, cwd=ROOT)
    os.close(end)
    seen = b""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    assert run.wait(timeout=60) == 1
    assert run.stdout is not None
    assert run.stdout.read() == b""
    text = seen.decode()
    for shown in ("running", "waiting", "tokens/s", "cache in use", "fragmentation", "prompts.jsonl:11"):
        assert shown in text
    assert "answering prompts" not in text  # the view is in its place
    assert out.read_text().count('"index"') == 11
    os.close(terminal)


def test_a_view_of_results_that_go_to_the_same_terminal(
    mla: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompt_file(tmp_path, {"prompt": "a", "max_new_tokens": 2})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = mla("--prompts", prompts, "--watch")
    assert code == 0
    assert json.loads(out.splitlines()[0])["completion_tokens"]
    assert "use --out" in err


def test_turns_of_a_conversation_add_up(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(b"x" * 600 + b"\nand\nthen\n")))
    code, _, err = mla("--chat", "--max-new-tokens", "3", "--ignore-eos", "--quiet", "--stats")
    assert code == 0
    assert re.search(r"prompt tokens not read again\s+1,2\d\d", err)  # most of it in each turn but the first
    assert re.search(r"requests answered\s+3", err)


def test_figures_of_a_server(model: str) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    run = process(model, "--serve", ":0", "--metrics", ":0", "--watch", "--max-batch", "2")
    try:
        figures = read_until(run, r"metrics at (http://\S+/metrics)")[1]
        name, address = read_until(run, r"serving (\S+) at (http://\S+)/v1").groups()

        def now() -> Samples:
            with urllib.request.urlopen(figures, timeout=10) as answer:
                return samples(answer.read().decode())

        def ask(**body: Any) -> Any:
            data = json.dumps({"model": name, "prompt": "hello", "temperature": 0, **body}).encode()
            request = urllib.request.Request(f"{address}/v1/completions", data, {"content-type": "application/json"})
            return urllib.request.urlopen(request, timeout=60)

        with ask(max_tokens=5) as answer:
            tokens = json.load(answer)["usage"]["completion_tokens"]
        found = now()
        assert found["mla_requests_total", ("completed",)] == 1
        assert found["mla_generated_tokens_total", ()] == tokens
        # One that goes away in the middle of its answer leaves nothing that seems to run.
        with ask(max_tokens=2000, stream=True) as answer:
            assert answer.readline()
        until = time.monotonic() + 60
        while (found := now())["mla_requests_running", ()] and time.monotonic() < until:
            time.sleep(0.1)
        assert found["mla_requests_running", ()] == found["mla_cache_pages", ("used",)] == 0
    finally:
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert b"Traceback" not in err
