"""Scores that do not depend on how requests are batched, sorted or shared (cases EV-05, EV-07, EV-12)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import MlaError
from mla_cli.evaluation.generation import Prompt, continue_greedily
from mla_cli.evaluation.requests import Request
from mla_cli.evaluation.scoring import MIN_SHARED_CONTEXT, Score, score
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.decoder import Decoder
from tests.runtime.latent import latent_decoder
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return load_decoder(open_model(str(folder)))


def make_requests(count: int = 24) -> list[Request]:
    """Of different lengths, several on one context; ids 0 and 2 (padding, EOS) occur like any other."""
    rng = random.Random(0)
    contexts = [tuple(rng.randrange(64) for _ in range(rng.randint(1, 60))) for _ in range(6)]
    return [
        Request(rng.choice(contexts), tuple(rng.randrange(64) for _ in range(rng.randint(1, 9)))) for _ in range(count)
    ]


def scores(decoder: Decoder, requests: list[Request], **options: object) -> list[Score]:
    found = dict(score(decoder, requests, max_length=256, **options))  # type: ignore[arg-type]
    assert sorted(found) == list(range(len(requests)))
    return [found[index] for index in range(len(requests))]


def one_by_one(decoder: Decoder, request: Request) -> Score:
    """The definition: run the sequence alone, read off each token of the continuation."""
    with torch.inference_mode():
        tokens = torch.tensor([request.context + request.continuation])
        logprobs = decoder.logits(decoder(tokens))[0].log_softmax(dim=-1)[len(request.context) - 1 : -1]
    wanted = torch.tensor(request.continuation)
    total = logprobs.gather(-1, wanted[:, None]).sum().item()
    return Score(total, bool((logprobs.argmax(dim=-1) == wanted).all()))


@pytest.mark.parametrize("batch_size", [1, 2, 8, None])
def test_scores_are_those_of_each_request_alone(decoder: Decoder, batch_size: int | None) -> None:
    requests = make_requests()
    for found, request in zip(scores(decoder, requests, batch_size=batch_size), requests, strict=True):
        expected = one_by_one(decoder, request)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert found.greedy == expected.greedy


def test_the_order_of_requests_does_not_matter(decoder: Decoder) -> None:
    requests = make_requests()
    backwards = scores(decoder, requests[::-1])[::-1]
    for found, other in zip(scores(decoder, requests), backwards, strict=True):
        assert found.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert found.greedy == other.greedy


def test_a_shared_context_runs_once(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    context = tuple(range(3, 3 + MIN_SHARED_CONTEXT + 8))
    requests = [Request(context, (5, 6, 7, token)) for token in (1, 2, 3, 4)]
    read = []
    original = Decoder.forward

    def counted(self: Decoder, tokens: torch.Tensor, *others: object, **more: object) -> torch.Tensor:
        read.append(tokens.numel())
        return original(self, tokens, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", counted)
    scores(decoder, requests)
    assert read == [len(context), 4 * 3]


def test_all_tokens_of_a_continuation_must_be_greedy(decoder: Decoder) -> None:
    context = (3, 4, 5, 6, 7, 8)
    prompt = Prompt(context, 3, lambda ids: False)
    greedy = tuple(continue_greedily(decoder, [prompt], eos_ids=frozenset())[0])
    first_wrong = ((greedy[0] + 1) % 64, *greedy[1:])
    last_wrong = (*greedy[:-1], (greedy[-1] + 1) % 64)
    found = scores(decoder, [Request(context, answer) for answer in (greedy, first_wrong, last_wrong)])
    assert [each.greedy for each in found] == [True, False, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_output_that_is_not_finite_ends_the_run(tmp_path: Path, value: float) -> None:
    save_tiny(tmp_path)
    broken = load_decoder(open_model(str(tmp_path)))
    broken.lm_head.weight[5, 0] = value
    with pytest.raises(MlaError, match="NaN or infinity"):
        scores(broken, [Request((3, 4), (5,)), Request((3, 6), (5,))])
    with pytest.raises(MlaError, match="NaN or infinity"):
        continue_greedily(broken, [Prompt((3, 4), 4, lambda ids: False)], eos_ids=frozenset())


def test_a_quantised_cache_is_what_attention_reads() -> None:
    latent = latent_decoder()
    quantizers = tuple(LatentQuantizer("int8") for _ in range(latent.spec.num_layers))
    requests = [Request(tuple(range(3, 30)), (token, 5)) for token in (6, 7)] + [Request((3, 4, 5), (6, 7, 8, 9))]
    exact = scores(latent, requests)
    for batch_size in (1, None):
        found = scores(latent, requests, quantizers=quantizers, batch_size=batch_size)
        for ours, request, unquantised in zip(found, requests, exact, strict=True):
            expected = token_by_token(latent, request, quantizers)
            # Float noise may move a code by one, which shows less than quantisation itself.
            assert ours.logprob == pytest.approx(expected, abs=1e-3)
            assert abs(ours.logprob - unquantised.logprob) > 1e-2


def token_by_token(decoder: Decoder, request: Request, quantizers: tuple[LatentQuantizer, ...]) -> float:
    """As a generator would meet the sequence: every token reads all before it from the cache."""
    tokens = request.context + request.continuation
    cache = decoder.make_cache(1, len(tokens), quantizers)
    with torch.inference_mode():
        steps = [decoder.logits(decoder(torch.tensor([[token]]), cache))[0, 0].log_softmax(dim=-1) for token in tokens]
    first = len(request.context)
    return sum(float(steps[first + i - 1][token]) for i, token in enumerate(request.continuation))


def test_sequences_that_end_leave_the_others_as_they_were(decoder: Decoder) -> None:
    rng = random.Random(3)
    prompts = [
        Prompt(tuple(rng.randrange(64) for _ in range(length)), limit, lambda ids: 9 in ids)
        for length, limit in ((30, 20), (3, 5), (11, 1), (60, 40))
    ]
    alone = [continue_greedily(decoder, [prompt], eos_ids=frozenset({2}))[0] for prompt in prompts]
    assert continue_greedily(decoder, prompts, eos_ids=frozenset({2})) == alone
    assert all(len(ids) <= prompt.max_new for ids, prompt in zip(alone, prompts, strict=True))
