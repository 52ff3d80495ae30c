"""How texts become what is scored, and where generated text ends (cases EV-02, EV-04, EV-09)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.evaluation.requests import Request, clip, cut_at_stops, encode_pair, move_trailing_space, stop_list
from mla_cli.model.tokenizer import Tokenizer, load_tokenizer
from tests.evaluation.small_model import save_bpe


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text("{}")
    save_bpe(folder)
    return load_tokenizer(folder)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    def bare(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    return encode_pair(tokenizer.encode, bare, tokenizer.bos_id, context, continuation)


@pytest.mark.parametrize("space", [" ", "  ", "\t", "\n", "\n\n "])
def test_a_trailing_space_of_the_context_belongs_to_the_continuation(tokenizer: Tokenizer, space: str) -> None:
    assert pair(tokenizer, "the man" + space, "answer") == pair(tokenizer, "the man", space + "answer")
    assert pair(tokenizer, "the man" + space, "answer").continuation


def test_both_spellings_of_a_word_boundary_are_one_request(tokenizer: Tokenizer) -> None:
    request = pair(tokenizer, "The ", "answer")
    assert request == pair(tokenizer, "The", " answer")
    assert tokenizer.decode(request.continuation) == " answer"


@settings(deadline=None)
@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_nothing_is_lost_or_scored_twice(context: str, continuation: str) -> None:
    request = encode_pair(letters, letters, 0, context, continuation)
    whole = request.context + request.continuation
    without_prefix = (
        whole if context.rstrip() or whole[:1] != (0,) or (context + continuation)[:1] == "\0" else whole[1:]
    )
    assert "".join(map(chr, without_prefix)) == context + continuation
    assert request.continuation


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_moving_a_space_keeps_the_text(context: str, continuation: str) -> None:
    left, right = move_trailing_space(context, continuation)
    assert left + right == context + continuation
    assert left == left.rstrip()


def test_one_bos_where_the_model_uses_one(tokenizer: Tokenizer) -> None:
    assert pair(tokenizer, "the man", " walks").context.count(1) == 1
    assert pair(tokenizer, "<s>the man", " walks").context.count(1) == 1
    assert pair(tokenizer, "", " walks").context == (1,)
    assert pair(tokenizer, " ", "walks").context == (1,)


def test_a_continuation_that_merges_into_the_context_is_scored_by_itself() -> None:
    def merging(text: str) -> list[int]:
        return [7] if text in ("a", "ab") else letters(text)

    assert encode_pair(merging, merging, 0, "a", "b") == Request((7,), (ord("b"),))


def test_what_cannot_be_scored_is_said() -> None:
    with pytest.raises(MlaError, match="both empty"):
        encode_pair(letters, letters, 0, "", "")
    with pytest.raises(MlaError, match="continuation is empty"):
        encode_pair(letters, letters, 0, "context", "")
    with pytest.raises(MlaError, match="neither a BOS nor an EOS"):
        encode_pair(letters, letters, None, "", "text")
    with pytest.raises(MlaError, match="exceeds the model's 3 positions"):
        clip(Request((1,), (2, 3, 4, 5)), 3)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 10), st.integers(10, 20))
def test_clipping_is_the_harness_s_formula(context: int, continuation: int, max_length: int) -> None:
    request = Request(tuple(range(context)), tuple(range(100, 100 + continuation)))
    kept = clip(request, max_length)
    expected = (request.context + request.continuation)[-(max_length + 1) :]
    assert kept.context + kept.continuation == expected
    assert kept.continuation == request.continuation
    assert kept.context


@pytest.mark.parametrize(
    ("text", "until", "expected"),
    [
        ("Identify the Question first.\n\nQuestion: next", ["Question:"], "Identify the Question first.\n\n"),
        ("12 apples", "Question:", "12 apples"),
        ("Q: at once", "Q:", ""),
        ("a</s>b Question: c", ["Question:", "</s>"], "a"),
        ("no stop", [], "no stop"),
        ("no stop", ["", "x"], "no stop"),
        ("no stop", None, "no stop"),
    ],
)
def test_text_ends_before_the_whole_stop_string(text: str, until: list[str] | str | None, expected: str) -> None:
    assert cut_at_stops(text, stop_list(until)) == expected
