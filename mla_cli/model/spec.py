"""What a decoder is, as pure data: read from `config.json` by a family, obeyed by `decoder.py` and the converters."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

# `offset_rms`: RMSNorm by `1 + weight` (Gemma). A layer norm may have no bias (MPT), or no weight either (OLMo).
NormKind = Literal["rms", "offset_rms", "layer", "layer_without_bias", "layer_without_weight"]
# Where a branch (attention, MLP) has its norms: before it, after it (OLMo 2), or both (Gemma 2 and 3).
BranchNorm = Literal["before", "after", "both"]
# Attention and MLP side by side read the same hidden state, by one norm (GPT-J, Phi-2) or by one each (GPT-NeoX).
Parallel = Literal["one_norm", "own_norms"]
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
class QkNormSpec:
    """RMSNorm of queries and keys between projection and rotation, of each head (Qwen3) or of all at once (OLMo 2).

    In a latent layer its weights are part of the matrices behind it; what is left is `1 / rms`, one factor a key head (or one
    for all), which is cached beside the latent and multiplies the scores.
    """

    eps: float
    whole: bool = False  # over all heads at once
    offset: bool = False  # by `1 + weight` (Gemma 3)
    bias: bool = False  # of the projections that are normed


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
    qk_norm: QkNormSpec | None = None
    alibi: tuple[float, ...] = ()  # a slope a head, by distance (arXiv 2108.12409)

    @property
    def cached_per_token(self) -> int:
        """Numbers cached per token and layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def key_factors(self) -> int:
        """Numbers that a norm of the keys divides by, a token."""
        return 0 if self.qk_norm is None else 1 if self.qk_norm.whole else self.num_kv_heads


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
    qk_norm: QkNormSpec | None = None
    num_kv_heads: int = 0  # of the source's keys, and their width: what `qk_norm` is over
    head_dim: int = 0
    alibi: tuple[float, ...] = ()

    @property
    def down_width(self) -> int:
        """Width of the latent and the rotary key together."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def key_factors(self) -> int:
        """Numbers that a norm of the keys divides by, a token, which are cached beside the rotary key."""
        return 0 if self.qk_norm is None else 1 if self.qk_norm.whole else self.num_kv_heads

    @property
    def cached_per_token(self) -> int:
        """Numbers cached per token and layer."""
        return self.down_width + self.key_factors

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: non-rotary part, then rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


AttentionSpec = StandardAttentionSpec | LatentAttentionSpec


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in the place of a layer's MLP (arXiv 2101.03961): each token goes to `per_token` of `count`.

    `normalized`: the chosen experts' probabilities are scaled to sum to 1. `shared_size`: an expert of this width for all
    tokens, behind a gate of its own; 0: there is none.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool = True
    shared_size: int = 0


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder: embedding, layers of attention and MLP, final norm, output head.

    Without any of the values that have a default it is a plain one: sequential, each branch behind a norm.
    """

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
    branch_norm: BranchNorm = "before"
    parallel: Parallel | None = None
    experts: tuple[ExpertsSpec | None, ...] = ()  # one a layer; empty: there are none
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False

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

    def unusual(self) -> str | None:
        """What the decoder has besides a plain block of RMS or layer norms, attention and MLP; None for a plain one.

        Learned positions are no part of a block. Whoever computes plain blocks alone refuses by this.
        """
        if self.norm not in ("rms", "layer"):
            return f"a norm of kind {self.norm}"
        for field in fields(self):
            if field.name in _UNUSUAL and getattr(self, field.name) != field.default:
                return _UNUSUAL[field.name]
        for attention in self.attention:
            if attention.qk_norm is not None:
                return "norms of queries and keys"
            if attention.alibi:
                return "ALiBi"
        return None

    def with_attention(self, attention: tuple[AttentionSpec, ...]) -> DecoderSpec:
        """The same decoder with other attention layers."""
        return replace(self, attention=attention)


_UNUSUAL = {
    "branch_norm": "norms behind attention and MLP",
    "parallel": "attention and MLP in parallel",
    "experts": "mixtures of experts",
    "embedding_scale": "a scaled embedding",
    "embedding_norm": "a norm of the embedding",
    "residual_scale": "scaled residual branches",
    "logit_scale": "scaled logits",
    "logit_softcap": "soft-capped logits",
    "head_bias": "a bias of the output head",
}
