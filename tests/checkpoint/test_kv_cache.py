"""What a checkpoint says about its cache is obeyed, or refused by name."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from mla_cli.checkpoint.kv_cache import (
    KEY,
    CachePlan,
    KvScheme,
    LayerRange,
    cache_plan,
    read_scheme,
    stored_scheme,
)
from mla_cli.errors import InputError, UsageError
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, StandardAttentionSpec

LATENT = LatentAttentionSpec(
    num_heads=2, kv_lora_rank=40, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, scale=0.3, rotary=None
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
STATIC = replace(
    TOKEN, dtype="fp8", granularity="static", layers=(LayerRange("fp8", 3.0, 3.0, 2.5), LayerRange("fp8", 3.0, 3.0)),
    every=1000, max_loss=1.0,
)  # fmt: skip
GROUPS = replace(
    TOKEN, dtype="int4", granularity="page", layers=(LayerRange("int4", (2.5, 3.0), 4.0), LayerRange("bf16", None, 9.0)),
    rope_dtype="int8", rotation="hadamard",
)  # fmt: skip
PART = replace(GROUPS, strength=0.5, layers=(LayerRange("int4", (2.5,), 4.0), LayerRange("int4", 3.0, 9.0)))
FIRST = {
    "version": 1, "dtype": "int8", "granularity": "static", "rope_dtype": "bfloat16", "samples": 8, "tokens": 256,
    "origin": "files: a.txt",
    "layers": [{"dtype": "int8", "clip": 2.5, "amax": 4.0}, {"dtype": "bf16", "clip": None, "amax": 3}],
}  # fmt: skip


def config(scheme: KvScheme) -> dict[str, Any]:
    return json.loads(json.dumps({KEY: stored_scheme(scheme)}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", [TOKEN, STATIC, GROUPS, PART])
def test_a_scheme_comes_back_as_it_was_stored(scheme: KvScheme) -> None:
    assert read_scheme(config(scheme), SPEC) == scheme


def test_what_is_stored_is_documented() -> None:
    assert config(GROUPS)[KEY] == {
        "version": 2, "dtype": "int4", "granularity": "page", "group": 32, "rope_dtype": "int8", "rotation": "hadamard",
        "every": None, "strength": 1.0, "max_loss": None, "samples": 8, "tokens": 256, "origin": "files: a.txt",
        "layers": [
            {"dtype": "int4", "clip": [2.5, 3.0], "amax": 4.0, "token_amax": None},
            {"dtype": "bf16", "clip": None, "amax": 9.0, "token_amax": None},
        ],
    }  # fmt: skip
    static = config(STATIC)[KEY]
    assert (static["group"], static["every"], static["max_loss"]) == (None, 1000, 1.0)
    assert static["layers"][0] == {"dtype": "fp8", "clip": 3.0, "amax": 3.0, "token_amax": 2.5}


def test_the_first_version_is_still_read() -> None:
    layers = (LayerRange("int8", 2.5, 4.0), LayerRange("bf16", None, 3.0))
    expected = KvScheme("int8", "static", layers, samples=8, tokens=256, origin="files: a.txt")
    assert read_scheme({KEY: FIRST}, SPEC) == expected
    assert cache_plan({KEY: FIRST}, SPEC, "auto").quantizers == (LatentQuantizer("int8", "static", 2.5), None)


def test_groups_and_rotary_keys_reach_the_cache() -> None:
    quantizer = LatentQuantizer("int4", "page", (2.5, 3.0), "int8")
    assert cache_plan(config(GROUPS), SPEC, "auto").quantizers == (quantizer, None)
    assert cache_plan(config(GROUPS), SPEC, "int4").quantizers == (quantizer, None)
    assert cache_plan(config(replace(TOKEN, rope_dtype="fp8")), SPEC, "auto").quantizers == (
        LatentQuantizer("int8", "token", math.inf, "fp8"),
        LatentQuantizer("int8", "token", 2.5, "fp8"),
    )


def test_a_scheme_for_a_part_of_each_latent_runs_on_that_part() -> None:
    both = (LatentQuantizer("int4", "page", (2.5,), "int8"), LatentQuantizer("int4", "page", 3.0, "int8"))
    assert cache_plan(config(PART), SPEC, "auto") == CachePlan(both, 0.5, PART)
    assert cache_plan(config(PART), SPEC, "auto", 0.25).strength == 0.25
    # What was never calibrated, or is not used, has no part.
    for kind in ("bf16", "int8"):
        plan = cache_plan(config(PART), SPEC, kind)
        assert (plan.strength, plan.scheme) == (1.0, None)
    assert cache_plan({}, SPEC, "auto", 0.25) == CachePlan(None, 0.25)
    # A part of a calibrated latent has the ranges of its groups.
    plan = cache_plan(config(GROUPS), SPEC, "auto", 0.8)
    assert plan.quantizers == (LatentQuantizer("int4", "page", (2.5,), "int8"), None)
    # In the stock form the constant channels go first: 38 of 40 are the latent's own.
    stock = spec(replace(LATENT, norm_eps=1e-6), replace(LATENT, norm_eps=1e-6))
    layers = (LayerRange("int4", (2.5,), 4.0), LayerRange("int4", (2.5,), 4.0))
    assert read_scheme(config(replace(PART, strength=32 / 38, layers=layers)), stock) is not None
    with pytest.raises(InputError, match="1 ranges for 2 groups"):
        read_scheme(config(replace(PART, strength=33 / 38, layers=layers)), stock)


def test_auto_is_as_calibrated_and_bf16_as_never_calibrated() -> None:
    token = (LatentQuantizer("int8", "token", math.inf), LatentQuantizer("int8", "token", 2.5))
    assert cache_plan(config(TOKEN), SPEC, "auto").quantizers == token
    assert cache_plan(config(TOKEN), SPEC, "int8").quantizers == token
    assert cache_plan(config(STATIC), SPEC, "auto").quantizers == (LatentQuantizer("fp8", "static", 3.0),) * 2
    assert cache_plan(config(STATIC), SPEC, "bf16").quantizers is None
    assert cache_plan({}, SPEC, "auto").quantizers is None
    assert cache_plan({}, SPEC, "bf16").quantizers is None
    # A damaged scheme is not in the way of a cache that does not use it.
    assert cache_plan({KEY: 3}, SPEC, "bf16").quantizers is None


@pytest.mark.parametrize("name", ["fp8", "FP8", "fp8_e4m3", "fp8-e4m3", "fp8_e4m3fn", "float8_e4m3fn", "e4m3"])
def test_every_alias_takes_the_calibrated_scheme(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_plan(config(STATIC), SPEC, name).quantizers == cache_plan(config(STATIC), SPEC, "auto").quantizers
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stored", "said"), [({}, "never calibrated"), (config(STATIC), "calibrated for fp8, not for int8")]
)
def test_a_type_never_calibrated_is_dynamic_and_said_loudly(
    stored: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache_plan(stored, SPEC, "int8").quantizers == (LatentQuantizer("int8"),) * 2
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert said in warning
    assert "mla calibrate" in warning


def test_only_latent_layers_are_quantised() -> None:
    assert cache_plan({}, spec(STANDARD, LATENT), "fp8").quantizers == (None, LatentQuantizer("fp8"))
    scheme = replace(TOKEN, layers=(LayerRange("bf16", None, 3.0), LAYERS[1]))
    assert cache_plan(config(scheme), spec(STANDARD, LATENT), "auto").quantizers == (
        None,
        LatentQuantizer("int8", "token", 2.5),
    )
    assert cache_plan(config(scheme), SPEC, "auto").quantizers == (None, LatentQuantizer("int8", "token", 2.5))
    with pytest.raises(InputError, match="is not bf16"):
        cache_plan(config(TOKEN), spec(STANDARD, LATENT), "auto")


def test_a_standard_model_has_no_latents_to_quantise() -> None:
    for kind in ("auto", "bf16"):
        assert cache_plan({}, spec(STANDARD), kind).quantizers is None
    for kind in ("int8", "fp8", "fp8_e4m3", "int4"):
        with pytest.raises(UsageError, match="only latents are quantised"):
            cache_plan({}, spec(STANDARD), kind)


@pytest.mark.parametrize("name", ["int3", "e5m2", "fp8_e5m2", "", "none"])
def test_an_unknown_type_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="use auto, bf16, int8, fp8 or int4"):
        cache_plan({}, SPEC, name)


def _broken(scheme: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A scheme with one entry changed (`...`: removed)."""
    stored = copy.deepcopy(scheme)
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


