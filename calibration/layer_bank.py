"""The layers a conversion runs: the source's, and variants of them with latent attention in the place of standard attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from mla_cli.calibration.layerwise import LayerAt
from mla_cli.calibration.offload import Series
from mla_cli.checkpoint.load import ModelSource, layer_bytes, load_attention, load_frame, load_layer
from mla_cli.model.attention import StandardAttention
from mla_cli.model.decoder import Decoder, DecoderLayer
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.spec import LatentAttentionSpec

# A model whose layers fit in this (float32) is kept in memory; a larger one is read layer by layer, and its large tables are
# kept as they are stored.
KEEP_BYTES = 1 << 30


class LayerBank:
    """Loads the layers of a source in float32, keeps them where they are small, and builds their latent variants.

    Of a large model it keeps the layer that was asked for last: variants of it follow one another.
    """

    def __init__(self, model: ModelSource, device: torch.device, *, like: Decoder | None = None) -> None:
        """Args: like: embedding, norm and head of the same source, whose equal tensors are shared."""
        self.model, self.device = model, device
        self.keeps = sum(layer_bytes(model)) <= KEEP_BYTES
        self.frame: Decoder = load_frame(model, device=device, keep_tables=not self.keeps, like=like)
        self._kept: dict[int, DecoderLayer] = {}

    def source_layer(self, index: int) -> DecoderLayer:
        """A layer of the source."""
        if index in self._kept:
            return self._kept[index]
        if not self.keeps:
            self.forget()
        self._kept[index] = load_layer(self.model, index, device=self.device)
        return self._kept[index]

    def forget(self) -> None:
        """Free the layers that are kept."""
        self._kept.clear()

    def source_attention(self, index: int) -> StandardAttention:
        """The attention of a source layer."""
        if self.keeps or index in self._kept:
            attention = self.source_layer(index).self_attn
        else:
            attention = load_attention(self.model, index, device=self.device)
        assert isinstance(attention, StandardAttention)
        return attention

    def latent_layers(self, weights: Sequence[LatentWeights]) -> LayerAt:
        """Layers of the source with these attentions."""

        def layer_at(index: int) -> DecoderLayer:
            return self.source_layer(index).with_attention(weights[index].module(index, device=self.device))

        return layer_at

    def latent_frame(self, weights: Sequence[LatentWeights]) -> Decoder:
        """The source's embedding, norm and head, with the description of the latent decoder."""
        frame = copy.copy(self.frame)
        frame.spec = self.model.spec.with_attention(specs_of(weights))
        return frame


class StoredLayers(Series[LatentWeights]):
    """Converted layers, see `Workplace.series`; their descriptions stay in memory."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self.specs: list[LatentAttentionSpec] = []

    def append(self, value: LatentWeights) -> None:
        """Keep one more."""
        super().append(value)
        self.specs.append(value.spec)


def specs_of(layers: Sequence[LatentWeights]) -> tuple[LatentAttentionSpec, ...]:
    """What layers are, without reading those that are not in memory."""
    return tuple(layers.specs if isinstance(layers, StoredLayers) else (layer.spec for layer in layers))
