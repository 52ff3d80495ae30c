"""The CPU kernels as a library: compiled on this machine for this machine, once, and kept.

A compiler is all that is needed (`c++`, or what `CXX` names): the library knows nothing of Python or PyTorch, so it outlives
their versions. Where it cannot be had, PyTorch's operators do the work. `MLA_CPU_KERNELS=off` says not to try.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import POINTER, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

from mla_cli.kernels.cpu.structures import STRUCTURES, PromptStruct, StepStruct

VERSION = 3
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
PATIENCE = 300  # seconds for the compiler; on a busy machine it takes half a minute
_SOURCES = Path(__file__).parent


class CpuLibrary:
    """The compiled functions.

    Raises:
        OSError: the library does not load, or is not what this module expects.
    """

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        sizes = (c_int64 * len(STRUCTURES))()
        library.mla_sizes(sizes)
        if library.mla_version() != VERSION or list(sizes) != [ctypes.sizeof(one) for one in STRUCTURES]:
            raise OSError(f"{file} belongs to another version")
        self._step, self._linear = library.mla_step, library.mla_linear
        self._step.argtypes, self._step.restype = (POINTER(StepStruct),), None
        library.mla_share_threads.argtypes, library.mla_share_threads.restype = (c_void_p,), None
        library.mla_share_threads(_parallel_of_torch())
        self._prompt = library.mla_prompt
        self._prompt.argtypes, self._prompt.restype = (POINTER(PromptStruct),), None
        self._linear.argtypes, self._linear.restype = (c_void_p, c_void_p, c_int, c_void_p, c_int), None

    def step(self, step: StepStruct) -> None:
        """One token more for every sequence (see `step.cpp`)."""
        self._step(step)

    def prompt(self, prompt: PromptStruct) -> None:
        """Attention of many tokens (see `prompt.h`)."""
        self._prompt(prompt)

    def linear(self, linear: ctypes.Structure, x: int, rows: int, out: int, threads: int) -> None:
        """`out = x w^T`: float32 `[rows, n]` from `[rows, k]`, both given by address and contiguous."""
        self._linear(ctypes.addressof(linear), x, rows, out, threads)


def _parallel_of_torch() -> int | None:
    """Where `GOMP_parallel` is in the OpenMP library that PyTorch runs on; None: there is none, or not by that name."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    files = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "omp" in line)
    for file in sorted(files, key=lambda file: "torch" not in file):  # others may have brought one, too
        if Path(file).name.startswith(("libgomp", "libiomp", "libomp")):
            try:
                return ctypes.cast(ctypes.CDLL(file).GOMP_parallel, c_void_p).value
            except (OSError, AttributeError):
                continue
    return None


@cache
def load_library(folder: Path, say: Callable[[str], None]) -> CpuLibrary | str:
    """The library out of `folder`, where it is compiled first if need be; or, in one line, why there is none.

    Args:
        say: is told before it is compiled, which takes a while.
    """
    if os.environ.get("MLA_CPU_KERNELS", "").lower() in ("off", "0", "no", "false"):
        return "switched off by MLA_CPU_KERNELS"
    if os.name == "nt":
        return "not available on Windows"
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler found (install g++ or clang, or set CXX)"
    file = folder / f"step-{_key(compiler)}.so"
    try:
        if not file.exists():
            say("compiling the CPU kernels for this machine, once (some 15 s)")
            _compile(compiler, file)
        return CpuLibrary(file)
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if "error" in line] or ["no message"]
        return f"{compiler[0]} cannot compile them: {lines[0].strip()}"
    except subprocess.TimeoutExpired:
        return f"{compiler[0]} took longer than {PATIENCE} s"
    except (OSError, AttributeError) as error:
        return f"the library cannot be made or loaded: {error}"


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get("CXX", ""))
    for words in (named, ["c++"], ["g++"], ["clang++"]):
        if words and shutil.which(words[0]):
            return words
    return None


def _key(compiler: list[str]) -> str:
    """Changes with the sources, the compiler and the processor (a home may be shared by several)."""
    digest = hashlib.sha256()
    for source in sorted((*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp"))):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False, timeout=60).stdout
    digest.update(" ".join((*compiler, *FLAGS)).encode() + version + _processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(telling)))


def _compile(compiler: list[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # put in place whole, also where two processes compile
        made = Path(folder) / "step.so"
        command = [*compiler, *FLAGS, *(str(each) for each in sorted(_SOURCES.glob("*.cpp"))), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
        os.replace(made, file)