NOT_A_RANGE = [0, -1.0, float("nan"), float("inf"), 10**400, "2.5", True]


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (KEY, 3, KEY),
        (f"{KEY}.version", 3, f"{KEY}.version"),
        (f"{KEY}.version", True, f"{KEY}.version"),
        (f"{KEY}.version", ..., f"{KEY}.version"),
        (f"{KEY}.block", 128, f"{KEY}.block"),
        (f"{KEY}.dtype", "int3", f"{KEY}.dtype"),
        (f"{KEY}.dtype", "fp8", f"{KEY}.layers[0].dtype"),
        (f"{KEY}.granularity", "channel", f"{KEY}.granularity"),
        (f"{KEY}.granularity", "static", f"{KEY}.layers[0].clip"),
        (f"{KEY}.rope_dtype", "int4", f"{KEY}.rope_dtype"),
        (f"{KEY}.rope_dtype", ..., KEY),
        (f"{KEY}.samples", 0, f"{KEY}.samples"),
        (f"{KEY}.tokens", 1.5, f"{KEY}.tokens"),
        (f"{KEY}.origin", None, f"{KEY}.origin"),
        (f"{KEY}.layers", {}, f"{KEY}.layers"),
        (f"{KEY}.layers.1", ..., f"{KEY}.layers"),
        (f"{KEY}.layers.1", 2.5, f"{KEY}.layers[1]"),
        (f"{KEY}.layers.1.k_scale", 0.1, f"{KEY}.layers[1].k_scale"),
        (f"{KEY}.layers.1.clip", ..., f"{KEY}.layers[1]"),
        *[(f"{KEY}.layers.1.clip", value, f"{KEY}.layers[1].clip") for value in NOT_A_RANGE],
        (f"{KEY}.layers.1.amax", -3.0, f"{KEY}.layers[1].amax"),
        (f"{KEY}.layers.1.amax", float("nan"), f"{KEY}.layers[1].amax"),
        (f"{KEY}.layers.1.dtype", "fp8", f"{KEY}.layers[1].dtype"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_an_unsound_scheme_is_refused_by_name(path: str, value: Any, where: str, version: int) -> None:
    sound = config(TOKEN)
    if version == 1:
        layers = [{key: layer[key] for key in ("dtype", "clip", "amax")} for layer in sound[KEY]["layers"]]
        sound = {KEY: {**{key: sound[KEY][key] for key in FIRST}, "version": 1, "layers": layers}}
        assert read_scheme(sound, SPEC) == TOKEN
    for kind in ("auto", "int8", "fp8"):
        with pytest.raises(InputError) as caught:
            cache_plan(_broken(sound, path, value), SPEC, kind)
        assert caught.value.where == f"config.json: {where}"
        assert caught.value.fix


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("dtype", "int4", "dtype"), ("granularity", "page", "granularity"), ("rope_dtype", "int8", "rope_dtype"),
        ("strength", 0.5, "strength"), ("layers.0.clip", [2.5], "layers[0].clip"),
        ("layers.0.token_amax", 1.0, "layers[0].token_amax"),
    ],
)  # fmt: skip
def test_the_first_version_knows_nothing_of_what_came_later(path: str, value: Any, where: str) -> None:
    with pytest.raises(InputError) as caught:
        read_scheme(_broken({KEY: FIRST}, f"{KEY}.{path}", value), SPEC)
    assert caught.value.where == f"config.json: {KEY}.{where}"


