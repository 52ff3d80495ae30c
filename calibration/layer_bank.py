"""The layers a conversion runs: the source's, and variants of them with latent attention in the place of standard attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from mla_cli.calibration.layerwise import LayerAt
from mla_cli.checkpoint.load import ModelSource, load_frame, load_layer
from mla_cli.model.attention import StandardAttention
from mla_cli.model.decoder import Decoder, DecoderLayer
from mla_cli.model.latent_weights import LatentWeights

KEEP_BYTES = (
    1 << 30
)  # a model whose layers fit in this (float32) is kept in memory; a larger one is read layer by layer


class LayerBank:
    """Loads the layers of a source in float32, keeps them where they are small, and builds their latent variants."""

    def __init__(self, model: ModelSource, device: torch.device) -> None:
        self.model, self.device = model, device
        self.frame: Decoder = load_frame(model, device=device)
        infos = model.source.tensors.infos
        total = 4 * sum(
            int(torch.Size(infos[model.rules[name].source].shape).numel())
            for layer in range(model.spec.num_layers)
            for name in model.layer_names(layer)
        )
        self._keeps = total <= KEEP_BYTES
        self._kept: dict[int, DecoderLayer] = {}

    def source_layer(self, index: int) -> DecoderLayer:
        """A layer of the source."""
        if index in self._kept:
            return self._kept[index]
        layer = load_layer(self.model, index, device=self.device)
        if self._keeps:
            self._kept[index] = layer
        return layer

    def source_attention(self, index: int) -> StandardAttention:
        """The attention of a source layer."""
        attention = self.source_layer(index).self_attn
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
        frame.spec = self.model.spec.with_attention(tuple(w.spec for w in weights))
        return frame
