"""The bytes that pages of a pool hold, to keep them elsewhere and to put them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_cli.model.cache import Cache

Bytes = npt.NDArray[np.uint8]


class PageBytes:
    """Reads and writes whole pages, all layers of a page after one another.

    Args:
        storage: of a pool. It may grow between two calls, not during one; two threads may work on different pages.
    """

    def __init__(self, storage: Cache) -> None:
        self._storage = storage
        self._seen: list[Tensor] = []  # the tensors that `_rows` are made of
        self._rows: list[Tensor] = []  # `[pages, bytes]` of each tensor, as bytes
        self._ends = np.cumsum([0, *(rows.shape[1] for rows in self._latest())])

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(self._ends[-1])

    def form(self) -> str:
        """What the bytes of a page are: types and shapes, in their order. Equal texts: equal meaning."""
        named = []
        for layer in self._storage.layers:
            for store in layer.stores:
                named += [f"{type(store).__name__}.{name}" for name in store.parts]
        return " ".join(f"{n}:{t.dtype}{list(t.shape[1:])}" for n, t in zip(named, self.tensors(), strict=True))

    def read(self, pages: Sequence[int]) -> Bytes:
        """A copy of what pages hold, `[N, page_bytes]` on the host."""
        out = np.empty((len(pages), self.page_bytes), dtype=np.uint8)
        at = list(pages)
        for rows, start, end in self._parts():
            out[:, start:end] = rows.numpy()[at] if rows.device.type == "cpu" else rows[at].cpu().numpy()
        return out

    def write(self, pages: Sequence[int], data: Bytes) -> list[Tensor]:
        """Have pages hold what `read` gave, `[N, page_bytes]`; gives the tensors that were written to.

        A pool that has grown since then is in others (see `tensors`), and what was written may be lost.
        """
        at = list(pages)
        parts, written = self._parts(), self._seen
        for rows, start, end in parts:
            if rows.device.type == "cpu":
                rows.numpy()[at] = data[:, start:end]
            else:
                with torch.inference_mode():
                    rows[at] = torch.from_numpy(np.ascontiguousarray(data[:, start:end])).to(rows.device)
        return written

    def _parts(self) -> list[tuple[Tensor, int, int]]:
        return list(zip(self._latest(), self._ends[:-1].tolist(), self._ends[1:].tolist(), strict=True))

    def tensors(self) -> list[Tensor]:
        """The tensors that the pages are in now."""
        stores = [store for layer in self._storage.layers for store in layer.stores]
        return [getattr(store, name) for store in stores for name in store.parts]

    def _latest(self) -> list[Tensor]:
        """The tensors as they are now, after the pool has grown too."""
        tensors = self.tensors()
        if len(tensors) != len(self._seen) or any(a is not b for a, b in zip(tensors, self._seen, strict=True)):
            # Of an empty tensor (rotary keys of no channels) PyTorch makes no bytes.
            self._rows = [
                tensor.view(torch.uint8).flatten(1)
                if tensor.numel()
                else tensor.new_empty(len(tensor), 0, dtype=torch.uint8)
                for tensor in tensors
            ]
            self._seen = tensors
        return self._rows
