"""An output is there completely or not at all, and nothing of the user's is deleted on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mla_cli.checkpoint import disk, inplace, writer
from mla_cli.checkpoint.disk import clean_leftovers
from mla_cli.checkpoint.reader import open_tensors
from mla_cli.checkpoint.weight_file import DTYPES
from mla_cli.checkpoint.writer import CheckpointWriter, check_output, parse_size, replace_files
from mla_cli.errors import InputError, MlaError, OutputError, UsageError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def nothing_hidden_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert [path.name for path in tmp_path.rglob(".*.tmp-*")] == []
    assert [path.name for path in tmp_path.rglob(".*.old-*")] == []


def tensors(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(10, 10, generator=generator) for i in range(count)}


def write(
    out: Path,
    values: dict[str, torch.Tensor] | None = None,
    more: Iterable[tuple[str, torch.Tensor]] = (),
    **options: Any,
) -> Path:
    """Write a checkpoint of `values`, then of what `more` yields."""
    with CheckpointWriter(out, **options) as checkpoint:
        checkpoint.write_json("config.json", {"model_type": "llama"})
        for name, tensor in chain((values or tensors()).items(), more):
            checkpoint.add(name, tensor)
    return out


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    reader = open_tensors(folder)
    assert set(reader.infos) == set(expected)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in expected.items())


def refusal(out: Path, force: bool = False, **options: Any) -> str:
    with pytest.raises(OutputError) as caught:
        check_output(out, force, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# what is written


def test_a_small_model_is_one_file(out: Path) -> None:
    write(out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert_holds(out, tensors())
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama"}


def test_a_large_model_is_shards_and_an_index(out: Path) -> None:
    write(out, max_shard_bytes=800)  # 400 bytes a tensor
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", *names, INDEX]
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == 2000
    assert index["weight_map"] == {f"layer.{i}.weight": names[i // 2] for i in range(5)}
    assert_holds(out, tensors())


def test_a_tensor_larger_than_a_shard_gets_its_own(out: Path) -> None:
    write(out, max_shard_bytes=1)
    assert len(open_tensors(out).files) == 5
    assert_holds(out, tensors())


STREAMED = """
import resource, sys, torch
from pathlib import Path
from mla_cli.checkpoint.writer import CheckpointWriter
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with CheckpointWriter(Path(sys.argv[1])) as checkpoint:
    checkpoint.add("first", torch.ones(1 << 22))  # 16 MiB
    before = peak()
    for number in range(12):
        checkpoint.add(str(number), torch.ones(1 << 22))
