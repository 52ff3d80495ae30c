"""The tensors of one latent attention layer, as the mathematics of conversion sees them: float64, shapes checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mla_cli.model.attention import LatentAttention
from mla_cli.model.spec import LatentAttentionSpec


@dataclass(frozen=True)
class LatentWeights:
    """`scores = scale * ((q_nope x) . (up_k c) + rope(q_rope x) . rope(k_rope x))`, `out(up_v c)`, `c = down x`.

    Attributes:
        q: `[H, nope + rope, D]`; q_bias: `[H, nope + rope]`.
        down: `[r + rope, D]`, latent rows first; down_bias: `[r + rope]`.
        up_k: `[H, nope, r]`; up_v: `[H, v, r]`.
        out: `[D, H * v]`; out_bias: `[D]`.
    """

    spec: LatentAttentionSpec
    q: Tensor
    q_bias: Tensor
    down: Tensor
    down_bias: Tensor
    up_k: Tensor
    up_v: Tensor
    out: Tensor
    out_bias: Tensor

    def __post_init__(self) -> None:
        s, hidden = self.spec, self.q.shape[-1]
        expected = {
            "q": (s.num_heads, s.qk_head_dim, hidden),
            "q_bias": (s.num_heads, s.qk_head_dim),
            "down": (s.cached_per_token, hidden),
            "down_bias": (s.cached_per_token,),
            "up_k": (s.num_heads, s.qk_nope_head_dim, s.kv_lora_rank),
            "up_v": (s.num_heads, s.v_head_dim, s.kv_lora_rank),
            "out": (hidden, s.num_heads * s.v_head_dim),
            "out_bias": (hidden,),
        }
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(f"latent weights: {name} has shape {found}, expected {shape}")

    def named_tensors(self) -> dict[str, Tensor]:
        """Tensors under the names of the native form, below `self_attn.`; biases that the spec has none of are left out."""
        s = self.spec
        named = {
            "q_proj.weight": self.q.flatten(0, 1),  # [H*(nope+rope), D]
            "kv_a_proj_with_mqa.weight": self.down,
            "kv_b_proj.weight": torch.cat((self.up_k, self.up_v), dim=1).flatten(0, 1),  # [H*(nope+v), r]
            "o_proj.weight": self.out,
        }
        for name, tensor, present in (
            ("q_proj.bias", self.q_bias.flatten(), s.q_bias),
            ("kv_a_proj_with_mqa.bias", self.down_bias, s.kv_a_bias),
            ("o_proj.bias", self.out_bias, s.o_bias),
        ):
            if present:
                named[name] = tensor
        return named

    def with_needed_biases(self) -> LatentWeights:
        """The same weights with a spec that has exactly those biases which are not zero."""
        spec = replace(
            self.spec,
            q_bias=bool(self.q_bias.any()),
            kv_a_bias=bool(self.down_bias.any()),
            o_bias=bool(self.out_bias.any()),
        )
        return replace(self, spec=spec)

    def module(
        self, layer: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> LatentAttention:
        """An attention module with these weights, frozen."""
        with torch.device("meta"):
            module = LatentAttention(self.spec, self.q.shape[-1], layer)
        state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.named_tensors().items()}
        module.load_state_dict(state, strict=True, assign=True)
        return module.requires_grad_(False).eval()  # type: ignore[return-value]


def bias_or_zeros(linear: nn.Linear) -> Tensor:
    """A linear layer's bias in float64 on the CPU, zeros where it has none."""
    if linear.bias is None:
        return torch.zeros(linear.out_features, dtype=torch.float64)
    return linear.bias.detach().cpu().double()
