"""A turn folded into a layer's weights: what is cached changes, what is computed does not.

The new latent `n` gives the old one as `c = diag(w / s) Q^T n`, with `w` the weights of a norm on the latent and `s` their
mean size (no norm: 1). So `Q` goes into `kv_a_proj_with_mqa`, whose norm has weight `s` on every channel then, and its
counterpart into whatever reads latents: `kv_b_proj`, and a gate. A turn leaves the root mean square that a norm divides by.

Channels whose norm weight is zero stay as they are: the constant channels with which the stock form neutralises its norm. The
weights of its real channels are alike, so there `w / s` is exactly 1. Rotary keys are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mla_cli.checkpoint.load import ModelSource
from mla_cli.errors import MlaError
from mla_cli.model.attention import LatentAttention
from mla_cli.model.decoder import DecoderLayer
from mla_cli.model.spec import LatentAttentionSpec

DOWN, DOWN_BIAS, NORM, UP = (
    "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_a_layernorm.weight", "kv_b_proj.weight",
)  # fmt: skip
GATE = "latent_gate.0.weight"


def turned_channels(spec: LatentAttentionSpec, norm: Tensor | None) -> int:
    """How many of the latent's channels, the first ones, a turn may mix: all but constant ones at the end."""
    if norm is None:
        return spec.kv_lora_rank
    used = norm.nonzero()
    return int(used.max()) + 1 if used.numel() else 0


def norm_shares(norm: Tensor | None, channels: int) -> Tensor:
    """`w / s`, `[channels]` float64: what a turn moves from the norm's weights into what reads the latent."""
    if norm is None:
        return torch.ones(channels, dtype=torch.float64)
    weights = norm[:channels].double()
    if bool((weights == weights[0]).all()):
        return torch.ones(channels, dtype=torch.float64)
    return weights / weights.square().mean().sqrt()


def turned_tensors(spec: LatentAttentionSpec, tensors: Mapping[str, Tensor], turn: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer that a turn of its first channels changes, float64.

    Args:
        tensors: of the layer, below `self_attn.`; turn: `[k, k]` orthogonal, `k` at most `turned_channels`.
    """
    k, plain = len(turn), {name: tensor.detach().cpu().double() for name, tensor in tensors.items()}
    norm = plain.get(NORM)
    whole = turned_channels(spec, norm)
    if k > whole:
        raise MlaError(f"a turn of {k} channels does not fit a latent of {spec.kv_lora_rank} with constant channels")
    shares = norm_shares(norm, whole)

    def turned_rows(tensor: Tensor) -> Tensor:
        return torch.cat((turn @ tensor[:k], tensor[k:]))

    def read_turned(readers: Tensor) -> Tensor:
        """`[..., r]` readers of the latent."""
        scaled = torch.cat((readers[..., :whole] * shares, readers[..., whole:]), dim=-1)
        return torch.cat((scaled[..., :k] @ turn.T, scaled[..., k:]), dim=-1)

    changed = {DOWN: turned_rows(plain[DOWN]), UP: read_turned(plain[UP])}
    if DOWN_BIAS in plain:
        changed[DOWN_BIAS] = turned_rows(plain[DOWN_BIAS])
    if norm is not None and bool((norm[:whole] != norm[0]).any()):
        level = norm[:whole].square().mean().sqrt()
        changed[NORM] = torch.cat((level.expand(whole), norm[whole:]))
    if GATE in plain:
        readers = plain[GATE].unflatten(-1, (2, spec.kv_lora_rank))  # of the chunk before, and of the token
        changed[GATE] = read_turned(readers).flatten(-2)
    return changed


def turned_layer(layer: DecoderLayer, turn: Tensor, stored: torch.dtype) -> DecoderLayer:
    """A layer as it will be read back once the turn is written in the data type `stored`."""
    attention = layer.self_attn
    assert isinstance(attention, LatentAttention)
    state = attention.state_dict()
    for name, tensor in turned_tensors(attention.spec, state, turn).items():
        state[name] = tensor.to(stored).to(state[name])
    with torch.device("meta"):
        module = LatentAttention(attention.spec, attention.o_proj.out_features, attention.layer)
    module.load_state_dict(state, strict=True, assign=True)
    return layer.with_attention(module.requires_grad_(False).eval())  # type: ignore[arg-type]


def turned_file_tensors(model: ModelSource, layer: int, turn: Tensor) -> dict[str, Tensor]:
    """What a turn changes of one layer, by the names and in the types of the checkpoint's file."""
    attention = model.spec.attention[layer]
    assert isinstance(attention, LatentAttentionSpec)
    prefix = f"model.layers.{layer}.self_attn."
    names = [name for name in model.layer_names(layer) if name.startswith(prefix)]
    stored = {name.removeprefix(prefix): model.tensor(name) for name in names if _is_latent(name)}
    changed = turned_tensors(attention, stored, turn)
    return {
        model.rules[prefix + name].source: tensor.to(stored[name].dtype).contiguous()
        for name, tensor in changed.items()
    }


def _is_latent(name: str) -> bool:
    return name.endswith((DOWN, DOWN_BIAS, NORM, UP, GATE))
