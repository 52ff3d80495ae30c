"""Who runs when: requests join and leave between steps, and prompts are read beside those that decode.

A turn admits what there are pages for, reads prompts for at most a budget of tokens, and gives every sequence that has read its
prompt one more token. Where pages run out, the sequence that came last gives its own up and waits, first in the queue, to be
computed again; so the one that came first always goes on, and all end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter

from mla_cli.errors import MlaError
from mla_cli.model.cache_store import PAGE_TOKENS
from mla_cli.model.page_pool import PagePool, pages_for
from mla_cli.runtime.batch import SHORTEST_CHUNK, Batch
from mla_cli.runtime.fallback import FAILURES, Fallback
from mla_cli.runtime.request import Event, Failure, Text
from mla_cli.runtime.sampling import Sampled
from mla_cli.runtime.sequence import ActiveSequence
from mla_cli.runtime.statistics import Statistics

LOOKED_AT = 4  # of those that wait, for what they will need


Look = Callable[[PagePool, Sequence[ActiveSequence], int], None]


class Scheduler:
    """Runs sequences on one batch.

    Args:
        max_batch: most that run together.
        budget: most tokens of prompts to read between two steps (at least one chunk is).
        look: is called after each turn with the pool, the sequences that run, and how many wait.
        fallback: of this pool; None: one that begins here.
    """

    def __init__(
        self,
        batch: Batch,
        pool: PagePool,
        statistics: Statistics,
        *,
        max_batch: int,
        budget: int = SHORTEST_CHUNK,
        look: Look | None = None,
        fallback: Fallback | None = None,
    ) -> None:
        self._batch, self._pool, self._statistics = batch, pool, statistics
        self._fallback = fallback or Fallback(pool, statistics)
        self._max_batch, self._budget, self._look = max_batch, budget, look
        self._shared = 0  # tokens that the batch has told so far
        self._waiting: deque[ActiveSequence] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._batch.rows)

    def add(self, sequence: ActiveSequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def cancel(self, sequence: ActiveSequence) -> None:
        """Forget a sequence, wherever it is, also within a turn; one that has ended already is none of ours."""
        if sequence in self._batch.rows:
            self._batch.leave(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def close(self) -> None:
        """Forget all."""
        for sequence in [*self._batch.rows, *self._waiting]:
            self.cancel(sequence)

    def turn(self) -> Iterator[Event]:
        """One turn; what it gave to each sequence."""
        yield from self._admit()
        self._look_ahead()
        yield from self._read_prompts()
        yield from self._decode()
        if self._look is not None:
            self._look(self._pool, self._batch.rows, len(self._waiting))

    def _admit(self) -> Iterator[Event]:
        while self._waiting and len(self._batch.rows) < self._max_batch:
            first, running = self._waiting[0], len(self._batch.rows)
            if self._let_in(first):
                self._waiting.popleft()
                self._statistics.admissions += 1
                self._statistics.prefix_hits += first.cached > 0
                continue
            if not running:
                self._waiting.popleft()
                yield from self._refused(first)
            return

    def _look_ahead(self) -> None:
        """Have chunks come back from other tiers that the first in the queue will ask for."""
        below = self._pool.below
        if below is None or not below.looks_ahead:
            return
        first = list(islice(self._waiting, LOOKED_AT))
        for sequence in first:
            self._batch.cut(sequence)
        below.look_ahead([name for s in first for name in s.names], running=len(self._batch.rows))

    def _let_in(self, sequence: ActiveSequence) -> bool:
        self._fallback.check()
        if self._fallback.left and self._batch.join_apart(sequence):
            self._fallback.count()
            return True
        # Each that runs may soon want a page more: who is let in must not push others out at once.
        running = len(self._batch.rows)
        room = pages_for(len(sequence.history) + 1) + running
        return (not running or room <= self._pool.available) and self._batch.join(sequence)

    def _read_prompts(self) -> Iterator[Event]:
        reading = [s for s in self._batch.rows if self._batch.next_chunk(s)]
        spent = 0
        for sequence in reading:
            while sequence in self._batch.rows and self._batch.next_chunk(sequence):
                count = self._batch.adopt(sequence)
                if spent and spent + count > self._budget:
                    return
                spent += count
                began = perf_counter()
                try:
                    sampled = self._batch.read(sequence)
                except MlaError as error:
                    yield self._fail(sequence, error)
                    break
                self._statistics.prompt_tokens += count
                self._statistics.prefill_s += perf_counter() - began
                self._count(began)
                if sampled is not None:
                    yield from self._deliver([sequence], sampled)
                    break

    def _decode(self) -> Iterator[Event]:
        ready = [s for s in self._batch.rows if not self._batch.next_chunk(s)]
        for sequence in ready:
            while sequence in self._batch.rows and not self._batch.extend(sequence):
                last = self._batch.rows[-1]
                alone = len(self._batch.rows) == 1
                self._batch.leave(last)
                self._statistics.preemptions += 1
                if alone:
                    yield from self._refused(last)
                else:
                    self._waiting.appendleft(last)
        ready = [s for s in ready if s in self._batch.rows]
        yield from self._step([s for s in ready if not s.apart])
        for sequence in ready:
            if sequence.apart:
                yield from self._step([sequence])

    def _step(self, sequences: list[ActiveSequence]) -> Iterator[Event]:
        """One token more for each; after a step that failed, one by one, to see which of them it was."""
        if not sequences:
            return
        began = perf_counter()
        try:
            given, sampled = self._batch.step(sequences)
        except MlaError as error:
            if len(sequences) == 1:
                yield self._fail(sequences[0], error)
                return
            for sequence in sequences:
                if sequence in self._batch.rows:
                    yield from self._step([sequence])
            return
        self._count(began)
        if sampled is not None:
            yield from self._deliver(given, sampled)

    def _refused(self, sequence: ActiveSequence) -> Iterator[Event]:
        """A sequence found no memory although nothing else runs: it tries again, then apart, but not for ever."""
        sequence.refusals += 1
        if self._fallback.left:
            self._pool.drop()  # what nobody uses may be what it wants
        elif sequence.refusals >= FAILURES:
            self._fallback.begin()
            sequence.refusals = 0
        if sequence.refusals < FAILURES:
            self._waiting.appendleft(sequence)
            return
        self._statistics.failed += 1
        need, held = pages_for(len(sequence.history) + 1), self._pool.limit
        yield Failure(
            sequence.index,
            MlaError(
                f"no memory is left for the cache: {need} pages of {PAGE_TOKENS} tokens are needed, {held} can be had",
                fix="free memory of the machine, or cache in fewer bytes with --kv-dtype int8",
            ),
        )

    def _fail(self, sequence: ActiveSequence, error: MlaError) -> Failure:
        self._batch.leave(sequence, broken=True)
        self._statistics.failed += 1
        return Failure(sequence.index, error)

    def _count(self, began: float) -> None:
        self._statistics.busy_s += perf_counter() - began
        self._statistics.cache_bytes = max(self._statistics.cache_bytes, self._pool.allocated_bytes())
        self._statistics.most_pages, self._statistics.page_limit = self._pool.most_used, self._pool.limit
        self._statistics.shared_tokens += self._batch.shared_tokens - self._shared
        self._shared = self._batch.shared_tokens

    def _deliver(self, sequences: list[ActiveSequence], sampled: Sampled) -> Iterator[Event]:
        """Hand out what a computation gave to each sequence."""
        tokens = sampled.ids.tolist()
        logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
        likeliest = None if sampled.likeliest is None else [part.tolist() for part in sampled.likeliest]
        now = perf_counter()
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if sequence not in self._batch.rows:  # cancelled by who received what came before
                continue
            if token < 0:
                yield self._fail(sequence, _not_finite())
                continue
            self._statistics.new_tokens += 1
            if sequence.tokens:
                self._statistics.between_tokens_s.append(now - sequence.last_at)
            else:
                self._statistics.first_token_s.append(now - sequence.started)
            if logprobs is not None and sequence.likeliest is not None:
                sequence.logprobs.append(logprobs[row])
                ids, values = ([], []) if likeliest is None else (part[row] for part in likeliest)
                sequence.alternatives.append(list(zip(ids, values, strict=True))[: sequence.likeliest])
            sequence.refusals = 0
            piece = sequence.push(token, now)
            if sequence.finish_reason is not None:
                self._batch.leave(sequence)
            if piece:
                yield Text(sequence.index, piece)
            if sequence.finish_reason is not None:
                self._statistics.completed += 1
                yield sequence.completion()


def _not_finite() -> MlaError:
    return MlaError(
        "the model's scores hold NaN or infinity",
        fix="run with --dtype float32; if it stays, the weights are damaged (`mla inspect`)",
    )
