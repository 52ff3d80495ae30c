"""From an opened source to a decoder, whole or one layer at a time, with every tensor accounted for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.checkpoint.disk import finite
from mla_cli.checkpoint.sources import Source, open_source
from mla_cli.console import note
from mla_cli.errors import InputError
from mla_cli.kernels.cpu.prompt import prompt_attention
from mla_cli.model.attention import LatentAttention, StandardAttention
from mla_cli.model.decoder import Decoder, DecoderLayer
from mla_cli.model.families import family_of
from mla_cli.model.families.base import Family, TensorRule
from mla_cli.model.families.multimodal import text_name, text_part
from mla_cli.model.spec import DecoderSpec

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint whose configuration is understood and whose tensors are all there, with the right shapes.

    Attributes:
        source: the opened checkpoint; family: who reads it; spec: the decoder; rules: where each tensor is.
        notes: what a user should know (a tied flag that the file contradicts, ...).
    """

    source: Source
    family: Family
    spec: DecoderSpec
    rules: dict[str, TensorRule]
    notes: tuple[str, ...] = ()

    @property
    def stored_dtype(self) -> torch.dtype:
        """The data type most of the weights are stored in."""
        numbers: Counter[torch.dtype] = Counter()
        for name in {rule.source for rule in self.rules.values()}:
            info = self.source.tensors.infos[name]
            numbers[info.dtype] += math.prod(info.shape)
        return numbers.most_common(1)[0][0]

    def tensor(self, name: str) -> Tensor:
        """One of the decoder's tensors, by the decoder's name, in its stored type.

        Raises:
            InputError: it holds NaN or infinity.
        """
        rule = self.rules[name]
        stored = self.source.tensors.read(rule.source)
        if not finite(stored):
            raise InputError(
                f"tensor {rule.source} holds NaN or infinity",
                where=self.source.tensors.infos[rule.source].file,
                fix="the file is damaged or the model diverged; download it again",
            )
        if rule.transpose:
            stored = stored.T
        if isinstance(rule.rows, range):
            stored = stored[rule.rows.start : rule.rows.stop]
        elif rule.rows is not None:
            stored = stored[torch.tensor(rule.rows)]
        return stored.contiguous()

    def layer_names(self, layer: int) -> list[str]:
        """Names of one layer's tensors."""
        prefix = f"model.layers.{layer}."
        return [name for name in self.rules if name.startswith(prefix)]


def resolve(source: Source) -> ModelSource:
    """Understand a source: its family, its decoder, and where every tensor is.

    Raises:
        InputError: a tensor is missing, has a wrong shape or type, or would be left unused.
    """
    notes: list[str] = []
    text, infos = text_part(source.config), source.tensors.infos
    stored = {name: name for name in infos}  # the tensor's name for the family -> in the file
    if text is not None:
        outer, source = source.config["model_type"], replace(source, config=text)
        stored = {short: name for name in infos if (short := text_name(name)) is not None}
        infos = {name: infos[name] for name in stored.values()}
        notes.append(f"{outer} reads images too: the text model inside it alone is taken")
    family = family_of(source.config)
    spec = family.spec(source.config)
    if spec.tied and "lm_head.weight" in stored:
        spec, said = _resolve_tied(source, family, spec, stored)
        notes += said
    rules = family.tensors(spec, frozenset(stored))
    rules = {name: replace(rule, source=stored.get(rule.source, rule.source)) for name, rule in rules.items()}
    for rule in rules.values():
        info = infos.get(rule.source)
        if info is None:
            raise source.tensors.missing(rule.source)
        if info.shape != rule.shape:
            raise InputError(
                f"tensor {rule.source} has shape {list(info.shape)}, config.json asks for {list(rule.shape)}",
                where=info.file,
                fix="config.json and weights do not belong together; download both again",
            )
        if info.dtype not in _FLOATS:
            raise InputError(
                f"tensor {rule.source} has type {str(info.dtype).removeprefix('torch.')}, not a plain float type",
                where=info.file,
                fix="the model is quantised; dequantise it first (save it in bfloat16)",
            )
    used = {rule.source for rule in rules.values()}
    tied_copy = {stored.get("lm_head.weight", "lm_head.weight")} if spec.tied else set()
    unused = [name for name in infos if name not in used | tied_copy and not family.skips(name)]
    if unused:
        raise InputError(
            f"{len(unused)} tensor(s) of the file would be left unused, e.g. {unused[0]}",
            where=infos[unused[0]].file,
            fix=f"config.json (model_type '{spec.model_type}') does not describe this file: check its bias and size keys",
        )
    return ModelSource(source, family, spec, rules, tuple(notes))


