"""The program around the commands: help, exit codes, and one line for every failure (cases CL-01 to CL-09)."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mla_cli import __version__, console
from mla_cli.app import COMMANDS, Command, main
from mla_cli.commands import options
from mla_cli.errors import InputError, OutputError, QualityError, UsageError

SECRET = "hf_" + "S3cret" * 5


def sample(
    src: options.Source,
    samples: options.Samples = options.DEFAULT_SAMPLES,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    seed: options.Seed = options.DEFAULT_SEED,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Fail or print as asked."""
    del samples, threads, seed, debug
    failures = {
        "input": InputError("no such folder", where="/data/[/v2]/a  b", fix="give a folder"),
        "output": OutputError("it exists", where="out\nput"),
        "quality": QualityError("the drop is 3.1 %"),
        "key": KeyError("layers.0"),
        "memory": MemoryError(),
        "allocator": RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
        "full": OSError(errno.ENOSPC, "No space left on device", "/out/[x]/model.safetensors"),
        "secret": ValueError(f"401 for token {SECRET}"),
        "interrupt": KeyboardInterrupt(),
    }
    if src == "cuda":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")
    if src in failures:
        raise failures[src]
    if as_json:
        console.result_json({"text": src})
    else:
        console.result(f"{src} {device} {dtype}")


SAMPLE = (Command("sample", sample, memory_options="--samples and --seq-len", hidden=True),)

PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_app import SAMPLE
from mla_cli.app import main
"""


def run(*arguments: str) -> int:
    return main(list(arguments), commands=SAMPLE)


def program(code: str, *, shell: str | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `code` after the imports of PROGRAM in a new process; `shell` may pipe it (`{python}` is the process)."""
    script = PROGRAM + textwrap.dedent(code)
    env = {**os.environ, **environment, "MLA_TEST_SCRIPT": script}
    command = f'"{sys.executable}" -c "$MLA_TEST_SCRIPT"'
    line = shell.replace("{python}", command) if shell else command
    return subprocess.run(["bash", "-c", line], env=env, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["sample", "--help"]])
def test_help_exits_zero_on_stdout(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    out, err = capsys.readouterr()
    assert "Usage: mla" in out
    assert err == ""


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    run("sample", "--help")
    out = capsys.readouterr().out
    places = [out.index(f"\n{group}:") for group in ("Input", "Budget", "Output", "Runtime")]
    assert places == sorted(places)
    assert out.index("SRC", places[0]) < places[1] < out.index("--samples") < places[2] < out.index("--json")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"mla {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nope"], "'nope'"),
        (["sample"], "SRC"),
        (["sample", "x", "--nope"], "--nope"),
        (["sample", "x", "--samples", "many"], "--samples"),
        (["sample", "x", "--samples", "0"], "--samples"),
        (["sample", "x", "--device", "gpu"], "gpu"),
        (["sample", "x", "--device", "cuda:x"], "cuda:x"),
        (["sample", "x", "--dtype", "int3"], "int3"),
        (["sample", "x", "--threads", "0"], "--threads"),
        (["sample", "x", "--seed", "-1"], "--seed"),
    ],
)
def test_usage_errors_are_one_line_and_exit_two(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("mla: error: ")
    assert named in err
    assert "--help'" in err


def test_values_are_checked_and_normalised(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "[bold]x[/v2]", "--device", "CUDA:1", "--dtype", "bf16") == 0
    assert capsys.readouterr().out == "[bold]x[/v2] cuda:1 bfloat16\n"


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("input", 2, "mla: error: no such folder [/data/[/v2]/a  b] -> give a folder\n"),
        ("output", 1, "mla: error: it exists [out\\nput]\n"),
        ("quality", 3, "mla: error: the drop is 3.1 %\n"),
        ("memory", 1, "mla: error: out of memory: no message -> lower --samples and --seq-len\n"),
        (
            "cuda",
            1,
            "mla: error: out of memory: CUDA out of memory. Tried to allocate 2 GiB. -> "
            "lower --samples and --seq-len\n",
        ),
        (
            "full",
            1,
            "mla: error: No space left on device [/out/[x]/model.safetensors] -> "
            "free some space or write to another disk\n",
        ),
        (
            "key",
            1,
            "mla: error: internal error: KeyError: 'layers.0' -> rerun with --debug and report what it prints\n",
        ),
        ("interrupt", 130, "mla: interrupted\n"),
    ],
)
def test_failures_are_one_line(kind: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", kind) == code
    assert capsys.readouterr() == ("", message)


def test_memory_of_the_cpu_allocator(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "allocator") == 1
    assert "lower --samples and --seq-len" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "sample", "key"], ["sample", "key", "--debug"]])
