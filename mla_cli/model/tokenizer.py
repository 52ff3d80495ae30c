"""Text to token ids and back, with the same ids that the model was trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from mla_cli.errors import InputError
from mla_cli.model.chat_template import find_template, render
from mla_cli.model.text_stream import TextStream
from mla_cli.model.token_bytes import token_bytes
from mla_cli.model.tokenizer_files import read_tokenizer_files

_CLEANED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
            (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model folder; build it with `load_tokenizer`.

    Attributes:
        bos_id: begin of sequence; of the model's configuration where the tokenizer names none.
        eos_ids: every id that ends a text: of the tokenizer, `config.json` and `generation_config.json` together.
        vocab_size: one more than the largest id the tokenizer can give.
        adds_bos: whether `encode` puts BOS in front.
        chat_template: the default one; None where the model has none.
    """

    bos_id: int | None
    eos_ids: frozenset[int]
    pad_id: int | None
    vocab_size: int
    adds_bos: bool
    chat_template: str | None = field(repr=False)
    folder: Path
    special_tokens: Mapping[str, str] = field(repr=False)
    cleans_up: bool
    _backend: tokenizers.Tokenizer = field(repr=False)
    _special_ids: frozenset[int] = field(repr=False)
    _byte_ids: frozenset[int] = field(repr=False)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; with `special` as the model expects it, with exactly one BOS where it uses one.

        Raises:
            InputError: the text cannot be UTF-8.
        """
        # A batch of one: during `encode` itself no other thread could run, and a long text takes seconds.
        ids: list[int] = self._backend.encode_batch([_checked(text)], add_special_tokens=special)[0].ids
        return ids[1:] if special and self._writes_bos(text, ids) else ids

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        checked = [_checked(text) for text in texts]
        encodings = [encoding.ids for encoding in self._backend.encode_batch(checked, add_special_tokens=special)]
        return [
            ids[1:] if special and self._writes_bos(text, ids) else ids
            for text, ids in zip(checked, encodings, strict=True)
        ]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; ids that the vocabulary does not hold give nothing."""
        text = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        if self.cleans_up:
            for found, clean in _CLEANED:
                text = text.replace(found, clean)
        return str(text)

    def check_chat(self) -> None:
        """Refuse conversations where the model has no chat template.

        Raises:
            InputError: it has none.
        """
        if self.chat_template is None:
            raise InputError(
                "the model has no chat template",
                where=self.folder,
                fix="give a plain prompt, without --chat or messages",
            )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Raises:
            InputError: the model has no chat template, or the template fails or refuses the messages.
        """
        self.check_chat()
        assert self.chat_template is not None
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
            where=self.folder,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, with exactly one BOS whether the template writes it or not."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        ids = self.encode(text, special=False)
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A decoder for ids that come one at a time."""
        return TextStream(
            lambda ids: self.decode(ids, skip_special=skip_special),
            skipped=self._special_ids if skip_special else (),
            joins_next=self._byte_ids.__contains__,
            hold_all=self.cleans_up,
        )

    def token_bytes(self) -> Callable[[int], bytes]:
        """A function from ids to the bytes that they stand for (see there)."""
        return token_bytes(self._backend)

    def _writes_bos(self, text: str, ids: list[int]) -> bool:
        """Whether the text itself starts with BOS, so that there are two now."""
        written = text.lstrip().startswith(self.special_tokens.get("bos_token", "\0"))
        return self.adds_bos and written and ids[:2] == [self.bos_id, self.bos_id]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model folder.

    `tokenizer.json` is taken as it stands. (transformers 5 rebuilds it for some tokenizer classes from their own
    code, which drops for instance the digit splitting of SmolLM.)

    Raises:
        InputError: a tokenizer file is missing or damaged.
    """
    folder = Path(folder)
    files = read_tokenizer_files(folder)
    backend, settings = files.backend, files.settings

    def token_id(name: str) -> int | None:
        token = files.special.get(f"{name}_token")
        found = None if token is None else backend.token_to_id(token)
        return found if found is not None else next(iter(_ids(files.model, f"{name}_token_id")), None)

    bos_id, eos_token = token_id("bos"), files.special.get("eos_token")
    eos_id = None if eos_token is None else backend.token_to_id(eos_token)
    eos_ids = frozenset(_ids(files.model, "eos_token_id")) | ({eos_id} if eos_id is not None else set())
    vocab = backend.get_vocab(with_added_tokens=True)
    is_bpe = isinstance(backend.model, tokenizers.models.BPE)
    anyway = settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return Tokenizer(
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=token_id("pad"),
        vocab_size=max(vocab.values(), default=-1) + 1,
        adds_bos=bos_id is not None and backend.encode("").ids[:1] == [bos_id],
        chat_template=find_template(folder, settings),
        folder=folder,
        special_tokens=files.special,
        # transformers ignores the request for BPE, where it would eat spaces of the text itself.
        cleans_up=bool(settings.get("clean_up_tokenization_spaces", False)) and (not is_bpe or bool(anyway)),
        _backend=backend,
        _special_ids=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
        _byte_ids=_byte_ids(backend, vocab),
    )


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid Unicode at character {error.start} (a lone surrogate, or bytes that are not UTF-8)",
            fix="give the text as UTF-8",
        ) from error
    return text


def _ids(models: Sequence[Mapping[str, Any]], key: str) -> list[int]:
    found: list[int] = []
    for model in models:
        value = model.get(key)
        values = value if isinstance(value, list) else [value]
        found += [i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    return found


def _byte_ids(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> frozenset[int]:
    """Ids that stand for single bytes, where the decoder joins them into characters."""
    if backend.decoder is None or b"ByteFallback" not in backend.decoder.__getstate__():
        return frozenset()
    return frozenset(vocab[token] for token in (f"<0x{byte:02X}>" for byte in range(256)) if token in vocab)
