"""How a token's gradient should weigh in the closed form: divergence from the source with one part changed at a time.

    python scripts/ablate_weights.py --calib ../shared/data/text/calibration --text ../shared/data/text/wikitext2-test.txt

The last table of docs/decisions/0002 comes from this script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches, run
from mla_cli.calibration.precision import fast_dtype
from mla_cli.calibration.texts import first, load_texts, split_heldout
from mla_cli.checkpoint.load import open_model
from mla_cli.converters.allocate import choose_common_slots, slot_worth, turned_energy
from mla_cli.converters.closed_form import gather_source_statistics
from mla_cli.converters.factorize import factorize
from mla_cli.converters.held_out import measure, source_and
from mla_cli.converters.rotary_split import split_rotary
from mla_cli.converters.statistics import second_moment, tempered, with_constant
from mla_cli.model.attention import Record
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.tokenizer import load_tokenizer

# Powers of |g| that a token weighs by in the moment of its input.
POWERS = (0.0, 1.0, 2.0)


def main() -> None:
    """Take every moment in one pass, factorise with each pair, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=6, help="spread evenly over the text")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--rope", type=int, default=64)
    options = parser.parse_args()

    model = open_model(options.model)
    tokenizer = load_tokenizer(model.source.folder)
    texts = load_texts(options.calib, tokenizer, samples=512, seq_len=options.seq_len, seed=0)
    fitted = first(split_heldout(texts)[0], options.samples)
    bank = LayerBank(model, torch.device("cpu"))
    layers = range(model.spec.num_layers)
    batches = Batches.fit(options.seq_len, model.spec.hidden_size, len(layers))
    seen = gather_source_statistics(bank, fitted, batches)
    attentions = [bank.source_attention(i) for i in layers]
    slots = choose_common_slots([slot_worth(a, s) for a, s in zip(attentions, seen, strict=True)], options.rope // 2)
    wide = [
        split_rotary(a, s.input_moment, turned_energy(s), slots, turn=s.mean_turn)
        for a, s in zip(attentions, seen, strict=True)
    ]
    inputs, whole, shared, counts = _moments(bank, wide, fitted.sequences, fitted.lengths, batches)
    print("effective tokens of a layer:", ", ".join(f"{count:.0f}" for count in counts))
    softened = [tempered(moment, float(moment.trace())) for moment in shared]
    pairs = {
        "inputs alike; F": (inputs[0.0], whole),
        "inputs by |g|^2; F (as it was)": (inputs[2.0], whole),
        "inputs by |g|; F": (inputs[1.0], whole),
        "inputs by |g|^2; F of |g|": (inputs[2.0], shared),
        "inputs by |g|; F of |g|": (inputs[1.0], shared),
        "inputs by |g|; F of |g|, tempered (what mla does)": (inputs[1.0], softened),
    }
    ids = torch.tensor(tokenizer.encode(options.text.read_text(encoding="utf-8")))
    width = options.seq_len
    spread = torch.linspace(0, len(ids) // width - 1, options.windows).long().tolist()
    test = torch.stack([ids[i * width : (i + 1) * width] for i in spread])
    lengths = torch.full((len(test),), width)
    print(f"| {options.text.name}, {len(test)} windows of {width} | KL | perplexity |\n|---|---|---|")
    for name, (of_inputs, of_errors) in {"split alone": ([], []), **pairs}.items():
        layers_of = [
            factorize(w, options.rank, c, f)[0] for w, c, f in zip(wide, of_inputs, of_errors, strict=True)
        ] if of_inputs else wide  # fmt: skip
        found = measure(source_and(bank, {"ours": layers_of}), test, lengths, replace(batches, sequences_per_micro=2))
        if not of_inputs:
            print(f"| source | | {found['source'].perplexity:.2f} |")
        print(f"| {name} | {found['ours'].kl:.4f} | {found['ours'].perplexity:.2f} |", flush=True)


def _moments(
    bank: LayerBank,
    wide: Sequence[LatentWeights],
    sequences: Tensor,
    lengths: Tensor,
    batches: Batches,
) -> tuple[dict[float, list[Tensor]], list[Tensor], list[Tensor], list[float]]:
    # Moments of inputs by power of |g|; of gradients, plain and divided by |g|; effective number of tokens, one a layer each.
    hidden, rank = bank.model.spec.hidden_size + 1, wide[0].spec.kv_lora_rank

    def zeros(size: int) -> list[Tensor]:
        return [torch.zeros(size, size, dtype=torch.float64) for _ in wide]

    inputs, whole, shared = {power: zeros(hidden) for power in POWERS}, zeros(rank), zeros(rank)
    sums, squares = [0.0] * len(wide), [0.0] * len(wide)

    def observe(layer: int, record: Record, gradient: Tensor, valid: Tensor) -> None:
        x, g = with_constant(record["x"][valid]).double(), gradient[valid].double()
        size = g.norm(dim=1, keepdim=True)
        for power in POWERS:
            inputs[power][layer] += second_moment(x * size.pow(power / 2))
        whole[layer] += second_moment(g)
        shared[layer] += second_moment(g / size.sqrt().clamp(min=1e-150))
        sums[layer] += float(size.square().sum())
        squares[layer] += float(size.pow(4).sum())

    run(
        bank.latent_frame(wide), bank.latent_layers(wide), sequences, lengths, batches,
        observe_gradient=observe, compute=fast_dtype(bank.device),
    )  # fmt: skip
    for moments in inputs.values():
        moments[:] = [m / m[-1, -1] for m in moments]
    return inputs, whole, shared, [a * a / max(b, 1e-300) for a, b in zip(sums, squares, strict=True)]


if __name__ == "__main__":
    main()
