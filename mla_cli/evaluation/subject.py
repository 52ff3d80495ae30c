"""A model under evaluation: decoder, tokenizer and how its cache is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mla_cli.checkpoint.load import ModelSource
from mla_cli.console import note
from mla_cli.errors import UsageError
from mla_cli.evaluation.scoring import Quantizers
from mla_cli.kernels.quantized import LIMITS, normalize_dtype
from mla_cli.model.decoder import Decoder
from mla_cli.model.tokenizer import Tokenizer, load_tokenizer
from mla_cli.runtime.loading import add_fast_step, computing_dtype, load_to_run, plan_to_run
from mla_cli.runtime.triton_kernels import add_triton


@dataclass(frozen=True)
class Subject:
    """What the measures need of a model. `name`: as the user wrote it; `latent_strength`: share of its latents in use;
    `weights`: `float`, or `int8` for the projections.
    """

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    quantizers: Quantizers | None
    latent_strength: float = 1.0
    weights: str = "float"

    @property
    def facts(self) -> dict[str, Any]:
        """How the model was run, for the report."""
        kinds = {None if quantizer is None else quantizer.dtype for quantizer in self.quantizers or (None,)}
        dtype = str(self.decoder.dtype).removeprefix("torch.")
        stored = "bfloat16" if self.decoder.kernels else dtype  # what is not quantised
        return {
            "name": self.name,
            "dtype": dtype,
            "weights": self.weights,
            "kv_dtype": "+".join(sorted(kind or stored for kind in kinds)),
            "backend": self.decoder.computed_by,
            "latent_strength": self.latent_strength,
            "cache_bytes_per_token": self.decoder.make_cache(1, 1, self.quantizers).bytes_per_token(),
            "max_length": self.decoder.spec.max_position_embeddings,
            "adds_bos": self.tokenizer.adds_bos,
            "bos_token_id": self.tokenizer.bos_id,
        }


def check_kv_dtype(model: ModelSource, kv_dtype: str) -> None:
    """Refuse a quantised cache for a model that caches keys and values.

    Raises:
        UsageError: only latents can be quantised.
    """
    if normalize_dtype(kv_dtype) in LIMITS and not model.spec.is_latent:
        raise UsageError(
            f"only latents can be cached as {kv_dtype}; this {model.spec.model_type} model caches keys and values",
            where=f"--kv-dtype {kv_dtype}",
            fix="convert it first (`mla convert`), or use --kv-dtype auto",
        )


def load_subject(
    model: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    kv_dtype: str = "auto",
    latent_strength: float = 1.0,
    weights: str = "float",
    backend: str = "auto",
) -> Subject:
    """Load a model to evaluate it.

    Args:
        dtype: of the weights in memory, and what is computed in; None: see `computing_dtype`.
        kv_dtype: how latents are cached; `auto`: as calibrated.
        latent_strength: share of each latent's channels, the first ones, that are cached and used; less if the checkpoint was
            calibrated for less.
        weights: `float`, or `int8` for the projections.
        backend: what computes attention (see `open_engine`).
    """
    check_kv_dtype(model, kv_dtype)
    plan = plan_to_run(model, kv_dtype, latent_strength)
    chosen = computing_dtype(model, dtype, device, weights)
    on_cpu = device.type == "cpu" and backend != "reference"
    decoder = load_to_run(
        model, dtype=chosen, device=device, latent_strength=plan.strength, weights=weights, keep_bfloat16=on_cpu
    )
    decoder.backend = "reference" if backend == "reference" else "torch"
    for text in add_triton(decoder, plan.quantizers, backend):
        note(f"{model.source.name}: {text}")
    if on_cpu and not decoder.kernels:
        add_fast_step(decoder)  # for answers that are written; scores never are steps of one token
    tokenizer = load_tokenizer(model.source.folder)
    return Subject(model.source.name, decoder, tokenizer, plan.quantizers, plan.strength, weights)
