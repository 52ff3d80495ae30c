"""What a family is: which configurations it reads, what decoder they describe, and where the tensors are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.decoder import ACTIVATIONS
from mla_cli.model.spec import DecoderSpec, RopeKind, RotarySpec

Config = dict[str, Any]
_REMOVE = "remove the key if it has no effect, or report the model so that it gets supported"
RESTORE = "restore the original file"  # configurations are written by programs, so a wrong one was changed


@dataclass(frozen=True)
class TensorRule:
    """Where one of the decoder's tensors is in a checkpoint.

    Attributes:
        source: its name there; shape: its shape there.
        transpose: stored as `[in, out]` (GPT-2's Conv1D).
        rows: which output rows of it are meant, in which order (of a fused projection, or of rotary pairs side by side): a
            range, or their indices; None: all.
    """

    source: str
    shape: tuple[int, ...]
    transpose: bool = False
    rows: range | tuple[int, ...] | None = None


@dataclass(frozen=True)
class Family:
    """One architecture family.

    Attributes:
        model_types: values of `model_type` it reads.
        spec: configuration to decoder.
        tensors: decoder to rules, keyed by the decoder's own (Llama-style) tensor names; the set of names in the file
            is given for families whose names have variants.
        skipped: patterns of tensors in a file that carry no weights of the model.
    """

    model_types: tuple[str, ...]
    spec: Callable[[Config], DecoderSpec]
    tensors: Callable[[DecoderSpec, frozenset[str]], dict[str, TensorRule]]
    skipped: tuple[str, ...] = ()

    def skips(self, name: str) -> bool:
        """Whether a tensor of the file is known to carry nothing."""
        return any(re.fullmatch(pattern, name) for pattern in self.skipped)


# Keys that never change what the decoder computes.
NEUTRAL_KEYS = frozenset(
    """architectures auto_map model_type dtype torch_dtype transformers_version _name_or_path use_cache initializer_range
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id attention_dropout
    attention_probs_dropout_prob hidden_dropout resid_pdrop embd_pdrop attn_pdrop pretraining_tp output_router_logits
    tie_word_embeddings vocab_size return_dict output_hidden_states output_attentions torchscript use_bfloat16 is_decoder
    is_encoder_decoder is_llama_config rope_interleaved transformers.js_config task_specific_params id2label label2id
    problem_type finetuning_task summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout n_ctx gradient_checkpointing chunk_size_feed_forward prefix tokenizer_class unsloth_version
    unsloth_fixed mla_kv_cache quantization_config _attn_implementation _flash_attn_2_enabled _attn_implementation_autoset
    max_window_layers attn_implementation reorder_and_upcast_attn use_return_dict num_labels remove_invalid_values
    head_dim_original rms_norm_eps_original cross_attention_hidden_size tf_legacy_loss pruned_heads""".split()
)

# A key with one of these words may change the mathematics, so a family that does not know it must not guess.
_MATHEMATICAL = re.compile(
    r"scal|multipl|cap|norm|rope|rotary|attn|attention|window|bias|act|expert|alibi|parallel|resid|position|head|layer|"
    r"quant|lora|mlp|logit|sink|theta|eps|embed|moe|conv|gate|mask|factor|temperature|tie|kv|interleav|rank|chunk|mult"
)


def check_keys(config: Config, understood: frozenset[str], model_type: str) -> None:
    """Refuse, by name, configuration keys that may change the mathematics and that the family does not understand."""
    if not config.get("is_causal", True):
        raise UnsupportedError(
            "config.json: a model whose tokens see what comes after them is no decoder", where="config.json: is_causal"
        )
    for key, value in config.items():
        if key in understood or key in NEUTRAL_KEYS or not value:
            continue
        if _MATHEMATICAL.search(key.lower()):
            raise UnsupportedError(
                f"config.json has the key '{key}' = {str(value)[:60]!r}, which may change what the model computes and is not "
                f"known for model_type '{model_type}'",
                where=f"config.json: {key}",
                fix=_REMOVE,
            )


# No model comes near either. Past them a damaged number would exhaust memory or a float before a shape is compared.
LARGEST_INTEGER = 1 << 40
MOST_LAYERS = 10_000


def integer(
    config: Config, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_INTEGER
) -> int:
    """A whole number of the configuration; absent and null mean the default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json lacks the key '{key}'", where="config.json", fix=RESTORE)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(
            f"config.json: {key} must be a whole number from {least} to {most:,}, not {_short(value)}",
            where=key,
            fix=RESTORE,
        )
    return value