def test_debug_shows_the_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("mla: error: internal error")
    assert run("sample", "key") == 1
    assert "Traceback" not in capsys.readouterr().err


def test_debug_by_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLA_DEBUG", "1")
    run("sample", "input")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["sample", "secret"], ["--debug", "sample", "secret"]])
def test_secrets_are_never_shown(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*arguments)
    assert SECRET not in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "of-another-shape")
    console.warn("the token of-another-shape was refused")
    assert capsys.readouterr().err == "warning: the token *** was refused\n"


def test_a_listing_into_a_closed_pipe_ends_quietly() -> None:
    # 141 is what the shell reports for any program that SIGPIPE ended.
    endless = """
    import mla_cli.console as console
    def many() -> None:
        for number in range(10**6): console.result(str(number))
    from mla_cli.app import Command
    sys.exit(main(["many"], commands=[Command("many", many)]))
    """
    done = program(endless, shell="set -o pipefail; {python} | head -1")
    assert (done.returncode, done.stdout, done.stderr) == (141, b"0\n", b"")
    done = program(endless.replace("console.result", "print"), shell="set -o pipefail; {python} | head -1")
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_into_a_closed_pipe_ends_quietly(unbuffered: str) -> None:
    done = program(
        "import time; time.sleep(0.2); sys.exit(main(['--help']))",
        shell="set -o pipefail; {python} | true",
        PYTHONUNBUFFERED=unbuffered,
    )
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_error_into_a_closed_pipe_ends_quietly() -> None:
    done = program(
        "import time; time.sleep(0.2); sys.exit(main(['nope']))", shell="set -o pipefail; {python} 2>&1 | true"
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, b"", b"")


def test_text_prints_in_the_c_locale() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = program(r"sys.exit(main(['sample', '\U0001f600\xe9\udcff'], commands=SAMPLE))", **plain)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"\U0001f600\xe9\udcff")
    done = program(r"sys.exit(main(['sample', '\U0001f600\xe9\udcff', '--json'], commands=SAMPLE))", **plain)
    assert json.loads(done.stdout) == {"text": "\U0001f600\xe9\udcff"}
    done = program(r"sys.exit(main(['\xe9', '\u2014']))", **{**plain, "PYTHONIOENCODING": "ascii:replace"})
    assert done.returncode == 2


def test_a_log_gets_a_line_a_phase_and_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def work(quiet: options.Quiet = False) -> None:
        console.set_quiet(quiet)
        for name in ("reading", "reading", "writing"):
            assert list(console.progress(range(3), name)) == [0, 1, 2]
        with console.progress_bar("checking", 2, "layer") as bar:
            bar.update()

    commands = [Command("work", work)]
    assert main(["work"], commands=commands) == 0
    assert capsys.readouterr() == ("", "reading\nwriting\nchecking\n")
    assert main(["work", "--quiet"], commands=commands) == 0
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_bars_and_no_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    console.set_quiet(False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(console.progress(range(3), "reading")) == [0, 1, 2]
    err = capsys.readouterr().err
    assert "reading: " in err
    assert "\n" not in err


def test_json_with_a_lone_surrogate_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "\udcff", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"text": "\udcff"}


