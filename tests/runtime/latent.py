"""Tiny decoders with random weights, made without any file."""

from __future__ import annotations

from typing import Any

import torch

from mla_cli.model.decoder import Decoder
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec, StandardAttentionSpec
from tests.runtime.stand_ins import VOCAB

SMALL_VOCAB, POSITIONS = 97, 2048


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


def decoder_of(*attention: Any, seed: int = 0, **changes: Any) -> Decoder:
    """A decoder with these layers: logits that are not flat, biases and norms that matter."""
    shape = {
        "model_type": "tiny", "vocab_size": SMALL_VOCAB, "hidden_size": 40, "intermediate_size": 56,
        "max_position_embeddings": POSITIONS, "norm": "rms", "norm_eps": 1e-5, "activation": "silu", "gated_mlp": True,
        "mlp_bias": False, "tied": True,
    }  # fmt: skip
    torch.manual_seed(seed)
    decoder = Decoder(DecoderSpec(**{**shape, **changes}, attention=attention))
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.3) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    return decoder.requires_grad_(False).eval()


def latent(**changes: Any) -> LatentAttentionSpec:
    """A latent layer with something of each kind, and changes to it."""
    shape: dict[str, Any] = {
        "num_heads": 5, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 8, "scale": 0.2,
        "rotary": RotarySpec(dim=6),
    }  # fmt: skip
    return LatentAttentionSpec(**{**shape, **changes})


def standard(**changes: Any) -> StandardAttentionSpec:
    """A layer of grouped queries, and changes to it."""
    shape: dict[str, Any] = {
        "num_heads": 6, "num_kv_heads": 2, "head_dim": 10, "scale": 0.3, "rotary": RotarySpec(dim=10),
    }  # fmt: skip
    return StandardAttentionSpec(**{**shape, **changes})
