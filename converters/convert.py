"""The conversion from start to end: source, plan, statistics, rotary split, factorisation, writing, verification, report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mla_cli.calibration.layer_bank import LayerBank, specs_of
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.offload import Workplace, workplace
from mla_cli.calibration.precision import keep_freed_memory
from mla_cli.calibration.texts import CalibrationTexts, first
from mla_cli.checkpoint.disk import remove
from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.checkpoint.writer import check_output, replace_files
from mla_cli.console import note, warn
from mla_cli.converters.choose import choose_plan, plan_conversion, ranks_of, with_ranks, with_slots
from mla_cli.converters.closed_form import ClosedForm, closed_form, gather_source_statistics
from mla_cli.converters.convert_texts import ConversionTexts, conversion_texts, language_of, within_context
from mla_cli.converters.estimate import memory_of, offloads
from mla_cli.converters.heal_stages import heal_in_stages
from mla_cli.converters.heal_state import HealState, fingerprint, layers_from
from mla_cli.converters.held_out import Loss, loss_of, measure_texts, source_and
from mla_cli.converters.objectives import compare_objectives
from mla_cli.converters.options import (
    FORWARD_OBJECTIVES,
    INDIFFERENT,
    PILOT_HELD_OUT,
    SPLIT_SAMPLES,
    ConvertOptions,
)
from mla_cli.converters.plan import ConversionPlan, LayerPlan
from mla_cli.converters.progressive import milder_ranks
from mla_cli.converters.report import Timings, build_report, model_card
from mla_cli.converters.strengths import losses_by_strength
from mla_cli.converters.write import output_dtype, report_files, write_checkpoint
from mla_cli.errors import MlaError
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.tokenizer import load_tokenizer
from mla_cli.report.charts import spectrum_points

# Rounding the weights to bfloat16 moves the held-out loss by about 1e-3 nats; a wrong tensor by far more than this.
VERIFY_NATS = 0.05
# Divergence from the source past which the output is hardly the same model: each token is half as likely on average.
USELESS_NATS = math.log(2)


def convert(source: str, out: Path, options: ConvertOptions, *, device: torch.device, command: str) -> dict[str, Any]:
    """Convert `source` and write the checkpoint to `out`.

    Returns:
        The report that `out/mla_report.json` holds.

    Raises:
        MlaError: anything that stops it; nothing is left at `out` then.
    """
    timings = Timings()
    with timings.timed("open"):
        model = open_model(source)
        options, clipped = within_context(options, model.spec.max_position_embeddings)
        plans = plan_conversion(model, options)
        dtype = output_dtype(model.stored_dtype, plans[0].form, options.dtype)
        # What an interrupted run has put in place, it may replace.
        replaces = options.force or (options.resume and HealState.began_writing(out))
        options = replace(options, force=replaces)
        check_output(
            out, options.force, source=model.source.folder, needed_bytes=_stored_numbers(model) * dtype.itemsize
        )
        memory = memory_of(model, plans, options)
        offloaded = offloads(memory, options)
        notes = [*model.notes, *clipped]
        stored = {model.source.tensors.infos[rule.source].dtype for rule in model.rules.values()}
        if stored != {dtype}:
            found = ", ".join(sorted(_name(kind) for kind in stored))
            notes.append(f"weights are written in {_name(dtype)} (the source has {found})")
    for line in notes:
        note(line)
    note(f"writing the {plans[0].form} form: {plans[0].reason}")
    if plans[0].warning is not None:
        warn(plans[0].warning)
        notes.append(plans[0].warning)
    near = None
    if offloaded:
        near = options.offload / out.name if options.offload is not None else Path(out).resolve()
        note(
            f"about {memory.offloaded / 1e9:.1f} GB of memory; what is kept by layer goes to files in {near.parent}, "
            f"which would take {memory.whole / 1e9:.1f} GB"
        )
    else:
        keep_freed_memory()
    with workplace(near) as place:
        return _convert(
            model,
            plans,
            out,
            options,
            place,
            timings,
            notes,
            source=source,
            dtype=dtype,
            device=device,
            command=command,
        )


def _convert(
    model: ModelSource,
    plans: list[ConversionPlan],
    out: Path,
    options: ConvertOptions,
    place: Workplace,
    timings: Timings,
    notes: list[str],
    *,
    source: str,
    dtype: torch.dtype,
    device: torch.device,
    command: str,
) -> dict[str, Any]:
    with timings.timed("texts"):
        tokenizer = load_tokenizer(model.source.folder)
        texts = conversion_texts(model, tokenizer, options, device)
        language = language_of(tokenizer, texts.fitted, options.preset)
    key = fingerprint(model.source.sha256(), options, (texts.fitted, texts.unseen, texts.to_heal))
    state = HealState(out, key, device=device, resume=options.resume)
    with state.kept_if_of_use():
        return _computed(
            LayerBank(model, device), plans, out, options, place, state, texts, timings, notes,
            opening=tokenizer.bos_id if tokenizer.adds_bos else None,
            source=source, language=language, dtype=dtype, command=command,
        )  # fmt: skip


def _computed(
    bank: LayerBank,
    plans: list[ConversionPlan],
    out: Path,
    options: ConvertOptions,
    place: Workplace,
    state: HealState,
    texts: ConversionTexts,
    timings: Timings,
    notes: list[str],
    *,
    opening: int | None,
    source: str,
    language: dict[str, Any],
    dtype: torch.dtype,
    command: str,
) -> dict[str, Any]:
    model, fitted, unseen = bank.model, texts.fitted, texts.unseen
    batches = Batches.fit(
        int(fitted.lengths.max()), model.spec.hidden_size, model.spec.num_layers, workplace=place
    )  # fmt: skip
    plan, layers, facts = _fit(bank, plans, fitted, unseen, batches, options, state, timings)
    layers, layer_errors = heal_in_stages(
        bank, plan, layers, texts, batches, options, state, timings, facts, notes,
        opening=opening,
    )  # fmt: skip
    bank.forget()
    state.save_writing()
    with timings.timed("write"):
        write_checkpoint(
            model, plan, layers, out, dtype=dtype, max_shard_bytes=options.max_shard_bytes, force=options.force
        )
    try:
        with timings.timed("verify"):
            held_out = _held_out_final(bank, layers, unseen, batches, out)
            verification = _verify(held_out, out)
            strengths = losses_by_strength(bank, plan, layers, unseen, batches)
    except BaseException:
        remove(out.resolve())  # unverified, it would look complete
        raise
    if not held_out["final"].kl < USELESS_NATS:
        notes.append(_too_much_lost(held_out["final"].kl, options))
        warn(notes[-1])
    timings.seconds["total"] = sum(timings.seconds.values())
    losses = {name: Loss(**loss) for name, loss in facts["held_out"].items()}
    report = build_report(
        source=source,
        source_sha256=model.source.sha256(),
        revision=model.source.revision,
        command=command,
        plan=plan,
        facts=facts,
        layer_errors=layer_errors,
        held_out={**losses, "final": held_out["final"]},
        strengths=strengths,
        calibration={
            "origin": fitted.origin,
            "language": language,
            "requested": fitted.requested,
            "sequences": len(fitted.lengths),
            "tokens": fitted.tokens,
            "split_tokens": facts["split_tokens"],
            "fisher_tokens": facts["fisher_tokens"],
            "healing_tokens": texts.to_heal.tokens if options.heal.mode != "none" else 0,
            "skipped": fitted.skipped,
        },
        options={key: value for key, value in asdict(options).items() if key not in INDIFFERENT},
        notes=notes,
        dtype=_name(dtype),
        timings=timings,
        verification=verification,
    )
    replace_files(out, report_files(report, model_card(report, command)))
    state.remove()
    return report


def _fit(
    bank: LayerBank,
    plans: list[ConversionPlan],
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    batches: Batches,
    options: ConvertOptions,
    state: HealState,
    timings: Timings,
) -> tuple[ConversionPlan, Sequence[LatentWeights], dict[str, Any]]:
    """What healing starts from and what the report says of it, from an interrupted run where there is one.

    The layers are the closed form at the plan's ranks, or at milder ones for a progressive conversion.
    """
    earlier = state.load_layers_and_facts("closed")
    if earlier is not None:
        tensors, facts = earlier
        plan = replace(plans[0], layers=tuple(LayerPlan(r, f, tuple(s), k) for r, f, s, k in facts["plan"]))
        layers = layers_from(bank.model.spec, plan, tensors)
        timings.seconds.update(facts["seconds"])
        return plan, layers, facts
    with timings.timed("source_statistics"):
        seen = fitted if options.objective in FORWARD_OBJECTIVES else first(fitted, SPLIT_SAMPLES)
        statistics = gather_source_statistics(bank, seen, batches)
    with timings.timed("rotary_width"):
        plans = [with_slots(bank, plan, statistics) for plan in plans]
        plan = choose_plan(bank, plans, statistics, fitted, unseen, batches, options)
    with timings.timed("closed_form"):
        probe = first(unseen, PILOT_HELD_OUT)
        closed = closed_form(
            bank, plan, statistics, first(fitted, options.fisher_samples), batches,
            objective=options.objective, mixing=options.mixing, ranks=ranks_of(plan, options), seed=options.seed,
            compensation=options.refits,
            check=lambda layers: loss_of(bank, layers, probe, batches).kl,
        )  # fmt: skip
        plan = with_ranks(plan, closed.ranks)
    start = closed.layers
    if options.progressive:
        start = closed.at(milder_ranks(plan, [spec.kv_lora_rank for spec in specs_of(closed.wide)]))
    with timings.timed("held_out"):
        losses = _held_out(bank, closed, start, unseen, batches)
    objectives = None
    if options.compare_objectives:
        with timings.timed("objectives"):
            objectives = compare_objectives(
                bank, closed, (options.objective, losses["closed_form"]), statistics,
                first(fitted, options.fisher_samples), unseen, batches, seed=options.seed,
            )  # fmt: skip
    facts = {
        "plan": [(layer.kv_lora_rank, layer.fitted_rank, layer.slots, layer.key_factors) for layer in plan.layers],
        "split_errors": closed.split_errors,
        "spectra": [
            spectrum_points(spectrum.energy.tolist(), keep=layer.fitted_rank)
            for spectrum, layer in zip(closed.spectra, plan.layers, strict=True)
        ],
        "factorization_errors": [
            spectrum.loss(layer.fitted_rank) / max(spectrum.loss(0), 1e-300)
            for spectrum, layer in zip(closed.spectra, plan.layers, strict=True)
        ],
        "refit_errors": [after for _, after in closed.compensated.output_errors] if closed.compensated else None,
        "fisher_tokens": closed.fisher_tokens,
        "split_tokens": statistics[0].tokens,
        "held_out": {name: asdict(loss) for name, loss in losses.items()},
        "objectives": objectives,
        "seconds": dict(timings.seconds),
    }
    if options.heal.mode != "none":
        state.save_layers_and_facts("closed", start, facts)
    return plan, start, facts


def _held_out(
    bank: LayerBank, closed: ClosedForm, start: Sequence[LatentWeights], unseen: CalibrationTexts, batches: Batches
) -> dict[str, Loss]:
    layers = {"rope_split": closed.wide, "closed_form": closed.narrow}
    if closed.compensated is not None:
        layers["compensated"] = closed.layers
    if start is not closed.layers:
        layers["milder_closed_form"] = start
    return measure_texts("checking the closed form on held-out text", source_and(bank, layers), unseen, batches)


def _held_out_final(
    bank: LayerBank, layers: Sequence[LatentWeights], unseen: CalibrationTexts, batches: Batches, out: Path
) -> dict[str, Loss]:
    written = LayerBank(open_model(str(out.resolve())), bank.device, like=bank.frame)
    stages = {**source_and(bank, {"computed": layers}), "final": (written.frame, written.source_layer)}
    return measure_texts("checking the file on held-out text", stages, unseen, batches)


def _verify(held_out: dict[str, Loss], out: Path) -> dict[str, Any]:
    """Compare the file on the disk with what was computed in memory."""
    moved = held_out["final"].nll - held_out["computed"].nll
    if not abs(moved) <= VERIFY_NATS:
        raise MlaError(
            f"the written checkpoint's held-out loss is {moved:+.3f} nats off what was computed",
            where=out,
            fix="it was removed; check the disk, and report this if it comes again",
        )
    return {"reloaded": True, "nll_difference": moved}


def _too_much_lost(kl: float, options: ConvertOptions) -> str:
    further = "" if options.heal.mode == "full" else ", or heal it (--heal full)"
    return f"the model diverges from its source by {kl:.3g} nats a token and is of little use: lower the ratio{further}"


def _stored_numbers(model: ModelSource) -> int:
    # What is written has about as many: attention changes, and it is the smaller part.
    infos = model.source.tensors.infos
    return sum(math.prod(infos[name].shape) for name in {rule.source for rule in model.rules.values()})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