def _resolve_tied(
    source: Source, family: Family, spec: DecoderSpec, stored: Mapping[str, str]
) -> tuple[DecoderSpec, list[str]]:
    # A tied flag with another lm_head in the file: the file wins, as in transformers.
    embedding = family.tensors(spec, frozenset(stored))["model.embed_tokens.weight"].source
    if embedding in stored and torch.equal(
        source.tensors.read(stored[embedding]), source.tensors.read(stored["lm_head.weight"])
    ):
        return spec, []
    said = (
        "config.json ties the output head to the embedding, but the file's lm_head.weight differs: using lm_head.weight"
    )
    return replace(spec, tied=False), [said]


def open_model(text: str, *, offline: bool = False) -> ModelSource:
    """Open and understand a source given as the user writes it (folder, Hub id, `.gguf`, built-in name)."""
    return resolve(open_source(text, offline=offline))


def _fill(
    module: nn.Module, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, device: str | torch.device
) -> None:
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors}
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()


def load_layer(
    model: ModelSource, layer: int, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> DecoderLayer:
    """One decoder layer with its weights."""
    with torch.device("meta"):
        module = DecoderLayer(model.spec, layer)
    prefix = f"model.layers.{layer}."
    _fill(module, ((n.removeprefix(prefix), model.tensor(n)) for n in model.layer_names(layer)), dtype, device)
    return module


def load_attention(
    model: ModelSource, layer: int, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> StandardAttention | LatentAttention:
    """The attention of one decoder layer with its weights, without reading the rest of the layer."""
    with torch.device("meta"):
        module = DecoderLayer(model.spec, layer).self_attn
    prefix = f"model.layers.{layer}.self_attn."
    names = [name for name in model.layer_names(layer) if name.startswith(prefix)]
    _fill(module, ((name.removeprefix(prefix), model.tensor(name)) for name in names), dtype, device)
    return module


def layer_bytes(model: ModelSource) -> list[int]:
    """Bytes of each layer's weights in float32."""
    infos = model.source.tensors.infos
    return [
        4 * sum(math.prod(infos[model.rules[name].source].shape) for name in model.layer_names(layer))
        for layer in range(model.spec.num_layers)
    ]


def load_decoder(
    model: ModelSource, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """The whole decoder, filled layer by layer so that no second copy of the weights ever exists."""
    decoder = load_frame(model, dtype=dtype, device=device)
    decoder.layers = nn.ModuleList(
        load_layer(model, layer, dtype=dtype, device=device) for layer in range(model.spec.num_layers)
    )
    return decoder


def load_frame(
    model: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    keep_tables: bool = False,
    like: Decoder | None = None,
) -> Decoder:
    """The decoder without layers: embedding, final norm, output head (for work layer by layer).

    On a CPU the compiled kernels compute the attention of its steps, where they can be had.

    Args:
        keep_tables: keep embedding and head as they are stored, where that is narrower; they are widened in parts for each use.
        like: another one, whose tensors are shared where they are equal to what is stored here.
    """
    with torch.device("meta"):
        decoder = Decoder(model.spec.with_attention(()))
    decoder.spec = model.spec
    if torch.device(device).type == "cpu" and dtype != torch.float64:
        decoder.fast_attention = prompt_attention(cache_dir() / "kernels", note)
    held = {} if like is None else like.state_dict()
    state = {}
    for name in [name for name in model.rules if not name.startswith("model.layers.")]:
        key, tensor = name.removeprefix("model."), model.tensor(name)
        kept = keep_tables and name in TABLES and tensor.dtype.itemsize < dtype.itemsize
        tensor = tensor.to(device=device, dtype=tensor.dtype if kept else dtype)
        same = held.get(key)
        equal = same is not None and same.dtype == tensor.dtype and torch.equal(same, tensor)
        state[key] = same if equal and same is not None else tensor
    decoder.load_state_dict(state, strict=True, assign=True)
    decoder.requires_grad_(False).eval()
    if keep_tables:
        decoder.computes_in = dtype
    return decoder
