"""Kept prompts outside the pool: what comes back is what left, whatever happens to the file meanwhile."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_cli.errors import InputError, OutputError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.decoder import Decoder
from mla_cli.model.page_bytes import PageBytes
from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.kept_file import KeptFile
from mla_cli.runtime.prefix_tree import PrefixTree
from mla_cli.runtime.request import Completion, Request
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.runtime.tiers import FEWEST_OUTCOMES, Prefetch, Tiers
from tests.runtime.latent import latent_decoder
from tests.runtime.stand_ins import EOS, VOCAB, save_byte_tokenizer

PAGE = 700  # bytes of a page where only the file is looked at
FACTS = {"version": "1", "model": "m"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), config={"eos_token_id": EOS})


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = latent_decoder()
    made.spec = replace(made.spec, max_position_embeddings=4096)
    return made


class Made:
    """Generators of one decoder, one request at a time, in a pool that holds two prompts at most."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, **options: Any) -> None:
        self._decoder, self._tokenizer, self._options = decoder, tokenizer, options
        self.said: list[str] = []

    def plain(self) -> Generator:
        return Generator(self._decoder, self._tokenizer, max_batch=1, pool_tokens=1344, **self._options)

    @contextmanager
    def tiered(
        self, host_pages: int = 0, path: Path | None = None, *, pages: int = 64, keep: bool = True, **more: Any
    ) -> Iterator[tuple[Generator, Tiers]]:
        generator = self.plain()
        held = PageBytes(generator.pool.storage)
        file = None if path is None else KeptFile(path, {"form": held.form()}, held.page_bytes, pages, self.said.append)
        tiers = Tiers(generator.pool, host_bytes=host_pages * held.page_bytes, file=file, **more)
        try:
            yield generator, tiers
        finally:
            tiers.close(keep=keep)
        generator.pool.forget_kept()
        assert generator.pool.used == 0


def requests(order: str, tokens: int = 520) -> list[Request]:
    """One a letter: a beginning of its own, and an end that no other has."""
    found = []
    for number, letter in enumerate(order):
        chance = random.Random(letter)
        system = [chance.randrange(3, VOCAB) for _ in range(tokens)]
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, seed=number, temperature=float(number % 2))
        found.append(Request((*system, 5 + number), params))
    return found


def answers(generator: Generator, asked: list[Request]) -> list[Any]:
    found = [generator.generate([request])[0] for request in asked]
    assert all(isinstance(answer, Completion) for answer in found), found
    return [answer.token_ids for answer in found if isinstance(answer, Completion)]


