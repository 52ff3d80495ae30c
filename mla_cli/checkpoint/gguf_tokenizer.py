"""The tokenizer that a GGUF file carries, rebuilt as the files of a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from mla_cli.checkpoint.gguf_keys import ORIGINAL
from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.tokenizer_build import (
    BLOOM_SPLIT,
    GPT2_SPLIT,
    GPT4O_SPLIT,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    SPACE,
    TEKKEN_SPLIT,
    PieceKind,
    add_ends,
    added_tokens,
    byte_level_bpe,
    sentencepiece_bpe,
    sentencepiece_decoder,
)

_PADDING = re.compile(r"\[PAD\d+\]|<pad\d+>|")  # what converters fill the vocabulary up with
_ENDS = ("eos", "eot", "eom")  # each of them ends a text: `eot` a turn, `eom` a message


@dataclass(frozen=True)
class _PreTokenizer:
    """How the text was cut when a byte-level vocabulary was trained."""

    splits: tuple[str, ...] = (GPT2_SPLIT,)
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False  # where the file does not say


_GPT2, _DIGITS = _PreTokenizer(), _PreTokenizer((r"\p{N}", GPT2_SPLIT))
_LLAMA3 = _PreTokenizer((LLAMA3_SPLIT,), ignore_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer((QWEN2_SPLIT,), nfc=True)
_CL100K = _PreTokenizer((LLAMA3_SPLIT,))  # the same expression
_PUNCTUATION, _THREE_DIGITS = r"[\p{P}\$\+<=>\^~\|`]+", "[0-9][0-9][0-9]"
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    "stablelm2": _PreTokenizer((QWEN2_SPLIT,)),
    "tekken": _PreTokenizer((TEKKEN_SPLIT,), ignore_merges=True, adds_bos=True),
    "gpt-4o": _PreTokenizer((GPT4O_SPLIT,)),
    "falcon": _PreTokenizer((_PUNCTUATION, GPT2_SPLIT, _THREE_DIGITS)),
    "bloom": _PreTokenizer((BLOOM_SPLIT,)),
    # llama.cpp's own fallback; no tokenizer was trained with it, but it is what such files are run with.
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", _THREE_DIGITS)),
}


@dataclass(frozen=True)
class _Vocabulary:
    tokens: tuple[str, ...] = field(repr=False)
    kinds: tuple[int, ...] = field(repr=False)
    scores: tuple[float, ...] = field(repr=False)


def write_tokenizer(metadata: Mapping[str, Any], rows: int, folder: Path, where: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        rows: of the embedding; ids beyond it have no meaning.
        where: the GGUF file, for errors.

    Raises:
        InputError: the tokenizer is missing or damaged. UnsupportedError: it is of a kind that is not known.
    """
    vocabulary = _vocabulary(metadata, rows, where)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre = _pre_tokenizer(metadata, where)
        backend = _byte_level(metadata, vocabulary, pre, where)
        adds_bos, prefix_space = pre.adds_bos, False
    elif model == "llama":
        prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        backend = _sentencepiece(vocabulary, prefix_space)
        adds_bos = True
    else:
        raise UnsupportedError(
            f"GGUF tokenizer {model!r} is not supported; supported are gpt2 (byte-level BPE) and llama (sentencepiece)",
            where=where,
            fix=ORIGINAL,
        )
    backend.add_tokens(added_tokens(vocabulary.tokens, vocabulary.kinds))
    ids = _special_ids(metadata, vocabulary, is_sentencepiece=model == "llama")

    def end(name: str, default: bool) -> tuple[str, int] | None:
        wanted, i = metadata.get(f"tokenizer.ggml.add_{name}_token"), ids.get(name)
        return (vocabulary.tokens[i], i) if i is not None and (default if wanted is None else wanted) else None

    bos, eos = end("bos", adds_bos), end("eos", False)
    if bos or eos:
        add_ends(backend, bos, eos)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the one class that takes tokenizer.json as it stands
        "add_bos_token": bos is not None,
        "add_eos_token": eos is not None,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": vocabulary.tokens[ids[name]] for name in ("bos", "eos", "unk", "pad") if name in ids},
    }
    template = _chat_template(metadata)
    if template:
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)
    endings = sorted({ids[name] for name in _ENDS if name in ids})
    generation: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    if endings:
        generation["eos_token_id"] = endings[0] if len(endings) == 1 else endings
    _write_json(folder / "generation_config.json", generation)


