"""Wear out the generator of a checkpoint: many requests, too few pages, cancellations and allocations that fail.

    python scripts/soak.py CKPT --requests 2000 --kv-dtype int8

Requests of one to some hundred tokens come at random, in waves, to a pool that holds a quarter of what those that run together
need. Some are cancelled, wherever they are; one allocation in ten is refused; after some waves the pool has given its memory
back, and finds none for a while when it grows again, also when some layers have got theirs. In the end every request that was
not cancelled must have the tokens and log-probabilities that it has alone, to the last bit, and no page may be in use.
Exit code 1 if one differs, fails or never ends, or if a page is lost.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from mla_cli.model.cache_store import PAGE_TOKENS, Store
from mla_cli.model.page_pool import PagePool, pages_for
from mla_cli.runtime.engine import Engine, open_engine
from mla_cli.runtime.request import Completion, Event, Failure, Request
from mla_cli.runtime.sampling_params import SamplingParams

MAX_BATCH = 32
WAVE = 60  # requests, after which all that have come are answered first
IDLE_TURNS = 500  # without a new token: then nothing will come any more
LENGTHS = (1, 5, 30, 63, 64, 65, 90, 127, 129)
NEW_TOKENS = (1, 2, 8, 20, 80)
SYSTEM_TOKENS = 520  # of which the first 512 are shared


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        wrong: what must not be, a line each.
    """

    finished: int = 0
    cancelled: int = 0
    turns: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rest = ", ".join(f"{count:,} {what}" for what, count in sorted(self.counts.items()))
        return (
            f"{self.finished:,} finished, {self.cancelled:,} cancelled in {self.turns:,} turns and {self.seconds:.1f} s; "
            f"{rest}"
        )


def make_requests(count: int, vocab: int, seed: int) -> list[Request]:
    """Distinct requests: greedy and drawn, one in eight behind a system prompt that they share."""
    chance = random.Random(seed)
    system = tuple(chance.randrange(3, vocab) for _ in range(SYSTEM_TOKENS))
    made = []
    for number in range(count):
        own = tuple(chance.randrange(3, vocab) for _ in range(chance.choice(LENGTHS)))
        params = SamplingParams(
            max_new_tokens=chance.choice(NEW_TOKENS), temperature=0.0 if number % 3 else 1.0, seed=number,
            repetition_penalty=1.1 if number % 5 == 0 else 1.0, ignore_eos=number % 2 == 0,
        )  # fmt: skip
        made.append(Request((*system, *own) if number % 8 == 0 else own, params))
    return made


