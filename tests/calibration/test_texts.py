"""Calibration sequences: what is drawn from which material (cases CA-06 to CA-10, CA-17, CA-20)."""

from __future__ import annotations

import gzip
import json
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cli.calibration.texts import CalibrationTexts, builtin_english, load_texts, split_heldout
from mla_cli.errors import InputError, NetworkError, UsageError

BOS = 1


class ByteTokenizer:
    """One token a byte (its value + 10), '<s>' in the text is BOS, and the chat template writes BOS itself."""

    bos_id = BOS
    eos_ids = (2,)

    def __init__(self, adds_bos: bool = False) -> None:
        self.adds_bos = adds_bos
        self.calls = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.calls += 1
        ids = [token for part in text.split("<s>") for token in [BOS, *(byte + 10 for byte in part.encode())]][1:]
        return [BOS, *ids] if special and self.adds_bos else ids

    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        assert not add_generation_prompt
        return self.encode("<s>" + "".join(f"[{m['role']}]{m['content']}" for m in messages))


def load(
    calib: object, *, samples: int = 4, seq_len: int = 16, seed: int = 0, adds_bos: bool = False
) -> CalibrationTexts:
    return load_texts(str(calib), ByteTokenizer(adds_bos), samples=samples, seq_len=seq_len, seed=seed)


def rows(texts: CalibrationTexts) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(texts.sequences, texts.lengths.tolist(), strict=True)]


def decoded(texts: CalibrationTexts) -> list[str]:
    return [bytes(token - 10 for token in row if token != BOS).decode() for row in rows(texts)]


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def write_records(path: Path, *records: object) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def numbered(count: int) -> str:
    return "".join(f"{number:07d} " for number in range(count))  # 8 characters a word: no two windows are alike


# Running text


def test_windows_are_full_do_not_overlap_and_cover_the_text(tmp_path: Path) -> None:
    text = numbered(1000)
    texts = load(write(tmp_path / "a.txt", text), samples=100, seq_len=16)
    assert texts.sequences.shape == (100, 16)
    assert texts.sequences.dtype == texts.lengths.dtype == torch.int64
    places = sorted(text.index(window) for window in decoded(texts))
    assert all(b - a >= 16 for a, b in pairwise(places))
    assert places[0] < 1600
    assert places[-1] > 6400
    assert (texts.origin, texts.requested, texts.skipped, texts.tokens) == ("files: a.txt", 100, 0, 1600)


def test_same_seed_same_sequences_and_another_seed_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", numbered(1000))
    first, again, other = (load(path, seed=seed, samples=20) for seed in (0, 0, 1))
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, other.sequences)


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf%s", b"%s\r\n\r\n", b"%s\n\n", b"\xef\xbb\xbf%s\r\n \r\n"])
def test_bom_crlf_and_blank_last_line_change_nothing(tmp_path: Path, data: bytes) -> None:
    lines = numbered(400).replace(" ", "\n").rstrip("\n").encode()
    clean = load(write(tmp_path / "clean" / "a.txt", lines + b"\n"))
    dirty_lines = lines.replace(b"\n", b"\r\n") if b"\r" in data else lines
    dirty = load(write(tmp_path / "dirty" / "a.txt", data % dirty_lines))
    assert torch.equal(clean.sequences, dirty.sequences)


def test_bom_crlf_and_blank_last_line_of_records(tmp_path: Path) -> None:
    records = [{"text": f"record number {i} with é"} for i in range(6)]
    clean = load(write_records(tmp_path / "clean" / "a.jsonl", *records), samples=6)
    lines = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    dirty = load(write(tmp_path / "dirty" / "a.jsonl", b"\xef\xbb\xbf" + lines.encode() + b"\r\n\r\n"), samples=6)
    assert torch.equal(clean.sequences, dirty.sequences)


def test_gzip_holds_the_same_text(tmp_path: Path) -> None:
    text = numbered(500)
    plain = load(write(tmp_path / "a.txt", text), samples=10**4)
    packed = load(write(tmp_path / "a.txt.gz", gzip.compress(text.encode())), samples=10**4)
    assert len(packed.lengths) == len(plain.lengths) == 249  # the space at the end is not text
    damaged = gzip.compress(text.encode())[:-300]
    with pytest.raises(InputError, match="damaged"):
        load(write(tmp_path / "b.txt.gz", damaged))


