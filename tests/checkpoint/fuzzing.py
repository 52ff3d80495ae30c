"""Damaged checkpoints by the number: configurations, indexes and headers, each input made again from its number alone."""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mla_cli.checkpoint.load import open_model
from mla_cli.errors import LONGEST_PART, MlaError
from mla_cli.model.families import family_of
from tests.model.test_families import CONFIGS, DAMAGE, places, put
from tests.tiny import GPT2_SHAPE, SHAPE, TINY

SECONDS, MEMORY = 10, 1 << 30  # of one input, of the processor; far more than any needs
LONGEST_MESSAGE = 6 * LONGEST_PART  # control characters are escaped by up to six others

VALUES: list[Any] = [*DAMAGE, 4, 7, 10_000, 1 << 40, 2**63, 2**64, 1e-9, "fp8", "gelu", "yarn", [0, 0], [64, 48],
                     [10**9, 10**9], {"rope_type": "yarn"}, "\x00\ud800\u2028\x1b[31m", "../../etc/passwd",
                     "model-00001-of-00002.safetensors", ["full_attention", "sliding_attention"], "x" * 5000]  # fmt: skip


def family_configs() -> dict[str, dict[str, Any]]:
    """A configuration of every family, as transformers writes it."""
    import transformers

    found = deepcopy(CONFIGS)
    for family, (config_class, _, differs) in TINY.items():
        shape = {**(GPT2_SHAPE if family == "gpt2" else SHAPE), **differs}
        given = {key: value for key, value in shape.items() if value is not None}
        found[f"tiny {family}"] = json.loads(
            getattr(transformers, config_class)(**given).to_json_string(use_diff=False)
        )
    return found


def save_zeros(folder: Path, config: dict[str, Any]) -> None:
    """The checkpoint that a configuration describes, of zeros."""
    family = family_of(config)
    rules = family.tensors(family.spec(config), frozenset())
    shapes = {rule.source: rule.shape for rule in rules.values()}
    folder.mkdir(parents=True)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def save_shards(folder: Path) -> None:
    """A checkpoint of two shards and their index."""
    save_zeros(folder, CONFIGS["llama"])
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {f"model-{n + 1:05d}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    owners = {name: file for file, part in halves.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": owners}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Fuzzer:
    """Inputs of three kinds, in a folder of its own."""

    def __init__(self, folder: Path, families: dict[str, dict[str, Any]]) -> None:
        self._configs = list(families.values())
        self._folders = []
        for number, config in enumerate(self._configs):
            self._folders.append(folder / f"family-{number}")
            save_zeros(self._folders[-1], config)
        self._keys = sorted({key for config in self._configs for key in config})
        self._shards = folder / "shards"
        save_shards(self._shards)
        self._index = (self._shards / "model.safetensors.index.json").read_bytes()
        self._shard = self._shards / "model-00001-of-00002.safetensors"
        self._whole = self._shard.read_bytes()

    def run(self, number: int) -> str:
        """Read input `number`; the refusal's text, or nothing if it was read."""
        rng = random.Random(number)
        kind = number % 3
        if kind == 0:
            chosen = rng.randrange(len(self._configs))
            (self._folders[chosen] / "config.json").write_bytes(self._config(rng, chosen))
            return _open(self._folders[chosen])
        if kind == 1:
            (self._shards / "model.safetensors.index.json").write_bytes(self._damaged_index(rng))
            said = _open(self._shards)
            (self._shards / "model.safetensors.index.json").write_bytes(self._index)
            return said
        self._shard.write_bytes(self._damaged_shard(rng))
        said = _open(self._shards)
        self._shard.write_bytes(self._whole)
        return said

    def _config(self, rng: random.Random, chosen: int) -> bytes:
        config = deepcopy(self._configs[chosen])
        for _ in range(rng.randint(1, 4)):
            action = rng.random()
            known = list(places(config))
            if action < 0.6 and known:
                put(config, rng.choice(known), deepcopy(rng.choice(VALUES)))
            elif action < 0.75:
                config.pop(rng.choice(self._keys), None)
            elif action < 0.9:
                other, key = rng.choice(self._configs), rng.choice(self._keys)
                config[key] = deepcopy(other.get(key, rng.choice(VALUES)))
            else:
                config[rng.choice(["quantization_config", "text_config", "mla", "mla_kv_cache", "rope_parameters"])] = (
                    made_up(rng, 3)
                )
        return _as_bytes(rng, config, damaged=0.2)

    def _damaged_index(self, rng: random.Random) -> bytes:
        index: Any = json.loads(self._index)
        for _ in range(rng.randint(1, 3)):
            known = list(places(index))
            if rng.random() < 0.7 and known:
                path = rng.choice(known)
                put(index, path, deepcopy(rng.choice(VALUES)))
            else:
                index = rng.choice([made_up(rng, 3), {"weight_map": made_up(rng, 2)}, index])
                index = index if isinstance(index, dict) else {"weight_map": index}
        return _as_bytes(rng, index, damaged=0.4)

    def _damaged_shard(self, rng: random.Random) -> bytes:
        length = int.from_bytes(self._whole[:8], "little")
        text, data = self._whole[8 : 8 + length], self._whole[8 + length :]
        if rng.random() < 0.4:
            return _flip(rng, self._whole, within=8 + length)
        header: Any = json.loads(text)
        for _ in range(rng.randint(1, 3)):
            known = list(places(header))
            if rng.random() < 0.8 and known:
                put(header, rng.choice(known), deepcopy(rng.choice([*VALUES, "F8_E4M3", "U8", "I32", "F4"])))
            else:
                header = {**(header if isinstance(header, dict) else {}), "x": made_up(rng, 2)}
        new = _as_bytes(rng, header, damaged=0.2)
        size = len(new) if rng.random() < 0.9 else rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, len(new) + 1])
        return struct.pack("<Q", size) + new + data[: rng.choice([len(data), len(data), rng.randrange(len(data))])]


