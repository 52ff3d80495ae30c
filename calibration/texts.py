"""Calibration sequences: token windows that cover the whole of the material, the same for the same seed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any, Protocol

import torch

from mla_cli import console
from mla_cli.calibration import material
from mla_cli.calibration.material import Content, HubName, MaterialFile
from mla_cli.errors import InputError, UsageError

MIN_TOKENS = 8  # shorter sequences say nothing about attention over a context
TEXT_BYTES = 4 << 20  # tokenised at least, where there is as much: a few seconds
RECORD_BYTES = 64 << 20  # parsed at least, where there is as much; only the drawn records are tokenised
# About four times what a token of English takes: enough to choose from, and room for languages that need more.
BYTES_PER_TOKEN = 16
CHUNK_BYTES = 64 << 10
RECORD_CHUNK_BYTES = 1 << 20  # in files beyond the bound above, a longer record is not seen
HELDOUT_FRACTION = 1 / 16


class Tokenizer(Protocol):
    """What is needed of `mla_cli.model.tokenizer`."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...
    def encode(self, text: str, *, special: bool = True) -> list[int]: ...
    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class CalibrationTexts:
    """Sequences in random order: any slice of them is a fair sample."""

    sequences: torch.Tensor  # [N, S] int64, padded right with 0
    lengths: torch.Tensor  # [N] int64
    origin: str
    skipped: int  # records and texts that were looked at and are too short
    requested: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, padding not counted."""
        return int(self.lengths.sum())


def load_texts(
    calib: str, tokenizer: Tokenizer, *, samples: int, seq_len: int, seed: int, enough: int | None = None
) -> CalibrationTexts:
    """Draw `samples` sequences of at most `seq_len` tokens from a file, a folder or a Hub dataset.

    Running text is cut into windows that do not overlap; a record is one sequence, cut at `seq_len`. Where the
    tokenizer puts BOS first, every sequence has exactly one. With fewer than `enough` (default: `samples`) a warning says so.

    Raises:
        InputError: the material is not there, not readable, or holds no sequence of MIN_TOKENS tokens.
        NetworkError: a Hub dataset could not be fetched.
    """
    if samples < 1 or seq_len < 2:
        raise UsageError(
            f"{samples} sequences of {seq_len} tokens are no calibration", fix="raise --samples, --seq-len"
        )
    found = material.locate(calib)
    if isinstance(found, HubName):
        parts = [name for name in (found.dataset, found.config, found.split) if name]
        origin = f"hub: {':'.join(parts)}"
        streams = [_from_hub(found, tokenizer, samples, seq_len, seed)]
        shares = [samples]
    else:
        origin = _names(found)
        total = sum(file.size for file in found)
        streams = [_from_file(file, file.size / max(1, total), tokenizer, samples, seq_len, seed) for file in found]
        shares = _shares([file.size for file in found], samples)
    sequences, skipped = _draw(streams, shares, samples)
    Random(f"{seed}/order").shuffle(sequences)
    return _collect(sequences, origin, skipped, samples, samples if enough is None else enough)


def split_heldout(
    texts: CalibrationTexts, fraction: float = HELDOUT_FRACTION
) -> tuple[CalibrationTexts, CalibrationTexts]:
    """Sequences for statistics, and sequences that never enter them (none when there is only one)."""
    count = len(texts.lengths)
    heldout = 0 if count < 2 else min(count - 1, max(1, round(count * fraction)))
    kept = count - heldout

    def part(rows: slice) -> CalibrationTexts:
        lengths = texts.lengths[rows]
        longest = int(lengths.max()) if len(lengths) else 0
        return CalibrationTexts(texts.sequences[rows, :longest], lengths, texts.origin, texts.skipped, texts.requested)

    return part(slice(0, kept)), part(slice(kept, count))


def hold_out(texts: CalibrationTexts, most: int) -> tuple[CalibrationTexts, CalibrationTexts]:
    """Sequences for statistics, and at most so many that never enter them.

    Raises:
        InputError: there is only one sequence.
    """
    fitted, unseen = split_heldout(texts)
    if not len(unseen.lengths):
        raise InputError(
            f"one calibration sequence is not enough ({texts.origin})", fix="give more text, or use --calib self"
        )
    return fitted, first(unseen, most)


def first(texts: CalibrationTexts, count: int) -> CalibrationTexts:
    """The first `count` sequences."""
    lengths = texts.lengths[:count]
    return replace(texts, sequences=texts.sequences[:count, : int(lengths.max())], lengths=lengths)


def cut(texts: CalibrationTexts, seq_len: int) -> CalibrationTexts:
    """At most `seq_len` tokens of each sequence."""
    lengths = texts.lengths.clamp(max=seq_len)
    return replace(texts, sequences=texts.sequences[:, : int(lengths.max())], lengths=lengths)


def builtin_english() -> str:
    """English prose that every Python carries: the language reference, without its code, grammar and headings."""
    from pydoc_data.topics import topics

    paragraphs: dict[str, None] = {}  # many topics repeat paragraphs of others
    for name in sorted(topics):
        for block in re.split(r"\n[ \t]*\n", topics[name]):
            text = " ".join(block.split())
            if _is_prose(text):
                paragraphs[re.sub(r"\*+([^*\s][^*]*?)\*+", r"\1", re.sub(r"^(\*|\d+\.|\[\d+\]) ", "", text))] = None
    return "\n\n".join(paragraphs)


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return (
        text.endswith((".", "!", "?", ":"))
        and text.count(" ") >= 7
        and letters >= 0.88 * len(text)
        and not any(mark in text for mark in ("::=", ">>>", "...", "==="))
    )


def _from_file(
    file: MaterialFile, part: float, tokenizer: Tokenizer, samples: int, seq_len: int, seed: int
) -> Iterator[list[int] | None]:
    """Sequences of one file in random order; None for one that is too short. Nothing is read before the first."""
    rng = Random(f"{seed}/{file.name}")
    chunk = max(CHUNK_BYTES, BYTES_PER_TOKEN * seq_len)
    needed = BYTES_PER_TOKEN * samples * seq_len
    if file.holds_records:
        limit = math.ceil(part * max(RECORD_BYTES, needed))
        contents = material.read_records(file, limit, max(RECORD_CHUNK_BYTES, chunk), rng)
        yield from _from_records(contents, tokenizer, seq_len, rng)
    else:
        documents = material.read_documents(file, math.ceil(part * max(TEXT_BYTES, needed)), chunk, rng)
        yield from _windows(documents, tokenizer, seq_len, rng)


def _from_hub(name: HubName, tokenizer: Tokenizer, samples: int, seq_len: int, seed: int) -> Iterator[list[int] | None]:
    rng = Random(f"{seed}/{name}")
    contents = material.hub_contents(name, seed)
    first = next((content for content in contents if content is not None), None)
    if first is None:
        return
    contents = chain([first], contents)
    if isinstance(first, str):
        # Many text datasets hold one line or paragraph a row: joined, they are the running text they came from.
        chunk = max(CHUNK_BYTES, BYTES_PER_TOKEN * seq_len)
        capacity = max(1, max(TEXT_BYTES, BYTES_PER_TOKEN * samples * seq_len) // chunk)
        texts = (content for content in contents if isinstance(content, str))
        yield from _windows(material.reservoir(_joined(texts, chunk), capacity, rng), tokenizer, seq_len, rng)
    else:
        yield from _from_records(material.reservoir(contents, max(1024, 4 * samples), rng), tokenizer, seq_len, rng)


def _joined(texts: Iterable[str], size: int) -> Iterator[str]:
    parts: list[str] = []
    length = 0
    for text in texts:
        parts.append(text if text.endswith("\n") else text + "\n")
        length += len(text)
        if length >= size:
            yield "".join(parts)
            parts, length = [], 0
    if parts:
        yield "".join(parts)


def _from_records(
    contents: list[Content], tokenizer: Tokenizer, seq_len: int, rng: Random
) -> Iterator[list[int] | None]:
    for content in rng.sample(contents, len(contents)):
        if content is None:
            yield None
        elif isinstance(content, str):
            # What is cut off below need not be tokenised.
            ids = tokenizer.encode(content[: 2 * BYTES_PER_TOKEN * seq_len], special=True)
            yield _sequence(ids, tokenizer, seq_len)
        else:
            # A conversation is read as it is: no turn is opened after its last one.
            yield _sequence(tokenizer.encode_chat(content, add_generation_prompt=False), tokenizer, seq_len)


def _windows(documents: list[str], tokenizer: Tokenizer, seq_len: int, rng: Random) -> Iterator[list[int] | None]:
    """Windows of running text in random order, without overlap; a document shorter than a window is one."""
    opening = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    width = seq_len - len(opening)
    windows: list[list[int]] = []
    for document in documents:
        ids = [token for piece in _pieces(document) for token in tokenizer.encode(piece, special=False)]
        count, rest = divmod(len(ids), width)
        start = rng.randint(0, rest) if count else 0
        windows += [ids[start + i * width : start + (i + 1) * width] for i in range(max(1, count))]
    rng.shuffle(windows)
    for window in windows:
        yield _sequence(opening + window, tokenizer, seq_len)


def _pieces(text: str, size: int = CHUNK_BYTES) -> Iterator[str]:
    """The text in pieces of at most `size`: some tokenizers take time that grows faster than the text."""
    start = 0
    while start < len(text):
        end = min(start + size, len(text))
        if end < len(text):
            line, word = text.rfind("\n", start + 1, end), text.rfind(" ", start + 1, end)
            end = line + 1 if line > 0 else word if word > 0 else end  # a space belongs to the word after it
        yield text[start:end]
        start = end


def _sequence(ids: list[int], tokenizer: Tokenizer, seq_len: int) -> list[int] | None:
    """The sequence cut at `seq_len`, with one BOS where a template and the tokenizer each put one."""
    while len(ids) > 1 and tokenizer.bos_id is not None and ids[0] == ids[1] == tokenizer.bos_id:
        ids = ids[1:]
    return ids[:seq_len] if len(ids) >= min(MIN_TOKENS, seq_len) else None


def _draw(streams: list[Iterator[list[int] | None]], shares: list[int], samples: int) -> tuple[list[list[int]], int]:
    """Each stream's share; what some cannot give, the others do."""
    sequences: list[list[int]] = []
    skipped = 0
    for stream, goal in [*zip(streams, shares, strict=True), *((stream, samples) for stream in streams)]:
        wanted = min(goal, samples - len(sequences))
        while wanted > 0:
            try:
                sequence = next(stream)
            except StopIteration:
                break
            if sequence is None:
                skipped += 1
            else:
                sequences.append(sequence)
                wanted -= 1
    return sequences, skipped


