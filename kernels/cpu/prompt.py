"""Attention of a prompt's tokens by the compiled CPU kernel (see `prompt.h`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mla_cli.kernels.cpu.build import CpuLibrary, load_library
from mla_cli.kernels.cpu.structures import BF16, F32, PromptStruct

_TYPES = {torch.float32: F32, torch.bfloat16: BF16}


def prompt_attention(folder: Path, say: Callable[[str], None]) -> PromptAttention | None:
    """The kernel out of `folder`; None where it cannot be had (see `load_library`)."""
    library = load_library(folder, say)
    return None if isinstance(library, str) else PromptAttention(library)


class PromptAttention:
    """Causal attention over explicit keys and values, part of which all heads may share.

    Several times as fast as PyTorch's operators on a CPU: scores stay in its first cache, and bfloat16 inputs are multiplied by
    its bfloat16 instructions where it has them. Sums are float32.

    Args:
        threads: most that it may use; None: as many as PyTorch uses.
    """

    def __init__(self, library: CpuLibrary, threads: int | None = None) -> None:
        self._library, self._threads = library, threads

    def takes(self, *inputs: Tensor) -> bool:
        """Whether these queries, keys and values are numbers that it reads, of which no gradient is wanted."""
        dtype = inputs[0].dtype
        return dtype in _TYPES and all(
            x.device.type == "cpu"
            and x.dtype == dtype
            and (x.stride(-1) == 1 or x.shape[-1] <= 1)
            and not (x.requires_grad and torch.is_grad_enabled())
            for x in inputs
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first: Tensor,
        scale: float,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`softmax(scale (q k^T + q_rope k_rope^T)) v`, of query `t` of row `b` over the keys up to place `first[b] + t`.

        Args:
            q: `[B, T, H, d]`; k: `[B, S, G, d]`; v: `[B, S, G, d_v]`, `H` a multiple of `G`.
            first: `[B]` int64 places of each row's first query among its keys.
            rope: queries `[B, T, H, d_R]` and keys `[B, S, d_R]` that all heads share.
            window: keys visible per query, itself included. softcap: `softcap tanh(score / softcap)` for scores.

        Returns:
            `[B, T, H, d_v]`, in the type of the inputs.
        """
        b, t, h, d = q.shape
        s, groups, v_dim = k.shape[1], k.shape[2], v.shape[-1]
        q_rope, k_rope = rope if rope is not None else (q[..., :0], k[:, :, 0, :0])
        first = first.contiguous()
        out = torch.empty(b, t, h, v_dim, dtype=q.dtype)
        threads = self._threads or torch.get_num_threads()
        struct = PromptStruct(
            *(x.data_ptr() for x in (q, q_rope, k, k_rope, v, out, first)),
            *q.stride()[:3], *q_rope.stride()[:3], *k.stride()[:3], *k_rope.stride()[:2], *v.stride()[:3],
            b, t, s, h, groups, d, k_rope.shape[-1], v_dim,
            window or 0, _TYPES[q.dtype], threads, scale, softcap or 0.0, 0,
        )  # fmt: skip
        self._library.prompt(struct)
        return out
