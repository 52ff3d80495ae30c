"""What calibrated caches cost: perplexity over the same checkpoint with unquantised latents, window by window.

    for kind in "int8" "fp8" "int8 --scales static" "int4"; do
        mla calibrate out --kv-dtype $kind --calib ../shared/data/text/calibration --out "out-${kind// --scales /-}"
    done
    python scripts/compare_caches.py out out-int8 out-fp8 out-int8-static out-int4 --text ../shared/data/text/wikitext2-test.txt

The first checkpoint runs without its scheme, in float32; the others as calibrated. Pairs of windows give the 95 % interval.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from mla_cli.checkpoint.load import open_model
from mla_cli.evaluation.fidelity import perplexity, windows
from mla_cli.evaluation.subject import load_subject


def main() -> None:
    """Score every checkpoint on the same windows, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", help="the first: without its scheme; the others: as calibrated")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=0, help="so many, spread evenly over the text (0: all)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of each")
    options = parser.parse_args()

    print(
        "| checkpoint | cache | bytes a token and layer | perplexity | over unquantised latents | 95 % interval | s |"
    )
    print("|---|---|---|---|---|---|---|")
    plain: Tensor | None = None
    for number, name in enumerate([options.checkpoints[0], *options.checkpoints]):
        if number == 1 and len(options.checkpoints) > 1:
            continue  # it is the first row already
        begun = time.monotonic()
        kind = "bf16" if number == 0 else "auto"
        subject = load_subject(open_model(name), device=torch.device("cpu"), dtype=torch.float32, kv_dtype=kind)
        tokens = subject.tokenizer.encode(options.text.read_text(encoding="utf-8"))
        texts = windows(tokens, max_length=subject.decoder.spec.max_position_embeddings, size=options.window)
        if options.windows:
            texts = [texts[i] for i in torch.linspace(0, len(texts) - 2, options.windows).long().tolist()]
        found = list(perplexity(subject.decoder, texts, batch_size=1, quantizers=subject.quantizers))
        losses = torch.tensor([window.nll for window in found], dtype=torch.float64)  # [N]
        counts = torch.tensor([window.tokens for window in found], dtype=torch.float64)  # [N]
        plain = losses if plain is None else plain
        size = 2 * subject.decoder.spec.cached_per_token  # bytes, in bfloat16
        if subject.quantizers is not None:
            cache = subject.decoder.make_cache(1, 1, subject.quantizers)
            size = cache.bytes_per_token()
        change, low, high = _change(losses - plain, counts)
        print(
            f"| {name} | {_kind(subject.facts['kv_dtype'], kind)} | {size / subject.decoder.spec.num_layers:.4g} | "
            f"{math.exp(float(losses.sum() / counts.sum())):.3f} | {change:+.3f} % | {low:+.3f} to {high:+.3f} % | "
            f"{time.monotonic() - begun:.0f} |",
            flush=True,
        )


def _kind(cached: str, asked: str) -> str:
    return "unquantised" if asked == "bf16" else cached


def _change(difference: Tensor, counts: Tensor) -> tuple[float, float, float]:
    """Percent of perplexity, and the ends of its interval by the spread of windows."""
    each, share = difference / counts, counts / counts.sum()
    mean = float((share * each).sum())
    error = float(((share * (each - mean)).square().sum()).sqrt())
    return tuple(100 * math.expm1(mean + k * error) for k in (0, -1.96, 1.96))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
