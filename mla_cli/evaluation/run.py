"""An evaluation from names to report: tasks, models one after the other on the same items, paired statistics."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from mla_cli.checkpoint.latent_strength import check_latent_strength
from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.console import note, progress, warn
from mla_cli.errors import InputError, MlaError, UsageError, first_line, internal_error, is_out_of_memory
from mla_cli.evaluation.fidelity import WINDOW, WindowLoss, check_vocabularies, kl_divergence, perplexity, windows
from mla_cli.evaluation.report import Report, compare_tasks, failure
from mla_cli.evaluation.results import Measured, TaskResult
from mla_cli.evaluation.statistics import Items, value
from mla_cli.evaluation.subject import Subject, check_kv_dtype, load_subject
from mla_cli.evaluation.tasks import DIVERGENCE, PERPLEXITY, TaskPlan, load_tasks, plan_tasks
from mla_cli.model.tokenizer import load_tokenizer
from mla_cli.runtime.triton_kernels import check_triton

# Below `--data DIR`: what perplexity is measured on unless a text is given.
DATA_TEXT = "text/wikitext2-test.txt"


@dataclass(frozen=True)
class _Work:
    """What every model is measured on: the harness's tasks and a text, with how many items of each."""

    plan: TaskPlan
    tasks: dict[str, Any] | None
    text: str | None
    limit: int | None
    batch_size: int | None
    failed: dict[str, MlaError] = field(default_factory=dict)  # by the user's name of the task

    @contextmanager
    def attempt(self, *names: str) -> Iterator[None]:
        """Note what stops a task, so that the others go on."""
        try:
            yield
        except OSError:  # of the disk or a closed pipe: not the task's
            raise
        except Exception as error:
            self.failed.update((name, _explained(error)) for name in names)


