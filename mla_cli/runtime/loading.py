"""From an opened model to the decoder that runs: in which numbers, with which share of its latents, with which weights."""

from __future__ import annotations

import torch

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.checkpoint.deepseek_form import without_query_detour
from mla_cli.checkpoint.engine_scales import check_engine_scales
from mla_cli.checkpoint.kv_cache import CachePlan, cache_plan
from mla_cli.checkpoint.latent_strength import check_latent_strength, narrowed_layer
from mla_cli.checkpoint.load import ModelSource, load_frame, load_layer
from mla_cli.console import note
from mla_cli.kernels.cpu.build import load_library
from mla_cli.kernels.quantized import LatentQuantizer, normalize_dtype
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import Decoder
from mla_cli.model.kept_linear import keep_linears, keep_tables
from mla_cli.runtime.cpu_step import CpuStep, why_not
from mla_cli.runtime.int8_weights import with_int8_weights


def computing_dtype(
    model: ModelSource, asked: torch.dtype | None, device: torch.device, weights: str = "float"
) -> torch.dtype:
    """The type to compute in where none was asked for.

    On a GPU it is the stored one, and on a CPU float32, which every CPU computes well. With INT8 weights it is bfloat16
    where the CPU has instructions for it: in float32 such weights save memory, but a small model's step takes longer.
    """
    if asked is not None:
        return asked
    if device.type != "cpu":
        return model.stored_dtype
    # Asked of the machine, not measured: the same command must compute the same numbers under any load.
    has_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return torch.bfloat16 if weights == "int8" and has_bfloat16() else torch.float32


def plan_to_run(model: ModelSource, kv_dtype: str, latent_strength: float) -> CachePlan:
    """How a checkpoint's latents are cached (see `cache_plan`), once it is sure that it can be run so.

    Raises:
        UsageError: an unknown type, or a part of latents that have no order. InputError: stored scales are not sound.
    """
    plan = cache_plan(model.source.config, model.spec, kv_dtype, latent_strength)
    check_latent_strength(model, plan.strength)
    if normalize_dtype(kv_dtype) != "bf16":
        check_engine_scales(model)
    return plan


def load_to_run(
    model: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    latent_strength: float = 1.0,
    weights: str = "float",
    keep_bfloat16: bool = False,
) -> Decoder:
    """The whole decoder, each layer made ready before the next one is read: one layer at most is in memory twice.

    Args:
        latent_strength: share of each latent's channels, the first ones, that are cached and used.
        weights: `float` (in `dtype`) or `int8` (of the projections).
        keep_bfloat16: keep matrices in bfloat16 that lose nothing by it, whatever `dtype` is computed in.
    """
    frame = load_frame(model, dtype=dtype, device=device)
    layers = []
    for index in range(model.spec.num_layers):
        layer = narrowed_layer(load_layer(model, index, dtype=dtype, device=device), latent_strength)
        if weights == "int8":
            layer = with_int8_weights(layer)
        elif isinstance(layer.self_attn, LatentAttention):  # a product less for each token
            layer = layer.with_attention(without_query_detour(layer.self_attn))
        layers.append(layer)
        if keep_bfloat16:
            keep_linears(layer)
    decoder = frame.with_layers(layers)
    if keep_bfloat16:
        keep_tables(decoder)
    return decoder


def add_fast_step(decoder: Decoder) -> str | None:
    """Have the compiled CPU kernels compute steps of one token; why not, if they cannot."""
    obstacle = why_not(decoder)
    if obstacle is not None:
        return obstacle
    library = load_library(cache_dir() / "kernels", note)
    if isinstance(library, str):
        return library
    decoder.fast_step = CpuStep(decoder, library)
    return None


def steps_are_fast(
    decoder: Decoder, quantizers: tuple[LatentQuantizer | None, ...] | None, dtype: torch.dtype | None
) -> bool:
    """Whether a decoder's compiled steps, where it has them, read such a cache (see `Decoder.make_cache`)."""
    return decoder.fast_step is None or decoder.fast_step.takes(decoder.make_cache(1, 1, quantizers, dtype))
