"""Weights kept as they are stored, in bfloat16, and computed with in a wider type: half the memory, the same numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_cli.model.decoder import Decoder, DecoderLayer


class KeptLinear(nn.Linear):
    """A linear layer whose weight is widened to the type of its input for each product."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, in the type of `x`."""
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def keep_linears(layer: DecoderLayer) -> None:
    """Keep the matrices of a layer in bfloat16 that lose nothing by it."""
    for part in (layer.self_attn, layer.mlp):
        for name, module in list(part.named_children()):
            if type(module) is not nn.Linear:
                continue
            narrow = _narrowed(module.weight)
            if narrow is not None:
                with torch.device("meta"):
                    kept = KeptLinear(module.in_features, module.out_features, bias=module.bias is not None)
                kept.weight = nn.Parameter(narrow, requires_grad=False)
                kept.bias = module.bias
                kept.eval()
                setattr(part, name, kept)


def keep_tables(decoder: Decoder) -> None:
    """The same for embedding and output head; what the decoder computes in stays."""
    decoder.computes_in = decoder.dtype
    tables: list[nn.Embedding | nn.Linear] = [decoder.embed_tokens]
    if not decoder.spec.tied:
        tables.append(decoder.lm_head)
    for table in tables:
        narrow = _narrowed(table.weight)
        if narrow is not None:
            table.weight = nn.Parameter(narrow, requires_grad=False)


def _narrowed(weight: Tensor) -> Tensor | None:
    """The weight in bfloat16 if every number of it is one."""
    if weight.dtype not in (torch.float32, torch.float64):
        return None
    narrow = weight.detach().bfloat16()
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else None
