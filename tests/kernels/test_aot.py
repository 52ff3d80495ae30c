"""What the compiler makes of the shipped kernels for machines that are not here: the committed table, and part of it anew."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernels.interpreter import ROOT

triton = pytest.importorskip("triton")

from mla_cli.kernels import aot  # noqa: E402

TABLE: dict[str, Any] = json.loads((ROOT / "docs" / "kernels" / "aot.json").read_text(encoding="utf-8"))
SHIPPED = {f"{configuration.machine} {configuration.name}": configuration for configuration in aot.configurations()}

# The whole table is `make kernels`; these are one of each kernel, and each kind of latent.
ANEW = (
    "sm_90 decode bf16 512+64 16 heads",
    "sm_90 decode int8 512+64 16 heads",
    "sm_90 decode fp8 512+64 16 heads",
    "sm_90 decode int4 512+64 16 heads",
    "sm_90 decode bf16 512+64 128 heads",
    "sm_80 decode fp8 512+64 16 heads",
    "sm_100 prefill bf16 512+64 16 heads",
    "gfx942 decode int8 512+64 16 heads",
    "sm_90 explicit 192+128 16 heads",
    "sm_90 write int8 512+64",
    "sm_90 merge 512",
)


def test_the_table_lists_what_is_shipped() -> None:
    assert set(TABLE["kernels"]) == set(SHIPPED), "run `make kernels`"
    assert {name.split()[0] for name in SHIPPED} == {"sm_80", "sm_89", "sm_90", "sm_100", "gfx942"}


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_spills_and_loads_are_wide(name: str) -> None:
    assert aot.faults(SHIPPED[name], TABLE["kernels"][name]) == []


@pytest.mark.parametrize("kernel", ["decode bf16 512+64 16", "prefill bf16 512+64 16", "explicit 128+128"])
def test_the_scale_of_scores_is_no_constant_of_the_compiled_kernel(kernel: str) -> None:
    """KN-09: what is compiled for one scale is right for every other."""
    launch = next(each for name, each in SHIPPED.items() if name.startswith(f"sm_90 {kernel}")).launch()
    parameter = next(each for each in launch.kernel.params if each.name == "softmax_scale")
    assert not parameter.is_constexpr
    assert isinstance(launch.arguments["softmax_scale"], float)


def test_faults_are_seen() -> None:
    whole = TABLE["kernels"]["sm_90 decode bf16 512+64 16 heads"]
    configuration = SHIPPED["sm_90 decode bf16 512+64 16 heads"]
    for key, value in (
        ("spills", 1),
        ("shared_bytes", 300_000),
        ("loads_128", 0),
        ("tensor_core", 0),
        ("async_copies", 0),
    ):
        assert len(aot.faults(configuration, {**whole, key: value})) == 1, key


@pytest.mark.parametrize("name", ANEW)
def test_compiled_anew_it_is_as_in_the_table(name: str) -> None:
    counts = aot.compile_launch(SHIPPED[name].launch(), aot.TARGETS[SHIPPED[name].machine])
    assert aot.faults(SHIPPED[name], counts) == []
    if triton.__version__ == TABLE["triton"]:
        assert counts == TABLE["kernels"][name], "the kernel compiles to something else now: run `make kernels`"