def evaluate(
    checkpoint: str,
    names: Sequence[str],
    *,
    baseline: str | None = None,
    data: Path | None = None,
    text: Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    max_drop: float = 2.3,
    kv_dtype: str = "auto",
    latent_strength: float = 1.0,
    weights: str = "float",
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Report:
    """Measure a checkpoint, and a baseline on the same items where one is given.

    A task that fails on one of them is left out, and the report says why.

    Args:
        names: tasks: `ppl`, `kl`, or any of lm-evaluation-harness. data: folder with the built-in tasks' files.
        text: what `ppl` and `kl` read. limit: items (windows of text) of each task; None: all.
        batch_size: sequences of a forward pass; None: as many as suit the device.
        max_drop: percent that a metric may be worse than the baseline's.
        latent_strength: share of the checkpoint's latent channels that is used (the baseline is used whole).
        weights: `float`, or `int8` for the checkpoint's projections (the baseline's stay as they are).
        backend: what computes the attention of both (see `open_engine`).

    Raises:
        MlaError: a name, a file or a model cannot be used, or every task fails.
    """
    started = perf_counter()
    device = torch.device(device)
    check_triton(backend, device)
    plan = plan_tasks(names, data)
    if DIVERGENCE in plan.own and baseline is None:
        raise UsageError("KL divergence needs a model to compare with", where="--tasks kl", fix="add --baseline SRC")
    words, text_name = read_text(text, data) if plan.own else (None, None)
    source = open_model(checkpoint)
    other = None if baseline is None else open_model(baseline)
    check_kv_dtype(source, kv_dtype)
    check_latent_strength(source, latent_strength)
    if DIVERGENCE in plan.own and other is not None and words is not None:
        _check_comparable(other, source, words)
    with _loaded(plan) as tasks:
        work = _Work(plan, tasks, words, limit, batch_size)
        candidate = _load(source, device, dtype, backend, kv_dtype, latent_strength, weights)
        facts, theirs_facts = candidate.facts, None
        results, theirs = _measure(candidate, work), {}
        kept = candidate if DIVERGENCE in plan.own else None
        del candidate  # never two models in memory where one will do
        if other is not None:
            reference = _load(other, device, dtype, backend)
            theirs_facts = reference.facts
            theirs = _measure(reference, work)
            if kept is not None:
                with work.attempt(*plan.own):
                    _divergence(reference, kept, work, theirs, results)
            results = {task: result for task, result in results.items() if task in theirs or task == DIVERGENCE}
            _check_same_text(results, theirs)
    if work.failed and not results:
        first = next(iter(work.failed.values()))
        told = failure(work.failed)
        raise type(first)(told.what, where=told.where, fix=told.fix) from first
    order = {name: place for place, name in enumerate(names)}
    labelled = {plan.labels.get(task, task): result for task, result in results.items()}
    labelled = dict(sorted(labelled.items(), key=lambda item: order.get(item[0], len(order))))
    theirs = {plan.labels.get(task, task): result for task, result in theirs.items()}
    return Report(
        tasks=compare_tasks(labelled, theirs, max_drop=max_drop, seed=seed),
        samples={task: result.count for task, result in labelled.items() if result.count},
        seconds=perf_counter() - started,
        compared=other is not None,
        facts={
            "checkpoint": facts,
            "baseline": theirs_facts,
            "cache_bytes_per_token": {
                "checkpoint": facts["cache_bytes_per_token"],
                "baseline": theirs_facts and theirs_facts["cache_bytes_per_token"],
            },
            "variants": plan.variants,
            "text": text_name,
            "window": min(WINDOW, facts["max_length"]),
            "limit": limit,
            "batch_size": batch_size or "auto",
            "max_drop": max_drop,
            "device": str(device),
            "seed": seed,
            "versions": versions(),
        },
        failed=work.failed,
    )


def _explained(error: Exception) -> MlaError:
    if isinstance(error, MlaError):
        return error
    if is_out_of_memory(error):
        found = MlaError(f"out of memory: {first_line(error)}", fix="lower --batch-size or --limit")
    else:
        found = internal_error(error)
    found.__cause__ = error  # shown by --debug
    return found


def read_text(text: Path | None, data: Path | None) -> tuple[str, str]:
    """The text for `ppl` and `kl`, and what to call it.

    Raises:
        InputError: the file is not UTF-8 text.
    """
    file = text if text is not None else data / DATA_TEXT if data is not None and (data / DATA_TEXT).is_file() else None
    if file is None:
        from mla_cli.calibration.texts import builtin_english

        return builtin_english(), "built-in English"
    try:
        return file.read_text(encoding="utf-8"), file.name
    except UnicodeDecodeError as error:
        what = f"the text is not UTF-8: byte {error.start}"
        raise InputError(what, where=file, fix="convert the file to UTF-8, or check --text") from error
    except OSError as error:
        raise InputError(f"the text cannot be read: {error.strerror}", where=file, fix="check --text") from error


def versions() -> dict[str, str]:
    """Versions of everything that a number can depend on."""
    found = {"python": platform.python_version()}
    for package in ("mla-cli", "torch", "tokenizers", "lm_eval", "datasets"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def _loaded(plan: TaskPlan) -> Iterator[dict[str, Any] | None]:
    """The harness's tasks, whose data is cached only as long as it is read."""
    if not plan.harness:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mla-eval-", ignore_cleanup_errors=True) as folder:
        yield load_tasks(plan, Path(folder))


def _load(
    model: ModelSource,
    device: torch.device,
    dtype: torch.dtype | None,
    backend: str,
    kv_dtype: str = "auto",
    latent_strength: float = 1.0,
    weights: str = "float",
) -> Subject:
    for remark in model.notes:
        note(remark)
    note(f"evaluating {model.source.name}")
    return load_subject(
        model, device=device, dtype=dtype, kv_dtype=kv_dtype, latent_strength=latent_strength, weights=weights,
        backend=backend,
    )  # fmt: skip


def _measure(subject: Subject, work: _Work) -> dict[str, TaskResult]:
    results: dict[str, TaskResult] = {}
    if work.tasks is not None:
        from mla_cli.evaluation.harness import HarnessModel
        from mla_cli.evaluation.harness_tasks import run_tasks

        model = HarnessModel(
            subject.decoder, subject.tokenizer, batch_size=work.batch_size, quantizers=subject.quantizers
        )
        for label, tasks in work.tasks["runs"]:
            if label not in work.failed:  # on the other model
                with work.attempt(label):
                    results.update(run_tasks(model, tasks, limit=work.limit))
        _ungate_parts(results, work)
    # The divergence gives both.
    if PERPLEXITY in work.plan.own and DIVERGENCE not in work.plan.own and PERPLEXITY not in work.failed:
        with work.attempt(PERPLEXITY):
            parts = _windows(subject, work)
            found = perplexity(subject.decoder, parts, batch_size=work.batch_size, quantizers=subject.quantizers)
            losses = list(progress(found, "perplexity", total=len(parts), unit="window"))
            results[PERPLEXITY] = _perplexity(losses, parts)
    return results


def _check_same_text(ours: Mapping[str, TaskResult], theirs: Mapping[str, TaskResult]) -> None:
    read = [results[PERPLEXITY].metrics[PERPLEXITY].items for results in (ours, theirs) if PERPLEXITY in results]
    if len({items.identity for items in read if items is not None}) > 1:
        warn("the two models split the text into different tokens: their perplexities, per token, do not compare")


def _ungate_parts(results: dict[str, TaskResult], work: _Work) -> None:
    """Where a group of tasks was asked for and has a score of its own, that alone is held against the gate."""
    for name in work.plan.other:
        group = work.tasks["groups"].get(name) if work.tasks else None
        if group is None or name not in results:
            continue
        inside = {task.task_name for task in group.get_all_tasks()} | {part.name for part in group.get_all_groups()}
        for part in inside - set(work.plan.harness):
            if part in results:
                metrics = {metric: replace(m, gated=False) for metric, m in results[part].metrics.items()}
                results[part] = TaskResult(metrics, results[part].count)


def _check_comparable(source: ModelSource, ours: ModelSource, text: str) -> None:
    check_vocabularies(source.spec, ours.spec)
    tokens = [load_tokenizer(model.source.folder).encode(text) for model in (source, ours)]
    lengths = {model.spec.max_position_embeddings for model in (source, ours)}
    if tokens[0] != tokens[1] or (len(lengths) > 1 and min(lengths) < WINDOW):
        raise InputError(
            "KL divergence needs one tokenizer and room for the same windows; the two models split the text differently",
            fix="compare with the model that the checkpoint was converted from",
        )


def _divergence(
    reference: Subject, ours: Subject, work: _Work, theirs: dict[str, TaskResult], results: dict[str, TaskResult]
) -> None:
    """Add the divergence to `results`, and each model's perplexity to its own where that was asked for too."""
    parts = _windows(reference, work)
    running = kl_divergence(reference.decoder, ours.decoder, parts, quantizers=ours.quantizers)
    found = list(progress(running, "divergence", total=len(parts), unit="window"))
    positions = [window.positions for window in found]
    kl = Items.of([window.divergence for window in found], positions)
    agreement = Items.of([window.agreed for window in found], positions)
    metrics = {
        "kl": Measured(value(kl), kl, False, gated=False),
        "top_token_agreement": Measured(value(agreement), agreement, True, gated=False),
    }
    results[DIVERGENCE] = TaskResult(metrics, len(found))
    if PERPLEXITY in work.plan.own:
        theirs[PERPLEXITY] = _perplexity([window.source for window in found], parts)
        results[PERPLEXITY] = _perplexity([window.ours for window in found], parts)


def _perplexity(losses: Sequence[WindowLoss], parts: Sequence[tuple[int, ...]]) -> TaskResult:
    tokens, identity = [loss.tokens for loss in losses], hash(tuple(parts))
    nll = replace(Items.of([loss.nll for loss in losses], tokens), identity=identity)
    ppl = replace(nll, transform="exp")
    acc = replace(Items.of([loss.hits for loss in losses], tokens), identity=identity)
    metrics = {
        PERPLEXITY: Measured(value(ppl), ppl, False),
        "loss": Measured(value(nll), nll, False, gated=False),  # the logarithm of the perplexity, which has the gate
        "acc": Measured(value(acc), acc, True),
    }
    return TaskResult(metrics, len(losses))


def _windows(subject: Subject, work: _Work) -> list[tuple[int, ...]]:
    assert work.text is not None
    tokens = subject.tokenizer.encode(work.text)
    return windows(tokens, max_length=subject.decoder.spec.max_position_embeddings, limit=work.limit)
