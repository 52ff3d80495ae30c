"""What a user may name as a model (a folder, a Hub id, a GGUF file, a built-in name), opened and checked."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mla_cli.checkpoint.hub import NotOnHubError, fetch_model, is_companion
from mla_cli.checkpoint.reader import TensorReader, open_tensors
from mla_cli.checkpoint.weight_file import read_json_object, unreadable
from mla_cli.console import note, warn
from mla_cli.errors import InputError, MlaError

_CHUNK = 1 << 24
# Tensors that only packed or scaled weights have. Our own cache scales (k_scale, v_scale) are not among them.
_PACKED = re.compile(
    r"\.(?:qweight|qzeros|g_idx|weight_packed|weight_scale|weight_scale_inv|weight_scale_2|weight_zero_point|SCB|W_q)$"
    r"|absmax$|quant_map$|\.quant_state\.|_blocks$"
)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FULL_WEIGHTS = re.compile(r"(?:model|pytorch_model).*\.(?:safetensors|bin)(?:\.index\.json)?")


@dataclass(frozen=True)
class Source:
    """An opened model: `name` as the user wrote it, `revision` the commit if it came from the Hub."""

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: TensorReader
    revision: str | None

    def sha256(self) -> str:
        """One digest over the names and contents of the weight files."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for file in self.tensors.files:
            try:
                with open(file, "rb") as stream:
                    digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
                    while chunk := stream.read(_CHUNK):
                        digest.update(chunk)
            except OSError as error:
                raise unreadable(file, error) from error
        return digest.hexdigest()

    def companion_files(self) -> list[Path]:
        """The files an output carries unchanged: tokenizer, chat templates (may be a folder), generation, licence."""
        return [self.folder / name for name in sorted(os.listdir(self.folder)) if is_companion(name)]


def open_source(text: str, *, offline: bool = False) -> Source:
    """Open what the user named; nothing that looks like a path is ever looked up on the network."""
    from mla_cli.checkpoint.builtin import BUILTIN, fetch_builtin

    path = os.path.expanduser(text)
    if text in BUILTIN:
        if os.path.isdir(text):
            note(f"{text} is taken as the built-in model; write ./{text} for the folder of that name")
        return _open_folder(text, fetch_builtin(text), None)
    if os.path.isdir(path):
        return _open_folder(text, Path(os.path.abspath(path)), None)
    if os.path.exists(path):
        return _open_folder(text, _unpack_file(text, Path(os.path.abspath(path))), None)
    hub_id = None if _looks_like_path(text) else parse_hub_id(text)
    if hub_id is None:
        raise _no_such_path(text)
    try:
        folder = fetch_model(*hub_id, offline=offline)
    except MlaError as error:
        if "/" not in text:
            names = ", ".join(BUILTIN)
            raise type(error)(f"no such folder: {text}; built-in: {names}; {error.what}", fix=error.fix) from None
        if isinstance(error, NotOnHubError):
            raise NotOnHubError(f"no such folder: {text}; and {error.what}", fix=error.fix) from None
        raise
    return _open_folder(text, folder, folder.name)


def parse_hub_id(text: str) -> tuple[str, str | None] | None:
    """Split `org/name[@revision]` or `name[@revision]`; None if it is no such id by the Hub's own rules."""
    match = re.fullmatch(r"((?:[\w.-]+/)?[\w.-]{1,96})(?:@(\w[\w./-]*))?", text, re.ASCII)
    if match is None:
        return None
    repo, revision = match[1], match[2]
    parts_sound = all(re.fullmatch(r"\w(?:.*\w)?", part, re.ASCII) for part in repo.split("/"))
    if not parts_sound or "--" in repo or ".." in text or repo.endswith(".git"):
        return None
    return repo, revision


def refuse_quantised(source: Source) -> None:
    """Refuse weights that are packed or scaled: read as plain numbers they would be silently destroyed."""
    _refuse_quantised_config(source.config, source.folder)
    infos = source.tensors.infos
    scales = [name for name in infos if "scale" in name.rsplit(".", 1)[-1]]
    for name, info in infos.items():
        if _PACKED.search(name):
            raise _quantised(f"a packed format (tensor {name})", info.file)
        if info.dtype in _FP8 and scales:
            raise _quantised(f"scaled FP8 (tensors {name}, {scales[0]})", info.file)
        if info.dtype in _INTEGERS and name.endswith(".weight"):
            raise _quantised(f"integers (tensor {name} is {str(info.dtype).removeprefix('torch.')})", info.file)


