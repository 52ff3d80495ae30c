"""A file of requests answered by our engine, by our engine on the source's standard cache, and by transformers.

    python scripts/compare_serving.py out --baseline smollm2-135m --text ../shared/data/text/wikitext2-test.txt

64 requests: prompts of 32 to 1,500 tokens, half of which begin with the same 600, and 64 to 256 new tokens each (end-of-text
does not end them). All engines are given the same requests; ours and the standard cache may use the same memory. transformers
answers batches of requests of like length, padded, by `generate`: the best of `--static` counts. Then each request is answered
alone, and the tokens must be the same. Exit code 1 where they are not.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mla_cli.runtime.engine import Engine
    from mla_cli.runtime.request import Request

SYSTEM_TOKENS = 600


@dataclass(frozen=True)
class Row:
    """What one engine took. cache: most bytes of it that were in use."""

    name: str
    seconds: float
    new_tokens: int
    cache: int | None
    details: str = ""


def main() -> int:
    """Run all engines, print a table; 1 if answers differ from those of each request alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--baseline", required=True, help="the source, unconverted")
    parser.add_argument("--text", type=Path, required=True, help="what prompts are cut from")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="computed in by ours (transformers: its faster one of two)")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--memory-mib", type=float, default=96, help="of the caches (default 96)")
    parser.add_argument("--static", default="4,8", help="batch sizes of transformers; empty: leave it out")
    parser.add_argument("--static-dtype", default="bfloat16,float32")
    parser.add_argument("--no-alone", action="store_true", help="do not answer each request alone")
    options = parser.parse_args()

    import torch

    dtype = getattr(torch, options.dtype)
    opened: dict[str, Engine] = {}
    memory = int(options.memory_mib * 2**20)
    alone = open_with(options.checkpoint, dtype, 1)
    unbound = open_with(options.baseline, dtype, options.max_batch)
    opened["mla"] = open_with(options.checkpoint, dtype, options.max_batch, tokens_within(alone, memory))
    opened["standard, same memory"] = open_with(
        options.baseline, dtype, options.max_batch, tokens_within(unbound, memory)
    )
    opened["standard, any memory"] = unbound
    requests = draw(opened["mla"], options.text, options.requests, options.seed)
    rows, answers = [], {}
    for name, engine in opened.items():
        row, answers[name] = answer(name, engine, requests)
        rows.append(row)
        print(shown(row), flush=True)
    sizes = [int(size) for size in options.static.split(",") if size]
    for size in sizes:
        for name in options.static_dtype.split(","):
            row = answer_static(unbound, requests, size, getattr(torch, name))
            rows.append(row)
            print(shown(row), flush=True)
    print(ratios(rows))
    if options.no_alone:
        return 0
    wrong = 0
    for request, together in zip(requests, answers["mla"], strict=True):
        (own,) = answer("alone", alone, [request])[1]
        wrong += own != together
    print(f"{wrong} of {len(requests)} answers differ from those of each request alone")
    return 1 if wrong else 0


def open_with(checkpoint: str, dtype: torch.dtype, max_batch: int, pool_tokens: int | None = None) -> Engine:
    """An engine whose cache may hold so many tokens; None: all that its batch can need."""
    from mla_cli.runtime.engine import open_engine

    return open_engine(checkpoint, dtype=dtype, max_batch=max_batch, max_context=2048, pool_tokens=pool_tokens)


def tokens_within(engine: Engine, memory: int) -> int:
    """Tokens that a cache of its kind holds in so many bytes."""
    return memory // engine.generator.statistics.cache_bytes_per_token


def draw(engine: Engine, text: Path, count: int, seed: int) -> list[Request]:
    """Requests as the module says."""
    from mla_cli.runtime.request import Request
    from mla_cli.runtime.sampling_params import SamplingParams

    chance = random.Random(seed)
    ids = engine.tokenizer.encode(text.read_text(encoding="utf-8"))
    system = ids[:SYSTEM_TOKENS]
    found = []
    for i in range(count):
        shared = i % 2 == 1
        length = chance.randint(SYSTEM_TOKENS + 32 if shared else 32, 1500)
        own = length - SYSTEM_TOKENS if shared else length
        at = chance.randrange(SYSTEM_TOKENS, len(ids) - own)
        prompt = (system if shared else []) + ids[at : at + own]
        params = SamplingParams(max_new_tokens=chance.randint(64, 256), ignore_eos=True)
        found.append(Request(tuple(prompt), params))
    chance.shuffle(found)
    return found


def answer(name: str, engine: Engine, requests: Sequence[Request]) -> tuple[Row, list[tuple[int, ...]]]:
    """All requests by our engine."""
    from mla_cli.runtime.request import Completion

    began = perf_counter()
    found = engine.generator.generate(requests)
    seconds = perf_counter() - began
    tokens = [a.token_ids for a in found if isinstance(a, Completion)]
    assert len(tokens) == len(requests), found
    s = engine.generator.statistics
    read = f"prefill {s.prefill_s:.1f} s of {s.prompt_tokens:,} tokens"
    details = f"{read}, {s.shared_tokens:,} shared, {s.preemptions} pre-empted"
    return Row(name, seconds, sum(map(len, tokens)), s.cache_bytes, details), tokens


def answer_static(engine: Engine, requests: Sequence[Request], size: int, dtype: torch.dtype) -> Row:
    """All requests by `generate` of transformers, so many at a time, those of like length together."""
    import torch
    import transformers

    folder = engine.model.source.folder
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ordered = sorted(requests, key=lambda r: len(r.prompt))
    began, count, cache = perf_counter(), 0, 0
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        longest, new = max(len(r.prompt) for r in part), max(r.params.max_new_tokens for r in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(part):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        count += sum(r.params.max_new_tokens for r in part)
        spec = engine.model.spec
        cache = max(cache, len(part) * (longest + new) * spec.cached_per_token * dtype.itemsize)
    name = f"transformers, {size} at a time, {str(dtype).removeprefix('torch.')}"
    return Row(name, perf_counter() - began, count, cache)


def shown(row: Row) -> str:
    """A line."""
    cache = "" if row.cache is None else f"  cache {row.cache / 2**20:6.1f} MiB"
    return f"{row.name:<40}  {row.seconds:7.1f} s  {row.new_tokens / row.seconds:7.1f} tokens/s{cache}  {row.details}"


def ratios(rows: Sequence[Row]) -> str:
    """Our rate over the others', and our cache over the standard one's."""
    ours, same, unbound = rows[:3]
    lines = [f"tokens/s over the standard cache in the same memory: {same.seconds / ours.seconds:.2f}"]
    if len(rows) > 3:
        best = min(rows[3:], key=lambda row: row.seconds)
        lines.append(f"tokens/s over {best.name}: {best.seconds / ours.seconds:.2f}")
    if ours.cache and unbound.cache:
        lines.append(f"cache over the standard one's at its peak: {ours.cache / unbound.cache:.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
