"""Tasks by name: which there are, checked before any model is loaded, and the built-in ones read from local files."""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from mla_cli.errors import InputError, MlaError, NetworkError, UnsupportedError, UsageError

PERPLEXITY, DIVERGENCE = OWN_TASKS = ("ppl", "kl")

HUB_SECONDS = 4.0  # to find out whether the Hub answers; a machine without a network must not wait longer

# The harness's own seed for drawing few-shot examples.
FEWSHOT_SEED = 1234


@dataclass(frozen=True)
class BuiltinTask:
    """A task of the harness that can also be read from local files.

    Attributes:
        definition: the harness's task file; files: split to data file; fields: what each record must hold, and of which types.
        variant: which of several tasks of that name it is, and how it counts.
        changes: further keys of the task file.
    """

    definition: str
    files: Mapping[str, str]
    fields: Mapping[str, tuple[type, ...]]
    variant: str
    changes: Mapping[str, Any]


def _accuracies(*names: str) -> dict[str, Any]:
    return {"metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]}


BUILTIN_TASKS: dict[str, BuiltinTask] = {
    "lambada_openai": BuiltinTask(
        "lambada/lambada_openai.yaml",
        {"test": "lambada/test.jsonl"},
        {"text": (str,)},
        "lambada_openai: OpenAI's text, not detokenised; the whole last word counts, all of its tokens greedy",
        {},
    ),
    "hellaswag": BuiltinTask(
        "hellaswag/hellaswag.yaml",
        {"train": "hellaswag/validation.jsonl", "validation": "hellaswag/validation.jsonl"},
        {"activity_label": (str,), "ctx_a": (str,), "ctx_b": (str,), "endings": (list,), "label": (str, int)},
        "hellaswag: 0-shot, validation split; acc_norm divides by characters, acc_bytes by UTF-8 bytes",
        _accuracies("acc", "acc_norm", "acc_bytes"),
    ),
    "gsm8k": BuiltinTask(
        "gsm8k/gsm8k.yaml",
        {"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"},
        {"question": (str,), "answer": (str,)},
        "gsm8k: 5-shot, greedy; exact_match compares text as the harness does, numeric_match compares numbers",
        {},
    ),
}
ALIASES = {"lambada": "lambada_openai"}


@dataclass(frozen=True)
class TaskPlan:
    """What was asked for, by where it comes from. `labels`: task of the harness to the name the user gave it."""

    own: tuple[str, ...]
    builtin: tuple[str, ...]
    other: tuple[str, ...]
    labels: Mapping[str, str]
    data: Path | None

    @property
    def harness(self) -> tuple[str, ...]:
        """All names that the harness runs."""
        return self.builtin + self.other

    @property
    def offline(self) -> bool:
        """Whether everything is read from local files."""
        return not self.other and (self.data is not None or not self.builtin)

    @property
    def variants(self) -> dict[str, str]:
        """For each built-in task, which variant it is."""
        return {self.labels[name]: BUILTIN_TASKS[name].variant for name in self.builtin}


def split_names(text: str) -> tuple[str, ...]:
    """Task names of a comma-separated list, each once; spaces around them do not matter.

    Raises:
        UsageError: there is none.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError("no task is named", where="--tasks", fix="name some, e.g. --tasks lambada,hellaswag")
    return names


def tasks_in_reach(data: Path | None) -> tuple[str, ...]:
    """The default tasks: the built-in ones whose files `data` holds, and perplexity."""
    shown = {canonical: alias for alias, canonical in ALIASES.items()}
    found = [
        shown.get(name, name)
        for name, task in BUILTIN_TASKS.items()
        if data is not None and all((data / file).is_file() for file in task.files.values())
    ]
    return (*found, PERPLEXITY)


def plan_tasks(names: Sequence[str], data: Path | None) -> TaskPlan:
    """Check task names and local files; a folder that happens to bear a task's name plays no part.

    Raises:
        UsageError: the harness has no such task. InputError: a local file is missing or is not what the task reads.
    """
    own = tuple(name for name in names if name in OWN_TASKS)
    labels = {ALIASES.get(name, name): name for name in names if name not in OWN_TASKS}
    builtin = tuple(name for name in labels if name in BUILTIN_TASKS)
    other = tuple(name for name in labels if name not in BUILTIN_TASKS)
    if labels:
        require_harness()
    if other:
        _check_known(other)
    if data is not None:
        for name in builtin:
            for file in dict.fromkeys(BUILTIN_TASKS[name].files.values()):
                _check_records(labels[name], data / file, BUILTIN_TASKS[name].fields)
    return TaskPlan(own, builtin, other, labels, data)


def require_harness() -> None:
    """Refuse to go on where lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UnsupportedError("lm-evaluation-harness is not installed", fix="pip install 'mla-cli[eval]'")


def load_tasks(plan: TaskPlan, folder: Path) -> dict[str, Any]:
    """The harness's task objects, with their data, as its evaluator takes them; under `runs` the same in parts, by task.

    Args:
        folder: where the overriding task files and the data's cache go; it must outlive the tasks.

    Raises:
        NetworkError: a data set has to be fetched and cannot be. InputError: local data cannot be read.
    """
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    runs: list[tuple[str, dict[str, Any]]] = []
    # Without an answer only the local cache is looked at: the client would try again for half a minute for each file.
    with quiet_harness(), _offline(plan.offline or not _hub_answers()):
        from lm_eval.tasks import TaskManager

        for name in plan.builtin:
            _write_override(name, plan.data, folder)
        builtin = TaskManager(include_path=str(folder), include_defaults=False)
        for name in plan.harness:
            manager = builtin if name in plan.builtin else _all_tasks()
            found = _load(manager, name, plan)
            runs = _with_run(runs, plan.labels[name], found)
            for kind in loaded:
                loaded[kind].update(found[kind])
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            what = f"task '{name}' runs generated code or needs images: not supported"
            raise UnsupportedError(what, where="--tasks", fix="evaluate another task")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return {**loaded, "runs": runs}


def _with_run(
    runs: Sequence[tuple[str, dict[str, Any]]], label: str, found: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """The runs and one more, which takes in those that share tasks with it: no task runs twice."""
    apart = [run for run in runs if not run[1]["tasks"].keys() & found["tasks"].keys()]
    shared = [run for run in runs if run not in apart]
    merged = {kind: {name: one for _, run in shared for name, one in run[kind].items()} | found[kind] for kind in found}
    return [*apart, (", ".join([*(name for name, _ in shared), label]), merged)]


@contextmanager
def quiet_harness() -> Iterator[None]:
    """The harness without its log lines and its own progress bars, which would mix with ours."""
    import lm_eval.api.task as task_module

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bar = task_module.tqdm
    task_module.tqdm = partial(bar, disable=True)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # what goes wrong is raised, and told in our words
    try:
        yield
    finally:
        task_module.tqdm = bar
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@lru_cache(maxsize=1)
def _all_tasks() -> Any:
    # The harness reads thousands of files for this: about 10 s.
    from lm_eval.tasks import TaskManager

    with quiet_harness():
        return TaskManager()


def _check_known(names: Sequence[str]) -> None:
    known = tuple(dict.fromkeys((*OWN_TASKS, *ALIASES, *_all_tasks().all_tasks)))
    for name in names:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            advice = f"did you mean {', '.join(similar)}?" if similar else "`lm-eval ls tasks` lists them"
            raise UsageError(f"there is no task '{name}'", where="--tasks", fix=advice)


def _check_records(label: str, file: Path, fields: Mapping[str, tuple[type, ...]]) -> None:
    """Every line, in a fraction of a second: a mistake far down must not come out after the tasks before it have run."""
    count = 0
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    count += 1
                    wrong = _what_is_wrong(line, fields)
                    if wrong is not None:
                        what = f"a record of task '{label}' cannot be used: {wrong}"
                        raise InputError(what, where=f"{file}, line {number}", fix="mend the line, or check --data")
    except FileNotFoundError as error:
        what = f"the data file of task '{label}' does not exist"
        raise InputError(what, where=file, fix="check --data") from error
    except OSError as error:
        what = f"the data file of task '{label}' cannot be read: {error.strerror}"
        raise InputError(what, where=file, fix="check --data") from error
    if not count:
        raise InputError(f"the data file of task '{label}' is empty", where=file, fix="check --data")


def _what_is_wrong(line: bytes, fields: Mapping[str, tuple[type, ...]]) -> str | None:
    try:
        record = json.loads(line.decode("utf-8").strip())
    except UnicodeDecodeError as error:
        return f"not UTF-8 text at byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return "not JSON" + (f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "")
    if not isinstance(record, dict):
        return "not a JSON object"
    missing = [name for name in fields if name not in record]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for name, kinds in fields.items():
        value = record[name]
        if not isinstance(value, kinds):
            return f"'{name}' is {_kind(value)}"
        if isinstance(value, list) and not all(isinstance(one, str) for one in value):
            return f"'{name}' is not a list of texts"
    return None


def _kind(value: Any) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _write_override(name: str, data: Path | None, folder: Path) -> None:
    # JSON is YAML. Without local data only the name is registered: reading all of the harness's tasks takes 10 s.
    task = BUILTIN_TASKS[name]
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None:
        raise MlaError("lm-evaluation-harness is damaged", fix="install it again: pip install 'mla-cli[eval]'")
    override: dict[str, Any] = {"include": str(Path(package.origin).parent / "tasks" / task.definition), "task": name}
    override.update(task.changes)
    if data is not None:
        files = {split: _linked(data / file, folder) for split, file in task.files.items()}
        cache = str(folder / "cache")
        override.update(
            dataset_path="json", dataset_name=None, dataset_kwargs={"data_files": files, "cache_dir": cache}
        )
    (folder / f"{name}.yaml").write_text(json.dumps(override), encoding="utf-8")


def _linked(file: Path, folder: Path) -> str:
    # The data library takes brackets and stars of a path for a pattern; ours has none.
    link = folder / f"{file.parent.name}-{file.name}"
    if not link.exists():
        try:
            link.symlink_to(file.resolve())
        except OSError:
            shutil.copyfile(file, link)
    return str(link)


def _load(manager: Any, name: str, plan: TaskPlan) -> dict[str, Any]:
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    label = plan.labels[name]
    try:
        found: dict[str, Any] = manager.load([name])
    except (DatasetsError, OSError, RuntimeError, ValueError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if name in plan.builtin and plan.data is not None:
            # Each record is sound by itself; the library's own words name neither file nor line.
            where = ", ".join(dict.fromkeys(str(plan.data / file) for file in BUILTIN_TASKS[name].files.values()))
            what = f"the data of task '{label}' cannot be read"
            fix = "give every line the same keys, each once, with values of the same types (--debug says more)"
            raise InputError(what, where=where, fix=fix) from error
        if isinstance(error, ImportError) or not isinstance(error, (OSError, DatasetNotFoundError)):
            raise MlaError(f"task '{label}' cannot be loaded: {reason}", fix="rerun with --debug") from error
        local = "; or give local files with --data DIR" if name in plan.builtin else ""
        raise NetworkError(
            f"task '{label}' needs the data set {_dataset(manager, name, reason)}, which is neither in the local cache nor "
            f"to be had from the Hugging Face Hub{'' if 'reach' in reason else f': {reason}'}",
            fix=f"check the connection (and HF_HUB_OFFLINE){local}",
        ) from error
    return found


def _hub_answers() -> bool:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # the library passes on whatever its HTTP client raises
        return False
    return True


def _dataset(manager: Any, name: str, reason: str) -> str:
    named = re.search(r"'([\w.-]+/[\w.-]+)'", reason)  # of a group: the one that was missing
    entry = manager.task_index.get(name)
    return named[1] if named else str(((entry.cfg if entry else None) or {}).get("dataset_path", "it uses"))


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """No look at the network while local files are read (what HF_HUB_OFFLINE and HF_DATASETS_OFFLINE set at import)."""
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
