"""`--config` and `--profile`: what they say becomes the default of the options, which win over both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mla_cli import console
from mla_cli.errors import MlaError, UsageError
from mla_cli.runtime import choices

if TYPE_CHECKING:
    from mla_cli.model.decoder import Decoder
    from mla_cli.model.spec import DecoderSpec
    from mla_cli.runtime.engine import Engine

_META = "mla.config"


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take a file's values as defaults. It runs before other options are looked at."""
    if path is not None:
        from mla_cli.runtime.config_file import read_config

        context.meta[_META] = {**context.meta.get(_META, {}), "values": read_config(path)}
        _apply(context)
    return path


def use_profile(context: typer.Context, name: str | None) -> str | None:
    """Take a profile's values as defaults, where the file has none."""
    if name is not None:
        if name not in choices.PROFILES:
            raise typer.BadParameter(f"'{name}' is not one of {', '.join(choices.PROFILES)}.")
        context.meta[_META] = {**context.meta.get(_META, {}), "profile": name}
        _apply(context)
    return name


def configured(context: typer.Context) -> dict[str, Any]:
    """What file and profile say, by the paths of its keys."""
    return dict(context.meta.get(_META, {}).get("whole", {}))


def _apply(context: typer.Context) -> None:
    from mla_cli.runtime.config_file import as_options, with_profile

    found = context.meta[_META]
    found["whole"] = with_profile(found.get("values", {}), found.get("profile"))
    context.default_map = as_options(found["whole"])


def configured_strength(values: dict[str, Any], path: Path | None, checkpoint: str, strength: float) -> float:
    """The share of the latents that a configuration asks for, once it is sure that the checkpoint is of its kind.

    Args:
        strength: as the options have it.

    Raises:
        UsageError: it asks for attention, or a width of the latents, that the checkpoint does not have.
    """
    enabled, width = values.get("latent_attention.enabled"), values.get("latent_attention.latent_dim")
    if enabled is None and width is None:
        return strength
    from mla_cli.checkpoint.load import open_model

    model = open_model(checkpoint)
    if enabled is not None and enabled != model.spec.is_latent:
        where = f"{path}:latent_attention.enabled"
        if enabled:
            fix = "convert it first (`mla convert`), or set it to false"
            raise UsageError("this model has standard attention: it was not converted", where=where, fix=fix)
        fix = "give the model that it was converted from, or set it to true"
        raise UsageError("a converted checkpoint has no standard attention any more", where=where, fix=fix)
    if width is None or strength != 1 or _ranks(model.spec) == {width}:
        return strength
    from mla_cli.checkpoint.latent_strength import strength_of_width

    return strength_of_width(model, width, f"{path}:latent_attention.latent_dim")


def check_width(values: dict[str, Any], path: Path | None, decoder: Decoder) -> None:
    """Refuse a model that does not have the configured width of the latents, whatever the cause.

    Raises:
        UsageError: it does not.
    """
    width = values.get("latent_attention.latent_dim")
    found = _ranks(decoder.spec)
    if width is not None and found != {width}:
        shown = " to ".join(str(number) for number in sorted({min(found), max(found)}))
        raise UsageError(
            f"the latents that are cached have {shown} channels, not {width}",
            where=f"{path}:latent_attention.latent_dim",
            fix="leave it out, or the option or calibration that makes latents smaller",
        )


def warm_up(values: dict[str, Any], path: Path | None, engine: Engine) -> None:
    """Read the beginnings of prompts that a configuration lists, and say what is kept of them.

    Raises:
        MlaError: one cannot be read as tokens.
    """
    entries = values.get("warmup", [])
    if not entries:
        return
    from mla_cli.runtime.batch import SHORTEST_CHUNK, reads_few_fast

    tokenizer = engine.generator.tokenizer
    fine = reads_few_fast(engine.generator.decoder, engine.generator.pool.storage)
    least = choices.PAGE_TOKENS if fine else SHORTEST_CHUNK
    tokens = []
    for number, entry in enumerate(entries, start=1):
        try:
            tokens.append(
                tokenizer.encode(entry) if isinstance(entry, str) else tokenizer.encode_chat(entry["messages"])
            )
        except MlaError as error:
            raise type(error)(error.what, where=f"{path}:warmup, entry {number}", fix=error.fix) from error
    console.note("reading the beginnings of prompts")
    for number, (own, kept) in enumerate(zip(tokens, engine.generator.warm_up(tokens), strict=True), start=1):
        if not kept:
            why = f"beginnings are kept from {least} tokens on"
            if len(own) >= least:
                why = (
                    f"there is no room for it in {choices.WARM_SHARE:.0%} of the pool, or the model reads prompts whole"
                )
            console.warn(f"nothing of warmup entry {number} ({len(own):,} tokens) is kept: {why}")
        elif kept < len(own):
            console.note(f"{kept:,} of the {len(own):,} tokens of warmup entry {number} are kept")


def _ranks(spec: DecoderSpec) -> set[int]:
    from mla_cli.model.spec import LatentAttentionSpec

    return {layer.kv_lora_rank for layer in spec.attention if isinstance(layer, LatentAttentionSpec)}
