"""What each part of the refit behind converted layers is worth, and what shifting rank to the worst heads gives.

    python scripts/ablate_compensation.py --calib ../shared/data/text/calibration --text ../shared/data/text/wikitext2-test.txt

The table of docs/decisions/0004-compensation.md comes from this script.
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
from mla_cli.calibration.texts import CalibrationTexts, first, load_texts, split_heldout
from mla_cli.checkpoint.load import open_model
from mla_cli.converters.allocate import choose_common_slots, slot_worth, turned_energy
from mla_cli.converters.closed_form import gather_source_statistics
from mla_cli.converters.compensate import compensate
from mla_cli.converters.factorize import covariance, factorize
from mla_cli.converters.held_out import measure
from mla_cli.converters.rotary_split import split_rotary
from mla_cli.converters.statistics import LatentStatistics, latent_statistics, second_moment, with_constant
from mla_cli.model.attention import Record
from mla_cli.model.decoder import begin_step
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.tokenizer import load_tokenizer

ROUNDS = 6  # of raising the weight of the worst heads
HEAD_SEQUENCES = 8


def main() -> None:
    """Take the statistics once, refit in every way, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--fisher-samples", type=int, default=48)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--rank", type=int, default=126)
    parser.add_argument("--rope", type=int, default=64)
    options = parser.parse_args()

    model = open_model(options.model)
    tokenizer = load_tokenizer(model.source.folder)
    bank = LayerBank(model, torch.device("cpu"))
    texts = load_texts(options.calib, tokenizer, samples=options.samples, seq_len=options.seq_len, seed=0)
    fitted, unseen = split_heldout(texts)
    fitted, unseen = first(fitted, options.fisher_samples), first(unseen, options.held_out)
    batches = Batches.fit(options.seq_len, model.spec.hidden_size, model.spec.num_layers)
    text = tokenizer.encode(options.text.read_text(encoding="utf-8"), special=False)
    windows = torch.tensor(text[: options.windows * options.window]).view(-1, options.window)
    other = replace(unseen, sequences=windows, lengths=torch.full((len(windows),), options.window))

    seen = gather_source_statistics(bank, fitted, batches)
    attentions = [bank.source_attention(i) for i in range(model.spec.num_layers)]
    slots = choose_common_slots([slot_worth(a, s) for a, s in zip(attentions, seen, strict=True)], options.rope // 2)
    wide = [
        split_rotary(a, s.input_moment, turned_energy(s), slots, turn=s.mean_turn)
        for a, s in zip(attentions, seen, strict=True)
    ]
    latents = latent_statistics(
        bank.latent_frame(wide), bank.latent_layers(wide), fitted.sequences, fitted.lengths, batches
    )
    narrow = _narrow(wide, latents, options.rank)
    print(f"| | held-out KL | {options.text.name}, {len(windows)} windows: KL | over the source |\n|---|---|---|---|")

    def show(name: str, layers: Sequence[LatentWeights]) -> None:
        stages = {"source": (bank.frame, bank.source_layer), "ours": (bank.frame, bank.latent_layers(layers))}
        known = measure(stages, unseen.sequences, unseen.lengths, batches)["ours"].kl
        found = measure(stages, other.sequences, other.lengths, batches)
        loss = 100 * math.expm1(found["ours"].nll - found["source"].nll)
        print(f"| {name} | {known:.4f} | {found['ours'].kl:.4f} | {loss:+.1f} % |", flush=True)

    show("closed form", narrow)
    for name, queries, toward in (
        ("queries", True, None),
        ("outputs, toward the source's attention output", False, "output"),
        ("outputs, toward the source's hidden state", False, "stream"),
        ("queries; outputs toward the source's attention output", True, "output"),
        ("queries; outputs toward the source's hidden state (what mla does)", True, "stream"),
    ):
        show(name, compensate(bank, narrow, fitted, batches, queries=queries, toward=toward).layers)  # type: ignore[arg-type]
    even, worst = _worst_heads(bank, wide, latents, options.rank, first(fitted, HEAD_SEQUENCES), batches)
    show(f"closed form, rank shifted to the worst heads (worst over median: {worst})", even)
    show("the same, queries and outputs refitted", compensate(bank, even, fitted, batches).layers)


def _narrow(
    wide: Sequence[LatentWeights], latents: Sequence[LatentStatistics], rank: int, raised: Tensor | None = None
) -> tuple[LatentWeights, ...]:
    """Factorise every layer; `raised` `[L, G]`: factors on the Fisher weight of each group's keys and values."""
    found = []
    for index, (layer, seen) in enumerate(zip(wide, latents, strict=True)):
        fisher = seen.fisher
        if raised is not None:
            width = layer.spec.kv_lora_rank // 2 // raised.shape[1]
            scale = raised[index].sqrt().repeat_interleave(width).repeat(2)  # [2 * G * d]: keys, then values
            fisher = fisher * scale[:, None] * scale
        found.append(factorize(layer, rank, seen.input_moment, fisher)[0])
    return tuple(found)


def _worst_heads(
    bank: LayerBank,
    wide: Sequence[LatentWeights],
    latents: Sequence[LatentStatistics],
    rank: int,
    texts: CalibrationTexts,
    batches: Batches,
) -> tuple[tuple[LatentWeights, ...], str]:
    """Raise the weight of heads whose output error is above their layer's median, round by round, at one rank."""
    groups = bank.source_attention(0).spec.num_kv_heads
    raised = torch.ones(len(wide), groups, dtype=torch.float64)
    ratios = []
    for _ in range(ROUNDS):
        narrow = _narrow(wide, latents, rank, raised)
        errors = head_errors(bank, narrow, texts, batches)  # [L, H]
        median = errors.median(dim=1, keepdim=True).values
        ratios.append(float((errors.max(dim=1, keepdim=True).values / median).mean()))
        raised *= (errors / median).clamp(min=1).view(len(wide), groups, -1).amax(dim=-1)
    return _narrow(wide, latents, rank, raised), f"{ratios[0]:.1f} to {ratios[-1]:.1f}"


def head_errors(bank: LayerBank, layers: Sequence[LatentWeights], texts: CalibrationTexts, batches: Batches) -> Tensor:
    """`[L, H]`: variance of what each head adds to the hidden state less what it should, over that of what it should.

    Every layer is given the source's inputs, so that a head's error is its own.
    """
    heads, width = layers[0].spec.num_heads, layers[0].spec.v_head_dim
    sums = torch.zeros(2, len(layers), heads, width + 1, width + 1, dtype=torch.float64)

    def observe(index: int, record: Record, valid: Tensor) -> None:
        step = begin_step(bank.frame.spec, valid.shape, valid.device, lengths=valid.sum(dim=1))
        ours: Record = {}
        layers[index].module(index, device=bank.device)(record["x"], step, ours)
        for h in range(heads):
            true = record["heads"][valid][:, h]  # [N, v]
            sums[0, index, h] += second_moment(with_constant(ours["heads"][valid][:, h] - true)).cpu()
            sums[1, index, h] += second_moment(with_constant(true)).cpu()

    run(bank.frame, bank.source_layer, texts.sequences, texts.lengths, batches, observe=observe)
    found = torch.zeros(2, len(layers), heads, dtype=torch.float64)
    for index, layer in enumerate(layers):
        out = layer.out.view(-1, heads, width)  # [D, H, v]
        for h in range(heads):
            for part in range(2):
                moment = sums[part, index, h] / sums[part, index, h, -1, -1]
                found[part, index, h] = ((out[:, h] @ covariance(moment)[0]) * out[:, h]).sum()
    return found[0] / found[1].clamp(min=1e-30)


if __name__ == "__main__":
    main()
