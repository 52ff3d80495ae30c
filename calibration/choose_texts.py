"""Which calibration text a model gets: what the user named, else the Hub's, else what the model writes itself."""

from __future__ import annotations

from random import Random

import torch

from mla_cli.calibration.material import hub_reachable
from mla_cli.calibration.mixes import Mix, find_mix
from mla_cli.calibration.self_texts import sample_texts
from mla_cli.calibration.texts import CalibrationTexts, Tokenizer, load_texts
from mla_cli.checkpoint.load import ModelSource, load_decoder
from mla_cli.console import note
from mla_cli.errors import MlaError, NetworkError


def choose_texts(
    model: ModelSource,
    tokenizer: Tokenizer,
    *,
    calib: str,
    samples: int,
    seq_len: int,
    seed: int,
    device: torch.device,
    preset: str = "general",
    enough: int | None = None,
) -> CalibrationTexts:
    """Calibration sequences for a model.

    Args:
        calib: `auto`, `self`, a file, a folder or a Hub dataset.
        seq_len: tokens of a sequence; the model's own positions bound it.
        preset: what the model will be used for: which Hub datasets `auto` takes, and how texts of `self` begin.
        enough: sequences of named text below which a warning is due; None: `samples`.

    Raises:
        InputError: the text that was named cannot be used.
        NetworkError: the Hub dataset that was named cannot be fetched.
        UsageError: there is no such preset.
    """
    mix = find_mix(preset)
    length = min(seq_len, model.spec.max_position_embeddings)
    if calib not in ("auto", "self"):
        return load_texts(calib, tokenizer, samples=samples, seq_len=length, seed=seed, enough=enough)
    parts = _from_hub(mix, tokenizer, samples, length, seed) if calib == "auto" else []
    missing = samples - sum(part.requested for part in parts)
    if missing:
        decoder = load_decoder(model, device=device)
        parts.append(
            sample_texts(decoder, tokenizer, samples=missing, seq_len=length, seed=seed, openings=mix.openings)
        )
    return _mixed(parts, seed)


def _from_hub(mix: Mix, tokenizer: Tokenizer, samples: int, length: int, seed: int) -> list[CalibrationTexts]:
    """The parts of a mix that can be had; says why of the others."""
    parts: list[CalibrationTexts] = []
    failed: list[tuple[str, MlaError]] = []
    for name, share in _shares(mix, samples):
        try:
            parts.append(load_texts(name, tokenizer, samples=share, seq_len=length, seed=seed))
        except MlaError as problem:
            failed.append((name, problem))
            if isinstance(problem, NetworkError) and not hub_reachable():
                break  # the others would wait for the network too
    if failed and not parts:
        note(f"no calibration text from the Hub ({failed[0][1].what}); the model writes its own")
    for name, why in failed if parts else []:
        note(f"no calibration text of {name} ({why.what}); the model writes this part")
    return parts


def _shares(mix: Mix, samples: int) -> list[tuple[str, int]]:
    """How many of `samples` sequences each dataset gives; those that give none are left out."""
    total, sum_before, found = sum(parts for _, parts in mix.hub), 0, []
    for name, parts in mix.hub:
        count = round(samples * (sum_before + parts) / total) - round(samples * sum_before / total)
        sum_before += parts
        if count:
            found.append((name, count))
    return found


def _mixed(parts: list[CalibrationTexts], seed: int) -> CalibrationTexts:
    """Texts of several origins as one, in random order."""
    if len(parts) == 1:
        return parts[0]
    lengths = torch.cat([part.lengths for part in parts])
    sequences = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
    row = 0
    for part in parts:
        sequences[row : row + len(part.lengths), : part.sequences.shape[1]] = part.sequences
        row += len(part.lengths)
    order = list(range(row))
    Random(f"{seed}/mix").shuffle(order)
    return CalibrationTexts(
        sequences[order],
        lengths[order],
        "; ".join(f"{part.origin} ({len(part.lengths)})" for part in parts),
        sum(part.skipped for part in parts),
        sum(part.requested for part in parts),
    )
