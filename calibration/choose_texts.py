"""Which calibration text a model gets: what the user named, else the Hub's, else what the model writes itself."""

from __future__ import annotations

import torch

from mla_cli.calibration.self_texts import sample_texts
from mla_cli.calibration.texts import CalibrationTexts, Tokenizer, load_texts
from mla_cli.checkpoint.load import ModelSource, load_decoder
from mla_cli.console import note
from mla_cli.errors import MlaError

HUB_TEXT = "Salesforce/wikitext:wikitext-2-raw-v1:train"


def choose_texts(
    model: ModelSource, tokenizer: Tokenizer, *, calib: str, samples: int, seq_len: int, seed: int, device: torch.device
) -> CalibrationTexts:
    """Calibration sequences for a model.

    Args:
        calib: `auto`, `self`, a file, a folder or a Hub dataset.
        seq_len: tokens of a sequence; the model's own positions bound it.

    Raises:
        InputError: the text that was named cannot be used.
        NetworkError: the Hub dataset that was named cannot be fetched.
    """
    length = min(seq_len, model.spec.max_position_embeddings)
    if calib == "auto":
        try:
            return load_texts(HUB_TEXT, tokenizer, samples=samples, seq_len=length, seed=seed)
        except MlaError as problem:
            note(f"no calibration text from the Hub ({problem.what}); the model writes its own")
    elif calib != "self":
        return load_texts(calib, tokenizer, samples=samples, seq_len=length, seed=seed)
    return sample_texts(load_decoder(model, device=device), tokenizer, samples=samples, seq_len=length, seed=seed)
