"""Greedy answers of a backend beside those of the float64 reference.

    python scripts/compare_backends.py out --text ../shared/data/text/wikitext2-test.txt

Eight prompts of 20 to 900 tokens, cut from the text, with 64 new tokens each, answered by both. Exit code 1 where tokens
differ, or log-probabilities of the same tokens differ by more than the type allows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_cli.runtime.request import Completion

LENGTHS = (20, 63, 64, 150, 300, 512, 513, 900)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}  # nats, of a token's log-probability


def main() -> int:
    """Answer by both, print a line a prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="what prompts are cut from")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()

    found = answers(options, options.backend, options.dtype)
    reference = answers(options, "reference", "float32")
    failed = False
    for length, ours, theirs in zip(LENGTHS, found, reference, strict=True):
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
        same = next((i for i, (own, other) in enumerate(pairs) if own != other), len(pairs))
        logprobs = zip((ours.logprobs or ())[:same], (theirs.logprobs or ())[:same], strict=True)
        worst = max((abs(own - other) for own, other in logprobs), default=0.0)
        equal = ours.token_ids == theirs.token_ids
        failed |= not equal or worst > TOLERANCE[options.dtype]
        told = "the same tokens" if equal else f"another token after {same} of {len(pairs)}"
        print(f"prompt of {length:>4} tokens: {told}, log-probabilities within {worst:.2e}")
    return 1 if failed else 0


def answers(options: argparse.Namespace, backend: str, dtype: str) -> list[Completion]:
    """Of one backend, in the order of LENGTHS."""
    import torch

    from mla_cli.runtime.engine import open_engine
    from mla_cli.runtime.request import Completion, Request
    from mla_cli.runtime.sampling_params import SamplingParams

    engine = open_engine(
        options.checkpoint,
        device=options.device,
        dtype=getattr(torch, dtype),
        kv_dtype=options.kv_dtype,
        backend=backend,
        max_context=2048,
        logprobs=True,
    )
    ids = engine.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    params = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True)
    requests = [Request(tuple(ids[5000 * i : 5000 * i + length]), params) for i, length in enumerate(LENGTHS)]
    found = [answer for answer in engine.generator.generate(requests) if isinstance(answer, Completion)]
    assert len(found) == len(LENGTHS)
    return found


if __name__ == "__main__":
    sys.exit(main())
