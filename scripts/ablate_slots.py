"""What the choice of rotary slots is worth: divergence from the source after the rotary split alone, nothing narrowed.

    python scripts/ablate_slots.py --calib ../shared/data/text/calibration

The first table of docs/decisions/0003 comes from this script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import first, load_texts, split_heldout
from mla_cli.checkpoint.load import open_model
from mla_cli.converters.allocate import choose_common_slots, choose_slots, slot_worth, turned_energy
from mla_cli.converters.closed_form import gather_source_statistics
from mla_cli.converters.held_out import measure
from mla_cli.converters.rotary_split import component_energies, default_slots, split_rotary
from mla_cli.model.tokenizer import load_tokenizer


def main() -> None:
    """Take the statistics once, split with every choice of slots, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seen", type=int, default=64, help="sequences that statistics are taken over")
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--rope", type=int, nargs="+", default=[64, 48, 32, 16])
    options = parser.parse_args()

    model = open_model(options.model)
    texts = load_texts(
        options.calib, load_tokenizer(model.source.folder), samples=options.samples, seq_len=options.seq_len, seed=0
    )
    fitted, unseen = split_heldout(texts)
    bank = LayerBank(model, torch.device("cpu"))
    batches = Batches.fit(options.seq_len, model.spec.hidden_size, model.spec.num_layers)
    seen = gather_source_statistics(bank, first(fitted, options.seen), batches)
    probe = first(unseen, options.held_out)
    attentions = [bank.source_attention(i) for i in range(model.spec.num_layers)]
    worths = [slot_worth(a, s) for a, s in zip(attentions, seen, strict=True)]
    energies = [component_energies(a, s.input_moment, s.query_energy) for a, s in zip(attentions, seen, strict=True)]
    frequencies, groups = worths[0].shape

    def alike(slots: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [slots] * len(attentions)

    def own(values: Sequence[Tensor], count: int) -> list[tuple[int, ...]]:
        return [choose_slots([value], count)[0] for value in values]

    print("| numbers of rotary key | slots | KL | perplexity |\n|---|---|---|---|")
    for rope in options.rope:
        count = rope // 2
        even = alike(default_slots(frequencies, rope, groups))
        variants: dict[str, tuple[list[tuple[int, ...]], bool]] = {
            "every frequency alike, weighted by query energy": (even, False),
            "every frequency alike, weighted by what the mean rotation misses": (even, True),
            "a layer's own, by energy alone": (own(energies, count), False),
            "one table for all layers, by what is missed (stock form)": (
                alike(choose_common_slots(worths, count)), True,
            ),
            "a layer's own, by what is missed": (own(worths, count), True),
            "shared out over all layers, by what is missed (native form)": (list(choose_slots(worths, count)), True),
        }  # fmt: skip
        for name, (slots, turned) in variants.items():
            if options.only and options.only not in name:
                continue
            wide = [
                split_rotary(
                    a, s.input_moment, turned_energy(s) if turned else s.query_energy, chosen, turn=s.mean_turn
                )
                for a, s, chosen in zip(attentions, seen, slots, strict=True)
            ]
            stages = {
                "source": (bank.frame, bank.source_layer),
                "split": (bank.latent_frame(wide), bank.latent_layers(wide)),
            }
            found = measure(stages, probe.sequences, probe.lengths, batches)["split"]
            print(f"| {rope} | {name} | {found.kl:.4f} | {found.perplexity:.2f} |", flush=True)


if __name__ == "__main__":
    main()