def test_special_words_stay(tmp_path: Path) -> None:
    assert decoded(load(write(tmp_path / "a.txt", "a <unk> @-@ b"), samples=1)) == ["a <unk> @-@ b"]


def test_a_short_text_is_one_sequence_and_the_count_is_honest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = load(write(tmp_path / "a.txt", "\n".join(f"line {i}" for i in range(7))), samples=512, seq_len=512)
    assert len(texts.lengths) == 1
    assert texts.requested == 512
    assert "1 calibration sequences instead of 512" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "\n\n  \n", "abc", b"\xef\xbb\xbf\r\n"])
def test_nothing_usable_is_an_error(tmp_path: Path, content: str | bytes) -> None:
    for name in ("a.txt", "d/b.txt"):
        with pytest.raises(InputError, match=r"no usable calibration text.*at least 8 tokens"):
            load(write(tmp_path / name, content))


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not UTF-8 text: byte 4 \[.*a\.txt\]"):
        load(write(tmp_path / "a.txt", "caf\u00e9 au lait".encode("latin-1").replace(b"f", b"ff")))


def test_a_huge_file_is_read_in_blocks_spread_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_cli.calibration.texts.TEXT_BYTES", 1 << 16)
    monkeypatch.setattr("mla_cli.calibration.texts.CHUNK_BYTES", 1 << 12)
    text = "é".join(numbered(100_000).split(" "))  # of two bytes each: a block may start within one
    tokenizer = ByteTokenizer()
    for name, data in (("a.txt", text.encode()), ("a.txt.gz", gzip.compress(text.encode(), 1))):
        texts = load_texts(str(write(tmp_path / name, data)), tokenizer, samples=200, seq_len=32, seed=0)
        places = [text.index(bytes(t - 10 for t in row).decode(errors="ignore")) / len(text) for row in rows(texts)]
        assert len(set(places)) == 200
        assert min(places) < 0.1
        assert max(places) > 0.9
        assert sum(0.25 < place < 0.75 for place in places) > 50
    assert tokenizer.calls < 200


def test_a_huge_record_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_cli.calibration.texts.RECORD_BYTES", 1 << 16)
    monkeypatch.setattr("mla_cli.calibration.texts.RECORD_CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr("mla_cli.calibration.texts.CHUNK_BYTES", 1 << 11)
    lines = "".join(json.dumps({"text": f"record {i:07d}"}) + "\n" for i in range(20_000)).encode()
    for name, data in (("a.jsonl", lines), ("a.jsonl.gz", gzip.compress(lines, 1))):
        numbers = [int(text[7:14]) for text in decoded(load(write(tmp_path / name, data), samples=50, seq_len=14))]
        assert len(set(numbers)) == 50
        assert min(numbers) < 4000
        assert max(numbers) > 16_000


# Records


def test_every_known_shape_of_a_record(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl",
        {"text": "plain text one", "id": 7},
        {"content": "content two"},
        {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "yes"}]},
        {"conversations": [{"from": "human", "value": "four"}, {"from": "gpt", "value": "ok"}]},
        {"prompt": "prompt five"},
        {"prompt": "prompt six", "completion": " and its end"},
        {"prompt": "prompt seven", "response": "answer"},
        "a bare string",
    )
    assert sorted(decoded(load(path, samples=8, seq_len=64))) == sorted(
        [
            "plain text one",
            "content two",
            "[user]three[assistant]yes",
            "[user]four[assistant]ok",
            "prompt five",
            "prompt six and its end",
            "prompt seven\nanswer",
            "a bare string",
        ]
    )


def test_a_json_array_and_json_lines_under_one_suffix(tmp_path: Path) -> None:
    records = [{"text": "the first record"}, {"text": "the second record"}]
    for number, content in enumerate([json.dumps(records), json.dumps(records, indent=1)]):
        texts = load(write(tmp_path / f"{number}.json", content), samples=2, seq_len=64)
        assert sorted(decoded(texts)) == ["the first record", "the second record"]
    assert len(load(write_records(tmp_path / "lines.json", *records), samples=2).lengths) == 2
    assert decoded(load(write(tmp_path / "one.json", json.dumps(records[0], indent=1)), samples=1, seq_len=64)) == [
        "the first record"
    ]


