"""The harness's own class for Hugging Face models is the oracle: same items, same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.evaluation.tasks import load_tasks, plan_tasks, quiet_harness
from mla_cli.model.tokenizer import load_tokenizer
from tests.evaluation.small_model import save_data, save_model

pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'mla-cli[eval]'")

KINDS = {
    "llama with BOS": {"family": "llama", "adds_bos": True},
    "gpt2 without any BOS": {"family": "gpt2", "adds_bos": False, "bos": False},
    "llama that has a BOS and adds none": {"family": "llama", "adds_bos": False},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=KINDS, ids=[name.replace(" ", "-") for name in KINDS])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Our adapter and the harness's own, on one model."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    from mla_cli.evaluation.harness import HarnessModel

    folder = tmp_path_factory.mktemp("model")
    reference = save_model(folder, **KINDS[request.param])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = HFLM(pretrained=reference, tokenizer=tokenizer, batch_size=4, device="cpu")
    ours = HarnessModel(load_decoder(open_model(str(folder))), load_tokenizer(folder))
    return ours, theirs


def instances(*arguments: tuple[Any, ...], kind: str = "loglikelihood") -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def test_every_item_of_the_built_in_tasks_scores_the_same(models: tuple[Any, Any], data: Path, tmp_path: Path) -> None:
    from lm_eval.evaluator import evaluate

    loaded = load_tasks(plan_tasks(("lambada", "hellaswag", "gsm8k"), data), tmp_path)
    found = []
    for model in models:
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(1234)
        with quiet_harness():
            found.append(evaluate(model, loaded, bootstrap_iters=0))
    ours, theirs = found
    for task in ("lambada_openai", "hellaswag"):
        for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert mine["arguments"] == other["arguments"]
            for (logprob, greedy), (expected, expected_greedy) in zip(
                mine["filtered_resps"], other["filtered_resps"], strict=True
            ):
                assert logprob == pytest.approx(expected, abs=1e-3)
                assert greedy == expected_greedy
    assert [s["resps"] for s in ours["samples"]["gsm8k"]] == [s["resps"] for s in theirs["samples"]["gsm8k"]]
    for task, metrics in theirs["results"].items():
        for name, expected in metrics.items():
            if isinstance(expected, float):
                assert ours["results"][task][name] == pytest.approx(expected, rel=1e-4), (task, name)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("The ", "answer"),
        ("The", " answer"),
        ("The  ", "answer"),
        ("The\t", "answer"),
        ("The\n", "answer"),
        ("", "answer"),
        ("", " the man"),
        ("<s>The man", " walks"),
        ("The naïveté of", " a man"),
        ("x" * 800, " under the river"),  # longer than the model: cut on the left
    ],
)
def test_texts_are_split_as_the_harness_splits_them(models: tuple[Any, Any], context: str, continuation: str) -> None:
    """Cases EV-02 and EV-04."""
    ours, theirs = (model.loglikelihood(instances((context, continuation)))[0] for model in models)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
    assert ours[1] == theirs[1]


def test_whole_texts_score_the_same(models: tuple[Any, Any]) -> None:
    texts = [("the man walks into the river",), ("x",), ("the old house " * 90,), ("the red door " * 300,)]
    ours, theirs = (model.loglikelihood_rolling(instances(*texts, kind="loglikelihood_rolling")) for model in models)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("until", [["the"], [" a", "\n"], [], "river", ["zz", "e"]])
def test_generated_text_is_the_same(models: tuple[Any, Any], until: list[str] | str) -> None:
    prompts = ["the man walks", "a", "question: the small dog and the large dog", "x" * 700]
    settings = {"until": until, "max_gen_toks": 24, "do_sample": False}
    requests = [(prompt, dict(settings)) for prompt in prompts]
    ours, theirs = (model.generate_until(instances(*requests, kind="generate_until")) for model in models)
    # Where every sequence must stop for the batch to end, text after the stop is generated but cut off again.
    assert ours == theirs


def test_chat_prompts_are_the_same(models: tuple[Any, Any]) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the man"}]
    ours, theirs = models
    if theirs.tokenizer.bos_token is None:
        pytest.skip("the template of this test needs a BOS")
    for add in (True, False):
        history = messages if add else [*messages, {"role": "assistant", "content": "the dog"}]
        assert ours.apply_chat_template(history, add) == theirs.apply_chat_template(history, add)
    assert ours.chat_template(True) == theirs.chat_template(True)
    prompt = ours.apply_chat_template(messages)
    assert ours.tokenizer.encode(prompt) == theirs.tok_encode(prompt)  # one BOS, CA-20


def test_a_seen_prefix_token_stands_for_an_empty_context(models: tuple[Any, Any]) -> None:
    ours, theirs = models
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.max_length == theirs.max_length
    with torch.inference_mode():
        assert ours.tokenizer.encode("the dog") == theirs.tok_encode("the dog")
