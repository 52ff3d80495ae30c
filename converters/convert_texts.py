"""The text of a conversion: for statistics, for healing, held out from both; and the language it is in."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_cli.calibration.choose_texts import choose_texts
from mla_cli.calibration.language import identify, tokenizer_languages, warn_other_language
from mla_cli.calibration.texts import CalibrationTexts, cut, first, hold_out
from mla_cli.checkpoint.load import ModelSource
from mla_cli.console import warn
from mla_cli.converters.heal_options import HEAL_LENGTHS, HEAL_SAMPLES, chunks_within
from mla_cli.converters.options import HELD_OUT, ConvertOptions
from mla_cli.errors import InputError

LANGUAGE_SEQUENCES = 64  # enough text to name its language


@dataclass(frozen=True)
class ConversionTexts:
    """What each stage of a conversion reads.

    Attributes:
        fitted: for statistics. healing: all that may be learned from, whole.
        unseen: held out, cut like `fitted`, for the report. long_unseen: the same, whole, for healing to judge by.
        to_heal: what healing reads; layer by layer, only a sequence's first tokens count.
    """

    fitted: CalibrationTexts
    unseen: CalibrationTexts
    long_unseen: CalibrationTexts
    healing: CalibrationTexts
    to_heal: CalibrationTexts


def within_context(options: ConvertOptions, positions: int) -> tuple[ConvertOptions, list[str]]:
    """The options with sequences that the model can hold, and a note where that shortens them."""
    if options.seq_len <= positions:
        return options, []
    told = f"--seq-len {options.seq_len}: the model has {positions:,} positions, so sequences have {positions:,} tokens"
    return replace(options, seq_len=positions), [told]


def conversion_texts(
    model: ModelSource, tokenizer: Any, options: ConvertOptions, device: torch.device
) -> ConversionTexts:
    """The sequences of a conversion.

    Healing end to end reads more text than statistics need, and longer sequences; so does a gate, which nothing of a sequence's
    first chunk teaches. What is held out is held out from all.

    Raises:
        InputError: there is too little text, or none long enough for a gate.
    """
    own = options.calib not in ("auto", "self")
    full = options.heal.mode == "full" and own
    chunk = max(chunks_within(options.heal, model.spec.max_position_embeddings), default=0)
    seq_len = HEAL_LENGTHS * options.seq_len if full else options.seq_len
    seq_len = max(seq_len, 2 * chunk) if own else seq_len
    more = seq_len > options.seq_len
    texts = choose_texts(
        model, tokenizer, calib=options.calib,
        samples=max(options.samples, HEAL_SAMPLES) if full else options.samples,
        seq_len=seq_len, seed=options.seed, device=device, preset=options.preset,
        enough=math.ceil(options.samples * options.seq_len / seq_len) if more else None,
    )  # fmt: skip
    healing, unseen = hold_out(texts, HELD_OUT)
    if chunk and min(int(healing.lengths.max()), int(unseen.lengths.max())) <= chunk:
        raise InputError(
            f"a gate over chunks of {chunk} tokens learns from longer sequences, and there are none ({texts.origin})",
            fix="give long texts in --calib, or leave out --gate",
        )
    opening = tokenizer.bos_id if tokenizer.adds_bos else None
    fitted = first(pieces(healing, options.seq_len, opening), options.samples) if more else healing
    fitted = replace(fitted, requested=options.samples)
    to_heal = healing if options.heal.mode == "full" else fitted
    return ConversionTexts(fitted, cut(unseen, options.seq_len), unseen, healing, to_heal)


def language_of(tokenizer: Any, fitted: CalibrationTexts, preset: str) -> dict[str, Any]:
    """The language of the calibration text, with a warning where the tokenizer looks made for another."""
    rows = zip(fitted.sequences[:LANGUAGE_SEQUENCES], fitted.lengths.tolist(), strict=False)
    found = identify([tokenizer.decode(row[:count].tolist()) for row, count in rows])
    if preset != "code" and (text := warn_other_language(found, tokenizer_languages(tokenizer))):
        warn(text)
    return {"name": found.name, "share": found.share, "confident": found.confident}


def pieces(texts: CalibrationTexts, seq_len: int, opening: int | None) -> CalibrationTexts:
    """Every sequence in pieces of `seq_len` tokens; a rest of less than half of that is left out.

    Args:
        opening: token that every sequence starts with (BOS), and so every piece, or None.
    """
    found = []
    for row, length in zip(texts.sequences, texts.lengths.tolist(), strict=True):
        for start in range(0, length, seq_len):
            piece = row[start : min(start + seq_len, length)].clone()
            if start and 2 * len(piece) < seq_len:
                continue
            if opening is not None:
                piece[0] = opening
            found.append(piece)
    lengths = torch.tensor([len(piece) for piece in found], dtype=torch.int64)
    return replace(texts, sequences=torch.nn.utils.rnn.pad_sequence(found, batch_first=True), lengths=lengths)
