"""Which text a model is calibrated on: presets, the mix of what the Hub gives, and what the model writes itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.calibration.choose_texts import choose_texts
from mla_cli.calibration.mixes import MIXES
from mla_cli.calibration.self_texts import sample_texts
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.load import ModelSource, load_decoder, open_model
from mla_cli.errors import InputError, NetworkError, UsageError
from mla_cli.model.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import save_text, save_tiny, save_tokenizer

CPU = torch.device("cpu")
DOMAINS = [name for name in MIXES if name != "general"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelSource:
    return open_model(str(folder))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


class Hub:
    """Stands for the datasets: `{name: failure}` of those that cannot be had, and what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: dict[str, Exception] | None = None) -> None:
        self.failures = failures or {}
        self.asked: dict[str, int] = {}
        module = importlib.import_module("mla_cli.calibration.choose_texts")
        monkeypatch.setattr(module, "load_texts", self)
        monkeypatch.setattr(module, "hub_reachable", lambda: "unreachable" not in self.failures)

    def __call__(self, name: str, _: Any, *, samples: int, seq_len: int, seed: int) -> CalibrationTexts:
        self.asked[name] = samples
        failure = self.failures.get(name.split(":")[0]) or self.failures.get("unreachable")
        if failure:
            raise failure
        sequences = torch.full((samples, seq_len - len(self.asked)), 10 + len(self.asked))
        return CalibrationTexts(sequences, torch.full((samples,), sequences.shape[1]), f"hub: {name}", 0, samples)


def choose(model: ModelSource, tokenizer: Tokenizer, calib: str = "auto", **changes: Any) -> CalibrationTexts:
    wanted = {"samples": 16, "seq_len": 24, "seed": 0, "device": CPU, **changes}
    return choose_texts(model, tokenizer, calib=calib, **wanted)


