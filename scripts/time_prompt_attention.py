"""Time the compiled attention of prompts beside PyTorch's, on one thread of this CPU.

    python scripts/time_prompt_attention.py [--heads 9] [--nope 64] [--rope 64] [--v 64]

Both compute the same attention of latents that were rebuilt as keys and values: the compiled kernel takes the rotary keys that
all heads share as they are, PyTorch's operator is given them joined (which is timed, too). Each figure is the processor time of
the best of some runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mla_cli.checkpoint.cache_dir import cache_dir  # noqa: E402
from mla_cli.kernels import reference, torch_ops  # noqa: E402
from mla_cli.kernels.cpu.build import load_library  # noqa: E402
from mla_cli.kernels.cpu.prompt import PromptAttention  # noqa: E402

RUNS = 6
# Sequences, their new tokens, and the tokens before these.
SHAPES = ((1, 512, 0), (1, 2048, 0), (1, 1024, 3072), (8, 64, 200), (1, 100, 4000))


def best(run: Callable[[], object]) -> float:
    """Milliseconds of the fastest of some runs."""
    found = []
    for _ in range(RUNS):
        begun = time.process_time()
        run()
        found.append(time.process_time() - begun)
    return 1000 * min(found)


def main() -> int:
    """Print one line a shape and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 9), ("nope", 64), ("rope", 64), ("v", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    library = load_library(cache_dir() / "kernels", print)
    if isinstance(library, str):
        print(f"no compiled kernels: {library}")
        return 1
    torch.set_num_threads(1)
    kernel, h = PromptAttention(library), options.heads
    print(
        f"{'type':<10}{'rows':>6}{'tokens':>8}{'before':>8}{'pytorch ms':>12}{'compiled ms':>13}{'ratio':>7}{'GFLOP/s':>9}"
    )
    for dtype in (torch.bfloat16, torch.float32):
        for b, t, past in SHAPES:
            s = past + t
            shapes = ((b, t, h, options.nope), (b, s, h, options.nope), (b, s, h, options.v))
            q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
            q_rope, k_rope = torch.randn(b, t, h, options.rope).to(dtype), torch.randn(b, s, options.rope).to(dtype)
            first = torch.full((b,), past)
            seen = reference.visible_keys(first[:, None] + torch.arange(t), s, None) if past else None

            def compiled() -> object:
                return kernel(q, k, v, first, 0.09, rope=(q_rope, k_rope))  # noqa: B023

            def plain() -> object:
                joined = torch.cat((k, k_rope[:, :, None].expand(-1, -1, h, -1)), dim=-1)  # noqa: B023
                return torch_ops.attention(torch.cat((q, q_rope), dim=-1), joined, v, seen, 0.09)  # noqa: B023

            theirs, ours = best(plain), best(compiled)
            flops = 2 * b * h * t * (past + (t + 1) / 2) * (options.nope + options.rope + options.v)
            print(
                f"{str(dtype)[6:]:<10}{b:>6}{t:>8}{past:>8}{theirs:>12.2f}{ours:>13.2f}{theirs / ours:>7.1f}"
                f"{flops / ours / 1e6:>9.0f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
