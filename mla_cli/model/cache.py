"""Token caches of one batch: keys and values of standard attention, latents and rotary keys of latent attention.

Sequences of a batch may differ in length: each occupies the first `lengths[b]` places, the rest is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import LatentQuantizer, decode
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec

GROWTH = 256  # tokens; growing in steps keeps a long generation from copying its cache at every token


@dataclass
class LayerCache:
    """One layer's storage: `first` holds keys or latents, `second` values or rotary keys, `scales` quantised only."""

    first: Tensor  # [B, C, ...]
    second: Tensor  # [B, C, ...]
    quantizer: LatentQuantizer | None = None
    scales: Tensor | None = None  # [B, C, G]
    width: int = 0  # of a quantised latent


class Cache:
    """Cache of a whole decoder for `batch` sequences of at most `capacity` tokens.

    Args:
        spec: the decoder; its layers decide what is stored.
        batch: sequences.
        capacity: most tokens a sequence may hold; writing past it raises `MlaError`.
        dtype: data type of what is not quantised.
        quantizers: one a layer (None: stored in `dtype`), or None for no quantisation at all.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantizers: tuple[LatentQuantizer | None, ...] | None = None,
    ) -> None:
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.host_lengths = torch.zeros(
            batch, dtype=torch.int64
        )  # the same on the host: a step never waits for the device
        self._room = min(GROWTH, capacity)
        self.layers: list[LayerCache] = []
        for index, attention in enumerate(spec.attention):
            if isinstance(attention, LatentAttentionSpec):
                widths: tuple[tuple[int, ...], tuple[int, ...]] = (
                    (attention.kv_lora_rank,),
                    (attention.qk_rope_head_dim,),
                )
            else:
                widths = ((attention.num_kv_heads, attention.head_dim),) * 2
            quantizer = quantizers[index] if quantizers and isinstance(attention, LatentAttentionSpec) else None
            stored = quantizer.storage_dtype if quantizer else dtype
            if quantizer:
                widths = ((quantizer.code_width(widths[0][0]),), widths[1])
            # A quantised cache keeps the rotary key in bfloat16: it is small, and errors in it ruin positions.
            second = torch.bfloat16 if quantizer else dtype
            shape = (batch, self._room)
            self.layers.append(
                LayerCache(
                    torch.zeros(*shape, *widths[0], dtype=stored, device=device),
                    torch.zeros(*shape, *widths[1], dtype=second, device=device),
                    quantizer,
                    torch.zeros(
                        *shape, quantizer.groups(attention.kv_lora_rank), dtype=quantizer.scale_dtype, device=device
                    )
                    if quantizer and isinstance(attention, LatentAttentionSpec)
                    else None,
                    attention.kv_lora_rank if isinstance(attention, LatentAttentionSpec) else 0,
                )
            )

    @property
    def longest(self) -> int:
        """Tokens held by the longest sequence."""
        return int(self.host_lengths.max()) if self.host_lengths.numel() else 0

    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers, from what is really allocated (scales included)."""
        return sum(
            part[0, 0].numel() * part.element_size()
            for layer in self.layers
            for part in (layer.first, layer.second, layer.scales)
            if part is not None
        )

    def allocated_bytes(self) -> int:
        """Bytes allocated now for all sequences."""
        return self.bytes_per_token() * self._room * self.lengths.numel()

    def begin(self, new_tokens: int, ends: Tensor) -> None:
        """Make room for a step that writes `new_tokens` places a sequence (padding included), after which they hold `ends`."""
        longest = int(ends.max()) if ends.numel() else 0
        if longest > self.capacity:
            raise MlaError(f"the cache holds at most {self.capacity} tokens a sequence, {longest} were asked for")
        need = self.longest + new_tokens
        if need > self._room:
            self._grow(max(need, min(self.capacity, self._room + max(GROWTH, self._room // 2))))

    def write(self, layer: int, places: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Store a step's new entries and return them as later steps will read them.

        Args:
            places: `[B, T]` where each token goes.
            first: `[B, T, ...]` keys or latents; `second`: values or rotary keys.

        Returns:
            Both as stored (rounded to the cache's types, quantised and back), in the type they came in.
        """
        store = self.layers[layer]
        rows = torch.arange(places.shape[0], device=places.device)[:, None]
        kept_second = second.to(store.second.dtype)
        store.second[rows, places] = kept_second
        if store.quantizer is None or store.scales is None:
            kept = first.to(store.first.dtype)
            store.first[rows, places] = kept
            return kept.to(first.dtype), kept_second.to(second.dtype)
        codes, scales = store.quantizer.quantize(first, layer)
        store.first[rows, places] = codes
        store.scales[rows, places] = scales
        return decode(codes, scales, first.shape[-1], first.dtype), kept_second.to(second.dtype)

    def read(self, layer: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first `length` places of a layer, in `dtype`: `[B, length, ...]` each."""
        store = self.layers[layer]
        second = store.second[:, :length].to(dtype)
        if store.scales is None:
            return store.first[:, :length].to(dtype), second
        return decode(store.first[:, :length], store.scales[:, :length], store.width, dtype), second

    def read_at(self, layer: int, places: Tensor, dtype: torch.dtype) -> Tensor:
        """What a layer holds first (keys or latents) at one place `[B]` of each sequence: `[B, ...]`."""
        store = self.layers[layer]
        rows = torch.arange(places.shape[0], device=places.device)
        if store.scales is None:
            return store.first[rows, places].to(dtype)
        return decode(store.first[rows, places], store.scales[rows, places], store.width, dtype)

    def as_stored(self, layer: int, first: Tensor) -> Tensor:
        """Keys or latents `[..., r]` as they would be read after `write`."""
        store = self.layers[layer]
        if store.quantizer is None:
            return first.to(store.first.dtype).to(first.dtype)
        return store.quantizer.rounded(first, layer)

    def advance(self, ends: Tensor) -> None:
        """The sequences now hold `ends` `[B]` tokens."""
        self.lengths = ends.to(self.lengths.device)
        self.host_lengths = ends.cpu()

    def truncate(self, lengths: Tensor) -> None:
        """Forget all tokens past `lengths` `[B]` (shorter than now)."""
        self.advance(torch.minimum(self.host_lengths, lengths.cpu()))

    def select(self, rows: Tensor) -> Cache:
        """A copy that holds the given sequences, in that order; a sequence may be repeated (shared contexts)."""
        other = object.__new__(Cache)
        other.capacity, other._room = self.capacity, self._room
        other.lengths = self.lengths[rows].clone()
        other.host_lengths = self.host_lengths[rows.cpu()].clone()
        other.layers = [
            LayerCache(
                layer.first[rows],
                layer.second[rows],
                layer.quantizer,
                None if layer.scales is None else layer.scales[rows],
                layer.width,
            )
            for layer in self.layers
        ]
        return other

    def _grow(self, room: int) -> None:
        def grown(old: Tensor) -> Tensor:
            new = old.new_zeros(old.shape[0], room, *old.shape[2:])
            new[:, : old.shape[1]] = old
            return new

        for layer in self.layers:
            layer.first, layer.second = grown(layer.first), grown(layer.second)
            layer.scales = None if layer.scales is None else grown(layer.scales)
        self._room = room
