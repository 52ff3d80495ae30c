"""Which language a sample of text is in, and when that is worth a warning."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mla_cli.calibration import language as this_module
from mla_cli.calibration.language import (
    Language,
    identify,
    template_language,
    tokenizer_languages,
    vocabulary_language,
    warn_other_language,
)
from mla_cli.calibration.mixes import MIXES
from mla_cli.calibration.texts import builtin_english
from mla_cli.model.tokenizer import load_tokenizer
from tests.tiny import save_tokenizer

# The same two sentences in every language, a line each.
LINES = (Path(__file__).parent / "languages.txt").read_text(encoding="utf-8").splitlines()
SAMPLES = {name: text for name, _, text in (line.partition(": ") for line in LINES)}

PROGRAMS = {
    "python": """
def mean(values):
    # The mean of some numbers.
    total = 0.0
    for value in values:
        total += value
    if not values:
        raise ValueError("no values")
    return total / len(values)
""",
    "c": """
#include <stdio.h>

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        printf("%s", argv[i]);
    }
    return 0;
}
""",
    "javascript": """
const total = items
  .filter((item) => item.price > 0)
  .reduce((sum, item) => sum + item.price, 0);
console.log(`total: ${total}`);
module.exports = { total };
""",
    "rust": """
fn main() {
    let mut total = 0;
    for i in 1..=10 {
        if i % 2 == 0 {
            total += i;
        }
    }
    println!("{}", total);
}
""",
    "sql": """
SELECT name, COUNT(*) AS n
FROM visits
WHERE day >= '2024-01-01'
GROUP BY name
ORDER BY n DESC;
""",
    "html": """
<ul class="menu">
  <li><a href="/">Home</a></li>
  <li><a href="/about">About</a></li>
</ul>
<p id="end"></p>
""",
    "shell": """
#!/bin/sh
set -e
for file in *.txt; do
  if [ -s "$file" ]; then
    gzip -9 "$file"
  fi
