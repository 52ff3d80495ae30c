"""What a checkpoint says about its cache is obeyed, or refused by name."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from mla_cli.checkpoint.kv_cache import KEY, KvScheme, LayerRange, quantizers_for, read_scheme, stored_scheme
from mla_cli.errors import InputError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, StandardAttentionSpec

LATENT = LatentAttentionSpec(
    num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, scale=0.3, rotary=None
)
STANDARD = StandardAttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=0.3, rotary=None)


def spec(*attention: Any) -> DecoderSpec:
    return DecoderSpec(
        model_type="tiny", vocab_size=64, hidden_size=16, intermediate_size=32, max_position_embeddings=64, norm="rms",
        norm_eps=1e-6, activation="silu", gated_mlp=True, mlp_bias=False, tied=True, attention=attention,
    )  # fmt: skip


SPEC = spec(LATENT, LATENT)
LAYERS = (LayerRange("int8", None, 3.0), LayerRange("int8", 2.5, 4.0))
TOKEN = KvScheme("int8", "token", LAYERS, samples=8, tokens=256, origin="files: a.txt")
STATIC = replace(TOKEN, dtype="fp8", granularity="static", layers=tuple(LayerRange("fp8", 3.0, 3.0) for _ in LAYERS))


def config(scheme: KvScheme) -> dict[str, Any]:
    return json.loads(json.dumps({KEY: stored_scheme(scheme)}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", [TOKEN, STATIC])
def test_a_scheme_comes_back_as_it_was_stored(scheme: KvScheme) -> None:
    assert read_scheme(config(scheme), SPEC) == scheme


def test_auto_is_as_calibrated_and_bf16_as_never_calibrated() -> None:
    token = (LatentQuantizer("int8", "token", math.inf), LatentQuantizer("int8", "token", 2.5))
    assert quantizers_for(config(TOKEN), SPEC, "auto") == token
    assert quantizers_for(config(TOKEN), SPEC, "int8") == token
    assert quantizers_for(config(STATIC), SPEC, "auto") == (LatentQuantizer("fp8", "static", 3.0),) * 2
    assert quantizers_for(config(STATIC), SPEC, "bf16") is None
    assert quantizers_for({}, SPEC, "auto") is None
    assert quantizers_for({}, SPEC, "bf16") is None
    # A damaged scheme is not in the way of a cache that does not use it.
    assert quantizers_for({KEY: 3}, SPEC, "bf16") is None


@pytest.mark.parametrize("name", ["fp8", "FP8", "fp8_e4m3", "fp8-e4m3", "fp8_e4m3fn", "float8_e4m3fn", "e4m3"])
def test_every_alias_takes_the_calibrated_scheme(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantizers_for(config(STATIC), SPEC, name) == quantizers_for(config(STATIC), SPEC, "auto")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stored", "said"), [({}, "never calibrated"), (config(STATIC), "calibrated for fp8, not for int8")]
)
def test_a_type_never_calibrated_is_dynamic_and_said_loudly(
    stored: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantizers_for(stored, SPEC, "int8") == (LatentQuantizer("int8"),) * 2
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert said in warning
    assert "mla calibrate" in warning


def test_only_latent_layers_are_quantised() -> None:
    assert quantizers_for({}, spec(STANDARD, LATENT), "fp8") == (None, LatentQuantizer("fp8"))
    scheme = replace(TOKEN, layers=(LayerRange("bf16", None, 3.0), LAYERS[1]))
    assert quantizers_for(config(scheme), spec(STANDARD, LATENT), "auto") == (
        None,
        LatentQuantizer("int8", "token", 2.5),
    )
    assert quantizers_for(config(scheme), SPEC, "auto") == (None, LatentQuantizer("int8", "token", 2.5))
    with pytest.raises(InputError, match="is not bf16"):
        quantizers_for(config(TOKEN), spec(STANDARD, LATENT), "auto")


def test_a_standard_model_has_no_latents_to_quantise() -> None:
    for kind in ("auto", "bf16"):
        assert quantizers_for({}, spec(STANDARD), kind) is None
    for kind in ("int8", "fp8", "fp8_e4m3"):
        with pytest.raises(UsageError, match="only latents are quantised"):
            quantizers_for({}, spec(STANDARD), kind)


@pytest.mark.parametrize("name", ["int4", "e5m2", "fp8_e5m2", "", "none"])
def test_an_unknown_type_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="use auto, bf16, int8 or fp8"):
        quantizers_for({}, SPEC, name)


def _broken(path: str, value: Any) -> dict[str, Any]:
    """The token scheme with one entry changed (`...`: removed)."""
    stored = copy.deepcopy(config(TOKEN))
    *parents, last = path.split(".")
    place: Any = stored
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    key: Any = int(last) if last.isdigit() else last
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return stored


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (KEY, 3, KEY),
        (f"{KEY}.version", 2, f"{KEY}.version"),
        (f"{KEY}.version", ..., f"{KEY}.version"),
        (f"{KEY}.block", 128, f"{KEY}.block"),
        (f"{KEY}.dtype", "int4", f"{KEY}.dtype"),
        (f"{KEY}.dtype", "fp8", f"{KEY}.layers[0].dtype"),
        (f"{KEY}.granularity", "page", f"{KEY}.granularity"),
        (f"{KEY}.granularity", "static", f"{KEY}.layers[0].clip"),
        (f"{KEY}.rope_dtype", "int8", f"{KEY}.rope_dtype"),
        (f"{KEY}.rope_dtype", ..., KEY),
        (f"{KEY}.samples", 0, f"{KEY}.samples"),
        (f"{KEY}.tokens", 1.5, f"{KEY}.tokens"),
        (f"{KEY}.origin", None, f"{KEY}.origin"),
        (f"{KEY}.layers", {}, f"{KEY}.layers"),
        (f"{KEY}.layers.1", ..., f"{KEY}.layers"),
        (f"{KEY}.layers.1", 2.5, f"{KEY}.layers[1]"),
        (f"{KEY}.layers.1.k_scale", 0.1, f"{KEY}.layers[1].k_scale"),
        (f"{KEY}.layers.1.clip", ..., f"{KEY}.layers[1]"),
        (f"{KEY}.layers.1.clip", 0, f"{KEY}.layers[1].clip"),
        (f"{KEY}.layers.1.clip", -1.0, f"{KEY}.layers[1].clip"),
        (f"{KEY}.layers.1.clip", float("nan"), f"{KEY}.layers[1].clip"),
        (f"{KEY}.layers.1.clip", float("inf"), f"{KEY}.layers[1].clip"),
        (f"{KEY}.layers.1.clip", 10**400, f"{KEY}.layers[1].clip"),
        (f"{KEY}.layers.1.clip", "2.5", f"{KEY}.layers[1].clip"),
        (f"{KEY}.layers.1.clip", True, f"{KEY}.layers[1].clip"),
        (f"{KEY}.layers.1.amax", -3.0, f"{KEY}.layers[1].amax"),
        (f"{KEY}.layers.1.amax", float("nan"), f"{KEY}.layers[1].amax"),
        (f"{KEY}.layers.1.dtype", "fp8", f"{KEY}.layers[1].dtype"),
    ],
)
def test_an_unsound_scheme_is_refused_by_name(path: str, value: Any, where: str) -> None:
    for kind in ("auto", "int8", "fp8"):
        with pytest.raises(InputError) as caught:
            quantizers_for(_broken(path, value), SPEC, kind)
        assert caught.value.where == f"config.json: {where}"
        assert caught.value.fix
