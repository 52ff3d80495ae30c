"""The generator: requests in, text out as it comes, several requests at a time.

A request's tokens are the same in every run, bit for bit. With the compiled CPU kernels they are the same among others, too;
where PyTorch or Triton computes a step, logits may differ by the rounding of another matrix shape (float32: log-probabilities
within 1e-4), so a text differs only where two tokens are that close. Sampled tokens depend on the request's own seed. Static
ranges of the cache follow each request's own tokens (see `live_range`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter

import torch

from mla_cli.errors import InputError, MlaError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.cache_store import PAGE_TOKENS
from mla_cli.model.decoder import Decoder
from mla_cli.model.page_pool import PagePool, pages_for
from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime.batch import Batch, prompt_cuts
from mla_cli.runtime.choices import COOL_DOWN, DEFAULT_MAX_BATCH, WARM_SHARE
from mla_cli.runtime.fallback import Fallback
from mla_cli.runtime.live_range import LiveRange, StaticRanges
from mla_cli.runtime.request import Completion, Event, Failure, Request, Text
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.runtime.scheduler import Look, Scheduler
from mla_cli.runtime.sequence import ActiveSequence
from mla_cli.runtime.statistics import Statistics


class Generator:
    """Answers requests with one decoder.

    Args:
        decoder: of a converted or an unconverted model; tokenizer: its own.
        quantizers: how the latents are cached (see `Cache`); None: not quantised.
        ranges: what calibration says of static ranges, which then follow the text; None: they stay as they are.
        cache_dtype: type of what is cached unquantised; None: the decoder's.
        max_batch: most requests that run together; the others wait.
        max_context: most tokens of prompt and answer together; never more than the model has positions for.
        pool_tokens: most tokens that the cache holds of all requests together; None: `max_batch` times the context.
        cool_down: requests that are computed beside the pool after memory ran out for it (see `Fallback`).
        logprobs: also give each token's log-probability.

    Attributes:
        statistics: of all that this generator has done.
        context: most tokens of prompt and answer together.
        look: see `Scheduler`; of those that are made after it is set.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        quantizers: tuple[LatentQuantizer | None, ...] | None = None,
        ranges: StaticRanges | None = None,
        cache_dtype: torch.dtype | None = None,
        max_batch: int = DEFAULT_MAX_BATCH,
        max_context: int | None = None,
        pool_tokens: int | None = None,
        cool_down: int = COOL_DOWN,
        logprobs: bool = False,
    ) -> None:
        for name, value in (("max-batch", max_batch), ("max-context", max_context), ("pool-size", pool_tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{name} cannot be {value}", where=f"--{name}", fix="give a whole number from 1")
        self.decoder, self.tokenizer = decoder, tokenizer
        positions = decoder.spec.max_position_embeddings
        self.context = positions if max_context is None else min(max_context, positions)
        limit = max_batch * pages_for(self.context)
        self._limited_by = "--max-context"
        if pool_tokens is not None:
            limit = pages_for(pool_tokens)
            if limit * PAGE_TOKENS < self.context:
                self.context, self._limited_by = limit * PAGE_TOKENS, "--pool-size"
        make_cache = partial(decoder.make_cache, quantizers=quantizers, dtype=cache_dtype or decoder.dtype)
        self._pool = PagePool(make_cache, limit)
        self.max_batch, self._logprobs = max_batch, logprobs
        self.look: Look | None = None
        self._live = None if ranges is None else LiveRange(ranges)
        self.statistics = Statistics(self._pool.bytes_per_token(), live=self._live)
        self._fallback = Fallback(self._pool, self.statistics, cool_down)

    def generate(self, requests: Sequence[Request]) -> list[Completion | Failure]:
        """Answer requests, in their order; one that cannot be answered gives a `Failure`."""
        answers = [event for event in self.events(requests) if not isinstance(event, Text)]
        return sorted(answers, key=lambda answer: answer.index)

    def complete(self, request: Request, on_text: Callable[[str], None] = lambda _: None) -> Completion:
        """Answer one request; `on_text` receives the text as it comes.

        Raises:
            InputError: the prompt cannot be used.
        """
        for event in self.events([request]):
            if isinstance(event, Text):
                on_text(event.piece)
            elif isinstance(event, Failure):
                raise event.error
            else:
                return event
        raise AssertionError("a request ended without an answer")

    def events(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Pieces of text as they come, and one `Completion` or `Failure` a request as it ends."""
        started = perf_counter()
        waiting: list[ActiveSequence] = []
        for index, request in enumerate(requests):
            try:
                waiting.append(self.prepare(index, request, started))
            except MlaError as error:
                self.statistics.failed += 1
                yield Failure(index, error)
        scheduler = self.scheduler()
        for sequence in waiting:
            scheduler.add(sequence)
        try:
            while scheduler.busy:
                yield from scheduler.turn()
        finally:
            scheduler.close()

    @torch.inference_mode()
    def warm_up(self, beginnings: Sequence[Sequence[int]]) -> list[int]:
        """Read tokens that prompts will begin with, before any comes; how many of each are kept, in whole chunks.

        They are kept as what prompts leave is: until their place is wanted, those first that were not used for the longest
        time. All together take at most `WARM_SHARE` of the pool.
        """
        room = int(WARM_SHARE * self._pool.limit) * PAGE_TOKENS
        kept = []
        for tokens in beginnings:
            ends = prompt_cuts(self.decoder, self._pool.storage, len(tokens) + 1)[:-1]
            end = max((end for end in ends if end <= room and end < self.context), default=0)
            if end:
                # One token more: a chunk is kept for prompts that go on behind it.
                request = Request((*tokens[:end], tokens[0]), SamplingParams(max_new_tokens=1))
                sequence = self.prepare(0, request, perf_counter())
                batch = Batch(self.decoder, self._pool, live=self._live)
                if not batch.join(sequence):
                    end = 0
                while sequence.cached < end:
                    batch.adopt(sequence)
                    if sequence.cached < end:
                        batch.read(sequence)
                if end:
                    batch.leave(sequence)
            room -= end
            kept.append(end)
        return kept

    @property
    def pool(self) -> PagePool:
        """The pages of all requests."""
        return self._pool

    def scheduler(self) -> Scheduler:
        """Runs sequences that `prepare` made, as many as come; one at a time, and by one thread."""
        batch = Batch(self.decoder, self._pool, live=self._live)
        return Scheduler(
            batch, self._pool, self.statistics, max_batch=self.max_batch, look=self.look, fallback=self._fallback
        )

    def prepare(self, index: int, request: Request, started: float) -> ActiveSequence:
        """The sequence that answers a request, under a number of the caller's; any thread may ask for one.

        Args:
            started: when the request was handed in (`perf_counter`).

        Raises:
            InputError: the prompt cannot be used.
        """
        prompt = self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        if not prompt:
            if self.tokenizer.bos_id is None:
                raise InputError(
                    "the prompt is empty, and the model has no begin-of-text token to start from", fix="give a prompt"
                )
            prompt = [self.tokenizer.bos_id]
        self._check(prompt)
        asked, room = request.params.max_new_tokens, self.context - len(prompt)
        note = f"cut at the context limit of {self.context} tokens ({len(prompt)} in the prompt)"
        return ActiveSequence(
            index,
            prompt,
            request.params,
            allowed=min(asked, room),
            note=note if asked > room else None,
            stream=self.tokenizer.stream(),
            eos_ids=self.tokenizer.eos_ids,
            started=started,
            likeliest=0 if request.logprobs is None and self._logprobs else request.logprobs,
        )

    def _check(self, prompt: list[int]) -> None:
        rows = self.decoder.spec.vocab_size
        outside = next((token for token in prompt if not 0 <= token < rows), None)
        if outside is not None:  # before any kernel runs: on a GPU it would end the process
            raise InputError(
                f"token id {outside} is outside the model's embedding table of {rows} rows",
                fix="the tokenizer does not belong to this model; use the one it was trained with",
            )
        if len(prompt) >= self.context:
            own = self.decoder.spec.max_position_embeddings
            raise InputError(
                f"the prompt has {len(prompt)} tokens, the context is limited to {self.context} with the answer",
                fix=f"shorten the prompt{f', or raise {self._limited_by} (at most {own})' if self.context < own else ''}",
            )