done
""",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_paragraph_of_each_language_is_named(name: str) -> None:
    assert identify([SAMPLES[name]]) == Language(name, 1.0, True)


@pytest.mark.parametrize("name", SAMPLES)
def test_sentences_and_capitals_are_named_or_unknown_but_never_wrong(name: str) -> None:
    words = SAMPLES[name].split()
    for text in (SAMPLES[name].upper(), *(" ".join(words[i : i + 8]) for i in range(0, len(words), 4))):
        found = identify([text])
        assert found.name in (name, "unknown"), text
        assert found.confident == (found.name == name)


@pytest.mark.parametrize("name", SAMPLES)
def test_short_texts_are_looked_at_together(name: str) -> None:
    pieces = [piece for piece in SAMPLES[name].replace(",", ".").split(".") if piece.strip()]
    assert identify(pieces).name == name


@pytest.mark.parametrize("language", PROGRAMS)
def test_source_code_is_code(language: str) -> None:
    assert identify([PROGRAMS[language]]) == Language("code", 1.0, True)


def test_whole_files_of_code_with_comments_are_code() -> None:
    files = sorted(Path(inspect.getfile(this_module)).parent.glob("*.py"))
    found = identify([path.read_text(encoding="utf-8") for path in files if "words" not in path.name])
    assert found.name == "code"
    assert found.share > 0.6
    assert identify([text for text in MIXES["code"].openings if isinstance(text, str)]).name == "code"


def test_mathematics_and_markdown_are_not_code() -> None:
    problems = [text for text in MIXES["math"].openings if isinstance(text, str)]
    assert identify(problems).name == "English"
    formulas = (
        "We have $f(x) = x^2 + 1$ and so\n$$\\int_0^1 f(x) \\, dx = \\frac{4}{3}.$$\nThe claim follows from this, because the "
        "function is positive.\n\nLet $g$ be another such function; then it is also true for $f + g$."
    )
    assert identify([formulas]).name == "English"
    notes = "# Notes\n\n- The first point is that it works.\n- The second is that it is fast.\n- And the third is not known.\n"
    assert identify([notes]).name in ("English", "unknown")


def test_real_prose_is_english() -> None:
    found = identify([builtin_english()])
    assert found.name == "English"
    assert found.share > 0.95


@pytest.mark.parametrize(
    "texts",
    [
        [], [""], ["   \n\n"], ["12345 67890"], ["?!... --- ***"], ["a"], ["Hello"], ["OK thanks"], ["\x00\ud800\ufffd" * 50],
        ["xqzt vrrk plmf bzzt qwrt kkjh zxcv mnbq hjkl wqpo"], ["🙂🙃😉" * 40], ["Lorem ipsum"], ["aaaa " * 200],
    ],
)  # fmt: skip
def test_what_says_nothing_is_unknown(texts: list[str]) -> None:
    found = identify(texts)
    assert found.name == "unknown"
    assert not found.confident


def test_a_mixture_is_unknown_and_says_how_much() -> None:
    texts = [(SAMPLES[name] + " ") * 8 for name in ("English", "German", "French")]
    found = identify(texts)
    assert (found.name, found.confident) == ("unknown", False)
    assert 0.2 < found.share < 0.5
    mostly = identify([(SAMPLES["German"] + " ") * 32, (SAMPLES["English"] + " ") * 8])
    assert mostly.name == "German"
    assert 0.7 < mostly.share < 0.9


def test_names_and_foreign_words_do_not_change_the_language() -> None:
    text = SAMPLES["Chinese"] + " 她用 Python 和 GitHub 写程序。"
    assert identify([text]).name == "Chinese"
    assert identify([SAMPLES["Russian"] + " Windows, Linux"]).name == "Russian"


def test_large_and_odd_samples_take_no_time() -> None:
    rng = random.Random(0)
    noise = "".join(rng.choice("abc (){}[];:=<>-> \n") for _ in range(400_000))
    begun = time.monotonic()
    identify([SAMPLES["English"] * 10_000, noise, "a: " * 100_000, "(" * 100_000, ") ->" * 50_000])
    assert time.monotonic() - begun < 10


# Tokenizers


def test_a_vocabulary_of_mostly_one_script_names_its_language() -> None:
    latin = ["the", "ing", " a", "Ġ", "", "123", "\ufffd"] * 10
    assert vocabulary_language(latin) == Language("unknown", 0.0, False)
    assert vocabulary_language(["的", "是", "我们", "在"] * 20 + latin).name == "Chinese"
    assert vocabulary_language(["の", "です", "カード", "日本"] * 20 + latin).name == "Japanese"
    assert vocabulary_language(["것", "입니다"] * 30 + latin).name == "Korean"
    assert vocabulary_language(["что", " не", "ст"] * 20 + latin).name == "Russian"
    assert vocabulary_language(["في", "من"] * 30 + latin).name == "Arabic"
    few = vocabulary_language(["的"] * 10 + latin)
    assert (few.name, few.confident) == ("unknown", False)
    assert 0 < few.share < 0.5
    assert vocabulary_language([]) == Language("unknown", 0.0, False)


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n%s"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("You are a helpful AI assistant, and you answer all of the questions.", "English"),
        ("You are a helpful AI assistant named Gizmo, trained by Acme", "English"),
        ("Du bist ein hilfreicher Assistent und antwortest auf die Fragen, die man dir stellt.", "German"),
        ("你是一个乐于助人的助手，请用中文回答所有问题。", "Chinese"),
        ("", "unknown"),
    ],
)
def test_a_template_is_known_by_what_it_says_not_by_its_program(said: str, name: str) -> None:
    assert template_language(CHATML.replace("%s", said)).name == name


class Vocabulary:
    """A tokenizer of given tokens."""

    def __init__(self, tokens: Sequence[str], chat_template: str | None = None) -> None:
        self.tokens = tokens
        self.vocab_size = len(tokens)
        self.chat_template = chat_template

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(self.tokens[i] for i in ids)


def test_what_a_tokenizer_suggests(tmp_path: Path) -> None:
    found = tokenizer_languages(
        Vocabulary(["的", "是", "x"] * 50_000, CHATML.replace("%s", "You are a helpful assistant to us."))
    )
    assert {what: language.name for what, language in found.items()} == {
        "the tokenizer's vocabulary": "Chinese",
        "the chat template": "English",
    }
    save_tokenizer(tmp_path)
    assert {language.name for language in tokenizer_languages(load_tokenizer(tmp_path)).values()} == {"unknown"}
    assert tokenizer_languages(Vocabulary([]))["the tokenizer's vocabulary"].name == "unknown"


def test_a_warning_names_both_languages_and_what_to_do_in_one_line() -> None:
    english, german, chinese = (Language(name, 0.9, True) for name in ("English", "German", "Chinese"))
    warning = warn_other_language(
        english, {"the prompts": german, "the chat template": english, "the vocabulary": chinese}
    )
    assert warning is not None
    assert "\n" not in warning
    assert "is English" in warning
    assert "unlike the prompts (German) and the vocabulary (Chinese)" in warning
    assert "--calib" in warning


def test_no_warning_without_a_sure_difference() -> None:
    english, unsure = Language("English", 0.9, True), Language("unknown", 0.4, False)
    german = Language("German", 0.9, True)
    assert warn_other_language(english, {"the prompts": english}) is None
    assert warn_other_language(english, {"the prompts": unsure}) is None
    assert warn_other_language(unsure, {"the prompts": german}) is None
    assert warn_other_language(english, {}) is None