def test_ragged_records_are_all_kept_with_their_lengths(tmp_path: Path) -> None:
    sizes = [8, 9, 11, 15, 21, 30, 40, 90]
    texts = load(write_records(tmp_path / "a.jsonl", *({"text": "x" * n} for n in sizes)), samples=8, seq_len=64)
    assert sorted(texts.lengths.tolist()) == [8, 9, 11, 15, 21, 30, 40, 64]
    assert texts.tokens == sum(texts.lengths.tolist())
    for row, length in zip(texts.sequences, texts.lengths.tolist(), strict=True):
        assert torch.all(row[:length] == ord("x") + 10)
        assert torch.all(row[length:] == 0)


def test_empty_and_short_records_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_records(
        tmp_path / "a.jsonl", {"text": ""}, {"text": None}, {"messages": []}, {"text": "abc"}, {"text": "long enough"}
    )
    texts = load(path, samples=5)
    assert (len(texts.lengths), texts.skipped) == (1, 4)
    err = capsys.readouterr().err
    assert "skipped 4 calibration records" in err
    assert "1 calibration sequences instead of 5" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "broken', r"not JSON: .* \[.*a\.jsonl, line 3\]"),
        ('{"sentence": "x", "label": 1}', r"unknown shape; its keys: sentence, label \[.*a\.jsonl, line 3\]"),
        ("{}", r"unknown shape; its keys: none \[.*line 3\]"),
        ("17", r"a record is a int, not an object \[.*line 3\]"),
        ('{"text": 17}', r"'text' is a int, not a string \[.*line 3\]"),
        ('{"messages": ["hello"]}', r"a message is a str, not an object \[.*line 3\]"),
        ('{"messages": [{"content": "x"}]}', r"a message without a role; its keys: content \[.*line 3\]"),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    good = '{"text": "a record that is fine"}\n'
    with pytest.raises(InputError, match=message):
        load(write(tmp_path / "a.jsonl", good + "\n" + line + "\n" + good * 2000), samples=4)


