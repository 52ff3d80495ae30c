"""A `tokenizer.model` file of sentencepiece, read without the sentencepiece package."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.tokenizer_build import PieceKind

_BPE = 2  # TrainerSpec.ModelType: 1 unigram, 2 bpe, 3 word, 4 char
_FIX = "convert it once with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)) to a tokenizer.json"


@dataclass(frozen=True)
class SentencePieceModel:
    """The vocabulary of a sentencepiece BPE model."""

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[int, ...]
    prefix_space: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read the pieces of a BPE model.

    Raises:
        InputError: the file is damaged or no sentencepiece model. UnsupportedError: it is no BPE model.
    """
    tokens, scores, kinds = [], [], []
    kind_of_model, prefix_space, charsmap = 1, True, b""
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                tokens.append(_text(piece[1]))
                scores.append(float(struct.unpack("<f", _bytes(piece[2]))[0]) if 2 in piece else 0.0)
                kinds.append(_integer(piece.get(3, int(PieceKind.NORMAL))))
            elif number == 2 and isinstance(value, bytes):
                kind_of_model = _integer(dict(_fields(value)).get(3, 1))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
                prefix_space = bool(normalizer.get(3, 1))
                charsmap = _bytes(normalizer.get(2, b""))
    except OSError as error:
        raise InputError(
            f"cannot read {path.name}: {error.strerror or error}", where=path, fix="check the path and its permissions"
        ) from error
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise InputError(f"{path.name} is not a sentencepiece model", where=path, fix=_FIX) from error
    if not tokens:
        raise InputError(f"{path.name} is not a sentencepiece model", where=path, fix=_FIX)
    if kind_of_model != _BPE or charsmap:
        reason = "normalises text by a character map" if kind_of_model == _BPE else "is not a BPE model"
        raise UnsupportedError(f"the sentencepiece model {reason}", where=path, fix=_FIX)
    return SentencePieceModel(tuple(tokens), tuple(scores), tuple(kinds), prefix_space)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of one protocol-buffer message as (number, value)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("a field ends after the file")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has no end")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("expected bytes")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode("utf-8")


def _integer(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("expected a number")
    return value
