"""What a decoder is, as pure data: read from `config.json` by a family, obeyed by `decoder.py` and the converters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

NormKind = Literal["rms", "layer"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embedding: `dim` rotated dimensions, so `dim / 2` frequencies, and how they are scaled.

    Source: RoFormer (arXiv 2104.09864); scalings as transformers defines them.
    """

    dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0  # multiplies cos and sin, so scores by its square
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # longrope: what each frequency is divided by, in sequences up to the original context and in longer ones
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.kind == "dynamic" or (self.kind == "longrope" and self.short_factor != self.long_factor)


@dataclass(frozen=True)
class StandardAttentionSpec:
    """Multi-head (`num_kv_heads == num_heads`), grouped-query or multi-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: RotarySpec | None  # None: no rotary part (learned positions)
    q_bias: bool = False
    kv_bias: bool = False
    o_bias: bool = False
    window: int | None = None  # keys visible per query, itself included
    softcap: float | None = None

    @property
    def cached_per_token(self) -> int:
        """Numbers cached per token and layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token caches one latent of `kv_lora_rank` numbers and one rotary key of `qk_rope_head_dim` numbers, both shared by
    all heads. Rotary dimensions lie in interleaved pairs unless `interleaved` is false (then in two halves). With
    `gate_chunk`, latents pass the gate of `latent_gate.py` over chunks of so many tokens.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    rotary: RotarySpec | None
    frequencies: tuple[int, ...] | None = None  # rotary pair -> frequency index; None: pair i turns at frequency i
    q_lora_rank: int | None = None
    norm_eps: float | None = None  # RMSNorm on the latent (and query latent); None: no norm
    interleaved: bool = True
    q_bias: bool = False
    kv_a_bias: bool = False
    o_bias: bool = False
    window: int | None = None
    softcap: float | None = None
    gate_chunk: int | None = None

    @property
    def cached_per_token(self) -> int:
        """Numbers cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: non-rotary part, then rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


AttentionSpec = StandardAttentionSpec | LatentAttentionSpec


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder: embedding, layers of attention and MLP, final norm, output head."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    norm: NormKind
    norm_eps: float
    activation: str
    gated_mlp: bool
    mlp_bias: bool
    tied: bool
    attention: tuple[AttentionSpec, ...]  # one a layer
    learned_positions: bool = False

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.attention)

    @property
    def is_latent(self) -> bool:
        """Whether any layer caches a latent instead of keys and values."""
        return any(isinstance(layer, LatentAttentionSpec) for layer in self.attention)

    @property
    def cached_per_token(self) -> int:
        """Numbers cached per token over all layers."""
        return sum(layer.cached_per_token for layer in self.attention)

    def with_attention(self, attention: tuple[AttentionSpec, ...]) -> DecoderSpec:
        """The same decoder with other attention layers."""
        return replace(self, attention=attention)
