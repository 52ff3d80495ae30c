"""Norms of every kind that decoders use, and what a norm of queries or keys divides by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_cli.model.spec import NormKind, QkNormSpec


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm by `1 + weight` (Gemma): the weight is stored about 0, where bfloat16 is finest."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`, computed in float32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight = 1.0 + self.weight.to(wide.dtype)
        return nn.functional.rms_norm(wide, self.normalized_shape, weight, self.eps).to(x.dtype)


def make_norm(kind: NormKind, width: int, eps: float) -> nn.Module:
    """A norm over the last dimension."""
    if kind == "rms":
        return nn.RMSNorm(width, eps=eps)
    if kind == "offset_rms":
        return OffsetRMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, elementwise_affine=kind != "layer_without_weight", bias=kind == "layer")


def norm_parts(kind: NormKind) -> tuple[str, ...]:
    """Names of a norm's tensors."""
    return {"layer": ("weight", "bias"), "layer_without_weight": ()}.get(kind, ("weight",))


def make_head_norm(norm: QkNormSpec, heads: int, head_dim: int) -> nn.Module:
    """The norm of queries or keys."""
    return make_norm("offset_rms" if norm.offset else "rms", heads * head_dim if norm.whole else head_dim, norm.eps)


def norm_heads(module: nn.Module, norm: QkNormSpec, x: Tensor) -> Tensor:
    """`[B, T, H, d]` normed, each head by itself or all at once."""
    if norm.whole:
        return module(x.flatten(-2)).view_as(x)  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]


def inverse_rms(x: Tensor, norm: QkNormSpec) -> Tensor:
    """What a norm multiplies by before its weight: `[B, T, H]` for heads `[B, T, H, d]`, or `[B, T, 1]` for all at once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    power = wide.square().mean(dim=(-2, -1) if norm.whole else -1)
    power = power[..., None] if norm.whole else power
    return (power + norm.eps).rsqrt().to(x.dtype)
