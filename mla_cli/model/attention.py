"""Standard and latent attention, each readable as its equation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from mla_cli.kernels import reference, torch_ops
from mla_cli.kernels.cpu.prompt import PromptAttention
from mla_cli.model.cache import Cache
from mla_cli.model.latent_gate import Chunks, LatentGate, gate_latents
from mla_cli.model.latent_pages import LatentPages
from mla_cli.model.norms import inverse_rms, make_head_norm, norm_heads
from mla_cli.model.rotary import rotary_tables, rotate
from mla_cli.model.spec import LatentAttentionSpec, QkNormSpec, RotarySpec, StandardAttentionSpec

Record = dict[str, Tensor]

FEW_TOKENS = 64  # of a step on a CPU, up to which it attends to the latents of its cache and not to rebuilt keys
PRODUCTS_UP_TO = 1024  # tokens: beyond, the scores of a training step cost more memory than they save time


@dataclass
class Step:
    """What the layers of one forward pass share: where the tokens stand, and what they may see.

    Attributes:
        positions: `[B, T]` int64; `ends`: `[B]` tokens of each sequence once this step is done.
        cache: where earlier tokens are, or None.
        keys: key places to read, `S`; `fresh`: no earlier tokens, so the step attends to itself alone.
        backend: `torch`, `reference`, or `training`: as torch, by operators whose backward pass is fast (fresh steps only).
        attend: a faster kernel for attention of many tokens; None: there is none.
    """

    positions: Tensor
    ends: Tensor
    keys: int
    cache: Cache | None = None
    fresh: bool = True
    backend: str = "torch"
    attend: PromptAttention | None = None
    _tables: dict[RotarySpec, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _visible: dict[int | None, Tensor | None] = field(default_factory=dict)
    _chunks: dict[int, Chunks] = field(default_factory=dict)
    _biases: dict[tuple[tuple[float, ...], int | None], Tensor] = field(default_factory=dict)

    def rotary(self, rotary: RotarySpec) -> tuple[Tensor, Tensor]:
        """cos, sin `[B, T, n]`, made once a step."""
        if rotary not in self._tables:
            self._tables[rotary] = rotary_tables(rotary, self.positions, self.ends)
        return self._tables[rotary]

    def visible(self, window: int | None) -> Tensor | None:
        """`[B, T, S]` bool, or None for plain causal attention of a fresh step."""
        if window not in self._visible:
            plain = self.fresh and (window is None or window >= self.keys)
            self._visible[window] = None if plain else reference.visible_keys(self.positions, self.keys, window)
        return self._visible[window]

    def biases(self, slopes: tuple[float, ...], window: int | None) -> Tensor:
        """ALiBi's addition to the scores, float32 `[B, H, T, S]`; minus infinity where nothing is visible."""
        if (slopes, window) not in self._biases:
            place = torch.arange(self.keys, device=self.positions.device)
            distance = (self.positions[..., None] - place)[:, None]  # [B, 1, T, S]
            seen = reference.visible_keys(self.positions, self.keys, window)[:, None]
            slope = torch.tensor(slopes, device=place.device)[:, None, None]  # [H, 1, 1]
            self._biases[slopes, window] = (-slope * distance).masked_fill(~seen, float("-inf"))
        return self._biases[slopes, window]

    def chunks(self, size: int) -> Chunks:
        """Where the tokens stand among chunks of `size`."""
        if size not in self._chunks:
            self._chunks[size] = Chunks.of(self.positions, size, fresh=self.fresh)
        return self._chunks[size]


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    spec: StandardAttentionSpec | LatentAttentionSpec,
    rope: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention with explicit keys and values, `[B, T, H, d_v]`, by the operator that suits the step.

    `rope` are more channels of the queries, `[B, T, H, d_R]`, and of the keys, `[B, S, d_R]`, which all heads share.
    """
    if spec.alibi:
        return torch_ops.biased_attention(q, k, v, step.biases(spec.alibi, spec.window), spec.scale)
    fast = step.attend
    if fast is not None and step.backend != "reference" and q.shape[1] > 1 and fast.takes(q, k, v, *(rope or ())):
        first = step.positions[:, 0]
        return fast(q, k, v, first, spec.scale, rope=rope, window=spec.window, softcap=spec.softcap)
    if rope is not None:
        q = torch.cat((q, rope[0]), dim=-1)
        k = torch.cat((k, rope[1][:, :, None].expand(-1, -1, k.shape[2], -1)), dim=-1)
    visible = step.visible(spec.window)
    by_products = step.backend == "training" and q.device.type == "cpu" and q.dtype == torch.bfloat16
    if by_products and visible is None and spec.softcap is None and q.shape[1] <= PRODUCTS_UP_TO:
        return torch_ops.causal_attention_by_products(q, k, v, spec.scale)
    return torch_ops.attention(q, k, v, visible, spec.scale, spec.softcap)


class StandardAttention(nn.Module):
    """`softmax(scale * rope(q) rope(k)^T) v`, heads sharing keys in groups."""

    def __init__(self, spec: StandardAttentionSpec, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        kv = spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden, spec.num_heads * spec.head_dim, bias=spec.q_bias)
        self.k_proj = nn.Linear(hidden, kv, bias=spec.kv_bias)
        self.v_proj = nn.Linear(hidden, kv, bias=spec.kv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, hidden, bias=spec.o_bias)
        if spec.qk_norm is not None:
            self.q_norm = make_head_norm(spec.qk_norm, spec.num_heads, spec.head_dim)
            self.k_norm = make_head_norm(spec.qk_norm, spec.num_kv_heads, spec.head_dim)

    def forward(self, x: Tensor, step: Step, record: Record | None = None) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; `record` receives `q`, `k` (normed), `v` before rotation."""
        s = self.spec
        q = self.q_proj(x).unflatten(-1, (s.num_heads, s.head_dim))  # [B, T, H, d]
        k = self.k_proj(x).unflatten(-1, (s.num_kv_heads, s.head_dim))  # [B, T, G, d]
        v = self.v_proj(x).unflatten(-1, (s.num_kv_heads, s.head_dim))  # [B, T, G, d]
        if s.qk_norm is not None:
            q, k = norm_heads(self.q_norm, s.qk_norm, q), norm_heads(self.k_norm, s.qk_norm, k)
        if record is not None:
            record.update(q=q, k=k, v=v)
        if s.rotary is not None:
            cos, sin = step.rotary(s.rotary)
            q, k = rotate(q, cos, sin, interleaved=False), rotate(k, cos, sin, interleaved=False)
        if step.cache is not None:
            k, v = step.cache.write(self.layer, step.positions, k, v)
            if not step.fresh:
                k, v = step.cache.read(self.layer, step.keys, x.dtype)  # [B, S, G, d]
        out = _explicit(q, k, v, step, s)  # [B, T, H, d]
        if record is not None:
            record["heads"] = out
        return self.o_proj(out.flatten(-2))


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """In the type of the norm's weight: where products alone are narrower, what they give is not."""
    return norm(x.to(norm.weight.dtype))  # type: ignore[no-any-return]


