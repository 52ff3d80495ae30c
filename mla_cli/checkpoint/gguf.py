"""A `.gguf` file as a Hugging Face folder, written once into the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.checkpoint.gguf_file import GgufFile, read_gguf
from mla_cli.checkpoint.gguf_layout import Layout, Target, layout
from mla_cli.checkpoint.gguf_tokenizer import write_tokenizer
from mla_cli.console import note, progress
from mla_cli.errors import InputError, OutputError

FORMAT = 2  # part of the folder's name: raise it when the same file has to be unpacked differently
SHARD_BYTES = 2 * 1000**3  # one shard is in memory while it is written
_PLAIN = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
_RECORD = "mla_gguf.json"  # lists the other files with their sizes: without it the folder is not complete


def materialise_gguf(path: Path) -> Path:
    """Write a GGUF file as a Hugging Face folder into the cache, or find it there.

    Quantised numbers become bfloat16; a file whose numbers are mostly float32 or float16 keeps that type.

    Raises:
        InputError: the file is missing or damaged, or a weight is not finite. UnsupportedError: it holds a model,
            tokenizer or number format that is not known. OutputError: the cache cannot be written.
    """
    path = Path(path)
    digest = file_sha256(path)
    target = materialised_folder(digest)
    if is_complete(target):
        return target
    file = read_gguf(path)
    planned = layout(file)
    note(f"unpacking {path.name} to {target}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _write(file, planned, temporary, digest)
            _put_in_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            f"cannot unpack {path.name}: {error.strerror or error}",
            where=target.parent,
            fix="free some space, or set MLA_CACHE to a folder that can be written",
        ) from error
    return target


def materialised_folder(digest: str) -> Path:
    """The folder of the GGUF file with this SHA-256."""
    return cache_dir() / "gguf" / f"{digest[:16]}-v{FORMAT}"


def is_complete(folder: Path) -> bool:
    """Whether the folder holds every file it was written with, in full size."""
    try:
        sizes = json.loads((folder / _RECORD).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        InputError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise InputError(
            f"cannot read {path.name}: {error.strerror or error}", where=path, fix="check the path and its permissions"
        ) from error
    return digest.hexdigest()


def _write(file: GgufFile, planned: Layout, folder: Path, digest: str) -> None:
    # The tokenizer first: it is quick, and the likeliest to be refused.
    write_tokenizer(file.metadata, planned.config["vocab_size"], folder, file.path)
    dtype = _dtype(file)
    config = json.dumps({**planned.config, "torch_dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    shards = _shards(planned.targets, dtype.itemsize)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(prod(target.shape) for target in planned.targets) * dtype.itemsize},
            "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    bar = iter(progress(planned.targets, f"unpacking {file.path.name}", unit="tensor"))
    for name, shard in zip(names, shards, strict=True):
        save_file({t.name: _tensor(file, next(bar), dtype) for t in shard}, folder / name, metadata={"format": "pt"})
    next(bar, None)  # lets the bar finish
    sizes = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
    record = {"sha256": digest, "format": FORMAT, "source": file.path.name, "files": sizes}
    (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _dtype(file: GgufFile) -> torch.dtype:
    """The type that most of the file's numbers have, bfloat16 for the quantised: nothing that it holds is rounded away."""
    counts: dict[torch.dtype, int] = {}
    for tensor in file.tensors.values():
        kind = _PLAIN.get(tensor.kind, torch.bfloat16)
        counts[kind] = counts.get(kind, 0) + prod(tensor.shape)
    return max(counts, key=lambda kind: counts[kind])


def _shards(targets: Sequence[Target], itemsize: int) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        own = prod(target.shape) * itemsize
        if shards[-1] and size + own > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += own
    return shards


def _tensor(file: GgufFile, target: Target, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.cat(list(_rounded(file, target, dtype)))
    tensor = tensor.reshape(target.shape[::-1] if target.transpose else target.shape)
    if target.order is not None:
        tensor = tensor[torch.from_numpy(target.order)]
    return (tensor.T if target.transpose else tensor).contiguous()


def _rounded(file: GgufFile, target: Target, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for rows in file.chunks(target.source, target.rows):
        tensor = (torch.from_numpy(rows) + target.offset if target.offset else torch.from_numpy(rows)).to(dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"the tensor {target.source} has values that are not finite",
                where=file.path,
                fix="fetch the file again",
            )
        yield tensor


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.exists() and not is_complete(target):
        # What a user or a full disk left of it: moved away first, so that it is never half deleted under its name.
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        os.replace(target, aside / target.name)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(temporary, target)
    except OSError:
        # Another process was faster; its folder is as good.
        if not is_complete(target):
            raise
