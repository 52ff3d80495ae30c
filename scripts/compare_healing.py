"""Ways of healing from one start, on the same text: held-out divergence from the source after equal numbers of tokens.

    mla convert smollm2-135m closed --ratio 2 --qk-rope-head-dim 64 --calib ../shared/data/text/calibration --heal none
    python scripts/compare_healing.py closed --calib ../shared/data/text/calibration --ways layers layers-plain
    mla convert smollm2-135m layered --ratio 2 --qk-rope-head-dim 64 --calib ../shared/data/text/calibration --heal-minutes 3
    python scripts/compare_healing.py layered --calib ../shared/data/text/calibration --ways full:1024:3e-4 full:256:2e-4

The second table of docs/decisions/0003 comes from this script. A way is `layers` (as `--heal layers`), `layers-plain` (the
target is the source's attention output alone, not what went wrong before), or `full:TOKENS:RATE` (end to end).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from mla_cli.calibration.precision import fast_dtype, keep_freed_memory
from mla_cli.calibration.texts import CalibrationTexts, cut, first, load_texts, split_heldout
from mla_cli.checkpoint.deepseek_form import weights_of_stock
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.converters.heal_data import Reader
from mla_cli.converters.heal_full import FullHealing, heldout_divergence
from mla_cli.converters.heal_layers import LayersHealing, States
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.student import Student
from mla_cli.model.attention import LatentAttention, Step
from mla_cli.model.decoder import Decoder, DecoderLayer
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.tokenizer import load_tokenizer


class PlainStates(States):
    """States that call nothing left behind: the target is the source's attention output alone."""

    def attention(self, index: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Step]:
        given, target, behind, valid, step = super().attention(index, rows)
        return given, target, torch.zeros_like(behind), valid, step


class PlainLayersHealing(LayersHealing):
    """Layer healing toward `PlainStates`."""

    def __init__(
        self, student: Student, fitted: tuple[Tensor, Tensor], unseen: tuple[Tensor, Tensor], options: HealOptions
    ) -> None:
        super().__init__(student, fitted, unseen, options)
        self.fitted, self.unseen = PlainStates(student, *fitted), PlainStates(student, *unseen)


def main() -> None:
    """Heal the same start in every way asked for, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("converted", help="a checkpoint that `mla convert` wrote")
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--ways", nargs="+", default=["layers", "layers-plain"])
    parser.add_argument("--tokens", type=int, default=46080, help="end to end: tokens that each way reads")
    parser.add_argument("--layer-steps", type=int, default=100)
    parser.add_argument("--layer-tokens", type=int, default=1 << 15)
    parser.add_argument("--held-out", type=int, default=8, help="sequences of 512 tokens")
    options = parser.parse_args()

    keep_freed_memory()
    model = open_model(options.source)
    texts = load_texts(
        options.calib, load_tokenizer(model.source.folder), samples=2000, seq_len=1024, seed=0, enough=256
    )
    fitted, unseen = split_heldout(texts)
    short = cut(fitted, 512)
    probe = cut(first(unseen, options.held_out), 512)
    start = converted_layers(load_decoder(open_model(options.converted)))
    dtype = fast_dtype(torch.device("cpu"))

    print("| way | steps | seconds | held-out KL |\n|---|---|---|---|")
    for way in ("start", *options.ways):
        student = Student(load_decoder(model, dtype=dtype), start)
        begun, steps = time.monotonic(), 0
        if way.startswith("layers"):
            kind = PlainLayersHealing if way == "layers-plain" else LayersHealing
            heal = HealOptions(mode="layers", steps=options.layer_steps)
            rows = slice(0, max(1, options.layer_tokens // 512))
            layers = kind(
                student, (short.sequences[rows], short.lengths[rows]), _pair(cut(first(unseen, 1), 512)), heal
            )
            layers.run([], lambda index, weights: None)
            steps = sum(record.steps for record in layers.records)
        elif way.startswith("full:"):
            tokens, rate = int(way.split(":")[1]), float(way.split(":")[2])
            heal = HealOptions(mode="full", steps=options.tokens // tokens, batch_tokens=tokens, learning_rate=rate)
            full = FullHealing(student, Reader(fitted.sequences, fitted.lengths, None, 0), _pair(probe), heal)
            full.run(lambda state: None)
            steps = full.progress.step
        elif way != "start":
            parser.error(f"unknown way {way!r}: layers, layers-plain or full:TOKENS:RATE")
        found = heldout_divergence(student, probe.sequences, probe.lengths)
        print(f"| {way} | {steps} | {time.monotonic() - begun:.0f} | {found:.4f} |", flush=True)


def converted_layers(decoder: Decoder) -> list[LatentWeights]:
    """The weights of every layer of a converted model, in either form."""
    found = []
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        attention = layer.self_attn
        if not isinstance(attention, LatentAttention):
            raise SystemExit("not a converted model")
        weights = weights_of_stock(attention) if attention.spec.norm_eps is not None else LatentWeights.of(attention)
        if weights is None:
            raise SystemExit("the latent has a norm that is not the stock form's own")
        found.append(weights)
    return found


def _pair(texts: CalibrationTexts) -> tuple[Tensor, Tensor]:
    return texts.sequences, texts.lengths


if __name__ == "__main__":
    main()
