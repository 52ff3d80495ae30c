"""Whether Triton's kernels write and read a decoder's latents: by the user's choice, the device, and what each layer is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from mla_cli.errors import UsageError
from mla_cli.kernels.dispatch import Backend, triton_or_why_not
from mla_cli.kernels.launch import interpreted
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.decoder import Decoder
from mla_cli.model.latent_pages import page_layout
from mla_cli.model.spec import AttentionSpec


def check_triton(backend: str, device: torch.device) -> None:
    """Refuse Triton by name where it cannot run, before any work.

    Raises:
        UsageError: there is no GPU, or no Triton.
    """
    if backend != "triton":
        return
    if device.type != "cuda" and not interpreted():
        raise UsageError(
            f"Triton's kernels need a CUDA or ROCm device, and this runs on {device.type}",
            where="--backend triton",
            fix="use --backend auto, or set TRITON_INTERPRET=1 to have them interpreted, which is slow",
        )
    if find_spec("triton") is None:
        raise UsageError("Triton is not installed", where="--backend triton", fix="pip install triton")


def add_triton(decoder: Decoder, quantizers: Sequence[LatentQuantizer | None] | None, backend: str) -> list[str]:
    """Have Triton's kernels write and read the latents of all layers that they can, after a check of each kind of layer.

    `auto` takes them on a GPU for a decoder that computes in bfloat16, as they do; `triton` takes them for any other, too.

    Args:
        quantizers: of the caches that the decoder will make.

    Returns:
        What a user should know: which layers run through PyTorch, and why; nothing where that was to be expected.
    """
    device = decoder.device
    if not decoder.spec.is_latent or backend not in ("auto", "triton"):
        return ["Triton's kernels are for latents, which this model does not cache"] if backend == "triton" else []
    if backend == "auto" and device.type != "cuda":
        return []
    if backend == "auto" and decoder.dtype != torch.bfloat16:
        return ["Triton's kernels, which compute in bfloat16, are not used: --backend triton or --dtype bfloat16 does"]
    found: list[Backend | None] = []
    reasons: dict[str, list[int]] = defaultdict(list)
    each = quantizers or [None] * decoder.spec.num_layers
    for layer, (attention, quantizer) in enumerate(zip(decoder.spec.attention, each, strict=True)):
        kernels = _kernels_for(attention, quantizer, device)
        if isinstance(kernels, str):
            reasons[kernels].append(layer)
        found.append(None if isinstance(kernels, str) else kernels)
    if any(found):
        decoder.kernels = tuple(found)
    notes = [_told(layers, why, len(found)) for why, layers in reasons.items()]
    if any(found) and decoder.dtype != torch.bfloat16:
        notes.append("Triton's kernels compute in bfloat16; unquantised latents are cached in it, too")
    return notes


def _kernels_for(attention: AttentionSpec, quantizer: LatentQuantizer | None, device: torch.device) -> Backend | str:
    layout = page_layout(attention, quantizer)
    if isinstance(layout, str):
        return f"it {layout}"
    return triton_or_why_not(device, layout, attention.num_heads, attention.window, attention.softcap)


def _told(layers: Sequence[int], why: str, count: int) -> str:
    if len(layers) == count:
        whose = "every layer runs"
    else:
        names = ", ".join(map(str, layers))
        whose = f"layer {names} runs" if len(layers) == 1 else f"layers {names} run"
    return f"{whose} through PyTorch instead of Triton's kernels: {why}"
