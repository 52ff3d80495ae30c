"""Damaged, ambiguous and odd checkpoints on disk: read exactly, or refused in one line that names the file."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mla_cli.checkpoint.reader import open_tensors
from mla_cli.checkpoint.weight_file import DTYPES, read_header
from mla_cli.errors import InputError, MlaError

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(4, 6, generator=generator) for i in range(5)}


def shard_name(number: int, count: int = 5) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Five shards, one tensor each, and their index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    for number, (name, tensor) in enumerate(tensors().items(), 1):
        save_file({name: tensor}, folder / shard_name(number))
    write_index(folder, {name: shard_name(n) for n, name in enumerate(tensors(), 1)})
    return folder


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_tensors(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    reader = open_tensors(folder)
    assert set(reader.infos) == set(expected)
    for name, tensor in expected.items():
        found = reader.read(name)
        assert found.dtype == tensor.dtype == reader.infos[name].dtype
        assert found.shape == tensor.shape == reader.infos[name].shape
        assert torch.equal(found, tensor)


def raw_file(path: Path, header: Any, data: bytes, *, pad: bool = False) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if pad else 0)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_single_file_is_read_exactly(single: Path) -> None:
    assert_same(single, tensors())
    assert open_tensors(single).files == (single / "model.safetensors",)


def test_shards_are_read_exactly(sharded: Path) -> None:
    assert_same(sharded, tensors())
    assert len(open_tensors(sharded).files) == 5


def test_every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    expected = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES.values()}
    expected |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    save_file(expected, tmp_path / "model.safetensors")
    reader = open_tensors(tmp_path)
    for name, tensor in expected.items():
        found = reader.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_owns_its_bytes_and_no_file_stays_open(single: Path) -> None:
    reader = open_tensors(single)
    first = reader.read("layer.0.weight")
    first.zero_()
    assert reader.read("layer.0.weight").abs().sum() > 0
    assert first.untyped_storage().nbytes() == first.nbytes
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit() and int(fd) > 2 and os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not [link for link in links if link.endswith(".safetensors")]
    assert str(single.resolve()) not in Path("/proc/self/maps").read_text()  # other tests may map their own


def test_odd_single_name_is_taken_when_it_is_the_only_one(single: Path) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert_same(single, tensors())


def test_one_of_one_needs_no_index(single: Path) -> None:
    (single / "model.safetensors").rename(single / shard_name(1, 1))
    assert_same(single, tensors())


# FM-01: interrupted downloads


def test_absent_shards_are_all_listed_before_any_work(sharded: Path) -> None:
    for number in (2, 4):
        (sharded / shard_name(number)).unlink()
    message = refusal(sharded)
    assert shard_name(2) in message
    assert shard_name(4) in message
    assert shard_name(3) not in message
    assert "download" in message


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no weights" in refusal(tmp_path)


def test_a_directory_named_like_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    message = refusal(tmp_path)
    assert "no weights" in message
    assert "model.safetensors/" in message


def test_a_directory_in_place_of_a_shard(sharded: Path) -> None:
    (sharded / shard_name(2)).unlink()
    (sharded / shard_name(2)).mkdir()
    assert shard_name(2) in refusal(sharded)


def test_gguf_folder_is_told_to_give_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert ".gguf file itself" in refusal(tmp_path)


# FM-02: stale index


def test_stale_index_is_no_reason_to_guess(sharded: Path) -> None:
    for number in range(1, 6):
        (sharded / shard_name(number)).rename(sharded / f"model-{number:05d}-of-00015.safetensors")
    message = refusal(sharded)
    assert "index.json does not match the files" in message
    assert "model-00001-of-00015.safetensors" in message


# FM-03: three different causes, three different messages


def test_swapped_shards(sharded: Path) -> None:
    first, second = sharded / shard_name(1), sharded / shard_name(2)
    first.rename(sharded / "x")
    second.rename(first)
    (sharded / "x").rename(second)
    message = refusal(sharded)
    assert f"{shard_name(1)} holds tensor 'layer.0.weight', but it does not" in message
    assert f"{shard_name(2)} holds it" in message


def test_shard_lacks_a_tensor(sharded: Path) -> None:
    save_file({"other": torch.ones(2)}, sharded / shard_name(3))
    message = refusal(sharded)
    assert f"{shard_name(3)} holds tensor 'layer.2.weight', but it does not" in message


def test_never_in_the_index(sharded: Path) -> None:
    with pytest.raises(InputError, match=r"no tensor 'lm_head.weight' in model.safetensors.index.json"):
        open_tensors(sharded).missing("lm_head.weight")


def test_not_in_the_index_but_in_a_shard(sharded: Path) -> None:
    write_index(sharded, {name: shard_name(n) for n, name in enumerate(tensors(), 1)})
    save_file({"layer.0.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}, sharded / shard_name(1))
    with pytest.raises(InputError, match="the index does not match"):
        open_tensors(sharded).read("lm_head.weight")


def test_shard_gone_after_opening(sharded: Path) -> None:
    reader = open_tensors(sharded)
    (sharded / shard_name(1)).unlink()
    with pytest.raises(InputError, match="that file is absent"):
        reader.read("layer.0.weight")


def test_file_cut_after_opening(single: Path) -> None:
    reader = open_tensors(single)
    os.truncate(single / "model.safetensors", 500)
    with pytest.raises(InputError, match="changed since it was opened"):
        reader.read("layer.4.weight")


def test_file_replaced_after_opening(single: Path) -> None:
    reader = open_tensors(single)
    save_file(dict(reversed(tensors().items())) | {"new": torch.ones(1)}, single / "new")
    (single / "new").rename(single / "model.safetensors")
    with pytest.raises(InputError, match="changed since it was opened"):
        reader.read("layer.0.weight")


# FM-04: damaged files


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-10], "is cut short: {size} bytes found, {whole} wanted"),
        (lambda data: data[:40], "is cut short: 40 bytes found"),
        (lambda data: data[:5], "is cut short: 5 bytes found"),
        (lambda data: b"", "is empty: 0 bytes found"),
        (lambda data: data + bytes(16), "is longer than its header says: {size} bytes found, {whole} wanted"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4321\n", "4321 wanted"),
        (lambda data: b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (lambda data: b"<?xml version='1.0'?><Error>AccessDenied</Error>", "error message of a server"),
        (lambda data: b"\xff" * len(data), "is no safetensors file"),
        (lambda data: data[:8] + b"[" + data[9:], "broken header"),
    ],
)
def test_damaged_file_is_named_with_sizes(sharded: Path, damage: Any, words: str) -> None:
    file = sharded / shard_name(3)
    data = file.read_bytes()
    file.write_bytes(damage(data))
    message = refusal(sharded)
    assert str(file) in message
    assert words.format(size=file.stat().st_size, whole=len(data)) in message
    assert "download the file again" in message


def test_unfinished_download_beside(single: Path) -> None:
    (single / "model.safetensors.incomplete").write_bytes(b"x")
    assert "unfinished download" in refusal(single)
    (single / "model.safetensors").unlink()
    assert "model.safetensors.incomplete" in refusal(single)


def test_unfinished_shard(sharded: Path) -> None:
    (sharded / shard_name(2)).rename(sharded / (shard_name(2) + ".incomplete"))
    message = refusal(sharded)
    assert "unfinished downloads" in message


def test_flipped_bytes_are_read_as_they_are(single: Path) -> None:
    # FM-05: the reader is faithful; the non-finite scan belongs to whoever uses the values.
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + b"\xff" * 8)
    reader = open_tensors(single)
    assert any(not reader.read(name).isfinite().all() for name in reader.infos)


# FM-06, FM-07, FM-08: which file owns a tensor


def test_consolidated_copy_is_ignored_beside_an_index(sharded: Path) -> None:
    save_file({n: torch.zeros(1) for n in tensors()}, sharded / "consolidated.safetensors")
    assert_same(sharded, tensors())


def test_consolidated_copy_is_ignored_beside_a_single_file(single: Path) -> None:
    save_file({n: torch.zeros(1) for n in tensors()}, single / "consolidated.00.safetensors")
    assert_same(single, tensors())


def test_stray_single_file_beside_an_index_is_ambiguous(sharded: Path) -> None:
    save_file({"layer.0.weight": torch.zeros(1)}, sharded / "model.safetensors")
    message = refusal(sharded)
    assert "model.safetensors," in message
    assert INDEX in message


def test_single_file_and_shards_without_index_are_ambiguous(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    save_file(tensors(), sharded / "model.safetensors")
    assert "two copies" in refusal(sharded)


def test_safetensors_win_over_bin(single: Path) -> None:
    torch.save({"other": torch.zeros(1)}, single / "pytorch_model.bin")
    assert_same(single, tensors())


def test_adapter_weights_are_no_model(tmp_path: Path) -> None:
    save_file({"lora_A": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert "no weights" in refusal(tmp_path)


def test_odd_shard_names_come_from_the_index(sharded: Path) -> None:
    names = {n: f"model.safetensors-{n:05d}-of-00005.safetensors" for n in range(1, 6)}
    for number, name in names.items():
        (sharded / shard_name(number)).rename(sharded / name)
    write_index(sharded, {name: names[n] for n, name in enumerate(tensors(), 1)})
    assert_same(sharded, tensors())


@pytest.mark.parametrize("owner", [1, 2])
def test_the_index_decides_between_duplicates(sharded: Path, owner: int) -> None:
    save_file({"layer.0.weight": torch.full((2,), 1.0)}, sharded / shard_name(1))
    save_file({"layer.0.weight": torch.full((2,), 2.0), "layer.1.weight": torch.ones(1)}, sharded / shard_name(2))
    weight_map = {name: shard_name(n) for n, name in enumerate(tensors(), 1)}
    write_index(sharded, weight_map | {"layer.0.weight": shard_name(owner)})
    assert open_tensors(sharded).read("layer.0.weight")[0] == owner


def test_shards_without_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"{INDEX} is missing" in refusal(sharded)
    for number in (2, 3, 4, 5):
        (sharded / shard_name(number)).unlink()
    assert f"{INDEX} is missing" in refusal(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../o/m.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "C:x.safetensors", "a\\b.safetensors",
     "x.bin", "x\n.safetensors", "", 7, None],
)  # fmt: skip
def test_index_may_only_name_files_of_its_folder(sharded: Path, shard: Any) -> None:
    write_index(sharded, {"layer.0.weight": shard})
    assert "no weight file of this folder" in refusal(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "", "\xff", "[" * 9999])
def test_broken_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text, encoding="latin-1")
    assert INDEX in refusal(sharded)


def test_hub_cache_links_work(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "cache/blobs", tmp_path / "cache/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    assert_same(snapshot, tensors())
    (blobs / f"{0:064x}").unlink()
    assert shard_name(1) in refusal(snapshot)


# FM-09, FM-10 and the rest of the header


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {}}, {"__metadata__": None}, {"__metadata__": {"a": "b"}}])
def test_metadata_is_optional(tmp_path: Path, metadata: dict[str, Any]) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    raw_file(tmp_path / "model.safetensors", metadata | {"a": entry}, struct.pack("<2f", 1, 2), pad=True)
    assert open_tensors(tmp_path).read("a").tolist() == [1, 2]


def test_a_header_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for spaces in range(8):
        text = json.dumps({"a": entry}).encode() + b" " * spaces
        raw_file(tmp_path / "model.safetensors", text, struct.pack("<2f", 1, 2))
        assert open_tensors(tmp_path).read("a").tolist() == [1, 2]


GOOD = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": GOOD, "b": GOOD}, "claim the same bytes"),
        ({"a": GOOD, "b": GOOD | {"data_offsets": [32, 96]}}, "claim the same bytes"),
        ({"a": GOOD | {"shape": [8], "data_offsets": [32, 64]}}, "belong to no tensor"),
        ({"a": GOOD | {"shape": [15]}}, "64 bytes found, 60 wanted"),
        ({"a": GOOD | {"shape": [-4, -4]}}, "impossible"),
        ({"a": GOOD | {"shape": [True] * 16}}, "impossible"),
        ({"a": GOOD | {"shape": [16.0]}}, "impossible"),
        ({"a": GOOD | {"shape": 16}}, "impossible"),
        ({"a": GOOD | {"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, "impossible"),
        ({"a": GOOD | {"data_offsets": [64, 0]}}, "impossible"),
        ({"a": GOOD | {"data_offsets": [0]}}, "impossible"),
        ({"a": GOOD | {"dtype": "F4"}}, "dtype 'F4'"),
        ({"a": GOOD | {"dtype": ["F32"]}}, "not read"),
        ({"a": {"dtype": "F32"}}, "absent"),
        ({"a": []}, "absent"),
        ({"a\x1b[31m": GOOD}, "unprintable"),
        ({"": GOOD}, "unprintable"),
        ({"__metadata__": [], "a": GOOD}, "broken header"),
        ([], "broken header"),
        (b'{"a": 1, "a": 1}', "stands twice"),
        (b"[" * 100_000, "broken header"),
        (b'{"a": ' + b"9" * 5000 + b"}", "broken header"),
        (b"\xff\xfe", "broken header"),
        ({}, "longer than its header says"),
    ],
)
def test_broken_headers(tmp_path: Path, header: Any, words: str) -> None:
    raw_file(tmp_path / "model.safetensors", header, bytes(64))
    assert words in refusal(tmp_path)


VALID = json.dumps({"__metadata__": {"format": "pt"}, "a": GOOD, "b": GOOD | {"data_offsets": [64, 128]}}).encode()
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", None]),
        "shape": st.lists(st.integers(-1, 9) | st.integers(), max_size=4) | st.none(),
        "data_offsets": st.lists(st.integers(-1, 130) | st.integers(), max_size=3) | st.none(),
    }
)
FAST = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def read_or_refuse(file: Path) -> None:
    """Either a refusal of ours, or a table whose tensors can be read."""
    try:
        header = read_header(file)
    except MlaError:
        return
    assert sum(stored.info.nbytes for stored in header.values()) <= file.stat().st_size
    reader = open_tensors(file.parent)
    for name, info in reader.infos.items():
        assert reader.read(name).shape == info.shape


@FAST
@given(data=st.binary(max_size=300))
def test_random_bytes_are_never_a_crash(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    read_or_refuse(tmp_path / "model.safetensors")


@FAST
@given(position=st.integers(0, len(VALID) + 7), change=st.binary(max_size=6), drop=st.integers(0, 6))
def test_mutated_headers_are_never_a_crash(tmp_path: Path, position: int, change: bytes, drop: int) -> None:
    file = raw_file(tmp_path / "model.safetensors", VALID, bytes(128))
    data = file.read_bytes()
    file.write_bytes(data[:position] + change + data[position + drop :])
    read_or_refuse(file)


@FAST
@given(header=st.dictionaries(st.text(max_size=3), ENTRY, max_size=4), size=st.sampled_from([0, 8, 64, 128]))
def test_made_up_tables_are_never_a_crash(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    read_or_refuse(raw_file(tmp_path / "model.safetensors", header, bytes(size)))


@FAST
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5), data=st.data())
def test_what_safetensors_writes_is_read_alike(tmp_path: Path, shapes: list[list[int]], data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(st.sampled_from([*DTYPES.values()]), min_size=len(shapes), max_size=len(shapes)))
    written = {
        f"t{i}": torch.ones(shape).to(dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    save_file(written, tmp_path / "model.safetensors")
    reader = open_tensors(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        found = reader.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.float(), tensor.float())


# pickles


def test_bin_is_read_exactly(tmp_path: Path) -> None:
    expected = tensors() | {"half": torch.ones(3, dtype=torch.bfloat16), "view": torch.arange(12.0).reshape(3, 4).t()}
    torch.save(expected, tmp_path / "pytorch_model.bin")
    assert_same(tmp_path, expected)
    assert open_tensors(tmp_path).read("view").is_contiguous()


def test_old_bin_is_read(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(tmp_path, tensors())


def test_bin_shards_follow_their_index(tmp_path: Path) -> None:
    names = list(tensors())
    torch.save({n: tensors()[n] for n in names[:3]}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({n: tensors()[n] for n in names[3:]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    assert "pytorch_model.bin.index.json is missing" in refusal(tmp_path)
    owners = {n: f"pytorch_model-0000{1 + (i >= 3)}-of-00002.bin" for i, n in enumerate(names)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": owners}))
    assert_same(tmp_path, tensors())


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


def test_code_in_a_pickle_never_runs(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Hostile(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    assert "not loaded for safety" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 3, 100, -30])
def test_cut_bin_is_named(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors(), file)
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(tmp_path)
    assert str(file) in message
    assert "again" in message


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1: torch.ones(1)}, {"a": torch.ones(1).to_sparse()},
                                   {"a": torch.ones(1, dtype=torch.complex64)}, torch.ones(1)])  # fmt: skip
def test_bin_that_is_no_table_of_tensors(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(tmp_path)


def test_unreadable_folder(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "absent")