@pytest.mark.parametrize("preset", DOMAINS)
def test_a_preset_mixes_its_datasets_in_random_order(
    model: ModelSource, tokenizer: Tokenizer, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    texts = choose(model, tokenizer, preset=preset)
    assert list(hub.asked) == [name for name, _ in MIXES[preset].hub]
    assert sum(hub.asked.values()) == texts.requested == len(texts.lengths) == 16
    whole = sum(share for _, share in MIXES[preset].hub)
    assert list(hub.asked.values()) == [16 * share // whole for _, share in MIXES[preset].hub]
    kinds = texts.sequences[:, 0].tolist()
    assert kinds != sorted(kinds)
    for row, length in zip(texts.sequences, texts.lengths.tolist(), strict=True):
        assert len(set(row[:length].tolist())) == 1, "rows and lengths stay together"
        assert not row[length:].any()
    assert all(name in texts.origin for name in hub.asked)
    Hub(monkeypatch)
    again = choose(model, tokenizer, preset=preset)
    assert torch.equal(texts.sequences, again.sequences)


def test_general_asks_for_what_it_always_did(
    model: ModelSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    texts = choose(model, tokenizer)
    assert hub.asked == {"Salesforce/wikitext:wikitext-2-raw-v1:train": 16}
    assert texts.origin == "hub: Salesforce/wikitext:wikitext-2-raw-v1:train"


def test_few_samples_ask_no_dataset_for_none(
    model: ModelSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    assert len(choose(model, tokenizer, preset="math", samples=1).lengths) == 1
    assert list(hub.asked.values()) == [1]


def test_a_part_that_cannot_be_had_is_written_by_the_model(
    model: ModelSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = InputError("the model has no chat template")
    hub = Hub(monkeypatch, {"HuggingFaceH4/ultrachat_200k": failure})
    texts = choose(model, tokenizer, preset="chat")
    assert len(hub.asked) == 2
    assert len(texts.lengths) == texts.requested == 16
    assert "self: sampled from the source model" in texts.origin
    assert "wikitext" in texts.origin
    assert "no calibration text of HuggingFaceH4/ultrachat_200k" in capsys.readouterr().err


def test_without_a_network_one_dataset_is_waited_for(
    model: ModelSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch, {"unreachable": NetworkError("the Hub cannot be reached")})
    texts = choose(model, tokenizer, preset="code")
    assert len(hub.asked) == 1
    assert texts.origin == "self: sampled from the source model, 3 of 4 begun by openings of the domain"
    said = capsys.readouterr().err
    assert said.count("the model writes its own") == 1


def test_a_dataset_that_is_gone_does_not_cost_the_others(
    model: ModelSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, {"openai/gsm8k": NetworkError("not found")})
    texts = choose(model, tokenizer, preset="math")
    assert len(hub.asked) == 3
    assert len(texts.lengths) == 16


def test_named_text_is_taken_whatever_the_preset(model: ModelSource, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = save_text(tmp_path / "a.txt")
    for preset in MIXES:
        assert choose(model, tokenizer, str(path), preset=preset).origin == "files: a.txt"


def test_an_unknown_preset_is_refused(model: ModelSource, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no preset 'poetry'"):
        choose(model, tokenizer, preset="poetry")


# What the model writes itself


@pytest.mark.parametrize("preset", DOMAINS)
def test_self_texts_begin_with_the_openings_of_the_preset(
    model: ModelSource, tokenizer: Tokenizer, preset: str
) -> None:
    texts = choose(model, tokenizer, "self", preset=preset, samples=40, seq_len=64)
    assert texts.sequences.shape == (40, 64)
    begun = [tuple(row[:12].tolist()) for row in texts.sequences]
    known = {tuple(start[:12]) for start in plain_openings(tokenizer, preset)}
    opened = [start in known for start in begun]
    assert sum(opened) == 30, "one in four begins at random"
    assert not opened[3]
    assert len({start for start, is_opening in zip(begun, opened, strict=True) if is_opening}) >= 10


def plain_openings(tokenizer: Tokenizer, preset: str) -> list[list[int]]:
    """The openings as ids; the tiny model has no chat template, so dialogues are plain text."""
    texts = []
    for content in MIXES[preset].openings:
        if isinstance(content, list):
            content = "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in content) + "Assistant:"
        texts.append(content or "")
    return [tokenizer.encode(text, special=False) for text in texts]


def test_every_opening_is_used_before_one_comes_again(model: ModelSource, tokenizer: Tokenizer) -> None:
    decoder = load_decoder(model, device=CPU)
    openings = [letter * 4 for letter in "abcdef"]
    texts = sample_texts(decoder, tokenizer, samples=16, seq_len=12, seed=0, openings=openings)
    used = [tokenizer.decode(row[:4].tolist()) for i, row in enumerate(texts.sequences) if i % 4 != 3]
    assert sorted(used) == sorted(openings * 2)


def test_a_sequence_depends_on_seed_and_index_only(model: ModelSource, tokenizer: Tokenizer) -> None:
    decoder = load_decoder(model, device=CPU)
    openings = ["a", "bcdefghij", "klm"]  # of different lengths, written side by side
    wanted: dict[str, Any] = {"seq_len": 24, "seed": 5, "openings": openings}
    many = sample_texts(decoder, tokenizer, samples=9, **wanted)
    few = sample_texts(decoder, tokenizer, samples=2, **wanted)
    assert torch.equal(many.sequences[:2], few.sequences)
    other = sample_texts(decoder, tokenizer, samples=9, seq_len=24, seed=6, openings=openings)
    assert not torch.equal(many.sequences, other.sequences)


def test_an_opening_leaves_the_model_at_least_half_of_the_sequence(model: ModelSource, tokenizer: Tokenizer) -> None:
    decoder = load_decoder(model, device=CPU)
    texts = sample_texts(decoder, tokenizer, samples=2, seq_len=20, seed=0, openings=["a" * 500, ""])
    assert texts.sequences.shape == (2, 20)
    assert tokenizer.decode(texts.sequences[0, :10].tolist()) == "a" * 10


class Chatting:
    """A tokenizer with a chat template of one token a message and one for the reply."""

    bos_id, adds_bos, eos_ids, vocab_size = 1, True, (2,), 64

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [5, *([2] if special else [])] * bool(text)

    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        assert add_generation_prompt, "the model is to reply"
        return [1, *(20 + (m["role"] == "assistant") for m in messages), 30]


def test_dialogues_go_through_the_chat_template_and_text_gets_one_bos_and_no_eos(model: ModelSource) -> None:
    decoder = load_decoder(model, device=CPU)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chat = sample_texts(decoder, Chatting(), samples=1, seq_len=12, seed=0, openings=[talk])
    assert chat.sequences[0, :5].tolist() == [1, 20, 21, 20, 30]
    text = sample_texts(decoder, Chatting(), samples=1, seq_len=12, seed=0, openings=["words"])
    assert text.sequences[0, :2].tolist() == [1, 5]


@pytest.mark.parametrize("preset", DOMAINS)
def test_openings_are_many_short_and_of_the_right_kind(preset: str) -> None:
    openings = MIXES[preset].openings
    assert len(openings) >= 24
    assert len({str(content) for content in openings}) == len(openings)
    for content in openings:
        if preset == "chat":
            assert isinstance(content, list)
            assert [m["role"] for m in content] == ["user", "assistant", "user"][: len(content)]
            assert content[-1]["role"] == "user"
        else:
            assert isinstance(content, str)
            assert 10 < len(content) < 400