print(peak() - before)
"""


def test_tensors_leave_memory_as_they_come(out: Path) -> None:
    # CV-24: one shard of 208 MiB.
    done = run_python(STREAMED, str(out))
    assert int(done.stdout) < 64 << 20, done.stderr
    assert len(open_tensors(out).infos) == 13


def test_transformers_and_safetensors_read_it(out: Path) -> None:
    # FM-09: stock readers want the format in the metadata.
    write(out, max_shard_bytes=800)
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    loaded = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())


def test_every_dtype_is_kept(out: Path) -> None:
    values = {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES.values()}
    values |= {"scalar": torch.tensor(1.0), "empty": torch.empty(0, 3)}
    write(out, values)
    reader = open_tensors(out)
    assert {name: info.dtype for name, info in reader.infos.items()} == {n: t.dtype for n, t in values.items()}


def test_tied_transposed_and_sliced_tensors_are_saved(out: Path) -> None:
    # CV-15: both are refused by safetensors.
    base = torch.arange(12.0).reshape(3, 4)
    values = {"a": base, "tied": base, "transposed": base.t(), "slice": base[:, 1:3], "expanded": base[:1].expand(5, 4)}
    values["parameter"] = torch.nn.Parameter(base)
    write(out, values)
    assert_holds(out, values)


def test_later_changes_by_the_caller_do_not_reach_the_file(out: Path) -> None:
    value = torch.ones(3)
    with CheckpointWriter(out) as checkpoint:
        checkpoint.add("a", value)
        value.zero_()
    assert open_tensors(out).read("a").tolist() == [1, 1, 1]


def test_files_are_as_readable_as_the_umask_says(out: Path) -> None:
    before = os.umask(0o022)
    try:
        write(out)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o644}
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


def test_companions_are_copied_unchanged(out: Path, tmp_path: Path) -> None:
    # FM-13, with a folder of templates.
    templates = tmp_path / "source" / "additional_chat_templates"
    templates.mkdir(parents=True)
    (templates / "tool.jinja").write_bytes(b"\r\n{{ x }}\xff")
    (tmp_path / "source" / "tokenizer.json").write_bytes(b"{}\r\n")
    with CheckpointWriter(out) as checkpoint:
        checkpoint.add("a", torch.ones(1))
        checkpoint.copy(templates)
        checkpoint.copy(tmp_path / "source" / "tokenizer.json")
        checkpoint.copy(tmp_path / "source" / "tokenizer.json", "sub/other.json")
        checkpoint.write_text("README.md", "größer \udc80\n")
    shutil.rmtree(tmp_path / "source")
    assert (out / "additional_chat_templates" / "tool.jinja").read_bytes() == b"\r\n{{ x }}\xff"
    assert (out / "tokenizer.json").read_bytes() == (out / "sub/other.json").read_bytes() == b"{}\r\n"
    assert (out / "README.md").read_bytes() == "größer \\udc80\n".encode()


def test_the_last_content_of_a_small_file_counts(out: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("copied")
    with CheckpointWriter(out) as checkpoint:
        checkpoint.add("a", torch.ones(1))
        checkpoint.write_text("one", "written")
        checkpoint.copy(tmp_path / "x", "one")
        checkpoint.copy(tmp_path / "x", "two")
        checkpoint.write_text("two", "written")
    assert (out / "one").read_text() == "copied"
    assert (out / "two").read_text() == "written"


def test_the_configuration_is_written_last(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(writer, "write_file", lambda path, data: (order.append(path.name), path.write_bytes(data)))
    with CheckpointWriter(out, max_shard_bytes=1) as checkpoint:
        checkpoint.write_json("config.json", {})
        checkpoint.write_json("mla_report.json", {})
        checkpoint.add("a", torch.ones(1))
        checkpoint.add("b", torch.ones(1))
    assert order == ["mla_report.json", INDEX, "config.json"]


# what is refused


def failing(out: Path, name: str, tensor: torch.Tensor) -> str:
    with pytest.raises(OutputError) as caught:
        write(out, {"fine": torch.ones(1)}, more=[(name, tensor)])
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1e5], dtype=torch.bfloat16).to(torch.float16),  # CV-22
        torch.tensor([float("nan"), 1.0]),
        torch.tensor([float("-inf"), 1.0], dtype=torch.float64),
        torch.tensor([float("nan")]).to(torch.bfloat16),
        torch.tensor([float("nan")]).to(torch.float8_e4m3fn),
        torch.tensor([float("inf")]).to(torch.float8_e5m2),
    ],
)
def test_values_that_are_not_finite_are_refused_by_name(out: Path, tensor: torch.Tensor) -> None:
    message = failing(out, "layer.q_proj.weight", tensor)
    assert "layer.q_proj.weight" in message
    assert "not finite" in message


def test_a_tensor_may_be_written_only_once(out: Path) -> None:
    assert "fine is written twice" in failing(out, "fine", torch.ones(1))


@pytest.mark.parametrize("name", ["", "__metadata__", "a\nb"])
def test_impossible_tensor_names(out: Path, name: str) -> None:
    assert "name of a tensor" in failing(out, name, torch.ones(1))


def test_dtypes_nobody_reads(out: Path) -> None:
    assert "complex64" in failing(out, "a", torch.ones(1, dtype=torch.complex64))


@pytest.mark.parametrize("name", ["../x", "/x", "", "a\\b", "model.safetensors", INDEX, "sub/../../x"])
def test_small_files_stay_inside(out: Path, name: str) -> None:
    with pytest.raises(OutputError), CheckpointWriter(out) as checkpoint:
        checkpoint.write_text(name, "x")
    assert not out.exists()


def test_json_without_a_meaning_is_refused(out: Path) -> None:
    with pytest.raises(OutputError, match=r"report\.json"), CheckpointWriter(out) as checkpoint:
        checkpoint.write_json("report.json", {"kl": float("nan")})


def test_an_output_without_tensors_is_refused(out: Path) -> None:
    with pytest.raises(OutputError, match="no tensor"), CheckpointWriter(out) as checkpoint:
        checkpoint.write_json("config.json", {})
    assert not out.exists()


def test_an_absent_companion_is_an_input_error(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"), CheckpointWriter(out) as checkpoint:
        checkpoint.copy(tmp_path / "absent")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_exception_leaves_nothing(out: Path, error: type[BaseException]) -> None:
    def values() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise error

    with pytest.raises(error):
        write(out, more=values(), max_shard_bytes=1)
    assert list(out.parent.iterdir()) == []


# where it may be written


def test_a_new_place_is_fine_and_parents_are_made(out: Path) -> None:
    check_output(out / "x" / "y", False)
    assert not out.exists()
    write(out / "x" / "y")


@pytest.mark.parametrize("name", ["[v2] x", "ü", ".hidden", "a b"])
def test_odd_names_work(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    write(tmp_path / name, force=True)
    assert_holds(tmp_path / name, tensors())


def test_an_empty_folder_is_used(out: Path) -> None:
    out.mkdir()
    assert_holds(write(out), tensors())


def test_an_existing_output_needs_force_and_is_replaced_wholly(out: Path) -> None:
    write(out, max_shard_bytes=400)
    assert "--force" in refusal(out)
    with pytest.raises(OutputError, match="exists"):
        write(out)
    assert_holds(out, tensors())
    write(out, {"other": torch.ones(1)}, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_force_deletes_checkpoints_only(out: Path) -> None:
    out.mkdir()
    (out / "letter.txt").touch()
    assert "choose another folder" in refusal(out)  # and not an option that would be refused, too
    assert "does not look like a checkpoint" in refusal(out, True)
    (out / "config.json").write_text('{"editor": "vim"}')
    assert "does not look like a checkpoint" in refusal(out, True)
    (out / "config.json").write_text('{"model_type": "llama"}')
    check_output(out, True)
    (out / ".git").mkdir()
    assert "does not look like a checkpoint" in refusal(out, True)


def test_home_and_working_folder_are_never_replaced(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(out)
    monkeypatch.setenv("HOME", str(out))
    assert "home" in refusal(out, True)
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(out)
    assert "working folder" in refusal(Path("."), True)
    assert "working folder" in refusal(tmp_path, True)


def test_the_source_is_never_replaced(out: Path, tmp_path: Path) -> None:
    source = write(out / "models" / "source")
    assert "replace the source" in refusal(source, True, source=source)
    assert "replace the source" in refusal(out, True, source=source)
    assert "replace the source" in refusal(out, True, source=source / "model.gguf")
    (tmp_path / "link").symlink_to(source)
    assert "replace the source" in refusal(tmp_path / "link", True, source=source)
    check_output(source / "inside", True, source=source)
    with pytest.raises(OutputError, match="replace the source"):
        write(source, force=True, source=source)
    assert_holds(source, tensors())


def test_a_file_is_in_the_way(out: Path) -> None:
    out.touch()
    assert "existing file" in refusal(out, True)
    assert "is no folder" in refusal(out / "x" / "y")


def test_a_link_to_a_folder_stays_a_link(out: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(out)
    write(tmp_path / "link")
    write(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert_holds(out, tensors())


def test_too_little_space_is_told_before_the_work(out: Path) -> None:
    message = refusal(out, needed_bytes=10**18)
    assert "1000000000000000000 bytes needed" in message
    assert "bytes free" in message


def test_a_mount_point_is_no_output(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    assert "mount point" in refusal(out)


# FM-12: full disks and kills


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


LIMITED = """
import resource, sys, torch
from pathlib import Path
from mla_cli.checkpoint.writer import CheckpointWriter
from mla_cli.errors import OutputError
out = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    with CheckpointWriter(out, max_shard_bytes=int(sys.argv[2])) as checkpoint:
        checkpoint.write_text("notes", "x" * int(sys.argv[3]))
        for i in range(10):
            checkpoint.add(f"t{i}", torch.ones(2500))
