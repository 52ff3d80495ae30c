"""The tensors of one latent attention layer, as the mathematics of conversion sees them: float64, shapes checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mla_cli.model.attention import LatentAttention
from mla_cli.model.latent_gate import gate_shapes
from mla_cli.model.spec import LatentAttentionSpec


@dataclass(frozen=True)
class LatentWeights:
    """`scores = scale * ((q_nope x) . (up_k c) + rope(q_rope x) . rope(k_rope x))`, `out(up_v c)`, `c = norm(down x)`.

    Attributes:
        q: `[H, nope + rope, D]`, or `[H, nope + rope, d]` where it reads normed queries; q_bias: `[H, nope + rope]`.
        down: `[r + rope, D]`, latent rows first; down_bias: `[r + rope]`.
        up_k: `[H, nope, r]`; up_v: `[H, v, r]`.
        out: `[D, H * v]`; out_bias: `[D]`.
        norm: `[r]` weight of the RMSNorm on the latent, where the spec has one (`norm_eps`).
        normed: `{q,k}_norm_proj.{weight,bias}`: projections whose rms queries and keys are divided by, where the spec has
            norms of them.
        gate: tensors of the chunk gate by their names below `latent_gate.`, where the spec has one: then `c` is gated.
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
    norm: Tensor | None = None
    gate: Mapping[str, Tensor] | None = None
    normed: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        s, hidden = self.spec, self.out.shape[0]
        expected = {
            "q": (s.num_heads, s.qk_head_dim, hidden if s.qk_norm is None else s.head_dim),
            "q_bias": (s.num_heads, s.qk_head_dim),
            "down": (s.down_width, hidden),
            "down_bias": (s.down_width,),
            "up_k": (s.num_heads, s.qk_nope_head_dim, s.kv_lora_rank),
            "up_v": (s.num_heads, s.v_head_dim, s.kv_lora_rank),
            "out": (hidden, s.num_heads * s.v_head_dim),
            "out_bias": (hidden,),
        }
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(f"latent weights: {name} has shape {found}, expected {shape}")
        norm = None if self.norm is None else tuple(self.norm.shape)
        if norm != (None if s.norm_eps is None else (s.kv_lora_rank,)):
            raise ValueError(f"latent weights: a norm with eps {s.norm_eps} cannot have a weight of shape {norm}")
        gate = {name: tuple(tensor.shape) for name, tensor in (self.gate or {}).items()}
        if gate != ({} if s.gate_chunk is None else gate_shapes(s.kv_lora_rank)):
            raise ValueError(f"latent weights: a gate over chunks of {s.gate_chunk} cannot have tensors {gate}")
        if (self.normed is None) != (s.qk_norm is None):
            raise ValueError("latent weights: norms of queries and keys need their projections")

    @staticmethod
    def of(attention: LatentAttention) -> LatentWeights:
        """The weights of a module whose queries have no latent (any converted layer in the native form)."""
        s = attention.spec
        if s.q_lora_rank is not None:
            raise ValueError("latent weights: a layer with a latent of the queries is not in the native form")
        up = attention.kv_b_proj.weight.detach().cpu().double().view(s.num_heads, -1, s.kv_lora_rank)
        reads = attention.q_proj if s.qk_norm is None else attention.q_map
        return LatentWeights(
            s,
            reads.weight.detach().cpu().double().view(s.num_heads, s.qk_head_dim, -1),
            bias_or_zeros(reads).view(s.num_heads, s.qk_head_dim),
            attention.kv_a_proj_with_mqa.weight.detach().cpu().double(),
            bias_or_zeros(attention.kv_a_proj_with_mqa),
            up[:, : s.qk_nope_head_dim],
            up[:, s.qk_nope_head_dim :],
            attention.o_proj.weight.detach().cpu().double(),
            bias_or_zeros(attention.o_proj),
            None if s.norm_eps is None else attention.kv_a_layernorm.weight.detach().cpu().double(),
            None if s.gate_chunk is None else _doubles(attention.latent_gate.state_dict()),
            None if s.qk_norm is None else _doubles(_norm_projections(attention.state_dict())),
        )

    def with_norm(self, eps: float, weight: Tensor) -> LatentWeights:
        """The layer with `weight * c / sqrt(mean(c^2) + eps)` in the place of its latent `c`."""
        return replace(self, spec=replace(self.spec, norm_eps=eps), norm=weight.detach().cpu().double())

    def with_gate(self, chunk: int, gate: Mapping[str, Tensor]) -> LatentWeights:
        """The layer with a gate over chunks of `chunk` tokens; `gate` is what `LatentGate.state_dict()` gives."""
        return replace(self, spec=replace(self.spec, gate_chunk=chunk), gate=_doubles(gate))

    def narrowed(self, channels: int) -> LatentWeights:
        """The layer with the first `channels` of its latent alone; a norm or a gate, which read all of them, rule that out."""
        rank = self.spec.kv_lora_rank
        return replace(
            self,
            spec=replace(self.spec, kv_lora_rank=channels),
            down=torch.cat((self.down[:channels], self.down[rank:])),
            down_bias=torch.cat((self.down_bias[:channels], self.down_bias[rank:])),
            up_k=self.up_k[..., :channels],
            up_v=self.up_v[..., :channels],
        )

    def named_tensors(self) -> dict[str, Tensor]:
        """Tensors under the names of the native form, below `self_attn.`; biases that the spec has none of are left out."""
        s = self.spec
        reader = "q_proj" if s.qk_norm is None else "q_map"
        named = {
            f"{reader}.weight": self.q.flatten(0, 1),  # [H*(nope+rope), D]
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
        if self.norm is not None:
            named["kv_a_layernorm.weight"] = self.norm
        named |= self.normed or {}
        return named | {f"latent_gate.{name}": tensor for name, tensor in (self.gate or {}).items()}

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
            module = LatentAttention(self.spec, self.out.shape[0], layer)
        state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.named_tensors().items()}
        module.load_state_dict(state, strict=True, assign=True)
        return module.requires_grad_(False).eval()  # type: ignore[return-value]


def _norm_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in ("q_norm_proj", "k_norm_proj")
    }


def _doubles(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().double() for name, tensor in tensors.items()}


def bias_or_zeros(linear: nn.Linear) -> Tensor:
    """A linear layer's bias in float64 on the CPU, zeros where it has none."""
    if linear.bias is None:
        return torch.zeros(linear.out_features, dtype=torch.float64)
    return linear.bias.detach().cpu().double()
