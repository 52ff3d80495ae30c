"""What tests run where Triton interprets: whole generators and commands, and single steps by both ways."""

from __future__ import annotations

import contextlib
import importlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_cli.app import main
from mla_cli.checkpoint.load import open_model
from mla_cli.evaluation.requests import Request as Score
from mla_cli.evaluation.scoring import score
from mla_cli.evaluation.subject import load_subject
from mla_cli.kernels import dispatch
from mla_cli.kernels.dispatch import Backend
from mla_cli.model.cache import Cache
from mla_cli.model.decoder import Decoder
from mla_cli.runtime.engine import open_engine
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.request import Completion, Request
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.runtime.triton_kernels import add_triton
from tests.runtime.stand_ins import save_byte_tokenizer

Answer = tuple[tuple[int, ...], tuple[float, ...]] | str


def request(prompt: Any, tokens: int) -> Request:
    """Greedy, past the end-of-text token."""
    return Request(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True))


def answers(folder: str, prompts: Sequence[Any], tokens: int, **options: Any) -> tuple[list[Answer], dict[str, Any]]:
    """Ids and log-probabilities of each answer (or the error), and notes and statistics of the engine."""
    engine = open_engine(folder, logprobs=True, **options)
    found = engine.generator.generate([request(prompt, tokens) for prompt in prompts])
    return [_answer(each) for each in found], _facts(engine.generator, engine.notes)


def answers_of(
    decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int, backend: str
) -> tuple[list[Answer], dict[str, Any]]:
    """As `answers`, by a decoder without files."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_byte_tokenizer(Path(folder))
    notes = add_triton(decoder, None, backend)
    decoder.backend = "reference" if backend == "reference" else "torch"
    generator = Generator(decoder, tokenizer, cache_dtype=torch.bfloat16, logprobs=True)
    found = generator.generate([request(prompt, tokens) for prompt in prompts])
    return [_answer(each) for each in found], _facts(generator, notes)


def answers_after_stopping(folder: str, prompts: Sequence[Any], tokens: int, **options: Any) -> list[Answer]:
    """As `answers`, after all of the same requests were left at their first piece of text."""
    engine = open_engine(folder, logprobs=True, **options)
    requests = [request(prompt, tokens) for prompt in prompts]
    events = engine.generator.events(requests)
    next(iter(events))
    events.close()  # type: ignore[attr-defined]
    return [_answer(each) for each in engine.generator.generate(requests)]


def answers_beside_a_broken_one(folder: str, prompts: Sequence[Any], tokens: int, bad: int, **options: Any) -> Any:
    """As `answers`, by a model in which the embedding of token `bad` is NaN; twice, with the same pool."""
    engine = open_engine(folder, logprobs=True, **options)
    engine.generator.decoder.embed_tokens.weight.data[bad] = float("nan")
    requests = [request(prompt, tokens) for prompt in prompts]
    return [[_answer(each) for each in engine.generator.generate(requests)] for _ in range(2)]


def run_mla(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def scores(folder: str, requests: Sequence[Score], backend: str, kv_dtype: str) -> list[tuple[float, bool]]:
    """Log-probability of each request's continuation, and whether it is the greedy one."""
    subject = load_subject(open_model(folder), device=torch.device("cpu"), kv_dtype=kv_dtype, backend=backend)
    found = dict(score(subject.decoder, requests, max_length=256, quantizers=subject.quantizers))
    return [(found[place].logprob, found[place].greedy) for place in range(len(requests))]


def answers_with_broken_decode(folder: str, prompt: str, tokens: int) -> tuple[Answer, tuple[str, ...]]:
    """An answer, and the notes of the engine, while the kernel for decoding does not start."""
    decode = importlib.import_module("mla_cli.kernels.decode")  # not before: importing it takes Triton
    whole = decode.decode

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    caches = (dispatch._triton, dispatch._failure)
    decode.decode = broken  # type: ignore[attr-defined]
    try:
        for cache in caches:
            cache.cache_clear()
        engine = open_engine(folder, backend="triton", logprobs=True)
        return _answer(engine.generator.complete(request(prompt, tokens))), engine.notes
    finally:
        decode.decode = whole  # type: ignore[attr-defined]
        for cache in caches:
            cache.cache_clear()


def both_ways(decoder: Decoder, quantizers: Any, chunks: Sequence[Sequence[int]]) -> tuple[list[Any], list[str]]:
    """Hidden states after each chunk by Triton's kernels and by the formula; and what was said.

    Args:
        chunks: new tokens of each sequence, chunk by chunk; they are random.
    """
    notes = add_triton(decoder, quantizers, "triton")
    kernels, found = decoder.kernels, []
    caches = [_cache(decoder, quantizers, by, chunks) for by in (kernels, ())]
    g = torch.Generator().manual_seed(0)
    for counts in chunks:
        lengths = torch.tensor(counts)
        tokens = torch.randint(0, decoder.spec.vocab_size, (len(counts), int(lengths.max())), generator=g)
        states: list[Tensor] = []
        for cache, backend in zip(caches, ("torch", "reference"), strict=True):
            decoder.backend = backend
            hidden = decoder(tokens, cache, lengths)
            states.append(torch.cat([row[:count] for row, count in zip(hidden, counts, strict=True)]))
        found.append(states)
    return found, notes


def _cache(decoder: Decoder, quantizers: Any, kernels: tuple[Backend | None, ...], chunks: Any) -> Cache:
    decoder.kernels = kernels
    capacity = sum(max(counts) for counts in chunks)
    return decoder.make_cache(len(chunks[0]), capacity, quantizers, torch.bfloat16)


def _answer(event: Any) -> Answer:
    if not isinstance(event, Completion):
        return str(event.error)
    assert event.logprobs is not None
    return event.token_ids, event.logprobs


def _facts(generator: Generator, notes: Sequence[str]) -> dict[str, Any]:
    statistics = generator.statistics
    return {"notes": notes, "preemptions": statistics.preemptions, "shared": statistics.shared_tokens}
