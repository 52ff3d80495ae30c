"""What each part of the closed form is worth: perplexity on a text with one part changed at a time.

    python scripts/ablate_conversion.py --calib ../shared/data/text/calibration --text ../shared/data/text/wikitext2-test.txt

The figures of docs/decisions/0002 come from this script.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches, run
from mla_cli.calibration.texts import load_texts
from mla_cli.checkpoint.load import open_model
from mla_cli.converters.factorize import factorize, output_weight
from mla_cli.converters.held_out import measure
from mla_cli.converters.rotary_split import default_slots, split_rotary
from mla_cli.converters.statistics import latent_statistics, second_moment, source_statistics, with_constant
from mla_cli.model.attention import Record
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.tokenizer import load_tokenizer

WINDOW = 1024


def main() -> None:
    """Take the statistics once, build every variant, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--rope", type=int, default=64)
    options = parser.parse_args()

    model = open_model(options.model)
    tokenizer = load_tokenizer(model.source.folder)
    bank = LayerBank(model, torch.device("cpu"))
    texts = load_texts(options.calib, tokenizer, samples=options.samples, seq_len=512, seed=0)
    sequences, lengths = texts.sequences, texts.lengths
    batches = Batches.fit(sequences.shape[1], model.spec.hidden_size, model.spec.num_layers)
    layers = range(model.spec.num_layers)
    attentions = [bank.source_attention(i) for i in layers]
    first = attentions[0].spec
    assert first.rotary is not None
    slots = default_slots(first.rotary.dim // 2, options.rope, first.num_kv_heads)

    seen = source_statistics(bank.frame, bank.source_layer, sequences, lengths, batches)

    def split(*, turn: bool, mixing: str = "complex", weighted: bool = True) -> list[LatentWeights]:
        return [
            split_rotary(
                a, s.input_moment, s.query_energy if weighted else torch.ones_like(s.query_energy), slots,
                turn=s.mean_turn if turn else None, mixing=mixing,  # type: ignore[arg-type]
            )
            for a, s in zip(attentions, seen, strict=True)
        ]  # fmt: skip

    turned, plain, real = split(turn=True), split(turn=False), split(turn=False, mixing="real", weighted=False)
    frame, layer_at = bank.latent_frame(turned), bank.latent_layers(turned)
    latents = latent_statistics(frame, layer_at, sequences, lengths, batches)
    unweighted = _input_moments(bank, turned, sequences, lengths, batches)
    fishers = [s.fisher for s in latents]
    weighted = [s.input_moment for s in latents]
    activations = [s.input_moment for s in seen]
    weights = [output_weight(w, s.query_moment) for w, s in zip(plain, seen, strict=True)]

    def narrow(
        wide: Sequence[LatentWeights], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[LatentWeights]:
        return [factorize(w, options.rank, i, o)[0] for w, i, o in zip(wide, inputs, outputs, strict=True)]

    variants = {
        "rotary split: real mixing, unweighted": real,
        "rotary split: complex, weighted by queries": plain,
        "rotary split: the same, remainder turned on average": turned,
        "real mixing; queries and output projection": narrow(real, activations, weights),
        "turned; queries and output projection": narrow(turned, activations, weights),
        "turned; Fisher, inputs unweighted about zero": narrow(turned, [_about_zero(m) for m in unweighted], fishers),
        "turned; Fisher, inputs unweighted about their mean": narrow(turned, unweighted, fishers),
        "turned; Fisher, inputs weighted about zero": narrow(turned, [_about_zero(m) for m in weighted], fishers),
        "turned; Fisher, inputs weighted about their mean (what mla does)": narrow(turned, weighted, fishers),
    }
    tokens = torch.tensor(tokenizer.encode(options.text.read_text(encoding="utf-8")))[: options.windows * WINDOW]
    test = tokens.view(-1, WINDOW)
    whole = torch.full((len(test),), WINDOW)
    source = None
    print(f"| {options.text.name}, {len(test)} windows of {WINDOW} | perplexity | over the source |\n|---|---|---|")
    for name, variant in variants.items():
        stages = {"source": (bank.frame, bank.source_layer), "variant": (bank.frame, bank.latent_layers(variant))}
        losses = measure(stages, test, whole, replace(batches, sequences_per_micro=2))
        if source is None:
            source = losses["source"].perplexity
            print(f"| source | {source:.2f} | |")
        found = losses["variant"].perplexity
        print(f"| {name} | {found:.2f} | {100 * math.expm1(math.log(found / source)):+.1f} % |", flush=True)


def _about_zero(moment: Tensor) -> Tensor:
    # A mean of zero makes the covariance the raw second moment.
    raw = moment.clone()
    raw[:-1, -1] = raw[-1, :-1] = 0
    return raw


def _input_moments(
    bank: LayerBank, weights: list[LatentWeights], sequences: Tensor, lengths: Tensor, batches: Batches
) -> list[Tensor]:
    size = bank.model.spec.hidden_size + 1
    sums = [torch.zeros(size, size, dtype=torch.float64) for _ in weights]

    def observe(layer: int, record: Record, valid: Tensor) -> None:
        sums[layer] += second_moment(with_constant(record["x"][valid]))

    run(bank.latent_frame(weights), bank.latent_layers(weights), sequences, lengths, batches, observe=observe)
    return [s / s[-1, -1] for s in sums]


if __name__ == "__main__":
    main()