def layer_count(config: Config, key: str = "num_hidden_layers") -> int:
    """Number of layers."""
    return integer(config, key, most=MOST_LAYERS)


def number(config: Config, key: str, default: float | None = None) -> float:
    """A positive number of the configuration; absent and null mean the default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json lacks the key '{key}'", where="config.json", fix=RESTORE)
    # Bounded by what float32 holds: the decoder computes in it.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-37 < value < 1e37:
        raise InputError(
            f"config.json: {key} must be a positive number that float32 holds, not {_short(value)}",
            where=key,
            fix=RESTORE,
        )
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def flag(config: Config, key: str, default: bool = False) -> bool:
    """A truth value of the configuration; absent and null mean the default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise InputError(f"config.json: {key} must be true or false, not {_short(value)}", where=key, fix=RESTORE)
    return value


def activation(config: Config, key: str, default: str) -> str:
    """The MLP's activation, refused by name when unknown."""
    name = config.get(key)
    name = default if name is None else name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(
            f"config.json: activation {_short(name)} is not supported; known: {', '.join(ACTIVATIONS)}", where=key
        )
    return name


def with_defaults(config: Config, **defaults: Any) -> Config:
    """The configuration with a family's own values for keys that are absent or null."""
    return {**config, **{key: value for key, value in defaults.items() if config.get(key) is None}}


