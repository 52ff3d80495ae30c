"""Runs kernels in a process of their own, in which Triton interprets them on CPU tensors.

Triton looks at TRITON_INTERPRET when it is imported, so one process cannot both interpret and compile.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[2]


class Interpreter:
    """Calls functions of modules in the other process: `interpreter("mla_cli.kernels.decode.decode", q, ...)`.

    Arguments and results are copied. What the call changes in tensor arguments comes back with `changed=True`.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.interpreter"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, function: str, *args: Any, changed: bool = False, **kwargs: Any) -> Any:
        """The result, or with `changed` a tuple of the result and the arguments afterwards; raises what the call raises."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((function, args, kwargs), self.process.stdin)
        self.process.stdin.flush()
        result, after, error, trace = pickle.load(self.process.stdout)
        if error is not None:
            error.add_note(trace) if hasattr(error, "add_note") else None
            raise error
        return (result, after) if changed else result

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def _resolve(function: str) -> Callable[..., Any]:
    import importlib

    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, kwargs = pickle.load(requests)
        except EOFError:
            return
        result, error, trace = None, None, ""
        try:
            result = _resolve(function)(*args, **kwargs)
        except Exception as raised:
            error, trace = raised, traceback.format_exc()
        try:
            answer = pickle.dumps((result, args, error, trace))
            pickle.loads(answer)  # an exception may pickle and still not come back
        except Exception:
            answer = pickle.dumps((None, None, RuntimeError(repr(error)), trace))
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not mix with the answers
    _serve(sys.stdin.buffer, channel)
