"""Everything that answering prompts takes, put together from what the user named."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_cli.checkpoint.load import ModelSource, open_model
from mla_cli.kernels.quantized import normalize_dtype
from mla_cli.model.decoder import Decoder
from mla_cli.model.tokenizer import Tokenizer, load_tokenizer
from mla_cli.runtime.choices import COOL_DOWN, DEFAULT_MAX_BATCH, check_backend
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.int8_weights import weight_bytes
from mla_cli.runtime.live_range import StaticRanges
from mla_cli.runtime.loading import add_fast_step, computing_dtype, load_to_run, plan_to_run, steps_are_fast
from mla_cli.runtime.triton_kernels import add_triton, check_triton


@dataclass(frozen=True)
class Engine:
    """A model ready to generate.

    Attributes:
        notes: what a user should know about how it runs.
        cache_form: what decides of the cache's numbers, beside the checkpoint and what computes.
    """

    model: ModelSource
    tokenizer: Tokenizer
    generator: Generator
    notes: tuple[str, ...]
    cache_form: str = ""


def open_engine(
    checkpoint: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    kv_dtype: str = "auto",
    backend: str = "auto",
    latent_strength: float = 1.0,
    weights: str = "float",
    max_batch: int = DEFAULT_MAX_BATCH,
    max_context: int | None = None,
    pool_tokens: int | None = None,
    cool_down: int = COOL_DOWN,
    logprobs: bool = False,
    chat: bool = False,
) -> Engine:
    """Open a checkpoint, converted or not, with its tokenizer and its cache.

    Args:
        dtype: of the weights in memory, and what is computed in; None: see `computing_dtype`.
        kv_dtype: `auto` takes what the checkpoint was calibrated for, else the type that the decoder computes in.
        backend: `auto` takes Triton's kernels on a GPU (see `add_triton`), the compiled ones on a CPU; `triton` takes them
            wherever they run, `cpu` never; `reference` attends in float64, to compare with.
        latent_strength: share of each latent's channels, the first ones, that are cached and used; less if the checkpoint was
            calibrated for less.
        weights: `float`, or `int8` for the projections (see `int8_weights`).
        pool_tokens, cool_down: see `Generator`.
        chat: refuse a model without a chat template before its weights are read.
    """
    check_backend(backend)
    device = torch.device(device)
    check_triton(backend, device)
    model = open_model(checkpoint)
    tokenizer = load_tokenizer(model.source.folder)
    if chat:
        tokenizer.check_chat()
    wanted = normalize_dtype(kv_dtype)
    plan = plan_to_run(model, wanted, latent_strength)
    stored = model.stored_dtype
    chosen = computing_dtype(model, dtype, device, weights)
    decoder = load_to_run(
        model, dtype=chosen, device=device, latent_strength=plan.strength, weights=weights,
        keep_bfloat16=device.type == "cpu" and backend != "reference",
    )  # fmt: skip
    decoder.backend = "reference" if backend == "reference" else "torch"
    from_triton = add_triton(decoder, plan.quantizers, backend)
    on_cpu = device.type == "cpu" and backend != "reference" and not decoder.kernels
    slow = add_fast_step(decoder) if on_cpu else None
    cache_dtype = torch.bfloat16 if wanted == "bf16" else None
    generator = Generator(
        decoder,
        tokenizer,
        quantizers=plan.quantizers,
        ranges=StaticRanges.of(plan.scheme),
        cache_dtype=cache_dtype,
        max_batch=max_batch,
        max_context=max_context,
        pool_tokens=pool_tokens,
        cool_down=cool_down,
        logprobs=logprobs,
    )
    notes = [*model.notes, _how(device, chosen, stored, decoder), *from_triton]
    if slow is not None:
        notes.append(f"without the compiled CPU kernels, which are several times faster: {slow}")
    elif not steps_are_fast(decoder, plan.quantizers, cache_dtype):
        notes.append(
            "the compiled CPU kernels read latents in bf16, int8 or fp8 with a range for each token; PyTorch computes steps on "
            "this cache, several times slower (`mla calibrate --scales token`)"
        )
    if weights == "int8":
        notes.append(f"projections in int8: {weight_bytes(decoder) / 2**20:,.0f} MiB of weights in memory")
    if plan.strength < 1:
        kept, whole = decoder.spec.cached_per_token, model.spec.cached_per_token
        notes.append(f"latent strength {plan.strength:g}: {kept:,} of {whole:,} numbers are cached a token")
    positions = model.spec.max_position_embeddings
    if max_context is not None and max_context > positions:
        notes.append(f"the model has {positions} positions: --max-context {max_context} is lowered to that")
    if chosen == torch.float16 and device.type == "cpu":
        notes.append("float16 is many times slower than float32 or bfloat16 on a CPU")
    form = f"{plan.quantizers} {plan.strength} {weights} {cache_dtype}"
    return Engine(model, tokenizer, generator, tuple(notes), form)


def _how(device: torch.device, dtype: torch.dtype, stored: torch.dtype, decoder: Decoder) -> str:
    kernels = {
        "triton": "Triton kernels",
        "compiled": "compiled CPU kernels",
        "torch": "PyTorch attention",
        "reference": "float64 reference attention",
    }[decoder.computed_by]
    widened = f" (stored as {_name(stored)})" if dtype != stored else ""
    return f"running on {device} in {_name(dtype)}{widened}, {kernels}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