def refuse_unless(config: Config, key: str, *allowed: Any) -> None:
    """Refuse, by name, a key that is understood with these values only; absent and null are among them."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise UnsupportedError(
            f"config.json: {key} = {_short(value)} is not supported, only {' or '.join(map(repr, allowed))}",
            where=f"config.json: {key}",
        )


def head_counts(config: Config) -> tuple[int, int]:
    """Query heads and key/value heads, checked to divide."""
    heads = integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly",
            where="num_attention_heads, num_key_value_heads",
            fix=RESTORE,
        )
    return heads, kv_heads


def head_width(hidden: int, heads: int, key: str = "hidden_size") -> int:
    """Width of a head where no key says it; `key` is what the hidden size is called."""
    if hidden % heads:
        raise InputError(f"config.json: {key} {hidden} is not a multiple of {heads} heads", where=key, fix=RESTORE)
    return hidden // heads


_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {  # type -> (needed, allowed besides)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "longrope": ({"short_factor", "long_factor", "original_max_position_embeddings"}, {"factor", "attention_factor"}),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",  # a note of the first YaRN models, read by nobody
        },
    ),
}


def rope_entries(config: Config) -> tuple[str, Config]:
    """The key that holds the rotary entries, and what it holds: `rope_parameters` (new) or `rope_scaling` (old).

    Raises:
        InputError: no object, or both are there and disagree (programs differ in which one they take).
    """
    found = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, entries in found.items():
        if not isinstance(entries, dict):
            raise InputError(f"config.json: {key} must be an object, not {_short(entries)}", where=key, fix=RESTORE)
    if len(found) == 2:
        new, old = (_complete(config, entries) for entries in found.values())
        differing = sorted(key for key in new.keys() | old.keys() if new.get(key) != old.get(key))
        if differing:
            raise InputError(
                f"config.json: rope_parameters and rope_scaling disagree about '{differing[0]}'",
                where="rope_parameters, rope_scaling",
                fix="keep the one that the model was trained with",
            )
    return next(iter(found.items()), ("rope_parameters", {}))


def _complete(config: Config, entries: Config) -> Config:
    kind = entries.get("rope_type") or entries.get("type") or "default"
    said = {key: value for key, value in entries.items() if value is not None and key != "type"}
    return {"rope_theta": config.get("rope_theta", 10000.0), **said, "rope_type": kind}


def rotary(config: Config, dim: int, share: float | None = None) -> RotarySpec:
    """The rotary embedding of a configuration, in the old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`) form.

    Args:
        dim: width of a head. share: of it that rotates where `partial_rotary_factor` does not say; None: all of it, and another
            share is refused.

    Raises:
        InputError: a key that the type needs is missing. UnsupportedError: an unknown type or key.
    """
    where, rope = rope_entries(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UnsupportedError(
            f"config.json: rope type {_short(kind)} is not supported; known: {', '.join(_ROPE_KEYS)}",
            where=f"{where}.rope_type",
        )
    needed, allowed = _ROPE_KEYS[kind]
    for key in sorted(needed):
        if rope.get(key) is None:
            raise InputError(
                f"config.json: {where} of type '{kind}' lacks the key '{key}'", where=f"{where}.{key}", fix=RESTORE
            )
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key, value in rope.items():
        if key not in needed | allowed | common and value is not None:
            what = f"config.json: {where} of type '{kind}' has the unknown key '{key}'"
            raise UnsupportedError(what, where=key, fix=_REMOVE)
    dim = int(dim * _rotary_share(config, rope, share))
    longest = integer(config, "max_position_embeddings", 2048)
    # transformers: dynamic scaling counts from max_position_embeddings, the others from the original context.
    trained = longest if kind == "dynamic" else integer(rope, "original_max_position_embeddings", longest)
    theta = number(rope, "rope_theta", number(config, "rope_theta", 10000.0))
    if dim % 2 or not dim:
        raise InputError(f"config.json: rotary dimension {dim} is not even and positive", where="head_dim", fix=RESTORE)
    if kind == "dynamic" and dim == 2:
        raise InputError(
            "config.json: dynamic scaling of a single frequency has no value", where=f"{where}.rope_type", fix=RESTORE
        )
    if kind == "yarn" and theta <= 1:
        raise InputError(
            f"config.json: yarn scaling needs a rope_theta above 1, not {theta}", where="rope_theta", fix=RESTORE
        )
    low, high = number(rope, "low_freq_factor", 1.0), number(rope, "high_freq_factor", 4.0)
    if kind == "llama3" and low >= high:
        raise InputError(
            f"config.json: low_freq_factor {low} is not below high_freq_factor {high}", where=where, fix=RESTORE
        )
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = _yarn_attention_factor(rope)
    if kind == "longrope":
        attention_factor = _longrope_attention_factor(rope, longest, trained)
    return RotarySpec(
        dim=dim,
        theta=theta,
        kind=RopeKind.__args__[RopeKind.__args__.index(kind)],  # type: ignore[attr-defined]
        factor=number(rope, "factor", 1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=trained,
        attention_factor=attention_factor,
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", True),
        short_factor=_factors(rope, "short_factor", dim, where) if kind == "longrope" else (),
        long_factor=_factors(rope, "long_factor", dim, where) if kind == "longrope" else (),
    )


def _rotary_share(config: Config, rope: Config, share: float | None) -> float:
    said = [
        number(entries, "partial_rotary_factor") for entries in (rope, config) if entries.get("partial_rotary_factor")
    ]
    if share is None and any(factor != 1 for factor in said):
        raise UnsupportedError(
            "config.json: partial_rotary_factor: partial rotary embeddings are not supported here",
            where="partial_rotary_factor",
        )
    found = said[0] if said else share or 1.0
    if found > 1:
        raise InputError(
            f"config.json: partial_rotary_factor {found} is more than all of a head",
            where="partial_rotary_factor",
            fix=RESTORE,
        )
    return found


def _factors(rope: Config, key: str, dim: int, where: str) -> tuple[float, ...]:
    factors = rope[key]
    if (
        not isinstance(factors, list)
        or len(factors) != dim // 2
        or any(type(f) not in (int, float) or not 0 < f < float("inf") for f in factors)
    ):
        raise InputError(
            f"config.json: {where}.{key} must be {dim // 2} positive numbers", where=f"{where}.{key}", fix=RESTORE
        )
    return tuple(float(f) for f in factors)


def _longrope_attention_factor(rope: Config, longest: int, trained: int) -> float:
    import math

    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    factor = number(rope, "factor", longest / trained)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: `0.1 m ln(factor) + 1` (arXiv 2309.00071, equation 22)."""
    import math

    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(rope: Config) -> float:
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    factor = number(rope, "factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(factor, number(rope, "mscale")) / yarn_mscale(factor, number(rope, "mscale_all_dim"))
    return yarn_mscale(factor)
