"""Time to the first token of a prompt that begins like one before: read whole, found in the pool, brought back from a tier.

    python scripts/time_prefix_hits.py r2-int8 [--shared 300 600 2048] [--runs 5]

A prompt has so many tokens that others share, and a question of 24 tokens that nobody else has. Each kind is measured in turn,
the medians are shown. `read` begins with a text of its own each time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch

from mla_cli.model.page_bytes import PageBytes
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.kept_file import KeptFile
from mla_cli.runtime.request import Completion, Request
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.runtime.tiers import Tiers

QUESTION = 24  # tokens
chance = random.Random(0)


def first_token_ms(generator: Generator, prompt: list[int]) -> float:
    """From a prompt's handing in to its first token."""
    answer = generator.generate([Request(tuple(prompt), SamplingParams(max_new_tokens=2, ignore_eos=True))])[0]
    assert isinstance(answer, Completion), answer
    return answer.ttft_s * 1e3


def tokens(generator: Generator, count: int) -> list[int]:
    """So many tokens that were never seen."""
    return [chance.randrange(100, generator.decoder.spec.vocab_size - 100) for _ in range(count)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--shared", type=int, nargs="+", default=[300, 600, 2048])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    engine = open_engine(options.checkpoint)
    generator = engine.generator
    first_token_ms(generator, tokens(generator, 900))
    first_token_ms(generator, tokens(generator, 20))
    pages = PageBytes(generator.pool.storage)
    print(
        f"{'shared':>6} {'read ms':>9} {'pool ms':>9} {'host ms':>9} {'file ms':>9} {'times':>6} {'a short one alone ms':>21}"
    )
    for shared in options.shared:
        times: dict[str, list[float]] = {kind: [] for kind in ("read", "pool", "host", "file", "short")}
        for _ in range(options.runs):
            system = tokens(generator, shared)
            times["read"].append(first_token_ms(generator, [*system, *tokens(generator, QUESTION)]))
            times["pool"].append(first_token_ms(generator, [*system, *tokens(generator, QUESTION)]))
            times["short"].append(first_token_ms(generator, tokens(generator, QUESTION)))
            with tempfile.TemporaryDirectory() as folder:
                for kind in ("host", "file"):
                    file = KeptFile(Path(folder) / "kept", {}, pages.page_bytes, 64, print) if kind == "file" else None
                    tiers = Tiers(generator.pool, host_bytes=1 << 30 if kind == "host" else 0, file=file)
                    while generator.pool._give_up():  # all that is kept goes to the tier
                        pass
                    times[kind].append(first_token_ms(generator, [*system, *tokens(generator, QUESTION)]))
                    tiers.close()
                    generator.pool.forget_kept() if kind == "file" else None
        m = {kind: statistics.median(found) for kind, found in times.items()}
        print(
            f"{shared:>6} {m['read']:>9.1f} {m['pool']:>9.1f} {m['host']:>9.1f} {m['file']:>9.1f} "
            f"{m['read'] / m['pool']:>6.1f} {m['short']:>21.1f}"
        )


if __name__ == "__main__":
    main()
