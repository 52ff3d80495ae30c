"""What keeps the first part of a latent good: loss at each `--latent-strength` after each way to heal, at equal steps.

    python scripts/ablate_strength.py --calib ../shared/data/text/calibration --heal layers --steps 60

Ways: healed as it is, healed and re-ordered (what `mla convert` does), nested (`--nested`), nested and re-ordered, and cut in
two stages (`--progressive`), whose steps are shared out over both.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import first, load_texts, split_heldout
from mla_cli.checkpoint.load import open_model
from mla_cli.converters.choose import with_slots
from mla_cli.converters.closed_form import closed_form, gather_source_statistics
from mla_cli.converters.heal import heal
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.heal_state import HealState
from mla_cli.converters.options import SPLIT_SAMPLES
from mla_cli.converters.plan import choose_form, make_plan
from mla_cli.converters.progressive import heal_and_cut, milder_ranks, shared_options
from mla_cli.converters.recut import ORDER_SAMPLES, recut
from mla_cli.converters.strengths import losses_by_strength
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.tokenizer import load_tokenizer

CPU = torch.device("cpu")


def main() -> None:
    """Fit the closed form once, heal it in every way, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--fisher-samples", type=int, default=48)
    parser.add_argument("--ratio", type=float, default=2.0)
    parser.add_argument("--qk-rope-head-dim", type=int, default=64)
    parser.add_argument("--format", choices=("auto", "deepseek", "native"), default="auto")
    parser.add_argument("--heal", choices=("layers", "full"), default="layers")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    model = open_model(options.model)
    tokenizer = load_tokenizer(model.source.folder)
    texts = load_texts(options.calib, tokenizer, samples=options.samples, seq_len=options.seq_len, seed=0)
    fitted, unseen = split_heldout(texts)
    bank = LayerBank(model, CPU)
    batches = Batches.fit(options.seq_len, model.spec.hidden_size, model.spec.num_layers)
    statistics = gather_source_statistics(bank, first(fitted, SPLIT_SAMPLES), batches)
    form, reason = choose_form(model.spec, options.format)
    plan = make_plan(
        model.spec, form=form, reason=reason, ratio=options.ratio, qk_rope_head_dim=options.qk_rope_head_dim
    )
    plan = with_slots(bank, plan, statistics)
    few = first(fitted, options.fisher_samples)
    closed = closed_form(bank, plan, statistics, few, batches, objective="fisher")

    print("| layers | strength | cached numbers a token | KL | perplexity |\n|---|---|---|---|---|")

    def show(name: str, layers: Sequence[LatentWeights]) -> None:
        for row in losses_by_strength(bank, plan, layers, unseen, batches):
            print(
                f"| {name} | {row.strength:g} | {row.cached_per_token:,} | {row.loss.kl:.4f} | {row.loss.perplexity:.2f} |",
                flush=True,
            )

    def healed(layers: Sequence[LatentWeights], how: HealOptions) -> tuple[LatentWeights, ...]:
        return heal(model, layers, fitted, unseen, how, state(), device=CPU, opening=opening).layers

    def state() -> HealState:
        return HealState(Path(folder) / "out", {}, device=CPU, resume=False)

    ranks = [layer.spec.kv_lora_rank for layer in closed.narrow]
    opening = tokenizer.bos_id if tokenizer.adds_bos else None
    asked = HealOptions(mode=options.heal, steps=options.steps)
    show("closed form", closed.narrow)
    with tempfile.TemporaryDirectory() as folder:
        for name, nested in (("healed", False), ("nested", True)):
            layers = healed(closed.narrow, replace(asked, nested=nested))
            show(name, layers)
            show(f"{name}, re-ordered", recut(bank, layers, ranks, first(fitted, ORDER_SAMPLES), batches))
        share, rest = shared_options(asked)
        milder = closed.at(milder_ranks(plan, [layer.spec.kv_lora_rank for layer in closed.wide]))
        cut, _ = heal_and_cut(bank, plan, milder, fitted, unseen, few, unseen, batches, share, state(), opening=opening)
        show("in two stages, before the second healing", cut.layers)
        show("in two stages", healed(cut.layers, rest))


if __name__ == "__main__":
    main()
