"""Text as it lies on disk or on the Hub: which files, which bytes of them, and what a record means.

Files of any size are read in blocks spread over the whole file, so that ten gigabytes cost what a few megabytes do.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import socket
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from mla_cli.errors import InputError, MlaError, NetworkError

T = TypeVar("T")
Content: TypeAlias = str | list[dict[str, Any]] | None
"""What a record holds: text, the messages of a conversation, or nothing."""

TEXT_SUFFIXES = (".txt",)
RECORD_SUFFIXES = (".jsonl", ".json")
SUFFIXES = TEXT_SUFFIXES + RECORD_SUFFIXES
WHOLE_JSON_BYTES = 256 << 20  # an array is parsed at once, in about ten times its size of memory
HUB_TEXT_BYTES = 64 << 20  # what is streamed from the Hub before sampling: minutes on a slow line

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:/\\]+))?(?::([^:/\\]+))?")
_SPLIT_NAMES = re.compile(r"(train|validation|valid|test|dev)\b.*")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_MESSAGE = "give every message a 'role' and a 'content'"
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("question", "answer"))


@dataclass(frozen=True)
class MaterialFile:
    """One file of calibration text; `name` is its path as the user would recognise it."""

    path: Path
    name: str
    size: int

    @property
    def holds_records(self) -> bool:
        return _suffix(self.path) in RECORD_SUFFIXES


@dataclass(frozen=True)
class Block:
    """Bytes of a file from `offset` on; `whole` when it is the entire file, `aligned` when it starts with a line."""

    offset: int
    data: bytes
    whole: bool
    aligned: bool = True


@dataclass(frozen=True)
class HubName:
    """`org/name[:config][:split]`."""

    dataset: str
    config: str | None
    split: str


def locate(calib: str) -> list[MaterialFile] | HubName:
    """The files that `calib` stands for, or the Hub dataset it names."""
    path = Path(calib).expanduser()
    if path.is_dir():
        return _files_below(path)
    if path.exists():
        if _suffix(path) not in SUFFIXES:
            raise InputError("not a kind of text file that can be read", where=path, fix=f"use {', '.join(SUFFIXES)}")
        return [MaterialFile(path, path.name, path.stat().st_size)]
    hub = _HUB_NAME.fullmatch(calib)
    # A mistyped path is not looked for on the Hub: the network's error would hide the mistake.
    if hub is None or _suffix(path) in SUFFIXES or calib.startswith((".", "~")):
        raise InputError(
            "no such file or folder", where=calib, fix="give a file, a folder or ORG/NAME of a Hub dataset"
        )
    dataset, config, split = hub[1], hub[2], hub[3]
    if split is None and config is not None and _SPLIT_NAMES.fullmatch(config):
        config, split = None, config
    return HubName(dataset, config, split or "train")


def _suffix(path: Path) -> str:
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def _files_below(folder: Path) -> list[MaterialFile]:
    files = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and _suffix(path) in SUFFIXES:
            files.append(MaterialFile(path, relative.as_posix(), path.stat().st_size))
    if not files:
        raise InputError("no text files in this folder", where=folder, fix=f"put {', '.join(SUFFIXES)} files there")
    return files


def reservoir(items: Iterable[T], capacity: int, rng: Random) -> list[T]:
    """At most `capacity` of the items, each with equal chance, in their order (Vitter's algorithm R)."""
    kept: list[tuple[int, T]] = []
    for index, item in enumerate(items):
        if index < capacity:
            kept.append((index, item))
        elif (place := rng.randrange(index + 1)) < capacity:
            kept[place] = (index, item)
    return [item for _, item in sorted(kept, key=lambda pair: pair[0])]


def read_documents(file: MaterialFile, limit: int, chunk: int, rng: Random) -> list[str]:
    """The text of a file, or, beyond `limit` bytes, blocks of about `chunk` bytes spread over it."""
    return [_normalise(_decode(block, file)) for block in _spread_blocks(file, limit, chunk, rng)]


def read_records(file: MaterialFile, limit: int, chunk: int, rng: Random) -> list[Content]:
    """The records of a file, or, beyond `limit` bytes, those of blocks spread over it."""
    if _suffix(file.path) == ".json" and not _is_json_lines(file):
        return _records_of_array(file)
    contents: list[Content] = []
    for block in _spread_blocks(file, limit, chunk, rng):
        lines = block.data.split(b"\n")
        if not block.whole:
            # A line cut off at an end of the block is no record. A complete last line leaves an empty one after it.
            lines = lines[0 if block.aligned else 1 : -1]
        for number, line in enumerate(lines, start=1):
            where = f"{file.path}, line {number}" if block.whole else f"{file.path}, after byte {block.offset}"
            text = _decode_line(line, number == 1 and block.offset == 0, where)
            if text:
                contents.append(content_of(_parse(text, where), where))
    return contents


def content_of(record: Any, where: str) -> Content:
    """What a record holds, by the keys that published datasets use."""
    if isinstance(record, str):
        return record if record.strip() else None
    if not isinstance(record, dict):
        raise InputError(
            f"a record is a {type(record).__name__}, not an object",
            where=where,
            fix="every record must be a JSON object",
        )
    for key in ("text", "content"):
        if key in record:
            return _text(record[key], key, where)
    for key in ("messages", "conversations", "conversation"):
        if key in record:
            return _messages(record[key], where)
    for first, second in _PAIRS:
        if first in record and second in record:
            return _joined(record[first], record[second], (first, second), where)
    if "prompt" in record:
        prompt = record["prompt"]
        return _messages(prompt, where) if isinstance(prompt, list) else _text(prompt, "prompt", where)
    found = ", ".join(map(str, list(record)[:12])) or "none"
    raise InputError(
        f"a record of unknown shape; its keys: {found}",
        where=where,
        fix="use 'text', 'content', 'messages', 'conversations' or 'prompt' (with 'completion' or 'response')",
    )


def hub_reachable(seconds: float = 3.0) -> bool:
    """Whether the Hub answers: without a network its client would retry for half a minute before it says so."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only the proxy knows
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((endpoint.hostname or "", endpoint.port or 443), timeout=seconds).close()
    except OSError:
        return False
    return True


def hub_contents(name: HubName, seed: int) -> Iterator[Content]:
    """The records of a Hub dataset, streamed, up to a bound."""
    where = name.dataset
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            "reading a Hub dataset needs the package 'datasets'",
            where=where,
            fix="pip install datasets, or give --calib a file or a folder",
        ) from None
    advice = "check its name and the connection, or give --calib a file, a folder or 'self'"
    if not hub_reachable():
        raise NetworkError("the Hub cannot be reached", where=where, fix=advice)
    size = 0
    try:
        stream = load_dataset(name.dataset, name.config, split=name.split, streaming=True)
        # A buffer of one row keeps the order within a shard, so that lines of running text stay together.
        for number, row in enumerate(stream.shuffle(seed=seed, buffer_size=1), start=1):
            content = content_of(row, f"{where}, record {number}")
            yield content
            size += len(str(content))
            if size > HUB_TEXT_BYTES:
                return
    except (MlaError, MemoryError):
        raise
    except (ValueError, KeyError) as failure:
        raise InputError(
            f"cannot read the dataset: {failure}", where=where, fix="check :CONFIG and :SPLIT"
        ) from failure
    except Exception as failure:  # whatever the network, the Hub or a file format of it raises
        raise NetworkError(
            f"cannot load the dataset: {type(failure).__name__}: {failure}",
            where=where,
            fix=advice,
        ) from failure


def _open(file: MaterialFile) -> IO[bytes]:
    return gzip.open(file.path, "rb") if file.path.name.lower().endswith(".gz") else file.path.open("rb")  # type: ignore[return-value]


def _spread_blocks(file: MaterialFile, limit: int, chunk: int, rng: Random) -> list[Block]:
    try:
        with _open(file) as stream:
            if isinstance(stream, gzip.GzipFile):
                return _sampled_stream(stream, limit, chunk, rng)
            if file.size <= limit:
                return [Block(0, stream.read(), whole=True)]
            count = max(1, limit // chunk)
            stride = file.size // count
            return [_block_within(stream, i * stride, (i + 1) * stride, chunk, rng) for i in range(count)]
    except (EOFError, zlib.error, gzip.BadGzipFile) as failure:
        raise InputError(
            f"a damaged gzip file: {failure}", where=file.path, fix="copy or download it again"
        ) from failure


def _block_within(stream: IO[bytes], start: int, end: int, chunk: int, rng: Random) -> Block:
    begin = start + rng.randrange(max(1, end - start - 2 * chunk))
    stream.seek(begin)
    aligned = begin == 0 or stream.readline(chunk).endswith(b"\n")
    offset = stream.tell()
    data = stream.read(max(0, min(chunk, end - offset)))
    data += stream.readline(max(0, min(chunk, end - stream.tell())))
    return Block(offset, data, whole=False, aligned=aligned)


def _sampled_stream(stream: IO[bytes], limit: int, chunk: int, rng: Random) -> list[Block]:
    # Its length is known only at the end: keep a fair sample while reading once.
    def blocks() -> Iterator[Block]:
        offset, aligned = 0, True
        while data := stream.read(chunk):
            data += stream.readline(chunk)
            yield Block(offset, data, whole=False, aligned=aligned)
            offset, aligned = offset + len(data), data.endswith(b"\n")

    kept = reservoir(blocks(), max(1, limit // chunk), rng)
    length = stream.tell()
    if sum(len(block.data) for block in kept) == length:
        return [Block(0, b"".join(block.data for block in kept), whole=True)]
    return kept


def _decode(block: Block, file: MaterialFile) -> str:
    data = block.data
    if block.offset == 0:
        data = data.removeprefix(codecs.BOM_UTF8)
    elif not block.whole:
        data = data[next((i for i in range(min(4, len(data))) if data[i] & 0xC0 != 0x80), 0) :]
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=block.whole)
    except UnicodeDecodeError as failure:
        raise InputError(
            f"not UTF-8 text: byte {block.offset + failure.start}", where=file.path, fix="convert the file to UTF-8"
        ) from failure


def _normalise(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").rstrip()


def _decode_line(line: bytes, first: bool, where: str) -> str:
    if first:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as failure:
        raise InputError("not UTF-8 text", where=where, fix="convert the file to UTF-8") from failure


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise InputError(f"not JSON: {failure}", where=where, fix="every line must be one JSON object") from failure


def _is_json_lines(file: MaterialFile) -> bool:
    """Whether the first line with anything on it is a JSON object of its own."""
    with _open(file) as stream:
        for line in stream:
            text = line.removeprefix(codecs.BOM_UTF8).strip()
            if text:
                try:
                    return isinstance(json.loads(text), (dict, str))
                except ValueError:
                    # An array or an object over several lines starts with a line that ends open.
                    return not text.endswith((b"{", b"[", b","))
    return True


def _records_of_array(file: MaterialFile) -> list[Content]:
    if file.size > WHOLE_JSON_BYTES:
        raise InputError("too large for one JSON array", where=file.path, fix="use .jsonl, one record a line")
    with _open(file) as stream:
        text = _decode(Block(0, stream.read(), whole=True), file)
    value = _parse(text, str(file.path))
    records = value if isinstance(value, list) else [value]
    return [content_of(record, f"{file.path}, record {number}") for number, record in enumerate(records, start=1)]


def _text(value: Any, key: str, where: str) -> Content:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(
            f"'{key}' is a {type(value).__name__}, not a string",
            where=where,
            fix="give the record its text as a string",
        )
    return value if value.strip() else None


def _messages(value: Any, where: str) -> Content:
    if not value:
        return None
    messages = []
    for message in value if isinstance(value, list) else [value]:
        if not isinstance(message, dict):
            raise InputError(f"a message is a {type(message).__name__}, not an object", where=where, fix=_MESSAGE)
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role is None:
            raise InputError(
                f"a message without a role; its keys: {', '.join(map(str, message))}", where=where, fix=_MESSAGE
            )
        messages.append({"role": _ROLES.get(role, role), "content": "" if content is None else content})
    return messages if any(message["content"] for message in messages) else None


def _joined(first: Any, second: Any, keys: tuple[str, str], where: str) -> Content:
    if isinstance(first, list) or isinstance(second, list):
        parts = [_messages(first, where), _messages(second, where)]
        return [message for part in parts if isinstance(part, list) for message in part] or None
    texts = [text for text in (_text(first, keys[0], where), _text(second, keys[1], where)) if isinstance(text, str)]
    if len(texts) == 2 and not (texts[0][-1].isspace() or texts[1][0].isspace()):
        texts.insert(1, "\n")
    return "".join(texts) or None
