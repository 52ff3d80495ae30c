"""Weight-only INT8 for the projections: a byte a weight, symmetric, one scale an output channel; activations stay as they are.

    scale_n = max_k |W_nk| / 127;  code_nk = round(W_nk / scale_n);  y_n = scale_n * sum_k code_nk x_k + b_n

A step that generates reads every weight for a handful of tokens, so that it takes as long as reading them does. Three things
stay in floating point: the embedding and the head; `kv_b_proj`, which absorbed attention multiplies by from both sides and
which is a few percent of a layer; and the gate on latents, which is smaller still.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from mla_cli.checkpoint.deepseek_form import without_query_detour
from mla_cli.errors import MlaError
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import DecoderLayer

LARGEST = 127  # and -127: symmetric, so that a weight and its negative lose the same
PROJECTIONS = frozenset(
    """q_proj k_proj v_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa gate_proj up_proj down_proj""".split()
)

# Rows from which widened blocks are faster than PyTorch's kernel, whose time grows with every row (one Zen 5 core, bfloat16,
# 1536 x 576: 8 rows 138 against 198 us, 16 rows 267 against 217; 4096 x 4096 alike).
KERNEL_ROWS = 12
# The kernel's vector code has no remainders and no unaligned loads: other shapes end the process, or read past the scales.
_KERNEL_INPUTS, _KERNEL_OUTPUTS, _KERNEL_ALIGNMENT = 16, 4, 32
# Weights that are widened at a time: so many stay in the cache until they are multiplied.
BLOCK = 1 << 20


class Int8Linear(nn.Module):
    """A linear layer whose weight is codes `[N, K]` int8 and scales `[N]`."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        self.codes: Tensor
        self.scales: Tensor
        self.bias: Tensor | None

    @staticmethod
    def of(linear: nn.Linear, where: str) -> Int8Linear:
        """The nearest one to a linear layer; `where` is its name in an error."""
        return Int8Linear(*quantize_rows(linear.weight.detach(), where), linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`."""
        out = multiply(x.reshape(-1, x.shape[-1]), self.codes, self.scales)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"in_features={self.codes.shape[1]}, out_features={self.codes.shape[0]}, bias={self.bias is not None}"


def quantize_rows(weight: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Codes `[N, K]` int8 and scales `[N]` of a weight `[N, K]`. A row of zeros gives zeros.

    Scales are in the weight's type, which the kernel wants; of float16 they would be too small for it, and are float32.

    Raises:
        MlaError: the weight holds NaN or infinity.
    """
    amax = weight.abs().amax(dim=1).float()  # [N]
    if not bool(torch.isfinite(amax).all()):
        raise MlaError(
            "a weight holds NaN or infinity and cannot be quantised",
            where=where,
            fix="check the weights (`mla inspect`), or try --dtype float32",
        )
    # Rounded to their type first: codes are made for the scale that is there. The floor keeps rows of zeros finite.
    kept_in = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    scales = (amax / LARGEST).to(kept_in).clamp(min=torch.finfo(kept_in).tiny)
    codes = (weight.float() / scales.float()[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales


def multiply(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """`x (scale * codes)^T`: `[M, K]` by `[N, K]` and `[N]` to `[M, N]`, accumulated no narrower than float32."""
    x = x.contiguous()
    (outputs, inputs), rows = codes.shape, x.shape[0]
    if (
        rows < KERNEL_ROWS
        and x.is_cpu
        and x.dtype == torch.bfloat16  # of float32 it has no vector code: ten times slower than the blocks below
        and inputs % _KERNEL_INPUTS == 0
        and outputs % _KERNEL_OUTPUTS == 0
        and x.data_ptr() % _KERNEL_ALIGNMENT == 0
        and kernel_works()
    ):
        return torch._weight_int8pack_mm(x, codes, scales)
    return multiply_by_blocks(x, codes, scales)


def multiply_by_blocks(x: Tensor, codes: Tensor, scales: Tensor, block: int = BLOCK) -> Tensor:
    """`multiply` by PyTorch's own matrix product, some rows of the weight widened at a time; on any device, in any type."""
    narrow = x.dtype == torch.float16  # its range ends at 65,504, which a sum of unscaled codes may pass
    out = x.new_empty(x.shape[0], codes.shape[0])
    step = max(1, block // codes.shape[1])
    for begin in range(0, codes.shape[0], step):
        rows = slice(begin, begin + step)
        if narrow:
            wide = (codes[rows] * scales[rows, None]).to(x.dtype)
        else:
            wide = codes[rows].to(x.dtype)  # exact: seven bits
        torch.mm(x, wide.T, out=out[:, rows])
    return out if narrow else out.mul_(scales)


@lru_cache
def kernel_works() -> bool:
    """Whether this PyTorch has the kernel for the CPU and it gives right results here."""
    codes = (torch.arange(4 * 32).view(4, 32) % 255 - 127).to(torch.int8)
    scales = torch.tensor([0.5, 1.0, 0.25, 2.0], dtype=torch.bfloat16)
    x = ((torch.arange(3 * 32).view(3, 32) * 7) % 13 - 6).to(torch.bfloat16)
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    try:
        found = torch._weight_int8pack_mm(x, codes, scales).double()
    except (AttributeError, RuntimeError):
        return False
    return bool(((found - expected).abs() <= 2.0**-7 * expected.abs() + 1e-3).all())


def with_int8_weights(layer: DecoderLayer) -> DecoderLayer:
    """A layer whose projections are INT8; the layer that is given must not be used any more (its own are dropped one by one).

    Raises:
        MlaError: a weight holds NaN or infinity.
    """
    attention = layer.self_attn
    if isinstance(attention, LatentAttention):
        # There the bias of the queries is a column among weights a hundred times smaller, which would lose their bits to it.
        layer = layer.with_attention(without_query_detour(attention))
    for part_name, part in (("self_attn", layer.self_attn), ("mlp", layer.mlp)):
        for name, module in list(part.named_children()):
            if name in PROJECTIONS and isinstance(module, nn.Linear):
                setattr(part, name, Int8Linear.of(module, f"model.layers.{attention.layer}.{part_name}.{name}"))
    return layer


def weight_bytes(module: nn.Module) -> int:
    """Memory of everything a module holds."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in module.state_dict().values()}
    return sum(tensors.values())
