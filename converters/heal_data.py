"""What healing reads, step by step: pieces of the calibration sequences, short ones first, in an order that a seed fixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.converters.heal_options import CURRICULUM


@dataclass
class Reader:
    """Gives batches of pieces; where it stands is `epoch` and `place`, so that it can be put there again.

    Attributes:
        sequences: `[N, T]` int64, padded right; lengths: `[N]`.
        opening: token that every piece starts with (BOS, where the tokenizer puts one), or None.
    """

    sequences: Tensor
    lengths: Tensor
    opening: int | None
    seed: int
    piece: int = 0
    epoch: int = 0
    place: int = 0

    def batch(self, piece: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Pieces of at most `piece` tokens, together about `tokens`: `[B, T]` int64 and lengths `[B]`."""
        piece = min(piece, int(self.lengths.max()))
        if piece != self.piece:
            self.piece, self.place = piece, 0
            self.epoch += 1
        rows, starts = self._order()
        wanted = max(1, tokens // piece)
        if self.place + wanted > len(rows):
            self.epoch += 1
            self.place = 0
            rows, starts = self._order()
        chosen = slice(self.place, self.place + min(wanted, len(rows)))
        self.place += wanted
        return self._cut(rows[chosen], starts[chosen])

    def _order(self) -> tuple[Tensor, Tensor]:
        """Row and start of every piece, shuffled; a rest of less than half a piece is left out unless it is all there is."""
        counts = ((self.lengths + self.piece // 2) // self.piece).clamp(min=1)  # [N]
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        starts = (torch.arange(len(rows)) - first) * self.piece
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(rows), generator=generator)
        return rows[order], starts[order]

    def _cut(self, rows: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        lengths = (self.lengths[rows] - starts).clamp(max=self.piece)  # [B]
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for into, row, start, length in zip(tokens, rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            into[:length] = self.sequences[row, start : start + length]
            if self.opening is not None:
                into[0] = self.opening
        return tokens, lengths

    def state(self) -> dict[str, int]:
        """Where it stands."""
        return {"piece": self.piece, "epoch": self.epoch, "place": self.place}

    def restore(self, state: dict[str, int]) -> None:
        """Stand there again."""
        self.piece, self.epoch, self.place = state["piece"], state["epoch"], state["place"]


def piece_at(fraction: float) -> int:
    """Length of a piece after this share of the healing."""
    return next(piece for start, piece in reversed(CURRICULUM) if fraction >= start)
