"""Tokenizers agree with transformers, and streams with whole decoding."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.tokenizer import load_tokenizer
from mla_cli.model.tokenizer_build import QWEN2_SPLIT, added_tokens, byte_level_bpe, sentencepiece_bpe
from mla_cli.model.tokenizer_build import sentencepiece_decoder as spm_decoder

CORPUS = [
    Path(__file__).read_text(encoding="utf-8"),
    "the cat and the dog went to the house in 2024, didn't they? " * 20,
]
TEXTS = [
    "the cat and the dog",
    " leading and  double   spaces ",
    "",
    "\n\n\ttabs\r\n",
    "didn't 12345 ½ ², x",
    "emoji 😀👩‍👩‍👧 🇨🇦 你好，世界 ñ é é",
    "a<|end|>b <|tool|> c",
    "nul \x00 and \ufffd",
]
EMOJI = "😀👩‍👩‍👧 你好 x"


def byte_level(*, digits: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdehotn", "▁t", "he", "▁the", "▁c"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    tokenizer = sentencepiece_bpe(pieces, [-float(i) for i in range(len(pieces))], kinds, unknown="<unk>")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = spm_decoder(prefix_space=True)
    tokenizer.add_tokens(added_tokens(pieces, kinds))
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer | None, model: dict[str, Any] | None = None, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(model or {})}), encoding="utf-8")
    return folder


def check_against_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    oracle, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        ids = oracle(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.encode(text, special=False) == oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == oracle.decode(ids)
    assert ours.encode_batch(TEXTS) == oracle(TEXTS)["input_ids"]
    assert ours.vocab_size == len(oracle)
    assert ours.pad_id == oracle.pad_token_id


def test_tokenizer_json(tmp_path: Path) -> None:
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    check_against_transformers(save(tmp_path / "digits", byte_level(digits=True), **names))
    check_against_transformers(save(tmp_path / "spm", sentencepiece_like(), bos_token="<s>", eos_token="</s>"))


def test_a_post_processor_adds_bos_and_the_configuration_does_not(tmp_path: Path) -> None:
    # With a tokenizer.json, transformers 5 ignores add_bos_token: the file holds it.
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": True}
    check_against_transformers(save(tmp_path / "silent", byte_level(), **names))
    assert not load_tokenizer(tmp_path / "silent").adds_bos
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    check_against_transformers(save(tmp_path / "adds", tokenizer, **names))
    ours = load_tokenizer(tmp_path / "adds")
    assert ours.adds_bos
    assert ours.encode("") == [0]
    assert ours.encode("<|begin|>the") == ours.encode("the")  # exactly one


def test_declared_tokens_are_added(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    entry = {"content": "<|tool|>", "lstrip": True, "normalized": False, "rstrip": False, "single_word": False}
    folder = save(
        tmp_path / "added",
        tokenizer,
        bos_token={**entry, "content": "<|begin|>", "lstrip": False, "__type": "AddedToken"},
        pad_token="<|pad|>",
        added_tokens_decoder={str(size): {**entry, "special": True}},
        extra_special_tokens=["<|more|>"],
    )
    check_against_transformers(folder)
    assert load_tokenizer(folder).pad_id == size + 1
    save(tmp_path / "wrong", tokenizer, added_tokens_decoder={str(size + 5): {**entry, "special": True}})
    with pytest.raises(InputError, match=f"should have id {size + 5}"):
        load_tokenizer(tmp_path / "wrong")


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    check_against_transformers(save(tmp_path / "cut", tokenizer, pad_token="[PAD]"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("GPT2Tokenizer", {}), ("GPT2Tokenizer", {"add_bos_token": True, "add_eos_token": True}), ("Qwen2Tokenizer", {}),
     ("GPT2Tokenizer", {"add_prefix_space": True})],
)  # fmt: skip
def test_vocab_and_merges(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    content = json.loads(byte_level().to_str())["model"]
    vocab = {**content["vocab"], "<|endoftext|>": len(content["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in content["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model_type = "qwen2" if kind == "Qwen2Tokenizer" else "gpt2"
    save(tmp_path, None, {"model_type": model_type}, tokenizer_class=kind, **settings)
    check_against_transformers(tmp_path)
    (tmp_path / "merges.txt").write_text("\n".join([*lines, "nope nope"]), encoding="utf-8")
    with pytest.raises(InputError, match=r"merges\.txt line"):
        load_tokenizer(tmp_path)


def field(number: int, value: bytes | float | int) -> bytes:
    if isinstance(value, bytes):
        return bytes([number << 3 | 2, len(value)]) + value
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3, value])


def sentencepiece_file(*, kind: int = 2) -> bytes:
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{i:02X}>", 6) for i in range(256)),
              *((piece, 1) for piece in ["▁t", "he", "▁the", *"▁the"])]  # fmt: skip
    data = b""
    for i, (piece, piece_kind) in enumerate(pieces):
        data += field(1, field(1, piece.encode()) + field(2, -float(i)) + field(3, piece_kind))
    return data + field(2, field(3, kind)) + field(3, field(3, 1))


def test_sentencepiece_without_its_package(tmp_path: Path) -> None:
    # Checked against transformers with the sentencepiece package once; here against values worked out by hand.
    save(tmp_path, None, tokenizer_class="LlamaTokenizer", add_bos_token=True)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file())
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_ids) == (1, {2})
    assert ours.encode("the the") == [1, 261, 261]
    assert ours.encode("é") == [1, 262, 3 + 0xC3, 3 + 0xA9]
    assert ours.decode([1, 261, 262, 3 + 0xC3, 3 + 0xA9]) == "the é"
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(kind=1))
    with pytest.raises(UnsupportedError, match="not a BPE model"):
        load_tokenizer(tmp_path)
    for damaged in (b"", b"IQ== 0\nIg== 1\n", sentencepiece_file()[:77]):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(InputError, match=r"tokenizer\.model"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"model": 1}', b"[]"])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    save(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content)
    if content == b'{"model": 1}' and name != "tokenizer.json":
        load_tokenizer(tmp_path)
        return
    with pytest.raises(InputError) as caught:
        load_tokenizer(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_eos_is_the_union_of_all_files(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), {"eos_token_id": 2, "bos_token_id": 9}, eos_token="<|end|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5, null]}', encoding="utf-8")
    ours = load_tokenizer(folder)
    assert ours.eos_ids == {1, 2, 5}
    assert ours.bos_id == 9  # the tokenizer names none
    assert not ours.adds_bos


def test_surrogates_are_refused(tmp_path: Path) -> None:
    ours = load_tokenizer(save(tmp_path, byte_level()))
    for call in (ours.encode, lambda text: ours.encode_batch(["ok", text])):
        with pytest.raises(InputError, match="not valid Unicode at character 2"):
            call("ab\udcff")


def test_ids_outside_the_vocabulary_decode_to_nothing(tmp_path: Path) -> None:
    ours = load_tokenizer(save(tmp_path, byte_level()))
    assert ours.decode([*ours.encode("the"), 10_000_000]) == "the"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "words", "cleaned"])
def test_a_stream_is_the_whole_decoding(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {}
    if kind == "byte level":
        tokenizer = byte_level()
    elif kind == "byte fallback":
        tokenizer = sentencepiece_like()
    else:
        words = {word: i for i, word in enumerate(["the", "cat", ".", "n't", "did", "[UNK]"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        settings["clean_up_tokenization_spaces"] = kind == "cleaned"
    ours = load_tokenizer(save(tmp_path, tokenizer, **settings))
    texts = [*TEXTS, EMOJI * 3, "the cat . did n't", "the the  the"]
    for text in texts:
        ids = ours.encode(text)
        for cut in [ids, *(ids[:i] for i in range(0, len(ids), 3))]:  # also in the middle of a character
            stream = ours.stream()
            pieces = [stream.push(i) for i in cut]
            assert "".join(pieces) + stream.finish() == ours.decode(cut)


@pytest.mark.parametrize("spm", [False, True])
def test_a_stream_never_shows_half_a_character(tmp_path: Path, spm: bool) -> None:
    tokenizer = sentencepiece_like() if spm else byte_level()
    ours = load_tokenizer(save(tmp_path, tokenizer))
    stream = ours.stream()
    pieces = [stream.push(i) for i in ours.encode(EMOJI)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == EMOJI
    assert sum(bool(piece) for piece in pieces) > 1  # and it does stream


def test_a_stream_skips_special_tokens(tmp_path: Path) -> None:
    ours = load_tokenizer(save(tmp_path, byte_level(), eos_token="<|end|>"))
    ids = ours.encode("the<|end|> cat")
    skipping, keeping = ours.stream(), ours.stream(skip_special=False)
    assert "".join(map(skipping.push, ids)) + skipping.finish() == "the cat"
    assert "".join(map(keeping.push, ids)) + keeping.finish() == "the<|end|> cat"


def test_qwen_normalises(tmp_path: Path) -> None:
    content = json.loads(byte_level().to_str())["model"]
    merges = [(left, right) for left, right in content["merges"]]
    tokenizer = byte_level_bpe(content["vocab"], merges, splits=(QWEN2_SPLIT,), nfc=True)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    ours = load_tokenizer(save(tmp_path, tokenizer))
    assert ours.encode("e\u0301") == ours.encode("é")


@pytest.mark.real
def test_the_real_tokenizer(data_dir: Path) -> None:
    from transformers import AutoTokenizer

    from mla_cli.checkpoint.builtin import fetch_builtin
    from mla_cli.errors import NetworkError

    try:
        folder = fetch_builtin("smollm2-135m")
    except NetworkError as error:
        pytest.skip(f"needs the weights of SmolLM2-135M: {error}")
    oracle, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = (data_dir / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")[:200_000]
    for sample in [text, Path(__file__).read_text(encoding="utf-8"), *TEXTS]:
        ids = oracle(sample)["input_ids"]
        assert ours.encode(sample) == ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": "你好 😀"}]
    assert ours.encode_chat(chat) == oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    stream = ours.stream()
    ids = ours.encode(text[:20_000] + EMOJI)
    assert "".join(map(stream.push, ids)) + stream.finish() == ours.decode(ids)
