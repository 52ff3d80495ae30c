"""A tiny decoder with latent attention and random weights, made without any file."""

from __future__ import annotations

import torch

from mla_cli.model.decoder import Decoder
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec
from tests.runtime.stand_ins import VOCAB


def latent_decoder(layers: int = 2, seed: int = 0) -> Decoder:
    """Random, with logits that are not flat."""
    attention = LatentAttentionSpec(
        num_heads=6, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, scale=12**-0.5,
        rotary=RotarySpec(dim=4),
    )  # fmt: skip
    spec = DecoderSpec("tiny", VOCAB, 48, 64, 256, "rms", 1e-5, "silu", True, False, True, (attention,) * layers)
    torch.manual_seed(seed)
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    return decoder.requires_grad_(False).eval()