class HeadLinear(nn.Linear):
    """A linear map for each head: `[B, T, H, d]` to `[B, T, H, e]`, its weight `[H*e, d]`."""

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        maps = self.weight.view(x.shape[-2], -1, x.shape[-1])  # [H, e, d]
        return torch.einsum("bthd,hed->bthe", x, maps.to(x.dtype))


class LatentAttention(nn.Module):
    """Multi-head latent attention: the cache holds one latent and one rotary key a token.

    `scores = scale * (q_nope W_UK c + rope(q_rope) rope(k_rope))`, `values = W_UV c`. A prompt rebuilds keys and values;
    later tokens run absorbed, with `W_UK` in the query and `W_UV` in the output, so that the cache is all that is read.
    With a gate, `c` is the gated latent everywhere. Where the source has norms of queries and keys, `q` reads the source's
    queries over their rms, and each key's scores are multiplied by `1 / rms` of the source's key, which is cached.
    """

    def __init__(self, spec: LatentAttentionSpec, hidden: int, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        s, query_width = spec, spec.num_heads * spec.qk_head_dim
        if s.qk_norm is not None:
            self.q_norm_proj = nn.Linear(hidden, s.num_heads * s.head_dim, bias=s.qk_norm.bias)
            self.k_norm_proj = nn.Linear(hidden, s.num_kv_heads * s.head_dim, bias=s.qk_norm.bias)
            self.q_map = HeadLinear(s.head_dim, query_width, bias=False)
        elif s.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, query_width, bias=s.q_bias)
        else:
            self.q_a_proj = nn.Linear(hidden, s.q_lora_rank, bias=s.kv_a_bias)
            self.q_a_layernorm = nn.RMSNorm(s.q_lora_rank, eps=s.norm_eps)
            self.q_b_proj = nn.Linear(s.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, s.kv_lora_rank + s.qk_rope_head_dim, bias=s.kv_a_bias)
        if s.norm_eps is not None:
            self.kv_a_layernorm = nn.RMSNorm(s.kv_lora_rank, eps=s.norm_eps)
        self.kv_b_proj = nn.Linear(s.kv_lora_rank, s.num_heads * (s.qk_nope_head_dim + s.v_head_dim), bias=False)
        self.o_proj = nn.Linear(s.num_heads * s.v_head_dim, hidden, bias=s.o_bias)
        if s.gate_chunk is not None:
            self.latent_gate = LatentGate(s.kv_lora_rank)

    def forward(self, x: Tensor, step: Step, record: Record | None = None) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; `record` receives `latent`, `k_rope`, `q_nope`, `q_rope`."""
        s = self.spec
        q_nope, q_rope = self._queries(x).split((s.qk_nope_head_dim, s.qk_rope_head_dim), dim=-1)  # [B, T, H, ...]
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((s.kv_lora_rank, s.qk_rope_head_dim), dim=-1)  # [B, T, r]
        pages = None if step.cache is None else step.cache.pages(self.layer)
        if pages is not None:
            out = self._through_pages(q_nope, q_rope, latent, k_rope, step, pages)
            return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]
        if s.norm_eps is not None:
            latent = _normed(self.kv_a_layernorm, latent)
        if s.gate_chunk is not None:
            latent = self._gated(latent, step.chunks(s.gate_chunk), step)  # [B, T, r]
        if record is not None:
            record.update(latent=latent, k_rope=k_rope, q_nope=q_nope, q_rope=q_rope)
        if s.rotary is not None and s.qk_rope_head_dim:
            cos, sin = self._tables(s.rotary, step)
            q_rope = rotate(q_rope, cos, sin, interleaved=s.interleaved)
            k_rope = rotate(k_rope, cos, sin, interleaved=s.interleaved)
        if s.qk_norm is not None:
            k_rope = torch.cat((k_rope, self._key_factors(x, s.qk_norm)), dim=-1)  # [B, T, rope+F]: cached together
        if step.cache is not None:
            latent, k_rope = step.cache.write(self.layer, step.positions, latent, k_rope)
        if step.cache is not None and not step.fresh:
            latent, k_rope = step.cache.read(self.layer, step.keys, x.dtype)  # [B, S, r], [B, S, rope+F]
        k_rope, factors = k_rope.split((s.qk_rope_head_dim, s.key_factors), dim=-1)
        # Many tokens are cheaper with keys and values rebuilt, whatever they attend to.
        many = x.device.type == "cpu" and x.shape[1] > FEW_TOKENS
        if (step.fresh or many) and step.backend != "reference":
            out = self._rebuilt(q_nope, q_rope, latent, k_rope, factors, step)
        else:
            out = self._absorbed(q_nope, q_rope, latent, k_rope, factors, step)
        if record is not None:
            record["heads"] = out
        return self.o_proj(out.flatten(-2))

    def _through_pages(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, step: Step, pages: LatentPages
    ) -> Tensor:
        """The same by kernels, `[B, T, H, v]`: they norm, turn and store what is cached, and attend to it absorbed."""
        s, tables = self.spec, None
        assert step.cache is not None, "pages belong to a cache"
        if s.rotary is not None and s.qk_rope_head_dim:
            tables = self._tables(s.rotary, step)
            q_rope = rotate(q_rope, *tables, interleaved=s.interleaved)
        at = step.cache.paged_step(pages)
        norm = None if s.norm_eps is None else self.kv_a_layernorm
        pages.write(at, latent, k_rope, tables, norm, s.interleaved)
        w_uk, w_uv = self._up(q_nope.dtype)
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, w_uk), q_rope), dim=-1)  # [B, T, H, r+rope]
        out = pages.attend(at, q, s.scale, window=s.window, softcap=s.softcap)  # [B, T, H, r]
        return torch.einsum("bthr,hvr->bthv", out, w_uv)  # [B, T, H, v]

    def _key_factors(self, x: Tensor, norm: QkNormSpec) -> Tensor:
        return inverse_rms(self.k_norm_proj(x).unflatten(-1, (self.spec.num_kv_heads, -1)), norm)  # [B, T, F]

    def _of_heads(self, factors: Tensor) -> Tensor | None:
        """`[B, S, F]` factors of key heads as `[B, S, H]`; None where there are none."""
        if not self.spec.key_factors:
            return None
        return factors.repeat_interleave(self.spec.num_heads // self.spec.key_factors, dim=-1)

    def _queries(self, x: Tensor) -> Tensor:
        norm = self.spec.qk_norm
        if norm is not None:
            q = self.q_norm_proj(x).unflatten(-1, (self.spec.num_heads, -1))  # [B, T, H, d]
            return self.q_map(q * inverse_rms(q, norm)[..., None])  # type: ignore[no-any-return]
        if self.spec.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(_normed(self.q_a_layernorm, self.q_a_proj(x)))
        return q.unflatten(-1, (self.spec.num_heads, self.spec.qk_head_dim))  # [B, T, H, nope+rope]

    def _tables(self, rotary: RotarySpec, step: Step) -> tuple[Tensor, Tensor]:
        cos, sin = step.rotary(rotary)
        if self.spec.frequencies is None:
            return cos, sin
        index = torch.tensor(self.spec.frequencies, device=cos.device)
        return cos.index_select(-1, index), sin.index_select(-1, index)

    def _gated(self, latent: Tensor, chunks: Chunks, step: Step) -> Tensor:
        cache = step.cache
        if cache is None:
            return gate_latents(self.latent_gate, latent, chunks, None, lambda last: last)
        before = None if step.fresh else cache.read_at(self.layer, chunks.before, latent.dtype)  # [B, r]
        return gate_latents(self.latent_gate, latent, chunks, before, partial(cache.as_stored, self.layer))

    def _up(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # W_UK [H, nope, r] and W_UV [H, v, r]
        s = self.spec
        up = self.kv_b_proj.weight.to(dtype).view(s.num_heads, s.qk_nope_head_dim + s.v_head_dim, s.kv_lora_rank)
        return up.split((s.qk_nope_head_dim, s.v_head_dim), dim=1)  # type: ignore[no-any-return]

    def _rebuilt(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, factors: Tensor, step: Step
    ) -> Tensor:
        s = self.spec
        kv = self.kv_b_proj(latent).unflatten(-1, (s.num_heads, -1))  # [B, T, H, nope+v]
        k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), dim=-1)
        rope = (q_rope, k_rope) if s.qk_rope_head_dim else None
        scaled = self._of_heads(factors)
        if scaled is None:
            return _explicit(q_nope, k_nope, v, step, s, rope)  # [B, T, H, v]
        key = torch.cat((k_nope, k_rope[:, :, None].expand(-1, -1, s.num_heads, -1)), dim=-1) * scaled[..., None]
        return _explicit(torch.cat((q_nope, q_rope), dim=-1), key, v, step, s)

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, factors: Tensor, step: Step
    ) -> Tensor:
        s, visible = self.spec, step.visible(self.spec.window)
        more = {
            "factors": self._of_heads(factors),  # [B, S, H]
            "bias": step.biases(s.alibi, s.window) if s.alibi else None,  # [B, H, T, S]
        }
        w_uk, w_uv = self._up(q_nope.dtype)
        q_latent = torch.einsum("bthn,hnr->bthr", q_nope, w_uk)  # [B, T, H, r]
        if step.backend == "reference":
            seen = reference.visible_keys(step.positions, latent.shape[1], s.window) if visible is None else visible
            out, _ = reference.latent_attention(q_latent, q_rope, latent, k_rope, seen, s.scale, s.softcap, **more)
            out = out.to(latent.dtype)
        else:
            out = torch_ops.latent_attention(q_latent, q_rope, latent, k_rope, visible, s.scale, s.softcap, **more)
        return torch.einsum("bthr,hvr->bthv", out, w_uv)  # [B, T, H, v]
