"""The native form: the source's own decoder with latent attention in each layer, for what the stock form cannot say.

`config.json` holds `model_type: mla_native`, the source's configuration under `source_config`, and under `mla` one entry a
layer: `kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`, `frequencies` (the source's frequency index of
each rotary pair). Tensors carry the decoder's names; attention has `q_proj`, `kv_a_proj_with_mqa`, `kv_b_proj`, `o_proj`.

Two entries are optional, and programs that do not know them refuse them by name. `norm_eps`: the layer has an RMSNorm of this
eps on the latent, `kv_a_layernorm`. `gate_chunk`: it has a gate over chunks of so many tokens,
`latent_gate.{0,2}.{weight,bias}`.
"""

from __future__ import annotations

from typing import Any

from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.families.base import RESTORE, Config, Family, check_keys, flag, integer, number
from mla_cli.model.families.layout import llama_names
from mla_cli.model.families.sources import SOURCES
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, StandardAttentionSpec

VERSION = 1
_LAYER_KEYS = {
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "frequencies", "q_bias", "kv_a_bias", "o_bias",
}  # fmt: skip
_OPTIONAL_KEYS = {"gate_chunk", "norm_eps"}  # written where it is not None


def native_config(source_config: Config, spec: DecoderSpec) -> Config:
    """The `config.json` of a native checkpoint with decoder `spec`, converted from `source_config`."""
    layers: list[dict[str, Any]] = []
    for attention in spec.attention:
        assert isinstance(attention, LatentAttentionSpec)
        entry = {key: _plain(getattr(attention, key)) for key in sorted(_LAYER_KEYS | _OPTIONAL_KEYS)}
        layers.append({key: value for key, value in entry.items() if value is not None or key not in _OPTIONAL_KEYS})
    kept = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")
    return {
        "architectures": ["MlaNativeForCausalLM"],
        "model_type": "mla_native",
        **{key: source_config[key] for key in kept if key in source_config},
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tied,
        "mla": {"version": VERSION, "layers": layers},
        "source_config": source_config,
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _source(config: Config) -> tuple[Family, DecoderSpec]:
    source = config.get("source_config")
    if not isinstance(source, dict):
        raise InputError(
            "a native config.json needs the object 'source_config'", where="config.json: source_config", fix=RESTORE
        )
    for family in SOURCES:
        if source.get("model_type") in family.model_types:
            return family, family.spec({**source, "tie_word_embeddings": flag(config, "tie_word_embeddings")})
    raise UnsupportedError(
        f"source_config has unsupported model_type {source.get('model_type')!r}", where="source_config", fix=RESTORE
    )


def _spec(config: Config) -> DecoderSpec:
    check_keys(config, frozenset(("mla", "source_config", "max_position_embeddings")), "mla_native")
    _, source = _source(config)
    mla = config.get("mla")
    if not isinstance(mla, dict) or not isinstance(mla.get("layers"), list):
        raise InputError("a native config.json needs 'mla' with a list 'layers'", where="config.json: mla", fix=RESTORE)
    if mla.get("version") != VERSION:
        raise UnsupportedError(
            f"native form version {mla.get('version')!r} is not {VERSION}",
            where="config.json: mla.version",
            fix="use the version of mla that wrote it, or convert again",
        )
    if set(mla) - {"version", "layers"}:
        raise UnsupportedError(
            f"unknown entries {sorted(set(mla) - {'version', 'layers'})} in 'mla'",
            where="config.json: mla",
            fix="use the version of mla that wrote it, or convert again",
        )
    if len(mla["layers"]) != source.num_layers:
        raise InputError(
            f"{len(mla['layers'])} latent layers for {source.num_layers} layers",
            where="config.json: mla.layers",
            fix=RESTORE,
        )
    return source.with_attention(
        tuple(_layer(i, entry, source.attention[i]) for i, entry in enumerate(mla["layers"]))  # type: ignore[arg-type]
    )


def _layer(index: int, entry: Any, source: StandardAttentionSpec) -> LatentAttentionSpec:
    where = f"config.json: mla.layers[{index}]"
    known_keys = _LAYER_KEYS | _OPTIONAL_KEYS
    if not isinstance(entry, dict) or set(entry) - known_keys:
        unknown = sorted(set(entry) - known_keys) if isinstance(entry, dict) else entry
        raise UnsupportedError(
            f"unknown entries {unknown} in a latent layer",
            where=where,
            fix="use the version of mla that wrote it, or convert again",
        )
    rope_dim = integer(entry, "qk_rope_head_dim", least=0)
    frequencies = entry.get("frequencies")
    if rope_dim and source.rotary is None:
        raise InputError("a rotary key in a model without rotary embedding", where=where, fix=RESTORE)
    if frequencies is not None or rope_dim:
        known = source.rotary.dim // 2 if source.rotary else 0
        if (
            not isinstance(frequencies, list)
            or len(frequencies) * 2 != rope_dim
            or any(type(f) is not int or not 0 <= f < known for f in frequencies)
        ):
            raise InputError(f"frequencies must be {rope_dim // 2} indices below {known}", where=where, fix=RESTORE)
        frequencies = tuple(frequencies)
    return LatentAttentionSpec(
        num_heads=source.num_heads,
        kv_lora_rank=integer(entry, "kv_lora_rank"),
        qk_nope_head_dim=integer(entry, "qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=integer(entry, "v_head_dim"),
        scale=source.scale,
        rotary=source.rotary,
        frequencies=frequencies,
        norm_eps=None if entry.get("norm_eps") is None else number(entry, "norm_eps"),
        q_bias=flag(entry, "q_bias"),
        kv_a_bias=flag(entry, "kv_a_bias"),
        o_bias=flag(entry, "o_bias"),
        window=source.window,
        softcap=source.softcap,
        qk_norm=source.qk_norm,
        num_kv_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        alibi=source.alibi,
        gate_chunk=None if entry.get("gate_chunk") is None else integer(entry, "gate_chunk"),
    )


NATIVE = Family(("mla_native",), _spec, llama_names)