@pytest.mark.parametrize(
    ("scheme", "path", "value", "where"),
    [
        (GROUPS, "group", None, "group"), (GROUPS, "group", 64, "group"), (GROUPS, "group", ..., ""),
        (TOKEN, "group", 32, "group"), (TOKEN, "group", False, "group"),
        (GROUPS, "rotation", "fourier", "rotation"), (GROUPS, "rotation", None, "rotation"),
        (STATIC, "every", 0, "every"), (STATIC, "every", 2.5, "every"), (STATIC, "every", True, "every"),
        (TOKEN, "every", 1000, "every"), (GROUPS, "every", 1000, "every"), (STATIC, "every", ..., ""),
        *[(TOKEN, "strength", value, "strength") for value in (0, -0.5, 1.5, None, "0.5", float("nan"), True)],
        *[(TOKEN, "max_loss", value, "max_loss") for value in (-1, "1", float("nan"), float("inf"), True)],
        *[(GROUPS, "layers.0.clip.1", value, "layers[0].clip") for value in [*NOT_A_RANGE, None, [3.0]]],
        (GROUPS, "layers.0.clip", [2.5], "layers[0].clip"), (GROUPS, "layers.0.clip", [], "layers[0].clip"),
        (GROUPS, "layers.0.clip", [1.0, 2.0, 3.0], "layers[0].clip"),
        (TOKEN, "layers.0.clip", [2.5], "layers[0].clip"), (STATIC, "layers.0.clip", None, "layers[0].clip"),
        *[(STATIC, "layers.0.token_amax", value, "layers[0].token_amax") for value in (-1, "1", float("inf"), True)],
        (STATIC, "layers.0.token_amax", ..., "layers[0]"),
        (PART, "strength", 0.9, "layers[0].clip"),
    ],
)  # fmt: skip
def test_every_entry_of_a_scheme_is_checked(scheme: KvScheme, path: str, value: Any, where: str) -> None:
    with pytest.raises(InputError) as caught:
        read_scheme(_broken(config(scheme), f"{KEY}.{path}", value), SPEC)
    assert caught.value.where == f"config.json: {KEY}{'.' if where else ''}{where}"
    assert caught.value.fix
