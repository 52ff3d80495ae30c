"""Models that read images (or sound) too: the text model inside them, where it stands alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mla_cli.errors import InputError, UnsupportedError
from mla_cli.model.families.base import RESTORE, Config, with_defaults

# What transformers takes where `text_config` says nothing: these files leave out what is so in the smallest model.
_GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
_DEFAULTS: Mapping[str, Config] = {"gemma3": _GEMMA3}
# The text model's tensors, as older and newer versions of transformers write them; the others are of the eye alone.
_TEXT = re.compile(r"language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.")
_OTHERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")


def text_part(config: Config) -> Config | None:
    """The configuration of the text model inside a multimodal one; None if it is none that is read so.

    Raises:
        InputError: it has no `text_config`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        return None
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise InputError(
            f"config.json of model_type '{model_type}' has no text_config",
            where="config.json: text_config",
            fix=RESTORE,
        )
    outer = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
    inherited = {key: config[key] for key in outer if config.get(key) is not None}
    return {**inherited, **with_defaults(text, **_DEFAULTS[model_type])}


def text_name(name: str) -> str | None:
    """A tensor's name in the text model alone; None for the tensors of the parts that are left out."""
    return None if _OTHERS.fullmatch(name) else _TEXT.sub("", name, count=1)


def refuse_multimodal(config: Config) -> None:
    """Refuse, by name, a model around a text model that is not read from inside it.

    Raises:
        UnsupportedError: it is one.
    """
    text = config.get("text_config") or config.get("llm_config")
    if not isinstance(text, dict) and not isinstance(config.get("vision_config"), dict):
        return
    inner = text.get("model_type") if isinstance(text, dict) else None
    raise UnsupportedError(
        f"model_type '{config.get('model_type')}' is a multimodal model"
        + (f" around a text model of type '{inner}'" if inner else "")
        + f"; the text inside it is read of {', '.join(_DEFAULTS)} only",
        where="config.json: model_type",
        fix="save its language model alone (transformers: model.language_model.save_pretrained), and give that folder",
    )