def _vocabulary(metadata: Mapping[str, Any], rows: int, where: Path) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise InputError("the GGUF file has no tokenizer", where=where, fix="give a file of a complete model")
    kinds = metadata.get("tokenizer.ggml.token_type") or [int(PieceKind.NORMAL)] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    if len(kinds) != len(tokens) or len(scores) != len(tokens):
        raise InputError("the GGUF file's token types or scores do not fit its tokens", where=where, fix=ORIGINAL)
    size = len(tokens)
    while size and kinds[size - 1] == PieceKind.UNUSED and _PADDING.fullmatch(tokens[size - 1]):
        size -= 1
    if size > rows:
        raise InputError(f"the GGUF file has {size} tokens but only {rows} embedding rows", where=where, fix=ORIGINAL)
    if len(set(tokens[:size])) != size:
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise InputError(f"the GGUF file's tokenizer has the token {twice!r} twice", where=where, fix=ORIGINAL)
    return _Vocabulary(tuple(tokens[:size]), tuple(kinds[:size]), tuple(scores[:size]))


def _pre_tokenizer(metadata: Mapping[str, Any], where: Path) -> _PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None and metadata.get("general.architecture") == "gpt2":
        name = "gpt-2"
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        what = "the GGUF file does not name its pre-tokenizer" if name is None else f"GGUF pre-tokenizer {name!r}"
        raise UnsupportedError(
            f"{what}; supported are {', '.join(_PRE_TOKENIZERS)}",
            where=f"{where}: tokenizer.ggml.pre",
            fix=ORIGINAL,
        )
    return _PRE_TOKENIZERS[name]


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary, pre: _PreTokenizer, where: Path) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = []
    for line in metadata.get("tokenizer.ggml.merges") or ():
        pair = line.split(" ") if isinstance(line, str) else ()
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise InputError(f"the GGUF file's merge {line!r} is no pair of its tokens", where=where, fix=ORIGINAL)
        merges.append((pair[0], pair[1]))
    return byte_level_bpe(vocab, merges, splits=pre.splits, nfc=pre.nfc, ignore_merges=pre.ignore_merges)


def _sentencepiece(vocabulary: _Vocabulary, prefix_space: bool) -> Tokenizer:
    pieces = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    unknown = next((token for token, kind in pieces if kind == PieceKind.UNKNOWN), None)
    backend = sentencepiece_bpe(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, unknown=unknown)
    # As sentencepiece and llama.cpp do: a space in front of the text, and of the text after each special token.
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix_space else spaces
    backend.decoder = sentencepiece_decoder(prefix_space=prefix_space)
    return backend


def _special_ids(metadata: Mapping[str, Any], vocabulary: _Vocabulary, *, is_sentencepiece: bool) -> dict[str, int]:
    keys = {"unk": "unknown", "pad": "padding"}
    defaults = {"bos": 1, "eos": 2, "unk": 0} if is_sentencepiece else {}  # llama.cpp's
    found = {}
    for name in ("bos", "unk", "pad", *_ENDS):
        i = metadata.get(f"tokenizer.ggml.{keys.get(name, name)}_token_id", defaults.get(name))
        if isinstance(i, int) and 0 <= i < len(vocabulary.tokens):
            found[name] = i
    return found


def _chat_template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    default, names = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates") or []
    named = [{"name": name, "template": metadata.get(f"tokenizer.chat_template.{name}")} for name in names]
    if not named:
        return default if isinstance(default, str) else None
    return [{"name": "default", "template": default}, *named] if default else named


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
