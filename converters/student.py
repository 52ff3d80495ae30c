"""The model that heals: the source's decoder with latent attention whose matrices learn, all else as the source has it.

One copy of the source serves both roles. As the teacher it runs its own attention; as the student it runs the latent one in
its place. Learning matrices are float32 masters; each step computes with copies in the fast type of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mla_cli.checkpoint.latent_strength import kept_channels
from mla_cli.model.attention import Step
from mla_cli.model.decoder import Decoder, DecoderLayer
from mla_cli.model.latent_weights import LatentWeights

Working = dict[str, Tensor]


class LearningAttention(nn.Module):
    """One layer's latent attention with float32 masters and a positive gain on the latent, `c = exp(log_gain) W_down x`.

    A norm on the latent would undo a gain before it, so there the gain is on the norm's weight.
    """

    def __init__(self, weights: LatentWeights, layer: int, device: torch.device) -> None:
        super().__init__()
        # Biases that are zero today may be wanted tomorrow: a value bias costs nothing at run time.
        spec = replace(weights.spec, kv_a_bias=True, o_bias=True)
        self.weights = replace(weights, spec=spec)
        self.attention = self.weights.module(layer, device=device).requires_grad_(True)
        self.log_gain = nn.Parameter(torch.zeros((), device=device))

    def working(self, dtype: torch.dtype, strength: float = 1.0) -> Working:
        """The matrices of one step, in its type; gradients flow back to the masters.

        Args:
            strength: share of the latent's channels, the first ones, that is read; what the others hold is lost, as it is to a
                model that runs at this `--latent-strength`.
        """
        s = self.weights.spec
        tensors: dict[str, Tensor] = dict(self.attention.named_parameters())
        gain = self.log_gain.exp()
        if s.norm_eps is not None:
            tensors["kv_a_layernorm.weight"] = tensors["kv_a_layernorm.weight"] * gain
            return {name: tensor.to(dtype) for name, tensor in tensors.items()}
        for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
            latent, rope = tensors[name].split((s.kv_lora_rank, s.qk_rope_head_dim))
            tensors[name] = torch.cat((latent * gain, rope))
        kept = kept_channels(s.kv_lora_rank, strength)
        if kept < s.kv_lora_rank:
            up = tensors["kv_b_proj.weight"]  # [H*(nope+v), r]
            tensors["kv_b_proj.weight"] = F.pad(up[:, :kept], (0, s.kv_lora_rank - kept))
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def forward(self, x: Tensor, step: Step, working: Working) -> Tensor:
        """`[B, T, D]` to `[B, T, D]` with these matrices."""
        return torch.func.functional_call(self.attention, working, (x, step))  # type: ignore[no-any-return]

    def gain(self) -> float:
        """The gain on the latent."""
        return float(self.log_gain.detach().exp())

    @torch.no_grad()
    def result(self) -> LatentWeights:
        """What was learned, the gain folded in, in float64 on the CPU."""
        learned = LatentWeights.of(self.attention)
        if learned.norm is not None:
            return replace(learned, norm=learned.norm * self.gain()).with_needed_biases()
        gain = torch.ones_like(learned.down_bias)  # [r + rope]
        gain[: learned.spec.kv_lora_rank] = self.log_gain.detach().cpu().double().exp()
        learned = replace(learned, down=learned.down * gain[:, None], down_bias=learned.down_bias * gain)
        return learned.with_needed_biases()


class Student(nn.Module):
    """Source and student over one frozen decoder in the type of computation."""

    def __init__(self, decoder: Decoder, weights: Sequence[LatentWeights]) -> None:
        super().__init__()
        self.decoder = decoder.requires_grad_(False)
        self.learning = nn.ModuleList(LearningAttention(w, i, decoder.device) for i, w in enumerate(weights))

    def layer(self, index: int) -> tuple[DecoderLayer, LearningAttention]:
        """A layer of the source, and the attention that learns to stand in for its own."""
        return cast(DecoderLayer, self.decoder.layers[index]), cast(LearningAttention, self.learning[index])

    def working(self, strength: float = 1.0) -> list[Working]:
        """The matrices of one step, layer by layer, at a strength of the latents."""
        return [self.layer(i)[1].working(self.decoder.dtype, strength) for i in range(len(self.learning))]

    def source(self, tokens: Tensor, lengths: Tensor) -> list[Tensor]:
        """Hidden states of the source after the embedding and each layer, `[B, T, D]` float32 each."""
        step = self.decoder.begin_step(tokens.shape, lengths=lengths, backend="training")
        with torch.no_grad():
            states = [self.decoder.embed(tokens, step.positions).float()]
            for index in range(len(self.learning)):
                layer, _ = self.layer(index)
                states.append(layer_output(layer, layer.self_attn, states[-1], step))
        return states

    def forward(
        self, tokens: Tensor, lengths: Tensor, working: Sequence[Working], *, recompute: bool = False
    ) -> list[Tensor]:
        """Hidden states of the student after the embedding and each layer.

        Args:
            recompute: keep only what is between layers for the backward pass, and run each layer a second time there.
        """
        step = self.decoder.begin_step(tokens.shape, lengths=lengths, backend="training")
        states = [self.decoder.embed(tokens, step.positions).float()]
        for index, matrices in enumerate(working):
            layer, learning = self.layer(index)
            attention = partial(learning, working=matrices)
            if recompute:
                states.append(checkpoint(layer_output, layer, attention, states[-1], step, use_reentrant=False))  # type: ignore[arg-type]
            else:
                states.append(layer_output(layer, attention, states[-1], step))
        return states

    def load_layer(self, index: int, weights: LatentWeights) -> None:
        """Take these weights for one layer (of the same shape as those it has)."""
        self.learning[index] = LearningAttention(weights, index, self.decoder.device)

    def result(self) -> tuple[LatentWeights, ...]:
        """What was learned."""
        return tuple(self.layer(i)[1].result() for i in range(len(self.learning)))

    def masters(self) -> dict[str, nn.Parameter]:
        """Everything that learns, under names that say layer and matrix."""
        return dict(self.learning.named_parameters())


def layer_output(layer: DecoderLayer, attention: Callable[[Tensor, Step], Tensor], x: Tensor, step: Step) -> Tensor:
    """A layer with this attention: `[B, T, D]` float32 hidden states to the same, matrices in the layer's own type."""
    dtype = layer.dtype
    return layer.complete(x, attention(layer.input_layernorm(x.to(dtype)), step), dtype)
