"""The chunk gate: what a learned share of a token's latent takes over from the chunk before.

    g = sigmoid(MLP([h; c_t])),   c'_t = g h + (1 - g) c_t,   h = c'_{k n - 1},   k = t // n >= 1

`n` tokens make a chunk; the first is not gated. `c'` is cached and attended to in the place of `c`, so that `h` is always in
the cache and a later token needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

GATE_WIDTH = 256


class LatentGate(nn.Sequential):
    """The MLP: `[..., 2r]` to the gate's logit `[..., 1]`."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Linear(2 * channels, GATE_WIDTH), nn.GELU(), nn.Linear(GATE_WIDTH, 1))

    def mix(self, previous: Tensor, latent: Tensor) -> Tensor:
        """`g h + (1 - g) c` of latents `[..., r]`."""
        share = torch.sigmoid(self(torch.cat((previous, latent), dim=-1)))  # [..., 1]
        return share * previous + (1 - share) * latent


def gate_shapes(channels: int) -> dict[str, tuple[int, ...]]:
    """Tensor names below `latent_gate.` and their shapes."""
    return {
        "0.weight": (GATE_WIDTH, 2 * channels),
        "0.bias": (GATE_WIDTH,),
        "2.weight": (1, GATE_WIDTH),
        "2.bias": (1,),
    }


@dataclass(frozen=True)
class Chunks:
    """Where a step's tokens stand among chunks. Rows may start anywhere, so each counts from the chunk it starts in.

    Attributes:
        index: `[B, T]` a token's chunk, counted so; gated: `[B, T]` whether there is a chunk before it.
        ends: `[B, M]` where in the step each of the row's chunks ends (past it: any place), `M` the most that can end and
            be followed by a token.
        before: `[B]` position of the last token before the chunk that the row starts in (0 if there is none).
    """

    index: Tensor
    gated: Tensor
    ends: Tensor
    before: Tensor

    @staticmethod
    def of(positions: Tensor, size: int, *, fresh: bool) -> Chunks:
        """Chunks of `size` for tokens at `positions` `[B, T]`; `fresh`: every row starts at 0."""
        tokens = positions.shape[1]
        first = positions[:, :1]  # [B, 1]
        chunk = first // size  # [B, 1]
        # The most over all rows, from what the host knows.
        most = max(0, (tokens - 1 + (0 if fresh else size - 1)) // size)
        ends = (chunk + torch.arange(1, most + 1, device=positions.device)) * size - 1 - first  # [B, M]
        return Chunks(
            positions // size - chunk,
            positions >= size,
            ends.clamp(max=tokens - 1),
            (chunk[:, 0] * size - 1).clamp(min=0),
        )


def gate_latents(
    gate: LatentGate, latent: Tensor, chunks: Chunks, before: Tensor | None, as_stored: Callable[[Tensor], Tensor]
) -> Tensor:
    """Gated latents `[B, T, r]`.

    The last latents of the chunks follow from one another; given these, all tokens are gated at once.

    Args:
        latent: `[B, T, r]` as projected.
        before: `[B, r]` gated latents at `chunks.before`; None: every row starts at position 0.
        as_stored: rounds a latent as the cache does, so that a prompt reads what later tokens will.
    """
    if before is None:
        if chunks.ends.shape[1] == 0:
            return latent  # nothing reaches beyond the first chunk
        before = torch.zeros_like(latent[:, 0])
    rows = torch.arange(latent.shape[0], device=latent.device)
    lasts = [before]
    for end in chunks.ends.unbind(dim=1):  # [B]
        own, gated = latent[rows, end], chunks.gated[rows, end][:, None]  # [B, r], [B, 1]
        lasts.append(as_stored(torch.where(gated, gate.mix(lasts[-1], own), own)))
    previous = torch.stack(lasts, dim=1)[rows[:, None], chunks.index]  # [B, T, r]
    return torch.where(chunks.gated[..., None], gate.mix(previous, latent), latent)