def test_control_c_exits_130() -> None:
    code = """
    import time
    from mla_cli.app import Command
    def wait() -> None:
        print("ready", flush=True)
        time.sleep(30)
    sys.exit(main(["wait"], commands=[Command("wait", wait)]))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"mla: interrupted\n")


def test_control_c_that_a_library_turns_into_its_own_error_is_an_interruption() -> None:
    code = """
    import os, signal
    from mla_cli.app import Command
    def load() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as interruption:
            raise ImportError("cannot load module more than once per process") from interruption
    sys.exit(main(["load"], commands=[Command("load", load)]))
    """
    done = program(code)
    assert (done.returncode, done.stderr) == (130, b"mla: interrupted\n")


@pytest.mark.parametrize("imported", ["mla_cli.app", "typer", "mla_cli.commands.inspect"])
@pytest.mark.parametrize("ignored", [False, True])
def test_control_c_before_the_program_has_started_is_silent(imported: str, ignored: bool) -> None:
    # The console script is `run`, too (see test_packaging.py).
    code = f"""
    import os, signal, sys
    class Interrupting:
        def find_spec(self, name, *_):
            if name == {imported!r}:
                os.kill(os.getpid(), signal.SIGINT)
    if {ignored}:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.meta_path.insert(0, Interrupting())
    from mla_cli.__main__ import run
    sys.argv = ["mla", "--version"]
    sys.exit(run())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0 if ignored else 130, b"")


def processor_seconds() -> float:
    """What this process's children have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], *[[command.name, "--help"] for command in COMMANDS]])
def test_help_is_fast_and_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
    import sys
    from mla_cli.app import main
    assert main({arguments!r}) == 0
    heavy = {{"torch", "transformers", "numpy", "triton", "datasets", "lm_eval", "huggingface_hub"}} & set(sys.modules)
    assert not heavy, heavy
    """
    seconds = []
    for _ in range(3):  # the best of three, by the time it computes: the machine may be busy
        started = processor_seconds()
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, timeout=60)
        seconds.append(processor_seconds() - started)
        if seconds[-1] < 0.5:
            return
    pytest.fail(f"{arguments} took {min(seconds):.2f} s")


def test_every_command_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert main([command.name, "--help"]) == 0
        assert command.function.__doc__
    capsys.readouterr()


def test_python_m_runs_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "mla_cli", "--version"], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode() == f"mla {__version__}\n"


def test_completion_is_offered() -> None:
    environment = {"_MLA_COMPLETE": "complete_bash", "COMP_WORDS": "mla --ver", "COMP_CWORD": "1"}
    assert b"--version" in program("sys.exit(main([]))", **environment).stdout


def test_a_device_that_is_not_there() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert options.resolve_device("auto").type == "cpu"
    with pytest.raises(UsageError, match="no CUDA device"):
        options.resolve_device("cuda:0")
    assert options.resolve_dtype("auto") is None
    assert options.resolve_dtype("float16") is torch.float16


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_cleans_up_and_exits_by_its_number(number: signal.Signals, tmp_path: Path) -> None:
    code = f"""
    import time, shutil, pathlib
    from mla_cli.app import Command
    def wait() -> None:
        folder = pathlib.Path({str(tmp_path)!r}) / "half"
        folder.mkdir()
        try:
            print("ready", flush=True)
            time.sleep(30)
        finally:
            shutil.rmtree(folder)
    sys.exit(main(["wait"], commands=[Command("wait", wait)]))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests run by nohup ignore SIGHUP
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (128 + number, b"mla: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("redirection", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_reason_to_fail(redirection: str) -> None:
    run_there = program('sys.exit(main(["sample", "text"], commands=SAMPLE))', shell="{python} " + redirection)
    assert run_there.returncode == 0, run_there.stderr
    assert b"Traceback" not in run_there.stderr


def test_more_threads_than_cores_are_cut_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    threads = torch.get_num_threads()
    try:
        options.setup_runtime(99999, 0, quiet=False, debug=False)
        assert torch.get_num_threads() <= (os.cpu_count() or 1)
        assert "99999" in capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)


def test_setup_runtime_seeds_and_limits_threads() -> None:
    import torch

    threads = torch.get_num_threads()
    try:
        options.setup_runtime(1, 7, quiet=True, debug=False)
        first = torch.rand(3)
        options.setup_runtime(None, 7, quiet=False, debug=False)
        assert torch.equal(first, torch.rand(3))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_option_lists() -> None:
    import typer

    check = options.several_of("a", "b")["callback"]
    assert check("B, a,b") == "b,a"
    with pytest.raises(typer.BadParameter):
        check("a,c")
    with pytest.raises(typer.BadParameter):
        check(" , ")
    assert options.one_of("int8", "fp8")["autocompletion"]("i") == ["int8"]
    with pytest.raises(typer.BadParameter, match="no such file"):
        options.existing_path("file")(Path("/not/there"))