def made_up(rng: random.Random, depth: int) -> Any:
    """Any JSON value."""
    roll = rng.random()
    if depth == 0 or roll < 0.4:
        return deepcopy(rng.choice(VALUES))
    if roll < 0.7:
        return [made_up(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    words = [
        "a",
        "quant_method",
        "weight_block_size",
        "weight_map",
        "dtype",
        "shape",
        "data_offsets",
        "layers",
        "",
        "\x00",
    ]
    return {rng.choice(words): made_up(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def _as_bytes(rng: random.Random, value: Any, *, damaged: float) -> bytes:
    data = json.dumps(value).encode()
    return _flip(rng, data, within=len(data)) if rng.random() < damaged else data


def _flip(rng: random.Random, data: bytes, *, within: int) -> bytes:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, min(within, len(data))))
        new = rng.choice(
            [rng.randbytes(rng.randint(0, 4)), b'"', b"{", b"[" * 5000, b"9" * 40, b"NaN", b"\\ud800", b""]
        )
        data = data[:at] + new + data[at + rng.randint(0, 6) :]
    return data


def _open(folder: Path) -> str:
    try:
        open_model(str(folder))
    except MlaError as refusal:
        return str(refusal)
    return ""


@contextmanager
def limits() -> Iterator[None]:
    """An input that takes long, or much memory, fails."""

    def late(*_: object) -> None:
        raise TimeoutError(f"an input took more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(fuzzer: Fuzzer, numbers: range) -> tuple[int, int]:
    """Run these inputs: how many were refused, and how many read.

    Raises:
        AssertionError: one ended in anything else, took too long, or was refused in several lines.
    """
    refused = read = 0
    with limits():
        for number in numbers:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                said = fuzzer.run(number)
            except Exception as failure:
                raise AssertionError(f"input {number}: {type(failure).__name__}: {str(failure)[:500]}") from failure
            assert "\n" not in said, f"input {number}: {said[:500]}"
            assert len(said) < LONGEST_MESSAGE, f"input {number}: {said[:500]}"
            refused, read = refused + bool(said), read + (not said)
    return refused, read
