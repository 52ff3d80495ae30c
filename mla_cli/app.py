"""The `mla` program: its commands, its global options, and how every failure becomes one line and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mla_cli import __version__, console
from mla_cli.commands.bench import bench
from mla_cli.commands.calibrate import calibrate
from mla_cli.commands.convert import convert
from mla_cli.commands.eval import command as evaluate
from mla_cli.commands.generate import generate
from mla_cli.commands.inspect import inspect
from mla_cli.commands.options import Debug, GroupedCommand
from mla_cli.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    MlaError,
    first_line,
    internal_error,
    is_out_of_memory,
)

# What a shell reports for a program that SIGPIPE ended. Zero would tell a script that all of the output was read.
EXIT_BROKEN_PIPE = 141

_SUMMARY = "Convert trained transformers to multi-head latent attention, calibrate, evaluate and run them."
_LOWER_MEMORY = "--samples, --seq-len, --batch-size or --max-context"


@dataclass(frozen=True)
class Command:
    """A subcommand, and the options to name when it runs out of memory."""

    name: str
    function: Callable[..., None]
    memory_options: str = _LOWER_MEMORY
    hidden: bool = False


# In the order of `mla --help`. A command's file imports nothing heavy at its top: listing it here costs milliseconds.
COMMANDS: tuple[Command, ...] = (
    Command("convert", convert, "--samples, --seq-len or --fisher-samples"),
    Command("calibrate", calibrate, "--samples or --seq-len"),
    Command("generate", generate, "--max-batch, --max-context or --kv-dtype int8"),
    Command("eval", evaluate, "--batch-size or --limit"),
    Command("bench", bench, "--batch or --context"),
    Command("inspect", inspect),
)


def build_app(commands: Sequence[Command] = COMMANDS) -> typer.Typer:
    """The Typer application with these commands."""
    app = typer.Typer(
        name="mla",
        help=_SUMMARY,
        rich_markup_mode=None,  # markup would swallow '[v2]' of a path
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback(invoke_without_command=True)(_global_options)
    for command in commands:
        app.command(command.name, cls=GroupedCommand, hidden=command.hidden)(command.function)
    return app


def main(arguments: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run `mla` with these arguments (default: those of the process) and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console.set_quiet(False)
    console.set_debug(os.environ.get("MLA_DEBUG", "") not in ("", "0"))
    _replace_closed_streams()
    _never_fail_to_encode()
    # Before torch is loaded: threads that wait for one another must not burn the cores that others need. On busy machines
    # spinning threads made a decode step up to ten times slower; on quiet ones waiting costs next to nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with _termination_as_interruption() as received:
            code = _run(arguments, commands, received)
        sys.stdout.flush()
    except BrokenPipeError:
        return _broken_pipe()
    return 128 + received[0] if received else code


def _run(arguments: list[str], commands: Sequence[Command], received: Sequence[int]) -> int:
    try:
        code = build_app(commands)(arguments, prog_name="mla", standalone_mode=False)
    except BrokenPipeError:
        raise
    except SystemExit as stop:
        # Typer ends a closed pipe by itself, with the exit code of a failure.
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        return stop.code if isinstance(stop.code, int) else EXIT_OK if stop.code is None else EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as failure:
        if console.debug_enabled() and not _is_usage_error(failure):
            console.error("".join(traceback.format_exception(failure)).rstrip())
        # A library that is interrupted while it is imported may raise something else.
        if not received:
            message, code = _explain(failure, arguments, commands)
            console.error(f"mla: error: {message}")
            return code
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        console.error("mla: interrupted")
    return code if isinstance(code, int) else EXIT_OK


def _explain(failure: Any, arguments: list[str], commands: Sequence[Command]) -> tuple[str, int]:
    """One line for the user, and the exit code."""
    if isinstance(failure, MlaError):
        return str(failure), failure.exit_code
    if _is_usage_error(failure):
        return str(MlaError(failure.format_message(), fix=f"see '{_help_command(failure)}'")), EXIT_USAGE
    if is_out_of_memory(failure):
        options = next((c.memory_options for c in commands if c.name in arguments), _LOWER_MEMORY)
        return str(MlaError(f"out of memory: {first_line(failure)}", fix=f"lower {options}")), EXIT_FAILED
    if isinstance(failure, OSError) and failure.strerror:
        advice = {
            errno.ENOSPC: "free some space or write to another disk",
            errno.EDQUOT: "your disk quota is used up: free some space or write elsewhere",
            errno.EACCES: "check the permissions",
            errno.EROFS: "write to another disk, this one is read-only",
            errno.EMFILE: "raise the limit of open files (ulimit -n)",
        }.get(failure.errno or 0)
        return str(MlaError(failure.strerror, where=failure.filename, fix=advice)), EXIT_FAILED
    return str(internal_error(failure)), EXIT_FAILED


def _is_usage_error(failure: Any) -> bool:
    # Known by its method: the class is Click's, or, in newer versions of Typer, one that Typer carries inside.
    return hasattr(failure, "format_message")


def _help_command(failure: Any) -> str:
    context = getattr(failure, "ctx", None)
    return f"{context.command_path if context else 'mla'} --help"


@contextmanager
def _termination_as_interruption() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, so that partial output is removed; gives what was received."""
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield received
        return
    signals = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # A signal that is ignored stays so: that is what nohup asks for.
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in signals if signal.getsignal(number) in usual}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _replace_closed_streams() -> None:
    # A parent may close them (`>&-`); Python then has None where every write would fail.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open as long as the program)


def _never_fail_to_encode() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _broken_pipe() -> int:
    # Python flushes stdout once more at exit, and would report the closed pipe then.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return EXIT_BROKEN_PIPE


def _global_options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    debug: Debug = False,
) -> None:
    if version:
        console.result(f"mla {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.result(context.get_help())
