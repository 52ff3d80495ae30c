"""Which language a sample of text is in: by its script, its frequent words, or, where it is source code, by its shape.

Good enough to notice that a model is calibrated on another language than it is used in; says `unknown` rather than guess.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mla_cli.calibration.language_words import CYRILLIC, LATIN, LETTERS, OF_SCRIPT

UNKNOWN, CODE = "unknown", "code"

PIECE = 600  # characters looked at together: enough words to tell languages apart, few enough to be of one language
MOST_PIECES = 200
MIN_WORDS = 6  # below, chance decides
MIN_LETTERS = 10  # of scripts that need no words
MIN_COVERAGE = 0.14  # share of frequent words: prose has 25 to 45 % of its language's, terse messages half of that
MIN_EVIDENCE = 1.2  # more than one word that no other language has
MIN_LEAD = 1.3  # over the next language
MIN_SHARE = 0.6  # of what could be named, for one language to stand for the sample
MIN_NAMED = 0.25  # of the sample, for that to be more than chance
MIN_LINES = 3  # two lines of a formula look like code
TOKENS = 4096  # of a vocabulary

_WORD = re.compile(r"\b[^\W\d_]+\b")  # not the letters of `E1031` and `x_1`
_CODE_LINE = re.compile(
    r"""\s*(?:
      [})\];]+[;,)]*\s*$                                                        # closes something
      | .*[{;]\s*$ | .*\)\s*(?:->\s*[\w\[\], .|]+)?:\s*$                          # opens or ends something
      | (?:import|from|package|using|namespace|module|include|require|use|export)\s[\w{*.:"'\\@/]+
      | \#\s*(?:include|define|ifn?def|endif|pragma)\b | \#!/ | \#\s | --\s | //|/\*|\*/ | <\?php
      | (?:@[\w.]+|(?:pub\s|public\s|private\s|protected\s|static\s|async\s|abstract\s|export\s|default\s)*
          (?:def|class|fn|func|function|fun|interface|struct|enum|trait|impl|type|data|record|object|template)\s+[\w<])
      | (?:if|for|while|switch|elif|elseif|else\s+if|catch|foreach)\s*[(\[].*
      | (?:else|try|finally|do|then|fi|done|end)\s*[:{]?\s*$
      | (?:return|const|let|var|val|echo|print|yield|await|throw|raise|break|continue|assert|local|export)\b.*[=(\[;\w]
      | [\w.\[\]'"*&$:<>, -]+\s*(?:[:+*/|&-]|<<)?=\s*\S.* | [\w.:$>-]+\(.*\)?[;,{]?\s*$
      | </?[A-Za-z][\w-]*(?:\s[^<>]*)?/?>.* | [.\#]?[\w-]+\s*:\s*(?:[^\s:]\S*|[^:.!?$]*[;,])\s*$
      | (?:SELECT|FROM|WHERE|LEFT|INNER|JOIN|GROUP|ORDER|INSERT|UPDATE|CREATE|DELETE|ALTER|VALUES|SET|AND|OR|ON)\s
    )""",
    re.VERBOSE,
)
_SYMBOLS = frozenset("{}()[]<>=;_+*/\\|&#@$%^~`\"'.:,!-")
_JINJA = re.compile(r"\{#.*?#\}|\{[{%].*?[}%]\}", re.DOTALL)
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_MARKER = re.compile(r"<[|\uff5c]?[^<>\s]{1,40}[|\uff5c]?>|\[/?[A-Z_]+\]|\\[nt]")


@dataclass(frozen=True)
class Language:
    """What a sample is written in.

    Attributes:
        name: English name of the language, `code`, or `unknown`.
        share: of what could be named (by length); of the most frequent language where the name is `unknown`.
        confident: whether one language stands for the sample.
    """

    name: str
    share: float
    confident: bool


class SomeTokenizer(Protocol):
    """What is needed of `mla_cli.model.tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def chat_template(self) -> str | None: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


def identify(texts: Iterable[str]) -> Language:
    """The language of a sample of texts; short ones are looked at together."""
    weights: Counter[str] = Counter()
    for piece in _pieces(texts):
        weights[_language_of(piece)] += len(piece)
    known = [(weight, name) for name, weight in weights.items() if name != UNKNOWN]
    if not known:
        return Language(UNKNOWN, 0.0, False)
    weight, name = max(known)
    share = weight / sum(weight for weight, _ in known)
    sure = share >= MIN_SHARE and weight >= MIN_NAMED * sum(weights.values())
    return Language(name, share, True) if sure else Language(UNKNOWN, share, False)


def vocabulary_language(tokens: Iterable[str]) -> Language:
    """The language that a vocabulary was made for, where its script tells: most tokens are of a script other than Latin.

    Tokens are decoded ones (`decode([id])`). Latin letters are in every vocabulary and tell nothing.
    """
    scripts: Counter[str] = Counter()
    for token in tokens:
        found = _scripts(token)
        if found:
            scripts[found.most_common(1)[0][0]] += 1
    total = sum(scripts.values())
    # Japanese is written in three scripts, Chinese in one of them.
    japanese = scripts["HIRAGANA"] + scripts["KATAKANA"]
    shares = {OF_SCRIPT[script]: count / total for script, count in scripts.items() if script in OF_SCRIPT}
    if scripts["CJK"] or japanese:
        shares["Japanese" if japanese > 0.1 * scripts["CJK"] else "Chinese"] = (scripts["CJK"] + japanese) / total
    if scripts["CYRILLIC"]:
        shares["Russian"] = scripts["CYRILLIC"] / total  # by far the most likely of those that share the script
    share, name = max(((share, name) for name, share in shares.items()), default=(0.0, UNKNOWN))
    return Language(name, share, True) if share > 0.5 else Language(UNKNOWN, share, False)


def template_language(template: str) -> Language:
    """The language of what a chat template says itself (system prompts, names of tools)."""
    said = [_JINJA.sub(" ", template)]
    said += ["".join(parts) for program in _JINJA.findall(template) for parts in _LITERAL.findall(program)]
    return identify([" ".join(_MARKER.sub(" ", text) for text in said if " " in text.strip() or not text.isascii())])


def tokenizer_languages(tokenizer: SomeTokenizer) -> dict[str, Language]:
    """What a tokenizer suggests, for `warn_other_language`."""
    step = max(1, tokenizer.vocab_size // TOKENS)
    tokens = (tokenizer.decode([i]) for i in range(0, tokenizer.vocab_size, step))
    found = {"the tokenizer's vocabulary": vocabulary_language(tokens)}
    if tokenizer.chat_template:
        found["the chat template"] = template_language(tokenizer.chat_template)
    return found


def warn_other_language(calibration: Language, others: Mapping[str, Language]) -> str | None:
    """One line of warning where the calibration text is in one language and something else suggests another.

    Args:
        others: by what they are the language of, such as "the prompts".
    """
    if not calibration.confident:
        return None
    differing = [
        f"{what} ({language.name})"
        for what, language in others.items()
        if language.confident and language.name != calibration.name
    ]
    if not differing:
        return None
    return (
        f"the calibration text is {calibration.name}, unlike {' and '.join(differing)}: text of another kind than was "
        "calibrated on loses more quality -> give --calib text like that of later use"
    )


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Stretches of about PIECE characters, spread over all texts; texts that are shorter are joined."""
    pieces: list[str] = []
    short: list[str] = []
    length = 0
    for text in texts:
        text = unicodedata.normalize("NFC", text)
        if len(text) >= PIECE:
            pieces += [text[i : i + PIECE] for i in range(0, len(text) - PIECE // 2, PIECE)]
        elif text.strip():
            short.append(text)
            length += len(text)
            if length >= PIECE:
                pieces.append("\n".join(short))
                short, length = [], 0
    if short:
        pieces.append("\n".join(short))
    step = max(1, -(-len(pieces) // MOST_PIECES))
    yield from pieces[::step]


def _language_of(text: str) -> str:
    if _is_code(text):
        return CODE
    scripts = _scripts(text)
    # One ideograph or syllable stands for as much as several letters.
    for script in ("CJK", "HIRAGANA", "KATAKANA", "HANGUL"):
        if script in scripts:
            scripts[script] *= 3
    total = sum(scripts.values())
    if not total:
        return UNKNOWN
    east = scripts["CJK"] + scripts["HIRAGANA"] + scripts["KATAKANA"]
    script, count = scripts.most_common(1)[0]
    if east >= MIN_SHARE * total and east >= MIN_LETTERS:
        return "Japanese" if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * east else "Chinese"
    if count < MIN_SHARE * total or count < MIN_LETTERS:
        return UNKNOWN
    if script in ("LATIN", "CYRILLIC"):
        return _by_words(text, LATIN if script == "LATIN" else CYRILLIC)
    if script == "ARABIC":
        return _of_arabic_script(text, count)
    return OF_SCRIPT.get(script, UNKNOWN)


def _by_words(text: str, languages: Mapping[str, str]) -> str:
    found = _WORD.findall(text)
    plain = [word for word in found if len(word) == 1 or not word.isupper()]  # AI and OR are no words of a text
    words = Counter(word.lower() for word in (plain if 2 * len(plain) >= len(found) else found))
    total = sum(words.values())
    if total < MIN_WORDS:
        return UNKNOWN
    owners = _owners(tuple(languages))
    covered: Counter[str] = Counter()  # words that are frequent in the language
    scores = dict.fromkeys(languages, 0.0)  # the same, each worth the less the more languages have it
    for word, count in words.items():
        for name in owners.get(word, ()):
            covered[name] += count
            scores[name] += count / len(owners[word]) ** 2
    for name in languages:
        special = LETTERS.get(name, "")
        scores[name] += 0.5 * sum(count for word, count in words.items() if any(letter in special for letter in word))
    (first, best), (_, second) = sorted(scores.items(), key=lambda item: -item[1])[:2]
    sure = covered[first] >= MIN_COVERAGE * total and best >= max(MIN_EVIDENCE, MIN_LEAD * second)
    return first if sure else UNKNOWN


@functools.cache
def _owners(languages: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Which of the languages have a word among their frequent ones."""
    owners: dict[str, tuple[str, ...]] = {}
    for name in languages:
        for word in {**LATIN, **CYRILLIC}[name].split():
            owners[word] = (*owners.get(word, ()), name)
    return owners


def _of_arabic_script(text: str, letters: int) -> str:
    counts = Counter(text)

    def share(chosen: str) -> float:
        return sum(counts[letter] for letter in chosen) / letters

    if (
        share("\u0679\u0688\u0691\u06d2\u06ba\u06be") > 0.02
    ):  # retroflex letters, the last yeh, nasal noon, aspirating heh
        return "Urdu"
    return "Persian" if share("\u067e\u0686\u0698\u06af\u06cc\u06a9") > 0.04 else "Arabic"


def _is_code(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    visible = sum(not character.isspace() for character in text)
    if len(lines) < MIN_LINES or not visible:
        return False
    symbols = sum(character in _SYMBOLS for character in text) / visible
    like_code = sum(bool(_CODE_LINE.match(line)) for line in lines) / len(lines)
    return like_code >= 0.5 and symbols >= 0.08


def _scripts(text: str) -> Counter[str]:
    """Letters by script."""
    found: Counter[str] = Counter()
    for character, count in Counter(text).items():
        script = _script(character)
        if script:
            found[script] += count
    return found


@functools.lru_cache(maxsize=1 << 16)
def _script(character: str) -> str:
    """The script of a letter, which its Unicode name begins with; empty for anything else."""
    return unicodedata.name(character, "").split(" ")[0].split("-")[0] if character.isalpha() else ""
