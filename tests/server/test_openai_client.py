"""The server as OpenAI's own client sees it, beside what the generator says without a server."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest

from mla_cli.runtime.engine import Engine
from mla_cli.runtime.request import Completion, Request
from mla_cli.runtime.sampling_params import SamplingParams
from tests.runtime.stand_ins import save_byte_tokenizer, save_tiny_with_tokenizer
from tests.server.support import MODEL, Running, running

CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
SETTINGS: list[dict[str, Any]] = [
    {}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.2, "top_p": 0.7, "seed": 2**62},
    {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3}},
]  # fmt: skip


def generated(engine: Engine, prompt: str | tuple[int, ...], **params: Any) -> Completion:
    own = {**params.pop("extra_body", {}), **params}
    answer = engine.generator.generate([Request(prompt, SamplingParams(**own), 3)])[0]
    assert isinstance(answer, Completion)
    return answer


@pytest.mark.parametrize("settings", SETTINGS)
def test_completions_are_those_of_the_generator(client: Any, engine: Engine, settings: dict[str, Any]) -> None:
    expected = generated(engine, "Once upon a time", max_new_tokens=20, **settings)
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=20, **settings)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.prompt_tokens == 17
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_conversations_are_those_of_the_template(
    client: Any, engine: Engine, settings: dict[str, Any], limit: str
) -> None:
    expected = generated(engine, tuple(engine.tokenizer.encode_chat(CHAT)), max_new_tokens=15, **settings)
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, **{limit: 15}, **settings)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("settings", [*SETTINGS, {"stop": ["e", "p"]}, {"n": 3, "temperature": 1.0, "seed": 8}])
def test_a_stream_is_the_whole_answer_in_pieces(client: Any, settings: dict[str, Any]) -> None:
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 40, "logprobs": True, "top_logprobs": 2, **settings}
    whole = client.chat.completions.create(**asked)
    count = settings.get("n", 1)
    texts, ends, scores, usages = [""] * count, [None] * count, [[] for _ in range(count)], []  # type: ignore[var-annotated]
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        usages.append(chunk.usage)
        for choice in chunk.choices:
            assert ends[choice.index] is None, "there is nothing after the end"
            texts[choice.index] += choice.delta.content or ""
            scores[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert scores == [choice.logprobs.content for choice in whole.choices]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] == whole.usage


def test_a_stream_of_completions(client: Any) -> None:
    asked = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 30, "logprobs": 2, "n": 2, "temperature": 1.0,
             "seed": 4, "stop": "e"}  # fmt: skip
    whole = client.completions.create(**asked)
    texts, tokens, ends = [""] * 4, [[] for _ in range(4)], [None] * 4  # type: ignore[var-annotated]
    for chunk in client.completions.create(**asked, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_choices_have_seeds_that_follow_one_another(client: Any, engine: Engine) -> None:
    asked = {"model": MODEL, "max_tokens": 12, "temperature": 1.0}
    several = client.completions.create(prompt=["left", "right"], n=3, seed=10, **asked)
    assert [choice.index for choice in several.choices] == list(range(6))
    for choice, (prompt, seed) in zip(several.choices, itertools.product(["left", "right"], (10, 11, 12)), strict=True):
        expected = generated(engine, prompt, max_new_tokens=12, temperature=1.0, seed=seed)
        assert choice.text == expected.text
    assert several.usage.prompt_tokens == len("<left") + len("<right")  # each once, with its BOS


def test_without_a_seed_answers_differ(client: Any) -> None:
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 30, "temperature": 2.0}
    assert len({client.completions.create(**asked).choices[0].text for _ in range(3)}) > 1


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]], ["a", [9, 8]]])
def test_prompts_may_be_token_ids(client: Any, engine: Engine, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6)
    prompts = [prompt] if isinstance(prompt[0], int) else prompt
    expected = [generated(engine, p if isinstance(p, str) else tuple(p), max_new_tokens=6).text for p in prompts]
    assert [choice.text for choice in answer.choices] == expected


def test_stop_texts_are_no_part_of_the_answer(client: Any, engine: Engine) -> None:
    free = generated(engine, "hello", max_new_tokens=60, temperature=1.5, seed=1)
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 60, "temperature": 1.5, "seed": 1, "logprobs": 0}
    stop = free.text[4:7]
    for stops in (stop, [stop], ["never there", stop]):
        answer = client.completions.create(**asked, stop=stops)
        cut = free.text.index(stop)
        assert answer.choices[0].text == free.text[:cut]
        assert answer.choices[0].finish_reason == "stop"
        assert all(start < cut for start in answer.choices[0].logprobs.text_offset)


def test_log_probabilities_are_those_of_the_generator(client: Any, engine: Engine) -> None:
    params = {"temperature": 0.8, "seed": 9}
    request = Request("hello", SamplingParams(max_new_tokens=9, ignore_eos=True, **params), 3)
    (sequence,) = [engine.generator.prepare(0, request, 0.0)]
    scheduler = engine.generator.scheduler()
    scheduler.add(sequence)
    while scheduler.busy:
        list(scheduler.turn())
    named = engine.tokenizer.token_bytes()
    asked = {"model": MODEL, "max_tokens": 9, **params, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt="hello", logprobs=3, **asked).choices[0].logprobs
    assert answer.token_logprobs == sequence.logprobs
    for token, shown, likeliest, ours in zip(
        sequence.tokens, answer.tokens, answer.top_logprobs, sequence.alternatives, strict=True
    ):
        assert shown == named(token).decode("utf-8") if named(token).isascii() else shown.startswith("bytes:")
        assert list(likeliest.values())[:3] == [value for _, value in ours]
        assert shown in likeliest
    ids = [[1, *range(3, 10)]]
    whole = client.completions.create(prompt=ids, logprobs=0, **asked).choices[0].logprobs
    assert [list(entry) for entry in whole.top_logprobs] == [[token] for token in whole.tokens]
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=4, **asked).choices[0]
    special = ("<pad>", "<s>", "</s>")  # they have scores, but no text
    joined = b"".join(bytes(score.bytes) for score in chat.logprobs.content if score.token not in special)
    assert joined.decode("utf-8", "replace") == chat.message.content
    assert all(len(score.top_logprobs) == 4 for score in chat.logprobs.content)
    none = client.chat.completions.create(messages=CHAT, **asked).choices[0]
    assert none.logprobs is None


def test_what_a_request_leaves_out_is_the_servers(model: Any, engine: Engine) -> None:
    defaults = SamplingParams(max_new_tokens=7, temperature=0.7, top_k=4, stop=("q",), seed=1)
    with running(model, defaults=defaults) as server:
        ours = generated(engine, "hi", max_new_tokens=7, temperature=0.7, top_k=4, stop=("q",), seed=6)
        assert server.complete("hi", seed=6)["choices"][0]["text"] == ours.text
        plain = generated(engine, "hi", max_new_tokens=7, temperature=0.7, stop=("e",), seed=6)
        assert server.complete("hi", seed=6, top_k=0, stop="e")["choices"][0]["text"] == plain.text


def test_parts_of_a_message_and_developers(client: Any) -> None:
    plain: list[Any] = [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}]
    parts: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "name": "eve"},
    ]
    answers = [client.chat.completions.create(model=MODEL, messages=m, max_tokens=9) for m in (plain, parts)]
    assert answers[0].choices == answers[1].choices


def test_an_answer_can_be_sent_back(client: Any) -> None:
    first = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=5).choices[0].message
    turn: list[Any] = [*CHAT, first, {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model=MODEL, messages=turn, max_tokens=5).choices[0].finish_reason == "length"


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mla"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"), ({"n": 0}, "n"), ({"n": 10**6}, "n"), ({"n": "1"}, "n"),
        ({"seed": -1}, "seed"), ({"seed": 2**63}, "seed"), ({"stop": ""}, "stop"), ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"), ({"stop": {}}, "stop"), ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"), ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"), ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"), ({"temprature": 1}, "temprature"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"), ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "loud": 1}]}, "messages[0].loud"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages[0].content"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(server: Running, changes: dict[str, Any], param: str) -> None:
    status, answer, _ = server.post("/v1/chat/completions", {"model": MODEL, "messages": CHAT, **changes})
    assert status == 400
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "changes",
    [
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "temperature": None, "stop": None, "n": None, "seed": None},
    ],
)
def test_what_asks_for_nothing_is_allowed(server: Running, changes: dict[str, Any]) -> None:
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    plain, more = (server.post("/v1/chat/completions", {**asked, **c}) for c in ({}, changes))
    assert plain[0] == more[0] == 200
    assert plain[1]["choices"] == more[1]["choices"]


def test_errors_are_those_of_the_client(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        client.chat.completions.create(model="gpt-4o", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match=r"1100.*1024|1024.*1100"):
        client.completions.create(model=MODEL, prompt=[5] * 1100)
    with pytest.raises(openai.BadRequestError, match=r"6 tokens and 5000 .*1024"):
        client.completions.create(model=MODEL, prompt="hello", max_tokens=5000)
    with pytest.raises(openai.BadRequestError, match="999"):
        client.completions.create(model=MODEL, prompt=[5, 999])


def test_the_context_is_used_to_its_last_token(client: Any) -> None:
    asked = {"model": MODEL, "prompt": [5] * 1000, "extra_body": {"ignore_eos": True}}
    assert client.completions.create(**asked, max_tokens=24).usage.total_tokens == 1024
    cut = client.completions.create(**asked)  # the server's own limit is no promise
    assert (cut.usage.total_tokens, cut.choices[0].finish_reason) == (1024, "length")


def test_a_model_without_a_template_has_no_conversations(tmp_path: Any) -> None:
    save_tiny_with_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_byte_tokenizer(tmp_path, chat=False, config=config)
    with running(tmp_path) as server:
        status, answer, _ = server.post("/v1/chat/completions", {"model": MODEL, "messages": CHAT})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "template" in answer["error"]["message"]
        assert str(tmp_path) not in answer["error"]["message"]
        assert server.complete("hello", max_tokens=2)["usage"]["completion_tokens"] == 2