def _refuse_quantised_config(config: dict[str, Any], folder: Path) -> None:
    text_config = config.get("text_config")
    for table in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            scheme = table.get(key)
            if not scheme:
                continue
            if not isinstance(scheme, dict):
                raise InputError(
                    f"{key} in config.json is no JSON object",
                    where=folder / "config.json",
                    fix="restore the original file",
                )
            # Calibrated cache scales leave every weight as it is.
            ignore = scheme.get("ignore")
            cache_only = scheme.get("kv_cache_scheme") and isinstance(ignore, list) and "*" in ignore
            switched_off = scheme.get("load_in_8bit") is False and scheme.get("load_in_4bit") is False
            if not cache_only and not switched_off:
                method = scheme.get("quant_method") or scheme.get("quant_algo") or f"{key} of an unnamed method"
                raise _quantised(str(method), folder / "config.json")


def _quantised(method: str, where: Path) -> InputError:
    return InputError(
        f"the weights are already quantised with {method}",
        where=where,
        fix="dequantise them first, or start from the unquantised model",
    )


def _looks_like_path(text: str) -> bool:
    before_revision = text.split("@", 1)[0]
    first = before_revision.split("/", 1)[0]
    return (
        text.startswith((".", "~", "/"))
        or "\\" in text
        or before_revision.count("/") > 1
        or text.endswith(("/", ".gguf", ".safetensors", ".bin"))
        or ("/" in text and os.path.isdir(first))
    )


def _no_such_path(text: str) -> InputError:
    if not text.strip():
        return InputError("no model is named: the source is empty", fix="give a folder, a Hub id or a built-in name")
    hub_url = re.match(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", text)
    if hub_url:
        return InputError(f"no such folder: {text}", fix=f"write a Hub model as {hub_url[1]}")
    if text.lower().endswith((".gguf", ".safetensors", ".bin")):
        return InputError(f"no such file: {text}", fix="check the path")
    return InputError(f"no such folder: {text}", fix="check the path; a Hub id is written org/name[@revision]")


def _unpack_file(text: str, file: Path) -> Path:
    try:
        with open(file, "rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise unreadable(file, error) from error
    if magic == b"GGUF" or file.suffix.lower() == ".gguf":
        from mla_cli.checkpoint.gguf import materialise_gguf

        unpacked: Path = materialise_gguf(file)
        return unpacked
    raise InputError(f"{text} is a file, not a model folder", where=file, fix=f"give its folder: {file.parent}")


def _open_folder(name: str, folder: Path, revision: str | None) -> Source:
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    has_weights = any(_FULL_WEIGHTS.fullmatch(entry) for entry in entries)
    if "adapter_config.json" in entries and not ("config.json" in entries and has_weights):
        base = read_json_object(folder / "adapter_config.json").get("base_model_name_or_path") or "(not named)"
        raise InputError(
            "this is a LoRA adapter, not a model",
            where=folder,
            fix=f"merge it with base {base} first (peft: merge_and_unload, save_pretrained)",
        )
    if "config.json" not in entries:
        raise _no_config(folder, entries)
    if "adapter_config.json" in entries:
        warn(f"{name} holds a full model and a LoRA adapter: the adapter is not applied")
    config = read_json_object(folder / "config.json")
    _refuse_quantised_config(config, folder)  # before the headers, whose packed dtypes would be refused less clearly
    generation = folder / "generation_config.json"
    source = Source(
        name=name,
        folder=folder,
        config=config,
        generation_config=read_json_object(generation) if generation.exists() else {},
        tensors=open_tensors(folder),
        revision=revision,
    )
    refuse_quantised(source)
    return source


def _no_config(folder: Path, entries: list[str]) -> InputError:
    if "params.json" in entries or any(entry.startswith("consolidated") for entry in entries):
        return InputError(
            "no config.json: this is the publisher's original format (params.json, consolidated weights)",
            where=folder,
            fix="use the Hugging Face version of the model, or convert it to that layout with transformers",
        )
    inside = [f.parent for pattern in ("*/config.json", "snapshots/*/config.json") for f in folder.glob(pattern)]
    ggufs = [entry for entry in entries if entry.endswith(".gguf")]
    fix = "give the folder of a model in Hugging Face layout"
    if ggufs:
        fix = f"give the file itself: {folder / ggufs[0]}"
    elif inside:
        fix = f"did you mean {sorted(inside)[-1]}?"
    shown = ", ".join(entries[:8]) + (f" and {len(entries) - 8} more" if len(entries) > 8 else "")
    seen = f"it holds {shown}" if entries else "it is empty"
    return InputError(f"no config.json in the folder: {seen}", where=folder, fix=fix)
