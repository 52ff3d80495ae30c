"""The conversion from start to end: source, plan, statistics, rotary split, factorisation, writing, verification, report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mla_cli.calibration.choose_texts import choose_texts
from mla_cli.calibration.texts import CalibrationTexts, split_heldout
from mla_cli.checkpoint.disk import remove
from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.checkpoint.writer import check_output, replace_files
from mla_cli.console import note
from mla_cli.converters.closed_form import ClosedForm, closed_form, gather_source_statistics, ticking
from mla_cli.converters.held_out import Loss, measure
from mla_cli.converters.layer_bank import LayerBank
from mla_cli.converters.layerwise import Batches
from mla_cli.converters.options import HELD_OUT, PILOT_HELD_OUT, PILOT_SAMPLES, SPLIT_SAMPLES, ConvertOptions
from mla_cli.converters.plan import (
    DEFAULT_RATIO,
    ConversionPlan,
    Form,
    choose_form,
    make_plan,
    rope_candidates,
    standard_layers,
)
from mla_cli.converters.report import Timings, build_report, model_card
from mla_cli.converters.statistics import SourceStatistics
from mla_cli.converters.write import output_dtype, report_files, write_checkpoint
from mla_cli.errors import InputError, MlaError, UsageError
from mla_cli.model.tokenizer import load_tokenizer

# Rounding the weights to bfloat16 moves the held-out loss by about 1e-3 nats; a wrong tensor by far more than this.
VERIFY_NATS = 0.05


def plan_conversion(model: ModelSource, options: ConvertOptions) -> list[ConversionPlan]:
    """The plans worth trying: one, unless the rotary width is to be chosen by measured loss.

    Raises:
        UsageError: an option is outside its range for this model.
    """
    form, reason = choose_form(model.spec, options.format)
    try:
        return _plans(model, options, form, reason)
    except UsageError as refusal:
        if options.format != "auto" or form == "native":
            raise
        return _plans(model, options, "native", refusal.what)


def _plans(model: ModelSource, options: ConvertOptions, form: Form, reason: str) -> list[ConversionPlan]:
    shape = {"ratio": options.ratio, "kv_lora_rank": options.kv_lora_rank}
    whole = standard_layers(model.spec)[0]
    widths = [options.qk_rope_head_dim]
    if options.qk_rope_head_dim is None:
        budget = (
            int(whole.cached_per_token / (options.ratio or DEFAULT_RATIO)) if options.kv_lora_rank is None else 1 << 30
        )
        widths = list(rope_candidates(model.spec, form, budget))
        if options.kv_lora_rank is not None:
            widths = widths[:1]  # the rank is fixed, so a wider rotary key only adds quality
    return [make_plan(model.spec, form=form, reason=reason, qk_rope_head_dim=w, **shape) for w in widths]  # type: ignore[arg-type]


def convert(source: str, out: Path, options: ConvertOptions, *, device: torch.device, command: str) -> dict[str, Any]:
    """Convert `source` and write the checkpoint to `out`.

    Returns:
        The report that `out/mla_report.json` holds.

    Raises:
        MlaError: anything that stops it; nothing is left at `out` then.
    """
    timings = Timings()
    with _timed(timings, "open"):
        model = open_model(source)
        plans = plan_conversion(model, options)
        dtype = output_dtype(model.stored_dtype, plans[0].form, options.dtype)
        check_output(out, options.force, source=model.source.folder, needed_bytes=_stored_numbers(model) * dtype.itemsize)
        notes = [*model.notes]
        stored = {model.source.tensors.infos[rule.source].dtype for rule in model.rules.values()}
        if stored != {dtype}:
            found = ", ".join(sorted(_name(kind) for kind in stored))
            notes.append(f"weights are written in {_name(dtype)} (the source has {found})")
    for line in notes:
        note(line)
    note(f"writing the {plans[0].form} form: {plans[0].reason}")

    with _timed(timings, "texts"):
        tokenizer = load_tokenizer(model.source.folder)
        texts = choose_texts(
            model, tokenizer, calib=options.calib, samples=options.samples, seq_len=options.seq_len,
            seed=options.seed, device=device,
        )  # fmt: skip
        fitted, unseen = split_heldout(texts)
        if not len(unseen.lengths):
            raise InputError(
                f"one calibration sequence is not enough ({texts.origin})", fix="give more text, or use --calib self"
            )
        unseen = _first(unseen, HELD_OUT)
    bank = LayerBank(model, device)
    longest = int(fitted.lengths.max())
    batches = Batches.fit(longest, model.spec.hidden_size, model.spec.num_layers)
    with _timed(timings, "source_statistics"):
        seen = fitted if options.objective == "activation" else _first(fitted, SPLIT_SAMPLES)
        statistics = gather_source_statistics(bank, seen, batches)
    with _timed(timings, "rotary_width"):
        plan = _choose_plan(bank, plans, statistics, fitted, unseen, batches, options)
    with _timed(timings, "closed_form"):
        closed = closed_form(
            bank, plan, statistics, _first(fitted, options.fisher_samples), batches,
            objective=options.objective, mixing=options.mixing, seed=options.seed,
        )  # fmt: skip
    with _timed(timings, "write"):
        write_checkpoint(
            model, plan, closed.narrow, out, dtype=dtype, max_shard_bytes=options.max_shard_bytes, force=options.force
        )
    try:
        with _timed(timings, "verify"):
            held_out = _held_out(bank, closed, unseen, batches, out)
            verification = _verify(held_out, out)
    except BaseException:
        remove(out.resolve())  # unverified, it would look complete
        raise
    timings.seconds["total"] = sum(timings.seconds.values())
    report = build_report(
        source=source,
        source_sha256=model.source.sha256(),
        revision=model.source.revision,
        plan=plan,
        closed=closed,
        held_out=held_out,
        calibration={
            "origin": texts.origin,
            "requested": texts.requested,
            "sequences": len(fitted.lengths),
            "tokens": fitted.tokens,
            "split_tokens": statistics[0].tokens,
            "fisher_tokens": closed.fisher_tokens,
            "skipped": texts.skipped,
        },
        options={key: value for key, value in asdict(options).items() if key != "force"},
        notes=notes,
        dtype=_name(dtype),
        timings=timings,
        verification=verification,
    )
    replace_files(out, report_files(report, model_card(report, command)))
    return report


def _choose_plan(
    bank: LayerBank,
    plans: list[ConversionPlan],
    statistics: list[SourceStatistics],
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    batches: Batches,
    options: ConvertOptions,
) -> ConversionPlan:
    """The plan with the least held-out divergence from the source after a rough closed form."""
    if len(plans) == 1:
        return plans[0]
    few, probe = _first(fitted, PILOT_SAMPLES), _first(unseen, PILOT_HELD_OUT)
    losses: list[float] = []
    for plan in plans:
        rough = closed_form(
            bank, plan, statistics, few, batches,
            objective=options.objective, mixing=options.mixing, seed=options.seed,
        )  # fmt: skip
        stages = {
            "source": (bank.frame, bank.source_layer),
            "plan": (bank.frame, bank.latent_layers(rough.narrow)),
        }
        losses.append(measure(stages, probe.sequences, probe.lengths, batches)["plan"].kl)
        shape = plan.layers[0]
        note(f"rotary key of {shape.qk_rope_head_dim} beside a latent of {shape.kv_lora_rank}: KL {losses[-1]:.4f}")
    return plans[losses.index(min(losses))]


def _held_out(
    bank: LayerBank, closed: ClosedForm, unseen: CalibrationTexts, batches: Batches, out: Path
) -> dict[str, Loss]:
    written = LayerBank(open_model(str(out.resolve())), bank.device)
    stages = {
        "source": (bank.frame, bank.source_layer),
        "rope_split": (bank.frame, bank.latent_layers(closed.wide)),
        "closed_form": (bank.frame, bank.latent_layers(closed.narrow)),
        "final": (written.frame, written.source_layer),
    }
    steps = len(batches.rounds(len(unseen.lengths))) * bank.model.spec.num_layers
    with ticking("checking on held-out text", steps) as tick:
        return measure(stages, unseen.sequences, unseen.lengths, batches, tick=tick)


def _verify(held_out: dict[str, Loss], out: Path) -> dict[str, Any]:
    """Compare the file on the disk with what was computed in memory."""
    moved = held_out["final"].nll - held_out["closed_form"].nll
    if not abs(moved) <= VERIFY_NATS:
        raise MlaError(
            f"the written checkpoint's held-out loss is {moved:+.3f} nats off what was computed",
            where=out,
            fix="it was removed; check the disk, and report this if it comes again",
        )
    return {"reloaded": True, "nll_difference": moved}


def _first(texts: CalibrationTexts, count: int) -> CalibrationTexts:
    lengths = texts.lengths[:count]
    return replace(texts, sequences=texts.sequences[:count, : int(lengths.max())], lengths=lengths)


def _stored_numbers(model: ModelSource) -> int:
    # What is written has about as many: attention changes, and it is the smaller part.
    infos = model.source.tensors.infos
    return sum(math.prod(infos[name].shape) for name in {rule.source for rule in model.rules.values()})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _timed(timings: Timings, stage: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    timings.seconds[stage] = time.monotonic() - begun
