"""The decoder: embedding, layers, final norm, output head. One layer can be built and run on its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_cli.errors import InputError
from mla_cli.kernels.cpu.prompt import PromptAttention
from mla_cli.kernels.dispatch import Backend
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.attention import LatentAttention, Record, StandardAttention, Step
from mla_cli.model.cache import Cache
from mla_cli.model.large_products import large_products
from mla_cli.model.norms import make_norm
from mla_cli.model.spec import DecoderSpec, ExpertsSpec, LatentAttentionSpec
from mla_cli.model.widened import widened_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

FAST_LOGITS = 16  # rows: from there on a library's matrix product is as fast


class MLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate; of the decoder's width or another."""

    def __init__(self, spec: DecoderSpec, intermediate_size: int | None = None) -> None:
        super().__init__()
        inner = intermediate_size or spec.intermediate_size
        self.activation = ACTIVATIONS[spec.activation]
        if spec.gated_mlp:
            self.gate_proj = nn.Linear(spec.hidden_size, inner, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, inner, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(inner, spec.hidden_size, bias=spec.mlp_bias)
        self.gated = spec.gated_mlp

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        if self.gated:
            return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
        return self.down_proj(self.activation(self.up_proj(x)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """`sum_e p_e expert_e(x)` over the experts that a token's router likes best, and what a shared expert adds."""

    def __init__(self, spec: DecoderSpec, experts: ExpertsSpec) -> None:
        super().__init__()
        self.spec = experts
        self.router = nn.Linear(spec.hidden_size, experts.count, bias=False)
        self.experts = nn.ModuleList(MLP(spec, experts.intermediate_size) for _ in range(experts.count))
        if experts.shared_size:
            self.shared = MLP(spec, experts.shared_size)
            self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        rows = x.flatten(0, -2)  # [N, D]
        weights, chosen = self.router(rows).float().softmax(dim=-1).topk(self.spec.per_token, dim=-1)  # [N, k]
        if self.spec.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(rows)
        for index in chosen.unique().tolist():
            row, place = (chosen == index).nonzero(as_tuple=True)
            given = self.experts[index](rows[row]) * weights[row, place, None].to(rows.dtype)
            out = out.index_add(0, row, given.to(out.dtype))
        if self.spec.shared_size:
            out = out + torch.sigmoid(self.shared_gate(rows)) * self.shared(rows)
        return out.view_as(x)


class DecoderLayer(nn.Module):
    """`y = x + attention(norm(x))`, then `y + mlp(norm(y))`; or both of `x` (parallel). A branch may have norms behind it."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        attention, width = spec.attention[layer], spec.hidden_size
        before, after = spec.branch_norm != "after", spec.branch_norm != "before"
        own = spec.parallel != "one_norm"
        self.parallel, self.residual_scale = spec.parallel, spec.residual_scale
        self.after = after
        self.input_layernorm = make_norm(spec.norm, width, spec.norm_eps) if before else nn.Identity()
        self.self_attn: LatentAttention | StandardAttention
        if isinstance(attention, LatentAttentionSpec):
            self.self_attn = LatentAttention(attention, width, layer)
        else:
            self.self_attn = StandardAttention(attention, width, layer)
        self.post_attention_layernorm = make_norm(spec.norm, width, spec.norm_eps) if before and own else nn.Identity()
        if after:
            self.attention_output_norm = make_norm(spec.norm, width, spec.norm_eps)
            self.mlp_output_norm = make_norm(spec.norm, width, spec.norm_eps)
        experts = spec.experts[layer] if spec.experts else None
        self.mlp: MLP | Experts = MLP(spec) if experts is None else Experts(spec, experts)

    def forward(self, x: Tensor, step: Step, record: Record | None = None) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; `record` receives the attention's inner tensors and `x`, its normed input."""
        normed = self.input_layernorm(x)
        if record is not None:
            record["x"] = normed
        return self.complete(x, self.self_attn(normed, step, record), x.dtype)

    def complete(self, x: Tensor, attended: Tensor, dtype: torch.dtype) -> Tensor:
        """The layer's output, from its input and what its attention gave, `[B, T, D]` each; the MLP computes in `dtype`."""
        y = x + self._branch("attention_output_norm", attended)
        if self.parallel == "one_norm":
            return y + self._branch("mlp_output_norm", self.mlp(self.input_layernorm(x.to(dtype))))
        read = self.post_attention_layernorm((x if self.parallel else y).to(dtype))
        return y + self._branch("mlp_output_norm", self.mlp(read))

    def _branch(self, norm: str, given: Tensor) -> Tensor:
        if self.after:
            module = getattr(self, norm)
            # In mixed precision (statistics) a branch gives fewer bits than the norm's weight has; PyTorch warns of that.
            given = module(given if module.weight is None else given.to(module.weight.dtype))
        return given if self.residual_scale == 1 else given * self.residual_scale

    def correction(self, behind: Tensor) -> Tensor:
        """What attention would have to give besides, so that the hidden state moves by `behind`; zeros behind a norm."""
        return torch.zeros_like(behind) if self.after else behind / self.residual_scale

    @property
    def dtype(self) -> torch.dtype:
        """Type of the layer's matrices (those that its MLP is made of)."""
        return next(self.mlp.parameters()).dtype

    def with_attention(self, attention: LatentAttention) -> DecoderLayer:
        """A layer that shares everything with this one but its attention."""
        other = copy.copy(self)
        other._modules = dict(self._modules)
        other.self_attn = attention
        return other


def _table(rows: int, columns: int) -> nn.Embedding:
    # Not drawn at random: on the meta device, where decoders are made, that loads the compiler of torch, which takes seconds.
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


class FastStep(Protocol):
    """Another way to compute steps of one token a sequence, and few rows of logits."""

    def takes(self, cache: Cache) -> bool:
        """Whether it can read and write this cache."""

    def __call__(self, decoder: Decoder, tokens: Tensor, cache: Cache) -> Tensor:
        """As `Decoder.forward` of `[B, 1]` tokens that all count."""

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits` of `[M, D]`, in float32."""


class Decoder(nn.Module):
    """A whole decoder. `forward` gives normed hidden states, `logits` the vocabulary scores of those one wants.

    Attributes:
        backend: see `Step`. fast_step: computes steps of one token; None: they are computed as all others.
        fast_attention: computes the attention of longer steps; None: PyTorch does.
        kernels: what writes and reads the latents of each layer in its caches, None for a layer without; empty: PyTorch does.
        computes_in: the type of activations; None: that of the embedding. (Weights may be kept narrower.)
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.backend = "torch"
        self.fast_step: FastStep | None = None
        self.fast_attention: PromptAttention | None = None
        self.kernels: tuple[Backend | None, ...] = ()
        self.computes_in: torch.dtype | None = None
        self.embed_tokens = _table(spec.vocab_size, spec.hidden_size)
        if spec.learned_positions:
            self.embed_positions = _table(spec.max_position_embeddings, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, i) for i in range(spec.num_layers))
        if spec.embedding_norm:
            self.embed_norm = make_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.norm = make_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        if not spec.tied:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=spec.head_bias)

    @property
    def dtype(self) -> torch.dtype:
        """Data type the decoder computes in."""
        return self.computes_in or self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device the decoder lives on."""
        return self.embed_tokens.weight.device

    @property
    def computed_by(self) -> str:
        """What computes attention over a cache: `triton`, `compiled` (on a CPU), `torch` or `reference`."""
        return "triton" if self.kernels else "compiled" if self.fast_step is not None else self.backend

    def forward(self, tokens: Tensor, cache: Cache | None = None, lengths: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: `[B, T]` int64, padded on the right where sequences differ in length.
            cache: holds what came before; the step is added to it. None: the sequences start here.
            lengths: `[B]` tokens of each row that count (a CPU tensor avoids a wait); None: all `T`.

        Returns:
            `[B, T, D]`; rows beyond a sequence's length are meaningless.

        Raises:
            InputError: a token id or a position is outside the model's tables.
        """
        fast = self.fast_step
        if fast is not None and cache is not None and lengths is None and tokens.shape[1] == 1 and fast.takes(cache):
            return fast(self, tokens, cache)
        step = self.begin_step(tokens.shape, cache, lengths)
        x = self.embed(tokens, step.positions)  # [B, T, D]
        with large_products(x):
            for layer in self.layers:
                x = layer(x, step)
        if cache is not None:
            cache.advance(step.ends)
        return self.norm(x)  # type: ignore[no-any-return]

    def begin_step(
        self,
        shape: torch.Size,
        cache: Cache | None = None,
        lengths: Tensor | None = None,
        backend: str | None = None,
    ) -> Step:
        """As the function of that name, for this decoder and with its kernels."""
        step = begin_step(self.spec, shape, self.device, cache, lengths, backend or self.backend)
        step.attend = self.fast_attention
        return step

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`[B, T]` ids (and positions) to `[B, T, D]`."""
        check_tokens(tokens, self.spec.vocab_size)
        x = self.embed_tokens(tokens).to(self.dtype)
        if self.spec.embedding_scale != 1:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)  # rounded, as Gemma was trained
        if self.spec.learned_positions:
            # Padding may stand past the table; its rows are meaningless anyway.
            x = x + self.embed_positions(positions.clamp(max=self.spec.max_position_embeddings - 1)).to(self.dtype)
        return self.embed_norm(x) if self.spec.embedding_norm else x  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., D]` hidden states to `[..., V]` scores."""
        if self.fast_step is not None and hidden.dim() == 2 and len(hidden) <= FAST_LOGITS:
            return self.fast_step.logits(hidden)
        s, weight = self.spec, self.embed_tokens.weight if self.spec.tied else self.lm_head.weight
        bias = self.lm_head.bias.to(hidden.dtype) if s.head_bias else None
        with large_products(hidden):
            scores = widened_linear(hidden, weight, bias)
        if s.logit_scale != 1:
            scores = scores * s.logit_scale
        return scores if s.logit_softcap is None else s.logit_softcap * torch.tanh(scores / s.logit_softcap)

    def with_layers(self, layers: Sequence[DecoderLayer]) -> Decoder:
        """A decoder that shares embedding, norm and head with this one, described as its layers are."""
        other = copy.copy(self)
        other._modules = dict(self._modules)
        other.layers = nn.ModuleList(layers)
        other.fast_step, other.kernels = None, ()
        other.spec = self.spec.with_attention(tuple(layer.self_attn.spec for layer in layers))
        return other

    def make_cache(
        self,
        batch: int,
        capacity: int,
        quantizers: tuple[LatentQuantizer | None, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Cache:
        """An empty cache for this decoder (see `Cache`)."""
        return Cache(
            self.spec, batch, capacity, dtype=dtype or self.dtype, device=self.device, quantizers=quantizers,
            kernels=self.kernels,
        )  # fmt: skip


def begin_step(
    spec: DecoderSpec,
    shape: torch.Size,
    device: torch.device,
    cache: Cache | None = None,
    lengths: Tensor | None = None,
    backend: str = "torch",
) -> Step:
    """Positions and visibility of `[B, T]` new tokens that follow what `cache` holds.

    Raises:
        InputError: a token would stand past the model's table of learned positions.
        MlaError: a sequence would outgrow the cache.
    """
    batch, new = shape
    added = torch.full((batch,), new) if lengths is None else lengths.cpu()  # [B]
    ends = added if cache is None else cache.host_lengths + added
    if spec.learned_positions and batch and int(ends.max()) > spec.max_position_embeddings:
        raise InputError(
            f"a sequence of {int(ends.max())} tokens exceeds the model's {spec.max_position_embeddings} learned positions",
            fix="shorten the prompt or ask for fewer new tokens",
        )
    offsets = torch.arange(new, device=device)
    if cache is None:
        return Step(offsets.expand(batch, new), ends.to(device), keys=new, backend=backend)
    fresh = cache.longest == 0
    cache.begin(new, ends)
    positions = cache.lengths[:, None] + offsets  # [B, T]
    return Step(positions, ends.to(device), keys=cache.longest + new, cache=cache, fresh=fresh, backend=backend)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Refuse ids outside the embedding table before any kernel runs."""
    if tokens.numel() and not tokens.is_cuda:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            raise InputError(
                f"token id {low if low < 0 else high} is outside the model's embedding table of {vocab_size} rows",
                fix="the tokenizer does not belong to this model; use the one it was trained with",
            )
