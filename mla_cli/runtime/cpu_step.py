"""One new token for every sequence by the compiled CPU kernels: one call for all layers of a step.

What a step attends to, and how entries of the cache are stored, are the same as in `Decoder.forward`; activations are float32
whatever the weights' type, and a weight is read in its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor, nn

from mla_cli.errors import MlaError
from mla_cli.kernels.cpu.build import CpuLibrary
from mla_cli.kernels.cpu.structures import (
    ACTIVATIONS,
    BF16,
    F32,
    FP8,
    INT8,
    LAYER_NORM,
    RMS,
    LayerStruct,
    LinearStruct,
    NormStruct,
    StepStruct,
    StoreStruct,
)
from mla_cli.model.attention import LatentAttention, StandardAttention, Step
from mla_cli.model.cache import Cache
from mla_cli.model.cache_store import PlainStore, Store, TokenStore
from mla_cli.model.decoder import MLP, Decoder, DecoderLayer, begin_step
from mla_cli.model.spec import AttentionSpec, RotarySpec, StandardAttentionSpec
from mla_cli.runtime.int8_weights import Int8Linear

_TYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: INT8, torch.float8_e4m3fn: FP8}
_WEIGHTS = (torch.float32, torch.bfloat16)
MOST_HEADS = 256  # that share keys: the kernel's own limit
MOST_CLIP = 3.4e38


def why_not(decoder: Decoder) -> str | None:
    """What of a decoder the kernels cannot do; None if they can do all."""
    if decoder.device.type != "cpu":
        return "it is not on the CPU"
    if decoder.embed_tokens.weight.dtype not in _WEIGHTS:
        return f"weights are {decoder.embed_tokens.weight.dtype}"
    unusual = decoder.spec.unusual()
    if unusual is not None:
        return f"it has {unusual}"
    for layer in _layers(decoder):
        attention = layer.self_attn
        if _turns_in_part(attention.spec):
            return "it has a partial rotary embedding"
        shared = attention.spec.num_heads
        if isinstance(attention, LatentAttention):
            if attention.spec.gate_chunk is not None:
                return "its latents pass a gate"
        else:
            shared //= attention.spec.num_kv_heads
        if shared > MOST_HEADS:
            return f"{shared} heads share their keys"
    return None


class CpuStep:
    """The kernels' view of a decoder. Weights stay where they are; norms and biases are copied, in float32.

    Args:
        decoder: one of which `why_not` says nothing. threads: most that a step may use; None: as many as PyTorch uses.
    """

    def __init__(self, decoder: Decoder, library: CpuLibrary, threads: int | None = None) -> None:
        self._library, self._spec, self._threads = library, decoder.spec, threads
        self._kept: list[object] = []  # what the structures point to
        self._tables: list[RotarySpec] = []
        self._layers = (LayerStruct * len(decoder.layers))()
        for struct, layer in zip(self._layers, _layers(decoder), strict=True):
            self._describe(struct, layer)
        self._last = self._norm(decoder.norm)
        self._head = self._weight(decoder.embed_tokens.weight if decoder.spec.tied else decoder.lm_head.weight)
        self._cache: Cache | None = None  # the last one that was looked at, and whether its stores will do
        self._suits = False

    def takes(self, cache: Cache) -> bool:
        """Whether all that a cache holds can be read and written."""
        if cache is not self._cache:
            self._cache = cache
            self._suits = all(_is_known(store) for layer in cache.layers for store in layer.stores)
        return self._suits

    def __call__(self, decoder: Decoder, tokens: Tensor, cache: Cache) -> Tensor:
        """As `decoder.forward` of one token a sequence: `[B, 1]` to `[B, 1, D]`, in the decoder's type.

        Raises:
            InputError: a token or a position is outside the model's tables.
            MlaError: a latent is not finite, or the cache is full.
        """
        step = begin_step(self._spec, tokens.shape, tokens.device, cache)
        x = decoder.embed(tokens, step.positions)[:, 0].float().contiguous()  # [B, D]
        for struct, layer in zip(self._layers, cache.layers, strict=True):
            _describe_store(struct.first, layer.first)
            _describe_store(struct.second, layer.second)
        failed = self._run(x, step)
        if failed >= 0:
            raise MlaError(
                f"the latents of layer {failed} hold NaN or infinity and cannot be quantised",
                fix="check the weights (`mla inspect`), or run with --kv-dtype bf16 --dtype float32",
            )
        cache.advance(step.ends)
        return x[:, None].to(decoder.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[M, D]` hidden states to `[M, V]` float32 scores."""
        x = hidden.float().contiguous()
        out = torch.empty(x.shape[0], self._head.n)
        self._library.linear(self._head, x.data_ptr(), x.shape[0], out.data_ptr(), self.threads)
        return out

    @property
    def threads(self) -> int:
        """Threads of a step."""
        return self._threads or torch.get_num_threads()

    def _run(self, x: Tensor, step: Step) -> int:
        positions = step.positions[:, 0].contiguous()
        pairs = [tuple(part[:, 0].contiguous() for part in step.rotary(table)) for table in self._tables]
        count = max(1, len(pairs))
        cos = (c_void_p * count)(*(pair[0].data_ptr() for pair in pairs))
        sin = (c_void_p * count)(*(pair[1].data_ptr() for pair in pairs))
        columns = (c_int32 * count)(*(pair[0].shape[-1] for pair in pairs))
        struct = StepStruct(
            ctypes.addressof(self._layers), x.data_ptr(), positions.data_ptr(),
            ctypes.addressof(cos), ctypes.addressof(sin), ctypes.addressof(columns), self._last,
            len(self._layers), x.shape[0], x.shape[1], self._spec.intermediate_size, self.threads, -1,
        )  # fmt: skip
        self._library.step(struct)
        return int(struct.failed)

    def _describe(self, struct: LayerStruct, layer: DecoderLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, MLP)  # why_not has refused mixtures of experts
        s = attention.spec
        struct.before_attention = self._norm(layer.input_layernorm)
        struct.before_mlp = self._norm(layer.post_attention_layernorm)
        struct.o, struct.up = self._linear(attention.o_proj), self._linear(mlp.up_proj)
        struct.down = self._linear(mlp.down_proj)
        if mlp.gated:
            struct.gate = self._linear(mlp.gate_proj)
        struct.activation = ACTIVATIONS[self._spec.activation]
        struct.heads, struct.scale, struct.softcap, struct.window = s.num_heads, s.scale, s.softcap or 0, s.window or 0
        struct.table = self._table(s.rotary)
        if isinstance(attention, StandardAttention):
            standard = attention.spec
            struct.q, struct.k = self._linear(attention.q_proj), self._linear(attention.k_proj)
            struct.v = self._linear(attention.v_proj)
            struct.kv_heads, struct.nope, struct.v_dim = standard.num_kv_heads, standard.head_dim, standard.head_dim
            struct.rope = standard.rotary.dim if standard.rotary is not None else 0
            return
        latent = attention.spec
        struct.latent, struct.kv_heads, struct.interleaved = 1, 1, latent.interleaved
        struct.nope, struct.rope, struct.v_dim = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
        struct.rank = latent.kv_lora_rank
        if latent.rotary is None or not latent.qk_rope_head_dim:
            struct.table = -1
        elif latent.frequencies is not None:
            struct.frequencies = self._numbers(latent.frequencies)
        struct.kv_a = self._linear(attention.kv_a_proj_with_mqa)
        struct.kv_b = self._weight(attention.kv_b_proj.weight)
        if latent.norm_eps is not None:
            struct.of_latent = self._norm(attention.kv_a_layernorm)
        if latent.q_lora_rank is None:
            struct.q = self._linear(attention.q_proj)
        else:
            struct.q_a, struct.q = self._linear(attention.q_a_proj), self._linear(attention.q_b_proj)
            struct.of_query = self._norm(attention.q_a_layernorm)

    def _table(self, rotary: RotarySpec | None) -> int:
        if rotary is None:
            return -1
        if rotary not in self._tables:
            self._tables.append(rotary)
        return self._tables.index(rotary)

    def _linear(self, module: nn.Module) -> LinearStruct:
        if isinstance(module, Int8Linear):
            return self._weight(module.codes, module.scales, module.bias)
        assert isinstance(module, nn.Linear)
        return self._weight(module.weight, None, module.bias)

    def _weight(self, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> LinearStruct:
        kept = weight.detach().contiguous()
        self._kept.append(kept)
        n, k = kept.shape
        return LinearStruct(kept.data_ptr(), self._floats(scales), self._floats(bias), n, k, _TYPES[kept.dtype], 0)

    def _norm(self, module: nn.Module) -> NormStruct:
        kind = LAYER_NORM if isinstance(module, nn.LayerNorm) else RMS
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        bias = module.bias if isinstance(module, nn.LayerNorm) else None
        return NormStruct(self._floats(module.weight), self._floats(bias), module.eps or 0.0, kind)

    def _floats(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()  # type: ignore[attr-defined]

    def _numbers(self, numbers: Sequence[int]) -> int:
        held = (c_int32 * len(numbers))(*numbers)
        self._kept.append(held)
        return ctypes.addressof(held)


def _turns_in_part(spec: AttentionSpec) -> bool:
    return isinstance(spec, StandardAttentionSpec) and spec.rotary is not None and spec.rotary.dim != spec.head_dim


def _layers(decoder: Decoder) -> list[DecoderLayer]:
    return list(decoder.layers)  # type: ignore[arg-type]


def _is_known(store: Store) -> bool:
    if isinstance(store, PlainStore):
        return store.values.dtype in _WEIGHTS
    # A range for each token; INT4 has one for each group of channels.
    return isinstance(store, TokenStore) and store.quantizer.dtype in ("int8", "fp8")


def _describe_store(struct: StoreStruct, store: Store) -> None:
    if isinstance(store, PlainStore):
        held, struct.scales = store.values, None
        struct.width = held[0, 0].numel()
    else:
        assert isinstance(store, TokenStore)
        held, struct.scales = store.codes, store.scales.data_ptr()
        clip = store.quantizer.clip
        assert isinstance(clip, float | int)
        struct.width, struct.clip = store.width, min(clip, MOST_CLIP)
    struct.data, struct.room, struct.type = held.data_ptr(), held.shape[1], _TYPES[held.dtype]
    struct.pages = None
    if store.table is not None:
        struct.pages, struct.room = store.table.data_ptr(), store.table.shape[1]
