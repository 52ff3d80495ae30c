"""What the files of a model folder say about its tokenizer: the tokenizer itself, special tokens, ids, options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from mla_cli.errors import InputError
from mla_cli.model.sentencepiece import read_sentencepiece
from mla_cli.model.tokenizer_build import (
    GPT2_SPLIT,
    QWEN2_SPLIT,
    SPACE,
    PieceKind,
    add_ends,
    added_tokens,
    byte_level_bpe,
    sentencepiece_bpe,
    sentencepiece_decoder,
)

# In transformers' order, which decides the ids of tokens that a vocabulary lacks.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"
_CLASS_TOKENS: dict[str, dict[str, str]] = {  # what these classes of transformers take where the files are silent
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "Qwen2Tokenizer": {"eos_token": _END, "pad_token": _END, "unk_token": _END},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
_CLASS_OF_MODEL = {"gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer"}
_RESTORE = "restore the original file"


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as the files of a folder define it.

    Attributes:
        backend: with every added token in place, without padding and truncation.
        special: named special tokens (`bos_token`, ...) that the tokenizer knows.
        settings: `tokenizer_config.json`.
        model: `config.json` with `generation_config.json` beside it, for their token ids.
    """

    backend: Tokenizer
    special: Mapping[str, str]
    settings: Mapping[str, Any]
    model: tuple[Mapping[str, Any], Mapping[str, Any]]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a model folder: `tokenizer.json`, else `vocab.json` + `merges.txt`, else `tokenizer.model`.

    Raises:
        InputError: a file is missing or damaged.
    """
    settings = read_json(folder / "tokenizer_config.json")
    model, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    kind = str(settings.get("tokenizer_class") or _CLASS_OF_MODEL.get(str(model.get("model_type")), ""))
    kind = kind.removesuffix("Fast")
    named = _named_tokens(folder, settings)
    complete = (folder / "tokenizer.json").is_file()
    if complete:
        backend = _load(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _from_vocab_and_merges(folder, settings, qwen=kind == "Qwen2Tokenizer")
        kind = kind if kind in _CLASS_TOKENS else "GPT2Tokenizer"
    elif (folder / "tokenizer.model").is_file():
        backend = _from_sentencepiece(folder / "tokenizer.model", settings)
        kind = "LlamaTokenizer"
    else:
        raise InputError(
            "the folder has no tokenizer (tokenizer.json, vocab.json with merges.txt, or tokenizer.model)",
            where=folder,
            fix="copy the tokenizer files of the original model into it",
        )
    backend.no_padding()
    backend.no_truncation()
    for name, token in _CLASS_TOKENS.get(kind, {}).items():
        if name not in settings and name not in named and backend.token_to_id(token) is not None:
            named[name] = AddedToken(token, special=True)
    _add_missing(backend, folder, settings, named)
    special = {name: token.content for name, token in named.items()}
    if not complete:
        _set_ends(backend, settings, special)
    return TokenizerFiles(backend, special, settings, (model, generation))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing.

    Raises:
        InputError: it cannot be read or is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # ValueError includes JSON and UTF-8 errors
        raise InputError(f"{path.name} is not valid JSON: {error}", where=path, fix=_RESTORE) from error
    if not isinstance(value, dict):
        raise InputError(f"{path.name} must hold an object", where=path, fix=_RESTORE)
    return value


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    # tokenizers raises bare Exceptions, and Rust panics, which are BaseExceptions, for damaged files.
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise InputError(f"{path.name} cannot be read: {str(error)[:200]}", where=path, fix=_RESTORE) from error


def _from_vocab_and_merges(folder: Path, settings: Mapping[str, Any], *, qwen: bool) -> Tokenizer:
    vocab, path = read_json(folder / "vocab.json"), folder / "merges.txt"
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in vocab.values()):
        raise InputError("vocab.json must map tokens to ids", where=folder / "vocab.json", fix=_RESTORE)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read merges.txt: {error}", where=path, fix=_RESTORE) from error
    merges = []
    for number, line in enumerate(lines, 1):
        pair = line.rstrip("\r").split(" ")
        if pair == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise InputError(f"merges.txt line {number} is no pair of tokens of vocab.json", where=path, fix=_RESTORE)
        merges.append((pair[0], pair[1]))
    prefix = bool(settings.get("add_prefix_space", False))
    splits = (QWEN2_SPLIT,) if qwen else (GPT2_SPLIT,)
    return byte_level_bpe(vocab, merges, splits=splits, nfc=qwen, add_prefix_space=prefix)


def _from_sentencepiece(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    model = read_sentencepiece(path)
    unknown = next((t for t, kind in zip(model.tokens, model.kinds, strict=True) if kind == PieceKind.UNKNOWN), None)
    backend = sentencepiece_bpe(model.tokens, model.scores, model.kinds, unknown=unknown)
    prefix = settings.get("add_prefix_space")
    prefix = model.prefix_space if prefix is None else bool(prefix)
    # As transformers 5 does: with `legacy`, the text after each special token gets a space in front as well.
    scheme = ("always" if settings.get("legacy") else "first") if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = sentencepiece_decoder(prefix_space=prefix)
    backend.add_tokens(added_tokens(model.tokens, model.kinds))
    return backend


def _named_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    values = dict(settings)
    if "added_tokens_decoder" not in settings:
        values.update(read_json(folder / "special_tokens_map.json"))
    others = [key for key in values if key.endswith("_token") and not key.startswith("add_") and key not in _NAMED]
    found = {}
    for name in (*_NAMED, *others):
        value = values.get(name)
        if isinstance(value, (str, dict)) and value:
            found[name] = _added_token(value, folder / "tokenizer_config.json", special=True)
    return found


def _add_missing(
    backend: Tokenizer, folder: Path, settings: Mapping[str, Any], named: Mapping[str, AddedToken]
) -> None:
    where = folder / "tokenizer_config.json"
    declared: dict[int, AddedToken] = {}
    entries = settings.get("added_tokens_decoder")
    if isinstance(entries, dict):
        if not all(key.isdecimal() for key in entries):
            raise InputError("added_tokens_decoder must map ids to tokens", where=where, fix=_RESTORE)
        declared = {int(key): _added_token(value, where) for key, value in entries.items()}
    else:
        specials = {token.content for token in named.values()}
        for content, i in read_json(folder / "added_tokens.json").items():
            is_special = content in specials
            declared[int(i)] = AddedToken(content, special=is_special, normalized=not is_special)
    for i, token in sorted(declared.items()):
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != i:
            raise InputError(
                f"token {token.content!r} should have id {i} but has {found} in the tokenizer",
                where=where,
                fix="restore tokenizer.json and tokenizer_config.json from the same source",
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    extras = [_added_token(value, where, special=True) for value in extra] if isinstance(extra, list) else []
    backend.add_tokens([token for token in (*named.values(), *extras) if token.content not in known])


def _added_token(value: Any, where: Path, *, special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special)
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(
            f"a special token must be text or an object with 'content', not {value!r}", where=where, fix=_RESTORE
        )
    options = {key: bool(value[key]) for key in fields if key in value}
    options["special"] = special or options.get("special", False)
    return AddedToken(value["content"], **options)


def _set_ends(backend: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    # Only without a tokenizer.json, which holds this itself: so does transformers 5.
    def end(name: str) -> tuple[str, int] | None:
        token = special.get(f"{name}_token")
        i = None if token is None else backend.token_to_id(token)
        return (token, i) if settings.get(f"add_{name}_token") and token is not None and i is not None else None

    bos, eos = end("bos"), end("eos")
    if bos or eos:
        add_ends(backend, bos, eos)