def test_no_more_is_tokenised_than_asked(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", *({"text": f"line number {i} " + "x" * 10_000} for i in range(2000)))
    tokenizer = ByteTokenizer()
    texts = load_texts(str(path), tokenizer, samples=4, seq_len=16, seed=0)
    assert tokenizer.calls == 4
    assert texts.sequences.shape == (4, 16)


# BOS


def test_exactly_one_bos(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello there"}]}
    path = write_records(tmp_path / "a.jsonl", chat, {"text": "<s>a text with BOS"}, {"text": "a text without it"})
    for row in rows(load(path, samples=3, seq_len=64, adds_bos=True)):
        assert row[0] == BOS
        assert row.count(BOS) == 1
    assert sum(row.count(BOS) for row in rows(load(path, samples=3, seq_len=64, adds_bos=False))) == 2


def test_every_window_of_running_text_starts_as_the_tokenizer_does(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", numbered(1000))
    for row in rows(load(path, samples=50, adds_bos=True)):
        assert len(row) == 16
        assert row[0] == BOS
        assert row.count(BOS) == 1
    assert all(BOS not in row for row in rows(load(path, samples=50, adds_bos=False)))


# Folders, names, the Hub


def test_a_folder_is_read_in_proportion_and_below(tmp_path: Path) -> None:
    write(tmp_path / "d" / "large.txt", "L" * 9000)
    write(tmp_path / "d" / "sub" / "small.txt", "s" * 3000)
    write(tmp_path / "d" / ".hidden.txt", "h" * 9000)
    write(tmp_path / "d" / "README.md", "r" * 9000)
    texts = load(tmp_path / "d", samples=100)
    letters = [text[0] for text in decoded(texts)]
    assert (letters.count("L"), letters.count("s")) == (75, 25)
    assert letters != sorted(letters)
    assert texts.origin == "files: large.txt, sub/small.txt"


def test_what_one_file_lacks_another_gives(tmp_path: Path) -> None:
    write(tmp_path / "d" / "one.jsonl", json.dumps({"text": "A" * 5000}))
    write(tmp_path / "d" / "two.txt", "b" * 5000)
    letters = [text[0] for text in decoded(load(tmp_path / "d", samples=20))]
    assert (letters.count("A"), letters.count("b")) == (1, 19)


@pytest.mark.parametrize("calib", ["./does/not/exist", "baze", "data/[v2]/a.txt", "/not/there", "~/no such", "a b/c"])
def test_a_mistyped_path_is_not_looked_for_on_the_hub(calib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError) as caught:
        load(calib)
    assert str(caught.value).startswith(f"no such file or folder [{calib}]")


def test_other_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a kind of text file"):
        load(write(tmp_path / "a.csv", "a,b"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no text files in this folder"):
        load(tmp_path / "empty")
    with pytest.raises(UsageError):
        load(tmp_path / "a.csv", samples=0)


class Rows(list[Any]):
    """A stand-in for a streamed dataset: rows in their order."""

    def shuffle(self, *, seed: int, buffer_size: int) -> Rows:
        assert buffer_size == 1
        return self


def stand_in_hub(monkeypatch: pytest.MonkeyPatch, rows: list[Any] | Exception) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Rows:
        asked.append((name, config, split, streaming))
        if isinstance(rows, Exception):
            raise rows
        return Rows(rows)

    monkeypatch.setattr("mla_cli.calibration.material.hub_reachable", lambda: True)
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


@pytest.mark.parametrize(
    ("calib", "asked"),
    [
        ("org/name", ("org/name", None, "train", True)),
        ("org/name:wiki-2-raw", ("org/name", "wiki-2-raw", "train", True)),
        ("org/name:validation", ("org/name", None, "validation", True)),
        ("org/name:en:train[:10%]", None),
        ("org/name:en:test", ("org/name", "en", "test", True)),
    ],
)
def test_a_hub_name_has_a_config_and_a_split(
    calib: str, asked: tuple[Any, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stand_in_hub(monkeypatch, [{"text": f"{word} \n"} for word in numbered(500).split()])
    if asked is None:
        with pytest.raises(InputError, match="no such file or folder"):
            load(calib)
        return
    texts = load(calib, samples=20, seq_len=64)
    assert seen == [asked]
    assert texts.origin.startswith("hub: org/name")
    assert texts.lengths.tolist() == [64] * 20  # short rows are lines of one running text


def test_hub_records_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_hub(monkeypatch, [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(50)])
    assert len(set(decoded(load("org/chat", samples=10, seq_len=64)))) == 10


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_hub(monkeypatch, ConnectionError("no route"))
    with pytest.raises(NetworkError, match="cannot load the dataset: ConnectionError: no route"):
        load("org/name")
    stand_in_hub(monkeypatch, ValueError("Config name is missing. Pick one of: a, b"))
    with pytest.raises(InputError, match="Pick one of: a, b"):
        load("org/name")
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    with pytest.raises(NetworkError, match="the Hub cannot be reached"):
        load("org/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        load("org/name")


# Held out, and the text that Python carries


def test_held_out_sequences_are_not_in_the_rest(tmp_path: Path) -> None:
    texts = load(write(tmp_path / "a.txt", numbered(1000)), samples=64)
    kept, heldout = split_heldout(texts, 0.25)
    assert (len(kept.lengths), len(heldout.lengths)) == (48, 16)
    assert not {tuple(row) for row in rows(kept)} & {tuple(row) for row in rows(heldout)}
    one = load(write(tmp_path / "b.txt", "a single text"), samples=1)
    kept, heldout = split_heldout(one)
    assert (len(kept.lengths), len(heldout.lengths)) == (1, 0)


def test_builtin_english_is_prose() -> None:
    text = builtin_english()
    assert len(text) > 100_000
    assert text == builtin_english()
    assert not any(noise in text for noise in ("::=", ">>>", "***", "====", "\n\n\n"))


def test_real_text(data_dir: Path) -> None:
    texts = load(data_dir / "text" / "calibration", samples=64, seq_len=128)
    assert texts.lengths.tolist() == [128] * 64
    assert texts.origin.count(".txt") == 5
