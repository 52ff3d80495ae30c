"""The structures of `layout.h`, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

F32, BF16, INT8, FP8 = range(4)
NO_NORM, RMS, LAYER_NORM = range(3)
ACTIVATIONS = {
    "silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "gelu_fast": 2, "relu": 3,
}  # fmt: skip


class LinearStruct(Structure):
    """`y = x w^T (* scale) (+ bias)`; `n == 0`: there is none."""

    _fields_ = (
        ("w", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
        ("n", c_int32), ("k", c_int32), ("type", c_int32), ("pad", c_int32),
    )  # fmt: skip


class NormStruct(Structure):
    """RMS or layer norm, or none."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32))


class StoreStruct(Structure):
    """Where a layer's cache keeps one kind of entry."""

    _fields_ = (
        ("data", c_void_p), ("scales", c_void_p), ("pages", c_void_p), ("room", c_int64),
        ("type", c_int32), ("width", c_int32), ("clip", c_float), ("pad", c_int32),
    )  # fmt: skip


class LayerStruct(Structure):
    """A decoder layer and its part of the cache."""

    _fields_ = (
        *((name, NormStruct) for name in ("before_attention", "before_mlp", "of_query", "of_latent")),
        *((name, LinearStruct) for name in ("q_a", "q", "kv_a", "k", "v", "kv_b", "o", "gate", "up", "down")),
        ("first", StoreStruct), ("second", StoreStruct), ("frequencies", c_void_p),
        *((name, c_int32) for name in (
            "latent", "heads", "kv_heads", "nope", "rope", "rank", "v_dim", "interleaved", "activation", "window", "table",
        )),
        ("scale", c_float), ("softcap", c_float), ("pad", c_int32),
    )  # fmt: skip


class StepStruct(Structure):
    """One step of all layers."""

    _fields_ = (
        ("layers", c_void_p), ("x", c_void_p), ("positions", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p), ("columns", c_void_p), ("last", NormStruct),
        *((name, c_int32) for name in ("num_layers", "rows", "hidden", "intermediate", "threads", "failed")),
    )  # fmt: skip


class PromptStruct(Structure):
    """Attention of many tokens, as `Prompt` of `prompt.h`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "q_rope", "k", "k_rope", "v", "out", "positions")),
        *((f"{name}_{axis}", c_int64) for name in ("q", "q_rope", "k") for axis in ("row", "token", "head")),
        ("k_rope_row", c_int64), ("k_rope_token", c_int64),
        *((f"v_{axis}", c_int64) for axis in ("row", "token", "head")),
        *((name, c_int32) for name in (
            "batch", "tokens", "keys", "heads", "kv_heads", "own", "shared", "v_dim", "window", "type", "threads",
        )),
        ("scale", c_float), ("softcap", c_float), ("pad", c_int32),
    )  # fmt: skip


STRUCTURES = (LinearStruct, NormStruct, StoreStruct, LayerStruct, StepStruct, PromptStruct)
