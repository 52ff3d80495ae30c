"""Answers as they come, in a file beside the output, so that an interrupted run goes on after those it has.

    .NAME.mla-resume   first a line that says what the answers depend on, then a line an answer, in the order they came in

A line is whole or it does not count: a kill cuts the last one at most. The output appears when all answers are there. An answer
depends on its own line, the model and the options (see `Generator`), so it is the one that an uninterrupted run would give.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from mla_cli import __version__
from mla_cli.checkpoint.digest import digest_of
from mla_cli.checkpoint.disk import disk_error
from mla_cli.console import note
from mla_cli.errors import UsageError
from mla_cli.model.decoder import Decoder
from mla_cli.runtime.prompt_file import PromptLine
from mla_cli.runtime.result_file import json_line, result_file

Facts = Mapping[str, str]


class ResultJournal:
    """The answers of one run; see `open_journal`.

    Attributes:
        done: indices of the lines that were answered, in this run or before.
    """

    def __init__(self, out: Path, facts: Facts, *, resume: bool) -> None:
        self.done: set[int] = set()
        self.file = out.with_name(f".{out.name}.mla-resume")
        self._out, self._facts = out, dict(facts)
        self._stream: IO[bytes] | None = None  # opened by the first answer: without any, nothing is left behind
        self._places: dict[int, int] = {}  # index -> where its line begins
        self._errors: dict[int, dict[str, Any]] = {}
        if resume:
            self._reopen()

    def add(self, answer: dict[str, Any]) -> None:
        """Keep an answer (`index` says whose). One with an `error` is kept for this run only: the next one tries again.

        Raises:
            OutputError: it cannot be written.
        """
        index = answer["index"]
        if "error" in answer:
            self._errors[index] = answer
            return
        try:
            if self._stream is None:
                self.file.unlink(missing_ok=True)  # of an earlier run that is not gone on with
                self._stream = open(self.file, "xb+")  # noqa: SIM115 (closed by open_journal)
                self._stream.write(_line(self._facts))
            self._places[index] = self._stream.tell()
            self._stream.write(_line(answer))
            self._stream.flush()
        except OSError as error:
            raise disk_error(error, self.file, 0) from error
        self.done.add(index)

    def finish(self) -> None:
        """Write the output, in the order of the prompts, and drop the journal.

        Raises:
            OutputError: it cannot be written; the journal stays.
        """
        with result_file(self._out) as write:
            for index in sorted(self._errors.keys() | self._places.keys()):
                write(self._read(index) if index in self._places else self._errors[index])
        self.close()
        self.file.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file; what it holds stays."""
        if self._stream is not None:
            self._stream.close()

    def _read(self, index: int) -> dict[str, Any]:
        assert self._stream is not None
        self._stream.seek(self._places[index])
        return json.loads(self._stream.readline())  # type: ignore[no-any-return]

    def _reopen(self) -> None:
        try:
            self._stream = open(self.file, "rb+")  # noqa: SIM115 (closed by open_journal)
        except FileNotFoundError:
            raise UsageError("there is nothing to resume", where=self.file, fix="leave out --resume") from None
        except OSError as error:
            raise disk_error(error, self.file, 0) from error
        stream = self._stream
        facts, end = _whole_line(stream)
        if facts is None:
            raise UsageError("what an interrupted run left is damaged", where=self.file, fix="leave out --resume")
        other = [name for name in self._facts if facts.get(name) != self._facts[name]]
        if other:
            what = f"the interrupted run had another {' and another '.join(other)}"
            fix = "repeat the command with --resume, or leave out --resume to start again"
            raise UsageError(what, where=self.file, fix=fix)
        while True:
            answer, after = _whole_line(stream)
            if answer is None or not isinstance(answer.get("index"), int):
                break
            self._places[answer["index"]], end = end, after
            self.done.add(answer["index"])
        stream.truncate(end)
        stream.seek(end)


@contextmanager
def open_journal(out: Path, facts: Facts, *, resume: bool, total: int) -> Iterator[ResultJournal]:
    """The journal of a run whose results go to `out`; where the run breaks off, what is kept is said.

    Args:
        facts: see `run_facts`. resume: go on with what an interrupted run left; total: lines to answer.

    Raises:
        UsageError: `resume` was asked for, and nothing was left, or by a run with other facts.
    """
    journal = ResultJournal(out, facts, resume=resume)
    try:
        yield journal
        journal.finish()
    except BaseException:
        if journal.done:
            note(f"{len(journal.done)} of {total} answers are kept: repeat the command with --resume to go on")
        raise
    finally:
        journal.close()


def run_facts(
    lines: Sequence[PromptLine], folder: Path, weights_sha256: str, decoder: Decoder, options: Mapping[str, Any]
) -> Facts:
    """Everything that answers depend on, as short texts by name.

    Args:
        folder: of the checkpoint; options: that change tokens, beside those of the lines.
    """
    usable = [[line.number, line.id, line.prompt, asdict(line.params)] for line in lines if line.error is None]
    prompts = [usable, [[line.number, line.id, str(line.error)] for line in lines if line.error is not None]]
    how = {**options, "dtype": str(decoder.dtype), "device": decoder.device.type, "kernels": decoder.computed_by}
    return {
        "version of mla": __version__,
        "model": model_digest(folder, weights_sha256),
        "file of prompts, or other sampling options": digest_of(prompts),
        "set of options": json.dumps(how, sort_keys=True, default=str),
    }


def model_digest(folder: Path, weights_sha256: str) -> str:
    """Of all of a checkpoint that answers depend on."""
    model = hashlib.sha256(weights_sha256.encode())
    for file in sorted(folder.glob("*.json")) + sorted(folder.glob("*.model")) + sorted(folder.glob("*.jinja")):
        if not file.name.startswith("mla_report") and not file.name.endswith(".index.json"):
            model.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return model.hexdigest()


def _line(value: Mapping[str, Any]) -> bytes:
    return (json_line(dict(value)) + "\n").encode("utf-8", "backslashreplace")


def _whole_line(stream: IO[bytes]) -> tuple[dict[str, Any] | None, int]:
    """The next line, if it is a whole one, and where the one after it begins."""
    raw = stream.readline()
    if not raw.endswith(b"\n"):
        return None, stream.tell()
    try:
        value = json.loads(raw)
    except ValueError:
        return None, stream.tell()
    return (value if isinstance(value, dict) else None), stream.tell()