def _shares(sizes: list[int], samples: int) -> list[int]:
    """`samples` divided in proportion to `sizes` (largest remainders)."""
    total = max(1, sum(sizes))
    shares = [samples * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (-(samples * sizes[i] % total), i))
    for index in by_remainder[: max(0, samples - sum(shares))]:
        shares[index] += 1
    return shares


def _names(files: list[MaterialFile], shown: int = 8) -> str:
    names = ", ".join(file.name for file in files[:shown])
    return f"files: {names}" + (f" and {len(files) - shown} more" if len(files) > shown else "")


def _collect(sequences: list[list[int]], origin: str, skipped: int, requested: int, enough: int) -> CalibrationTexts:
    if not sequences:
        raise InputError(
            "no usable calibration text" + (f": {skipped} records too short" if skipped else ""),
            where=origin,
            fix=f"give more text: a sequence needs at least {MIN_TOKENS} tokens",
        )
    if skipped:
        console.warn(f"skipped {skipped} calibration records with fewer than {MIN_TOKENS} tokens [{origin}]")
    if len(sequences) < enough:
        console.warn(f"{len(sequences)} calibration sequences instead of {enough}: there is no more text [{origin}]")
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    padded = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    return CalibrationTexts(padded, lengths, origin, skipped, requested)
