"""Task names and data, checked before any model is loaded (cases EV-05, EV-06, EV-13, EV-14)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mla_cli.errors import InputError, NetworkError, UnsupportedError, UsageError
from mla_cli.evaluation import tasks
from mla_cli.evaluation.tasks import load_tasks, plan_tasks, split_names, tasks_in_reach
from tests.evaluation.small_model import save_data

pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'mla-cli[eval]'")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_data(tmp_path_factory.mktemp("data [v2] *"))  # a pattern to whoever does not take paths literally


class FewTasks:
    """Stands for the harness's own list, which takes 10 s to read."""

    all_tasks = ("lambada", "lambada_openai", "hellaswag", "gsm8k", "arc_easy", "arc_challenge", "piqa")


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_all_tasks", FewTasks)


def test_names_are_a_list_in_which_spaces_do_not_matter() -> None:
    assert split_names("lambada, hellaswag ,,lambada") == ("lambada", "hellaswag")
    with pytest.raises(UsageError, match="no task is named"):
        split_names(" , ")


@pytest.mark.usefixtures("few_tasks")
def test_an_unknown_name_is_answered_with_similar_ones() -> None:
    with pytest.raises(UsageError, match=r"no task 'lambda'.*did you mean lambada"):
        plan_tasks(("lambda",), None)
    with pytest.raises(UsageError, match=r"no task 'arc'.*arc_easy"):
        plan_tasks(("lambada", "arc"), None)
    with pytest.raises(UsageError, match="lists them"):
        plan_tasks(("zzzzqqq",), None)


@pytest.mark.usefixtures("few_tasks")
def test_a_folder_or_file_with_a_task_s_name_plays_no_part(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    for name in ("hellaswag", "lambada_openai", "json"):
        (work / name).mkdir(parents=True)
        (work / name / "data.jsonl").write_text('{"text": "hijacked"}\n')
    (work / "mine.yaml").write_text("task: mine\n")
    (tmp_path / "cache").mkdir()
    monkeypatch.chdir(work)
    loaded = load_tasks(plan_tasks(("hellaswag", "lambada"), data), tmp_path / "cache")
    assert {name: len(task.eval_docs) for name, task in loaded["tasks"].items()} == {
        "lambada_openai": 8,
        "hellaswag": 8,
    }
    with pytest.raises(UsageError, match=r"no task 'mine\.yaml'"):
        plan_tasks(("mine.yaml",), None)


def test_local_tasks_are_the_harness_s_own_but_for_the_data(data: Path, tmp_path: Path) -> None:
    plan = plan_tasks(("lambada", "hellaswag", "gsm8k", "ppl"), data)
    assert plan.offline
    assert plan.own == ("ppl",)
    assert "whole last word" in plan.variants["lambada"]
    assert "characters" in plan.variants["hellaswag"]
    loaded = load_tasks(plan, tmp_path)["tasks"]
    assert loaded["gsm8k"].config.num_fewshot == 5
    assert loaded["gsm8k"].config.generation_kwargs["until"] == ["Question:", "</s>", "<|im_end|>"]
    record = json.loads((data / "lambada/test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    document = loaded["lambada_openai"].eval_docs[0]
    assert document == record
    assert loaded["lambada_openai"].doc_to_text(document) == record["text"].rsplit(" ", 1)[0]
    assert loaded["lambada_openai"].doc_to_target(document) == " " + record["text"].rsplit(" ", 1)[1]
    assert loaded["hellaswag"].eval_docs[0]["query"].startswith("Walking. home: ")


def test_lengths_of_endings_are_characters_and_bytes_apart(data: Path, tmp_path: Path) -> None:
    task = load_tasks(plan_tasks(("hellaswag",), data), tmp_path)["tasks"]["hellaswag"]
    document = {"query": "x", "choices": ["coffee!", "naïveté"], "label": 0}
    found = task.process_results(document, [(-10.0, False), (-11.0, False)])
    assert found["acc_norm"] == 1.0  # both have 7 characters
    assert found["acc_bytes"] == 0.0  # 7 and 9 bytes


def test_default_tasks_are_those_with_data(data: Path, tmp_path: Path) -> None:
    assert tasks_in_reach(data) == ("lambada", "hellaswag", "gsm8k", "ppl")
    assert tasks_in_reach(tmp_path) == ("ppl",)
    assert tasks_in_reach(None) == ("ppl",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ("not json\n", "not JSON at column 1"),
        ('{"sentence": "x"}\n', "it lacks text"),
        ("[1]\n", "not a JSON object"),
        ('{"text": ["x"]}\n', "'text' is a list"),
        (b'{"text": "\xff"}\n', "not UTF-8 text at byte 11"),
    ],
)
def test_a_data_file_that_is_not_the_task_s_is_named(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    file = tmp_path / "lambada/test.jsonl"
    file.parent.mkdir()
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=message) as failure:
        plan_tasks(("lambada",), tmp_path)
    assert "task 'lambada'" in failure.value.what
    assert failure.value.where == (f"{file}, line 1" if content else str(file))
    assert failure.value.fix is not None


def test_a_damaged_line_further_down_is_found_before_any_work(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "hellaswag/validation.jsonl"
    file.parent.mkdir()
    record = json.loads((data / "hellaswag/validation.jsonl").read_text(encoding="utf-8").splitlines()[0])
    for damage, message in (
        ('{"ctx_a": ', "not JSON at column 10"),
        (json.dumps(record | {"endings": ["a", 1]}), "'endings' is not a list of texts"),
        (json.dumps(record | {"label": None}), "'label' is null"),
    ):
        file.write_text(f"{json.dumps(record)}\n\n{damage}\n")
        with pytest.raises(InputError, match=message) as failure:
            plan_tasks(("hellaswag",), tmp_path)
        assert failure.value.where == f"{file}, line 3"


def test_what_the_data_library_refuses_is_told_in_our_own_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lambada/test.jsonl"
    file.parent.mkdir()
    file.write_text('{"text": "a b c"}\n{"text": "a b c", "text": "a b c"}\n')
    (tmp_path / "cache").mkdir()
    with pytest.raises(InputError) as failure:
        load_tasks(plan_tasks(("lambada",), tmp_path), tmp_path / "cache")
    assert str(failure.value) == (
        f"the data of task 'lambada' cannot be read [{file}] -> "
        "give every line the same keys, each once, with values of the same types (--debug says more)"
    )
    assert capfd.readouterr().err == ""


def test_without_a_network_the_data_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    import huggingface_hub

    def no_route(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    class Session:
        head = get = request = stream = no_route

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    started = time.perf_counter()
    with pytest.raises(NetworkError, match=r"EleutherAI/lambada_openai.*--data DIR") as failure:
        load_tasks(plan_tasks(("lambada",), None), tmp_path)
    assert failure.value.exit_code == 1
    assert time.perf_counter() - started < 10


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert plan_tasks(("ppl",), None).own == ("ppl",)  # ours need no harness
    with pytest.raises(UnsupportedError, match=r"pip install 'mla-cli\[eval\]'"):
        plan_tasks(("lambada",), None)


def test_reading_local_data_leaves_the_network_as_it_was(data: Path, tmp_path: Path) -> None:
    load_tasks(plan_tasks(("lambada",), data), tmp_path)
    hub, sets = sys.modules["huggingface_hub.constants"], sys.modules["datasets.config"]
    assert (hub.HF_HUB_OFFLINE, sets.HF_HUB_OFFLINE) == (False, False) or "HF_HUB_OFFLINE" in os.environ