def pages_of(requests: Sequence[Request]) -> int:
    """A quarter of the pages that as many of these as run together need, but enough for the longest."""
    needs = [pages_for(len(request.prompt) + request.params.max_new_tokens) for request in requests]
    return max(max(needs), MAX_BATCH * sum(needs) // len(needs) // 4)


class Faults:
    """Lets allocations of a pool fail: as a whole, and by memory that runs out when some layers have got theirs."""

    def __init__(self, pool: PagePool, chance: random.Random, counts: Counter[str]) -> None:
        self._pool, self._chance, self._counts = pool, chance, counts
        self._spell = 0  # times that memory will run out

    def strike(self) -> None:
        """Let the pool begin anew, where memory runs out for some time."""
        self._pool.drop()
        self._spell = self._chance.choice((0, 1, 2, 3, 4, 9))

    @contextmanager
    def injected(self) -> Iterator[None]:
        """While this lasts."""
        take, add_pages = self._pool.take, Store.add_pages

        def refusing(count: int) -> list[int] | None:
            if self._chance.random() < 0.1:
                self._counts["allocations refused"] += 1
                return None
            return take(count)

        def out_of_memory(store: Store, pages: int) -> None:
            if self._spell and self._chance.random() < 0.4:
                self._spell -= 1
                self._counts["times out of memory"] += 1
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            add_pages(store, pages)

        self._pool.take, Store.add_pages = refusing, out_of_memory  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._pool.take, Store.add_pages = take, add_pages  # type: ignore[method-assign]


def answers_alone(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Each answer of an engine that has done nothing else."""
    found = []
    for request in requests:
        found.append(engine.generator.complete(request))
        engine.generator._pool.forget_kept()
    return found


def soak(engine: Engine, requests: Sequence[Request], alone: Sequence[Completion], count: int, seed: int) -> Outcome:
    """Run `count` of these requests, drawn at random, through an engine whose pool is too small."""
    chance, outcome = random.Random(seed), Outcome()
    generator, pool, began = engine.generator, engine.generator._pool, perf_counter()
    chosen = [chance.randrange(len(requests)) for _ in range(count)]
    sequences = [generator.prepare(i, requests[which], began) for i, which in enumerate(chosen)]
    arriving, arrived, wave, open_ = iter(sequences), 0, 0, set[int]()
    scheduler = generator.scheduler()
    faults = Faults(pool, chance, outcome.counts)
    last = (0, 0)  # new tokens, turn

    def take(event: Event) -> None:
        if event.index not in open_:  # cancelled when it had just ended
            return
        if isinstance(event, Completion):
            open_.discard(event.index)
            outcome.finished += 1
            expected = alone[chosen[event.index]]
            found, right = ((a.text, a.token_ids, a.logprobs, a.finish_reason) for a in (event, expected))
            if found != right:
                outcome.wrong.append(f"request {event.index} ({chosen[event.index]}): {found} instead of {right}")
        elif isinstance(event, Failure):
            open_.discard(event.index)
            outcome.wrong.append(f"request {event.index} failed: {event.error}")

    def cancel() -> None:
        if open_ and chance.random() < 0.02:
            index = chance.choice(sorted(open_))
            scheduler.cancel(sequences[index])
            open_.discard(index)
            outcome.cancelled += 1

    with faults.injected():
        while arrived < count or scheduler.busy:
            outcome.turns += 1
            if not scheduler.busy:
                wave = min(arrived + WAVE, count)
                if chance.random() < 0.5:
                    faults.strike()
            for sequence in islice(arriving, min(chance.choice((0, 0, 4, 16)), wave - arrived)):
                open_.add(sequence.index)
                scheduler.add(sequence)
                arrived += 1
            for event in scheduler.turn():
                take(event)
                cancel()  # who hears of one request may cancel another
            cancel()
            done = generator.statistics.new_tokens
            last = (done, outcome.turns) if done != last[0] or arrived < count else last
            if outcome.turns - last[1] > IDLE_TURNS:
                outcome.wrong.append(f"{len(open_)} requests never end: {sorted(open_)[:20]}")
                break
    outcome.seconds = perf_counter() - began
    outcome.counts["computed apart"] = generator.statistics.computed_apart
    outcome.counts["put off"] = generator.statistics.preemptions
    outcome.counts["prompt tokens shared"] = generator.statistics.shared_tokens
    if open_:
        outcome.wrong.append(f"{len(open_)} requests have no answer")
    pool.forget_kept()
    if pool.used:
        outcome.wrong.append(f"{pool.used} pages are lost")
    return outcome


def run(checkpoint: str, count: int, seed: int, distinct: int = 250, **how: Any) -> Outcome:
    """Open a checkpoint twice, for each request alone and for all; what became of them."""
    single = open_engine(checkpoint, max_batch=1, logprobs=True, **how)
    requests = make_requests(min(distinct, count), single.model.spec.vocab_size, seed)
    alone = answers_alone(single, requests)
    pages = pages_of(requests)
    engine = open_engine(checkpoint, max_batch=MAX_BATCH, logprobs=True, pool_tokens=pages * PAGE_TOKENS, **how)
    return soak(engine, requests, alone, count, seed)


def main() -> int:
    """Run the soak that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--weights", default="float")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcome = run(args.checkpoint, args.requests, args.seed, kv_dtype=args.kv_dtype, weights=args.weights)
    print(outcome)
    for line in outcome.wrong[:20]:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