except OutputError as error:
    print(error)
print([path.name for path in out.parent.iterdir()])
"""


@pytest.mark.parametrize(("shard", "notes", "needed"), [(60_000, 0, 60_000), (20_000, 80_000, 80_000)])
def test_a_write_that_fails_leaves_nothing(out: Path, shard: int, notes: int, needed: int) -> None:
    done = run_python(LIMITED, str(out), str(shard), str(notes))
    message, left = done.stdout.splitlines()
    assert f"{needed} bytes needed" in message
    assert "bytes free" in message
    assert left == "[]"


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from mla_cli.checkpoint.writer import CheckpointWriter
with CheckpointWriter(Path(sys.argv[1]), max_shard_bytes=1) as checkpoint:
    checkpoint.write_json("config.json", {"model_type": "llama"})
    checkpoint.add("a", torch.ones(1))
    checkpoint.add("b", torch.ones(1))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_nothing_usable_and_is_cleaned_up(out: Path) -> None:
    assert run_python(KILLED, str(out)).returncode == -signal.SIGKILL
    assert not out.exists()
    (remains,) = out.parent.iterdir()
    assert remains.name.startswith(".out.tmp-")
    assert not (remains / "config.json").exists()
    with pytest.raises(InputError):
        open_tensors(remains)
    write(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_moved_aside_by_a_killed_run_is_put_back(out: Path) -> None:
    write(out)
    out.rename(out.with_name(".out.old-999999999-0123abcd"))
    with pytest.raises(OutputError, match="exists"):
        write(out)
    assert_holds(out, tensors())


def test_the_work_of_a_living_run_is_left_alone(out: Path) -> None:
    living = out.with_name(f".out.tmp-{os.getppid()}-0123abcd")
    foreign = out.with_name(".other.tmp-999999999-0123abcd")
    living.mkdir()
    foreign.mkdir()
    with CheckpointWriter(out) as checkpoint:
        clean_leftovers(out)  # as a second writer in this process would
        checkpoint.add("a", torch.ones(1))
    assert out.exists()
    assert living.exists()
    assert foreign.exists()
    living.rmdir()
    foreign.rmdir()


def test_the_old_output_comes_back_if_the_new_one_cannot_take_its_place(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(out)
    rename = Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name and target == out:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OutputError, match="Input/output error"):
        write(out, {"other": torch.ones(1)}, force=True)
    assert_holds(out, tensors())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "the disk is full: 7 bytes needed for x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full: 7 bytes needed for x"),
        (OSError(27, "File too large"), "file size limit"),
        (PermissionError(13, "Permission denied"), "no permission to write x"),
        (RuntimeError("odd"), "x cannot be written: odd"),
    ],
)
def test_disk_errors(tmp_path: Path, error: Exception, words: str) -> None:
    assert words in str(disk.disk_error(error, tmp_path / "absent" / "x", 7))


# sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("20KB", 20_000),
        ("20kb", 20_000),
        (" 1.5 GB ", 1_500_000_000),
        ("2GiB", 2**31),
        ("123", 123),
        ("123B", 123),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "0", "-5GB", "5 apples", "1e9", "inf", "5GBs", "0.5", "5G B", "٥GB", "1" * 99]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="no size"):
        parse_size(text)


# additions in place


@pytest.fixture(params=[10**9, 800])
def checkpoint(request: pytest.FixtureRequest, out: Path) -> Path:
    """A checkpoint in one file, and in three."""
    return write(out, max_shard_bytes=request.param)


SCALES = {f"layer.{i}.k_scale": torch.tensor(0.5 + i) for i in range(3)}


def test_scales_are_added_and_the_rest_is_kept(checkpoint: Path) -> None:
    before = {path.name for path in checkpoint.iterdir()}
    replace_files(checkpoint, {"config.json": b'{"a": 1}', "mla_report.json": b"{}"}, SCALES)
    assert {path.name for path in checkpoint.iterdir()} == before | {"mla_report.json"}
    assert_holds(checkpoint, tensors() | SCALES)
    assert (checkpoint / "config.json").read_bytes() == b'{"a": 1}'
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:  # the library's own reader agrees
            assert opened.metadata() == {"format": "pt"}
            assert all(torch.equal(opened.get_tensor(n), (tensors() | SCALES)[n]) for n in opened.keys())  # noqa: SIM118
    if (checkpoint / INDEX).exists():
        assert json.loads((checkpoint / INDEX).read_text())["metadata"]["total_size"] == 2000 + 12


def test_a_second_calibration_replaces_the_first(checkpoint: Path) -> None:
    replace_files(checkpoint, {}, SCALES)
    changed = {name: tensor.to(torch.bfloat16) * 2 for name, tensor in SCALES.items()} | {"more": torch.ones(3)}
    replace_files(checkpoint, {}, changed)
    assert_holds(checkpoint, tensors() | changed)


def test_small_files_alone(checkpoint: Path) -> None:
    (checkpoint / "config.json").chmod(0o640)
    replace_files(checkpoint, {"config.json": b"{}"})
    assert stat.S_IMODE((checkpoint / "config.json").stat().st_mode) == 0o640
    assert_holds(checkpoint, tensors())


def test_a_reader_from_before_refuses_to_read_on(out: Path) -> None:
    write(out)
    reader = open_tensors(out)
    replace_files(out, {}, SCALES)
    with pytest.raises(InputError, match="changed since it was opened"):
        reader.read("layer.4.weight")


def test_alignment_survives(out: Path) -> None:
    write(out, {"b": torch.ones(3, dtype=torch.int8), "a": torch.ones(3, dtype=torch.bfloat16)})
    replace_files(out, {}, {"z": torch.ones(3, dtype=torch.float64)})
    data = (out / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert [header[name]["data_offsets"][0] for name in ("z", "a", "b")] == [0, 24, 30]


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_stop_at_any_rename_leaves_a_readable_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    replace = os.replace
    calls = [0]

    def failing_replace(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] == stop:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(inplace.os, "replace", failing_replace)
    files = {"config.json": b'{"new": 1}', "mla_report.json": b"{}"}
    try:
        replace_files(checkpoint, files, SCALES)
    except OutputError as error:
        assert "disk is full" in str(error)  # noqa: PT017
        assert "new" not in (checkpoint / "config.json").read_text()
    reader = open_tensors(checkpoint)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize("stop", range(1, 9))
def test_tensors_of_several_files_change_all_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    replace = os.replace
    old, calls, found = tensors(), [0], []  # type: ignore[var-annotated]
    new = {name: tensor * 2 for name, tensor in list(old.items())[::2]}

    def look() -> None:
        reader = open_tensors(checkpoint)
        says = json.loads((checkpoint / "config.json").read_text()).get("says")
        found.append((says, {name: reader.read(name) for name in reader.infos}))

    def watched_replace(source: Any, target: Any) -> None:
        look()
        calls[0] += 1
        if calls[0] == stop:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(inplace.os, "replace", watched_replace)
    said = [json.dumps({"says": word}).encode() for word in ("soon", "done")]
    with suppress(KeyboardInterrupt):
        replace_files(checkpoint, {"config.json": said[1]}, new, before={"config.json": said[0]})
    look()
    for says, state in found:
        doubled = {name for name in old if not torch.equal(state[name], old[name])}
        assert doubled in (set(), set(new))
        assert all(torch.equal(state[name], new[name]) for name in doubled)
        # What is said before holds from before the weights change; what is said in the end, from when they have.
        assert says in ({"soon", "done"} if doubled else {None, "soon"})
    monkeypatch.undo()
    replace_files(checkpoint, {"config.json": said[1]}, new)  # after a stop, the same again
    assert_holds(checkpoint, old | new)
    used = open_tensors(checkpoint).files
    assert sorted(name for file in used for name in load_file(file)) == sorted(old)  # each in one place
    assert calls[0] == stop or set(checkpoint.glob("*.safetensors")) == set(used)


def test_a_failed_write_changes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}

    def failing_write(path: Path, data: bytes) -> None:
        raise disk.disk_error(OSError(28, "full"), path, len(data))

    monkeypatch.setattr(inplace, "write_file", failing_write)
    with pytest.raises(OutputError, match="disk is full"):
        replace_files(checkpoint, {"config.json": b"{}"}, SCALES)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "model.safetensors", INDEX, "pytorch_model.bin"])
def test_only_small_files_are_replaced_by_name(checkpoint: Path, name: str) -> None:
    with pytest.raises(OutputError, match="small file"):
        replace_files(checkpoint, {name: b""})


def test_download_caches_and_pickles_are_not_changed(out: Path, tmp_path: Path) -> None:
    write(tmp_path / "blobs")
    out.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (out / file.name).symlink_to(file)
    for call in (lambda: replace_files(out, {"config.json": b""}), lambda: replace_files(out, {}, SCALES)):
        with pytest.raises(OutputError, match="--out"):
            call()
    (tmp_path / "pickle").mkdir()
    torch.save(tensors(), tmp_path / "pickle" / "pytorch_model.bin")
    with pytest.raises(OutputError, match="--out"):
        replace_files(tmp_path / "pickle", {}, SCALES)


def test_scales_must_be_finite(checkpoint: Path) -> None:
    with pytest.raises(MlaError, match=r"layer\.0\.k_scale"):
        replace_files(checkpoint, {}, {"layer.0.k_scale": torch.tensor(float("inf"))})
    assert_holds(checkpoint, tensors())


def test_odd_shards_are_extended_where_the_name_is(out: Path) -> None:
    out.mkdir()
    save_file({"a": torch.ones(9)}, out / "x.safetensors")
    save_file({"b": torch.ones(2), "k_scale": torch.ones(1)}, out / "y.safetensors")
    owners = {"a": "x.safetensors", "b": "y.safetensors", "k_scale": "y.safetensors"}
    (out / INDEX).write_text(json.dumps({"metadata": None, "weight_map": owners}))
    replace_files(out, {}, {"k_scale": torch.zeros(1), "v_scale": torch.zeros(1)})
    assert open_tensors(out).infos["v_scale"].file.name == "y.safetensors"
    assert open_tensors(out).read("k_scale").item() == 0