QUANTIZERS = {
    "float32": {},
    "int8": {"quantizers": (LatentQuantizer("int8"),) * 2},
    "int4, groups": {"quantizers": (LatentQuantizer("int4"), LatentQuantizer("int8", granularity="page"))},
    "static, rotary too": {
        "quantizers": (
            LatentQuantizer("int8", granularity="static", clip=8.0, rope_dtype="int8"),
            LatentQuantizer("fp8"),
        )
    },
}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_what_comes_back_is_what_left(decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    made, asked = Made(decoder, tokenizer, **QUANTIZERS[kind]), requests("abcdabcd")
    expected = answers(made.plain(), asked)
    with made.tiered(32) as (generator, tiers):
        assert answers(generator, asked) == expected
        assert tiers.counts.from_host == 4
        assert tiers.counts.host_evictions == 0
    with made.tiered(8, tmp_path / "kept") as (generator, tiers):
        assert answers(generator, asked) == expected
        assert tiers.counts.from_file == 4
        assert tiers.counts.pool_evictions >= 6
        assert generator.statistics.shared_tokens == 4 * 512
    with made.tiered(0, tmp_path / "kept") as (generator, tiers):  # another run: all of them are known already
        assert answers(generator, asked[:4]) == expected[:4]
        assert tiers.counts.from_file == 4
        assert tiers.counts.from_nowhere == 0
        assert tiers.counts.damaged == 0
    assert made.said == []


def test_longer_prompts_come_back_chunk_by_chunk(decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    made, asked = Made(decoder, tokenizer), requests("abab", 1100)
    expected = answers(made.plain(), asked)
    with made.tiered(16, tmp_path / "kept", keep=False) as (generator, tiers):
        assert answers(generator, asked) == expected
        assert tiers.counts.from_host + tiers.counts.from_file + tiers.counts.from_pool == 4
    assert not (tmp_path / "kept").exists()


def test_less_is_kept_than_there_is_room_for(decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    made, asked = Made(decoder, tokenizer), requests("abcdefabcdef")
    with made.tiered(8, tmp_path / "kept", pages=16) as (generator, tiers):
        assert answers(generator, asked) == answers(made.plain(), asked)
        page = tiers.counts.host_bytes // 8
        assert tiers.counts.file_bytes == 16 * page
        assert tiers.counts.file_evictions > 0
        assert tiers.counts.host_evictions > 0


def test_a_damaged_file_costs_time_only(decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    made, asked, path = Made(decoder, tokenizer), requests("abc"), tmp_path / "kept"
    expected = answers(made.plain(), asked)
    with made.tiered(0, path) as (generator, _):
        answers(generator, asked)
    content = bytearray(path.read_bytes())
    for at in range(8192 + 300, len(content), 1000):  # every page
        content[at] ^= 1
    path.write_bytes(content)
    with made.tiered(0, path) as (generator, tiers):
        assert answers(generator, asked) == expected
        assert tiers.counts.damaged == 3
        assert tiers.counts.from_file == 0


def chunk(pages: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (pages, PAGE), dtype=np.uint8)


@contextmanager
def kept(path: Path, slots: int = 12, **facts: Any) -> Iterator[tuple[KeptFile, list[str]]]:
    said: list[str] = []
    file = KeptFile(path, {**FACTS, **facts}, PAGE, slots, said.append)
    try:
        yield file, said
    finally:
        file.close(keep=True)


NAMES = [bytes([i]) * 32 for i in range(1, 30)]


def test_nothing_wrong_is_found_after_a_crash(tmp_path: Path) -> None:
    """Any part of the file may be as it was before the last writes, or nonsense."""
    path, chance = tmp_path / "kept", random.Random(0)
    found = lost = 0
    for _ in range(60):
        with kept(path) as (file, _):
            for name in chance.sample(range(20), 5):
                file.put(NAMES[name], chunk(1 + name % 4, name))
            before = path.read_bytes()
            for name in chance.sample(range(20), 3):
                file.put(NAMES[name], chunk(1 + name % 4, name))
        content = bytearray(path.read_bytes())
        for _ in range(3):
            start = chance.randrange(4096, len(content))
            end = min(len(content), start + chance.choice((1, 64, 4096)))
            content[start:end] = before[start:end] if chance.random() < 0.7 else chance.randbytes(end - start)
        path.write_bytes(content)
        with kept(path) as (file, said):
            assert said == []
            for name in range(20):
                data = file.get(NAMES[name])
                if data is None:
                    lost += 1
                else:
                    found += 1
                    assert np.array_equal(data, chunk(1 + name % 4, name))
    assert found > 50
    assert lost > 50


def test_the_longest_unused_leaves_first_in_the_next_run_too(tmp_path: Path) -> None:
    with kept(tmp_path / "kept") as (file, _):
        for name in range(4):
            file.put(NAMES[name], chunk(3, name))
        assert file.get(NAMES[0]) is not None
    with kept(tmp_path / "kept") as (file, _):
        file.put(NAMES[9], chunk(4, 9))
        assert [NAMES[name] in file for name in (0, 1, 2, 3, 9)] == [True, False, False, True, True]
        file.put(NAMES[10], chunk(13, 10))  # more than the file holds
        assert NAMES[10] not in file
        assert file.held_bytes == (3 + 3 + 4) * PAGE


def test_a_file_of_something_else_is_emptied_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with kept(path) as (file, said):
        file.put(NAMES[0], chunk(2, 0))
    assert path.stat().st_mode & 0o777 == 0o600
    for changes, why in (({"model": "n"}, "another model"), ({"version": "2"}, "another version and another model")):
        with kept(path, **changes) as (file, said):
            assert file.get(NAMES[0]) is None
            file.put(NAMES[0], chunk(2, 0))
        assert len(said) == 1
        assert why in said[0]
    with kept(path, slots=24) as (file, said):
        assert "another slots" in said[0]
    os.truncate(path, 5000)
    with kept(path, slots=24) as (file, said):
        assert "broke off" in said[0]
    path.write_bytes(b"something of value")
    with pytest.raises(InputError, match="something else"):
        KeptFile(path, FACTS, PAGE, 12, said.append)
    assert path.read_bytes() == b"something of value"
    (tmp_path / "link").symlink_to(path)
    for wrong in (tmp_path, tmp_path / "none" / "kept", tmp_path / "link"):
        with pytest.raises(InputError):
            KeptFile(wrong, FACTS, PAGE, 12, said.append)


def test_a_file_that_is_cut_off_while_it_is_used(tmp_path: Path) -> None:
    with kept(tmp_path / "kept") as (file, _):
        file.put(NAMES[0], chunk(2, 0))
        os.truncate(tmp_path / "kept", 4096)
        assert file.get(NAMES[0]) is None
        file.put(NAMES[1], chunk(2, 1))


def test_a_full_disk_is_seen_before_it_is_written_to(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OutputError, match="needed for kept"):
            KeptFile(tmp_path / "kept", FACTS, PAGE, 100, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


OTHER = """
import sys
from pathlib import Path
from mla_cli.runtime.kept_file import KeptFile
file = KeptFile(Path(sys.argv[1]), {"version": "1", "model": "m"}, 700, 12, print)
print("open", flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with kept(path) as (file, _):
        file.put(NAMES[0], chunk(2, 0))
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UsageError, match="another process"):
            KeptFile(path, FACTS, PAGE, 12, lambda _: None)
        other.kill()
    with kept(path) as (file, said):  # who is killed holds it no longer, and leaves it whole
        assert np.array_equal(file.get(NAMES[0]), chunk(2, 0))
        assert said == []


def test_what_waits_is_brought_back_beside_the_computation(decoder: Decoder, tokenizer: Tokenizer) -> None:
    made, asked = Made(decoder, tokenizer), requests("abcdabcdabcd")
    expected = [list(tokens) for tokens in answers(made.plain(), asked)]
    with made.tiered(64, prefetch=Prefetch()) as (generator, tiers):
        found = [list(a.token_ids) for a in generator.generate(asked) if isinstance(a, Completion)]
        assert found == expected
        assert tiers.counts.prefetched >= 6
        assert tiers.counts.wanted == tiers.counts.from_pool >= tiers.counts.prefetched - 2
        assert tiers.counts.saved_s > 0
        assert tiers.counts.fallbacks == 0


class Calls(np.ndarray):
    """Bytes of pages; `before_reading` is called once, when they are about to be put into a pool."""

    before_reading: Callable[[], None] | None = None

    def __getitem__(self, at: Any) -> Any:
        call, self.before_reading = self.before_reading, None
        if call is not None:
            call()
        return super().__getitem__(at)


def test_a_pool_that_grows_while_a_page_is_filled(
    decoder: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes to the place where the pages were is not taken for what the pages hold."""
    made, asked = Made(decoder, tokenizer), requests("aba")
    expected = answers(made.plain(), asked)
    left: list[bytes] = []
    chunks: list[Calls] = []
    read, save = PageBytes.read, Tiers.save

    def read_calling(pages: PageBytes, which: Any) -> Calls:
        chunks.append(read(pages, which).view(Calls))
        return chunks[-1]

    def save_named(tiers: Tiers, name: bytes, pages: Any) -> None:
        left.append(name)
        save(tiers, name, pages)

    monkeypatch.setattr(PageBytes, "read", read_calling)
    monkeypatch.setattr(Tiers, "save", save_named)
    with made.tiered(64, prefetch=Prefetch()) as (generator, tiers):
        pool = generator.pool

        def grow() -> None:
            pool.storage.add_pages(pool.limit + 1 + len(left))
            pool.growths += 1

        assert answers(generator, asked[:2]) == expected[:2]
        answers(generator, requests("cd"))  # in the place of what is asked for again
        chunks[0].before_reading = grow
        tiers.look_ahead([left[0]], running=0)
        tiers.settle()
        assert chunks[0].before_reading is None
        assert not pool.has(left[0])
        assert answers(generator, asked[2:]) == expected[2:]
        assert tiers.counts.from_host == 1


def run_one_by_one(made: Made, order: str, settle: Callable[[Tiers], None], prefetch: Prefetch) -> Tiers:
    """Requests that come when the one before has ended: nothing waits, so all that is brought back is a guess."""
    asked = requests(order)
    with made.tiered(128, prefetch=prefetch) as (generator, tiers):
        expected = answers(made.plain(), asked)
        for request, tokens in zip(asked, expected, strict=True):
            assert answers(generator, [request]) == [tokens]
            settle(tiers)
    return tiers


def test_what_comes_next_is_guessed(decoder: Decoder, tokenizer: Tokenizer) -> None:
    tiers = run_one_by_one(Made(decoder, tokenizer), "abcd" * 5, Tiers.settle, Prefetch())
    assert tiers.counts.guesses >= 8
    assert tiers.counts.right >= tiers.counts.guesses - 3
    assert tiers.counts.wanted == tiers.counts.from_pool >= 7
    assert tiers.counts.from_pool + tiers.counts.from_host - tiers.counts.guesses == 4 * 4  # all but the first round
    assert tiers.counts.fallbacks == 0


def test_guessing_pauses_when_it_is_wrong_too_often(decoder: Decoder, tokenizer: Tokenizer) -> None:
    made = Made(decoder, tokenizer)
    # After a came b, then never again.
    order = "ab" * 3 + "".join(f"a{letter}" for letter in "cdefghijcdefghij")
    wild = Prefetch(lookahead=1, threshold=0.1, fallback=0.85, cool_down=1000)
    tiers = run_one_by_one(made, order, Tiers.settle, wild)
    assert tiers.counts.fallbacks == 1
    assert FEWEST_OUTCOMES <= tiers.counts.guesses <= FEWEST_OUTCOMES + 2
    sure = run_one_by_one(made, order, Tiers.settle, replace(wild, threshold=0.9))
    assert sure.counts.guesses <= 3


def test_the_tree_knows_what_follows_a_template() -> None:
    tree, template, other = PrefixTree(), [b"t1", b"t2"], [b"o1"]
    assert tree.expected(3, 0.5) == []
    for i in range(4):
        tree.add([*template, b"own %d" % i])  # nobody's end comes twice
        tree.add(other if i % 4 else template)
    tree.add([*template, b"own 9"])
    assert tree.expected(3, 0.5) == [b"o1"]
    assert tree.expected(3, 0.9) == []
    tree.add(other)
    assert tree.expected(3, 0.7) == template
    assert tree.expected(1, 0.7) == template[:1]


def test_the_tree_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_cli.runtime.prefix_tree.MOST_NODES", 64)
    tree, chance = PrefixTree(), random.Random(0)
    for _ in range(2000):
        tree.add([b"%d" % chance.randrange(1000) for _ in range(4)])
    assert len(tree._passed) <= 64
    assert len(tree._after) <= 4
    assert max(map(len, tree._after.values())) <= 64
