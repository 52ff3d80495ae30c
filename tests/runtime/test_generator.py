"""The generator beside transformers' generate, and the cases that went wrong elsewhere (GE-02 to GE-10, FM-14)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import InputError, MlaError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.decoder import Decoder
from mla_cli.model.spec import LatentAttentionSpec
from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime.batch import chunk_ends
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.request import Completion, Failure, Request, Text
from mla_cli.runtime.sampling_params import SamplingParams
from tests.runtime.stand_ins import (
    BOS,
    EOS,
    VOCAB,
    ScriptedDecoder,
    byte_ids,
    save_byte_tokenizer,
    save_tiny_deepseek,
    save_tiny_with_tokenizer,
    script,
)

FAMILIES = ("llama", "mistral", "qwen2", "gpt2")
PROMPTS = ["The quick brown fox", "a", "Once upon a time there was a very long prompt indeed, " * 3, "xy z", "42"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), config={"eos_token_id": EOS})


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder, Tokenizer]:
    return load(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder, Tokenizer]:
    return load(tmp_path_factory.mktemp("one"), "llama")


def load(folder: Path, family: str, **changes: Any) -> tuple[Any, Decoder, Tokenizer]:
    from mla_cli.model.tokenizer import load_tokenizer

    reference = save_tiny_with_tokenizer(folder, family, **changes)
    return reference, load_decoder(open_model(str(folder))), load_tokenizer(folder)


def scripted(answer: Any, prompt: str, tokenizer: Tokenizer, **more: Any) -> Generator:
    """A generator whose model answers `answer` (ids) to `prompt`."""
    return Generator(ScriptedDecoder(script(answer, len(tokenizer.encode(prompt)))), tokenizer, **more)  # type: ignore[arg-type]


def answers(generator: Generator, requests: list[Request]) -> list[Completion]:
    found = generator.generate(requests)
    assert all(isinstance(answer, Completion) for answer in found), found
    return found  # type: ignore[return-value]


def greedy(reference: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=EOS, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_equals_transformers_alone_and_in_a_ragged_batch(model: tuple[Any, Decoder, Tokenizer]) -> None:
    reference, decoder, tokenizer = model
    requests = [Request(prompt, SamplingParams(max_new_tokens=20 + 7 * i)) for i, prompt in enumerate(PROMPTS)]
    expected = [greedy(reference, tokenizer.encode(r.prompt), r.params.max_new_tokens) for r in requests]  # type: ignore[arg-type]
    for max_batch in (1, 2, 3, 8):
        found = answers(Generator(decoder, tokenizer, max_batch=max_batch), requests)
        assert [list(a.token_ids) for a in found] == expected
        assert [a.index for a in found] == list(range(len(requests)))


def test_latent_greedy_equals_transformers(tmp_path: Path) -> None:
    from mla_cli.model.tokenizer import load_tokenizer

    reference = save_tiny_deepseek(tmp_path)
    decoder, tokenizer = load_decoder(open_model(str(tmp_path))), load_tokenizer(tmp_path)
    requests = [Request(prompt, SamplingParams(max_new_tokens=15 + 5 * i)) for i, prompt in enumerate(PROMPTS)]
    found = answers(Generator(decoder, tokenizer, max_batch=3), requests)
    for request, answer in zip(requests, found, strict=True):
        assert isinstance(request.prompt, str)
        expected = greedy(reference, tokenizer.encode(request.prompt), request.params.max_new_tokens)
        assert list(answer.token_ids) == expected


def test_long_prompts_are_read_in_chunks(llama: tuple[Any, Decoder, Tokenizer], tmp_path: Path) -> None:
    reference, decoder, tokenizer = load(tmp_path, "llama", max_position_embeddings=2048)
    prompts = [tuple(torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist())
               for n in (1, 511, 512, 513, 1100, 1025)]  # fmt: skip
    requests = [Request(prompt, SamplingParams(max_new_tokens=4)) for prompt in prompts]
    found = answers(Generator(decoder, tokenizer), requests)
    for prompt, answer in zip(prompts, found, strict=True):
        assert list(answer.token_ids) == greedy(reference, list(prompt), 4)


def test_dynamic_scaling_reads_a_prompt_whole(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    reference, decoder, tokenizer = load(tmp_path, "llama", max_position_embeddings=640, rope_parameters=rope)
    prompt = torch.randint(3, VOCAB, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    (answer,) = answers(Generator(decoder, tokenizer), [Request(tuple(prompt), SamplingParams(max_new_tokens=5))])
    assert list(answer.token_ids) == greedy(reference, prompt, 5)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_every_step_equals_a_full_forward(llama: tuple[Any, Decoder, Tokenizer], length: int, tmp_path: Path) -> None:
    _, decoder, tokenizer = load(tmp_path, "llama", max_position_embeddings=512)
    prompt = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    generator = Generator(decoder, tokenizer, logprobs=True)
    (answer,) = answers(generator, [Request(tuple(prompt), SamplingParams(max_new_tokens=4, ignore_eos=True))])
    for step, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs or (), strict=True)):
        whole = torch.tensor([[*prompt, *answer.token_ids[:step]]])
        scores = decoder.logits(decoder(whole)[:, -1])[0].log_softmax(-1)
        assert token == scores.argmax()
        torch.testing.assert_close(torch.tensor(logprob), scores[token], atol=2e-4, rtol=1e-4)


def test_each_request_has_the_log_probabilities_that_it_asked_for(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    """Side by side, also where text is held back and cut; of no other request, and equal to those of a full forward."""
    _, decoder, tokenizer = llama
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    generator = Generator(decoder, tokenizer)
    scheduler = generator.scheduler()
    sequences = [generator.prepare(i, Request("hello", params, asked), 0.0) for i, asked in enumerate((None, 0, 2, 5))]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.busy:
        list(scheduler.turn())
    none, alone, two, five = sequences
    assert none.logprobs == []
    counts = [[len(found) for found in sequence.alternatives] for sequence in (none, alone, two, five)]
    assert counts == [[], [0] * 6, [2] * 6, [5] * 6]
    assert alone.logprobs == two.logprobs == five.logprobs
    assert [entry[:2] for entry in five.alternatives] == two.alternatives
    for step, found in enumerate(five.alternatives):
        whole = torch.tensor([[*five.prompt, *five.tokens[:step]]])
        scores = decoder.logits(decoder(whole)[:, -1])[0].log_softmax(-1)
        values, ids = scores.topk(5)
        assert [token for token, _ in found] == ids.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in found]), values, atol=2e-4, rtol=1e-4)
        assert found[0] == (five.tokens[step], five.logprobs[step])  # greedy took the likeliest


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
def test_latent_decoders_generate_alike_in_any_batch(tokenizer: Tokenizer, kind: Any) -> None:
    from tests.runtime.latent import latent_decoder

    decoder = latent_decoder()
    assert isinstance(decoder.spec.attention[0], LatentAttentionSpec)
    quantizers = None if kind is None else (LatentQuantizer(kind),) * decoder.spec.num_layers
    requests = [Request(p, SamplingParams(max_new_tokens=12 + i, ignore_eos=True)) for i, p in enumerate(PROMPTS)]
    alone = [answers(Generator(decoder, tokenizer, quantizers=quantizers), [r])[0].token_ids for r in requests]
    for max_batch in (2, 5):
        generator = Generator(decoder, tokenizer, quantizers=quantizers, max_batch=max_batch)
        assert [a.token_ids for a in answers(generator, requests)] == alone
        assert generator.statistics.cache_bytes_per_token > 0


# GE-02


@pytest.mark.parametrize("batch", [["", "hi"], ["", ""], [" \n"], ["hi"]])
def test_an_empty_prompt_starts_from_bos(llama: tuple[Any, Decoder, Tokenizer], batch: list[str]) -> None:
    reference, decoder, tokenizer = llama
    found = answers(Generator(decoder, tokenizer), [Request(p, SamplingParams(max_new_tokens=3)) for p in batch])
    for prompt, answer in zip(batch, found, strict=True):
        ids = tokenizer.encode(prompt) or [BOS]
        assert list(answer.token_ids) == greedy(reference, ids, 3)


def test_an_empty_prompt_without_bos_fails_alone(llama: tuple[Any, Decoder, Tokenizer], tmp_path: Path) -> None:
    _, decoder, _ = llama
    without = save_byte_tokenizer(tmp_path, adds_bos=False, bos=False, config={"eos_token_id": EOS})
    assert without.bos_id is None
    first, second, third = Generator(decoder, without).generate([Request(""), Request("hi"), Request(())])
    assert isinstance(first, Failure)
    assert isinstance(first.error, InputError)
    assert isinstance(second, Completion)
    assert isinstance(third, Failure)
    with pytest.raises(InputError, match="empty"):
        Generator(decoder, without).complete(Request(""))


def test_no_requests_no_answers(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    assert Generator(*llama[1:]).generate([]) == []


# GE-03, GE-04


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_context_is_used_to_its_last_token_and_no_further(family: str, tmp_path: Path) -> None:
    limit = {"n_positions": 16} if family == "gpt2" else {"max_position_embeddings": 16}
    _, decoder, tokenizer = load(tmp_path, family, **limit)
    generator = Generator(decoder, tokenizer)

    def run(prompt: int, new: int) -> Completion:
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        return generator.complete(Request(tuple([5] * prompt), params))

    for prompt, new, expected, cut in [
        (10, 5, 5, False), (10, 6, 6, False), (10, 7, 6, True), (10, 10, 6, True), (15, 1, 1, False),
        (15, 2, 1, True), (1, 10**9, 15, True),
    ]:  # fmt: skip
        answer = run(prompt, new)
        assert len(answer.token_ids) == expected
        assert answer.finish_reason == "length"
        assert (answer.note is not None) == cut
        if cut:
            assert "16" in str(answer.note)
    for prompt in (16, 17, 20):
        with pytest.raises(InputError, match=rf"{prompt} tokens.*16"):
            run(prompt, 1)


@pytest.mark.parametrize("context", [15, 16, 17, 255, 256, 257])
def test_max_context_limits_prompt_and_answer(tokenizer: Tokenizer, context: int) -> None:
    decoder = ScriptedDecoder(lambda tokens: 70, positions=300)
    generator = Generator(decoder, tokenizer, max_context=context)  # type: ignore[arg-type]
    answer = generator.complete(Request(tuple([5] * 10), SamplingParams(max_new_tokens=1000)))
    assert len(answer.token_ids) == context - 10
    assert sum(decoder.fed) == context - 1  # the last token is given out, never fed
    with pytest.raises(InputError, match=r"--max-context \(at most 300\)"):
        generator.complete(Request(tuple([5] * context)))
    assert Generator(decoder, tokenizer, max_context=10**6).context == 300  # type: ignore[arg-type]


def test_a_long_prompt_fails_alone(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    first, second = Generator(*llama[1:]).generate([Request("x" * 300), Request("hi")])
    assert isinstance(first, Failure)
    assert isinstance(second, Completion)


# GE-05


@pytest.mark.parametrize("token", [2, 5, 7])
def test_any_end_of_text_ends(token: int, tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path, config={"eos_token_id": 5})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    from mla_cli.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tmp_path)
    generator = scripted([*byte_ids("ab"), token, *byte_ids("cd")], "hi", tokenizer)
    answer = generator.complete(Request("hi"))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    assert answer.token_ids == (*byte_ids("ab"), token)
    on = scripted([*byte_ids("ab"), 2, *byte_ids("cd")], "hi", tokenizer)
    going = on.complete(Request("hi", SamplingParams(max_new_tokens=5, ignore_eos=True)))
    assert (going.text, going.finish_reason) == ("abcd", "length")


def test_a_row_that_ends_leaves_and_the_others_go_on(tokenizer: Tokenizer) -> None:
    def say(tokens: list[int]) -> int:
        # The second token of a prompt says how many more come before the end.
        return EOS if len(tokens) - 3 >= tokens[1] else 80 + len(tokens)

    requests = [Request((BOS, n, 9)) for n in (5, 1, 30, 0, 17, 3, 3, 12)]
    for max_batch in (1, 2, 3, 8):
        decoder = ScriptedDecoder(say)
        found = answers(Generator(decoder, tokenizer, max_batch=max_batch), requests)  # type: ignore[arg-type]
        assert [len(a.token_ids) for a in found] == [6, 2, 31, 1, 18, 4, 4, 13]
        assert sum(decoder.fed) == 3 * 8 + sum(len(a.token_ids) - 1 for a in found)  # nobody computes after its end


# GE-06


@pytest.mark.parametrize("text", ["a👍🏽b", "漢字かな", "é", "👩‍👩‍👧‍👦!", "\ufffd", "plain"])
def test_the_stream_is_the_whole_decode(tokenizer: Tokenizer, text: str) -> None:
    ids = byte_ids(text)
    for cut in range(1, len(ids) + 1):
        pieces: list[str] = []
        generator = scripted([*ids, EOS], "hi", tokenizer)
        answer = generator.complete(Request("hi", SamplingParams(max_new_tokens=cut)), pieces.append)
        assert "".join(pieces) == answer.text == tokenizer.decode(ids[:cut])
        if cut == len(ids):
            assert answer.text == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces[:-1])  # only the cut itself can leave half a character


# Stop texts


@pytest.mark.parametrize(
    ("said", "stops", "text"),
    [
        ("hello world", ("o w",), "hell"),
        ("hello world", ("lo", "l"), "he"),
        ("STOP", ("STOP",), ""),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("a👍b", ("👍",), "a"),
        ("a👍b", ("b",), "a👍"),
        ("no such", ("such a",), "no such"),
        ("line\n\nnext", ("\n\n",), "line"),
    ],
)
def test_stop_texts_end_before_themselves(tokenizer: Tokenizer, said: str, stops: tuple[str, ...], text: str) -> None:
    pieces: list[str] = []
    generator = scripted([*byte_ids(said), EOS], "hi", tokenizer)
    answer = generator.complete(Request("hi", SamplingParams(stop=stops)), pieces.append)
    assert "".join(pieces) == answer.text == text
    assert answer.finish_reason == "stop"
    assert bytes(said.encode()).startswith(text.encode())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.text("abc👍", min_size=1, max_size=12), stops=st.lists(st.text("abc👍", min_size=1, max_size=4), max_size=3)
)
def test_stop_texts_as_if_the_text_were_cut_afterwards(tokenizer: Tokenizer, said: str, stops: list[str]) -> None:
    generator = scripted([*byte_ids(said), EOS], "hi", tokenizer)
    answer = generator.complete(Request("hi", SamplingParams(stop=tuple(stops))))
    # Of what has been said when the first stop text is complete, everything before where a stop text begins.
    ends = [said.find(stop) + len(stop) for stop in stops if stop in said]
    seen = said[: min(ends)] if ends else said
    starts = [seen.find(stop) for stop in stops if stop in seen]
    assert answer.text == (seen[: min(starts)] if starts else said)


# GE-07, GE-09


def test_solo_runs_are_equal_and_neighbours_hardly_matter(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    _, decoder, tokenizer = llama
    request = Request("The quick brown", SamplingParams(max_new_tokens=24, ignore_eos=True))
    solo = [answers(Generator(decoder, tokenizer, logprobs=True), [request])[0] for _ in range(5)]
    assert all((a.token_ids, a.logprobs) == (solo[0].token_ids, solo[0].logprobs) for a in solo)
    others = [Request("abcdefgh" * n, SamplingParams(max_new_tokens=24, ignore_eos=True)) for n in range(1, 8)]
    among = answers(Generator(decoder, tokenizer, logprobs=True), [*others[:3], request, *others[3:]])[3]
    assert among.token_ids == solo[0].token_ids
    torch.testing.assert_close(torch.tensor(among.logprobs), torch.tensor(solo[0].logprobs), atol=1e-4, rtol=0)


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_neighbours(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    _, decoder, tokenizer = llama
    params = [
        SamplingParams(max_new_tokens=10 + i, temperature=0.5 * i, top_p=0.9, seed=i % 3, repetition_penalty=1 + i % 2,
                       ignore_eos=True)
        for i in range(6)
    ]  # fmt: skip
    requests = [Request("hello" * (1 + i % 4), p) for i, p in enumerate(params)]
    alone = [answers(Generator(decoder, tokenizer), [request])[0].token_ids for request in requests]
    for max_batch in (2, 6):
        assert [a.token_ids for a in answers(Generator(decoder, tokenizer, max_batch=max_batch), requests)] == alone
    repeated = answers(
        Generator(decoder, tokenizer), [Request("hi", SamplingParams(temperature=1.0, seed=s)) for s in (1, 1, 2)]
    )
    assert repeated[0].text == repeated[1].text != repeated[2].text


# FM-14, broken models, bad options


def test_an_id_past_the_table_fails_before_any_kernel(tokenizer: Tokenizer) -> None:
    decoder = ScriptedDecoder(lambda tokens: EOS, vocab=64)
    first, second, third = Generator(decoder, tokenizer).generate([Request((1, 65)), Request((1, 63)), Request((-1,))])  # type: ignore[arg-type]
    assert isinstance(first, Failure)
    assert "65" in str(first.error)
    assert isinstance(second, Completion)
    assert isinstance(third, Failure)
    assert decoder.fed == [2]


def test_rows_without_a_token_can_be_generated(tokenizer: Tokenizer) -> None:
    generator = scripted([VOCAB - 1, *byte_ids("a"), EOS], "hi", tokenizer)
    assert generator.complete(Request("hi")).text == "a"


def test_broken_scores_fail_their_own_request(tokenizer: Tokenizer) -> None:
    def say(tokens: list[int]) -> Any:
        broken = tokens[0] == 9 and len(tokens) > 3
        return torch.full((VOCAB,), torch.nan) if broken else EOS if len(tokens) > 5 else 80

    first, second = Generator(ScriptedDecoder(say), tokenizer).generate([Request((9, 9)), Request((8, 8))])  # type: ignore[arg-type]
    assert isinstance(first, Failure)
    assert isinstance(first.error, MlaError)
    assert "NaN" in str(first.error)
    assert isinstance(second, Completion)


@pytest.mark.parametrize("limits", [{"max_batch": 0}, {"max_context": 0}, {"max_context": -5}])
def test_bad_limits_are_refused(llama: tuple[Any, Decoder, Tokenizer], limits: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Generator(*llama[1:], **limits)


# Events and statistics


def test_events_stream_several_requests(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    generator = Generator(*llama[1:], max_batch=2)
    requests = [Request(p, SamplingParams(max_new_tokens=9)) for p in PROMPTS]
    texts = dict.fromkeys(range(len(PROMPTS)), "")
    for event in generator.events(requests):
        if isinstance(event, Text):
            texts[event.index] += event.piece
        else:
            assert isinstance(event, Completion)
            assert event.text == texts.pop(event.index)
    assert not texts


def test_a_consumer_may_compute_between_events(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    for _ in Generator(*llama[1:]).events([Request("hi")]):
        assert not torch.is_inference_mode_enabled()
        return


def test_statistics_count_what_happened(llama: tuple[Any, Decoder, Tokenizer]) -> None:
    generator = Generator(*llama[1:])
    found = answers(generator, [Request(p, SamplingParams(max_new_tokens=5, ignore_eos=True)) for p in ("ab", "cde")])
    summary = generator.statistics.summary()
    assert summary["prompt_tokens"] == sum(a.prompt_tokens for a in found) == 3 + 4
    assert summary["new_tokens"] == 10
    assert len(generator.statistics.between_tokens_s) == 8
    assert summary["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32
    assert summary["cache_bytes"] == 5 * 64 * summary["cache_bytes_per_token"]
    assert summary["ms_per_token_median"] <= summary["ms_per_token_p99"]
    assert summary["peak_rss_bytes"] > 10**7


def test_chunks() -> None:
    assert [chunk_ends(n) for n in (1, 512, 513, 1500)] == [[1], [512], [512, 513], [512, 1024, 1500]]
    assert chunk_ends(6200) == [512, 1024, 2048, 4096, 6144, 6200]
    fine = {64: [64], 330: [256, 320, 330], 513: [512, 513], 624: [512, 576, 624], 1400: [512, 1024, 1280, 1344, 1400]}
    assert {n: chunk_ends(n, fine=True) for n in fine} == fine
