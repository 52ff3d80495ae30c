"""Ahead-of-time compilation of every shipped kernel, for machines that are not there, and what the compiler made of it.

A configuration is the very launch that a launcher would run, from tensors without storage. Registers and spills come from the
binary, instructions from its disassembly, with the tools in Triton's own wheel. What must hold (`faults`): no spills, matrix
products on tensor cores, loads of 128 bits, and asynchronous copies where latents are bfloat16.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mla_cli.kernels import decode, merge, prefill, write
from mla_cli.kernels.launch import Launch, Target
from mla_cli.kernels.pages import LATENT_DTYPES, PageLayout
from mla_cli.kernels.tuning import max_rank

TARGETS = {
    "sm_80": Target("cuda", 80, 108),
    "sm_89": Target("cuda", 89, 128),
    "sm_90": Target("cuda", 90, 132),
    "sm_100": Target("cuda", 100, 148),
    "gfx942": Target("hip", "gfx942", 304),
}

# Latent width, rotary width, heads: DeepSeek's and its wide form, a small model's, and the widest latent.
SHAPES = ((512, 64, 16), (512, 64, 128), (256, 32, 9), (1024, 64, 16))

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
_TENSOR_CORES = {"cuda": r"\b(?:HGMMA|HMMA|UTCHMMA)\b", "hip": r"\bv_mfma"}
_WIDE_LOADS = {"cuda": r"\bLD(?:G|GSTS)\.E[.\w]*\.128\b", "hip": r"\b(?:global|buffer)_load_dwordx4\b"}


@dataclass(frozen=True)
class Configuration:
    """One kernel, as it is shipped for one machine.

    Attributes:
        name: kernel, latents and shape; machine: of `TARGETS`.
        launch: makes it.
        attention: it multiplies matrices; plain: its latents are copied as they are.
    """

    name: str
    machine: str
    launch: Callable[[], Launch]
    attention: bool
    plain: bool


def configurations() -> list[Configuration]:
    """Everything that is shipped."""
    found: list[Configuration] = []
    for machine, target in TARGETS.items():
        for r, d, heads in SHAPES:
            for dtype in LATENT_DTYPES:
                if r > max_rank(target, dtype):
                    continue
                layout, tail = PageLayout(dtype, r, d), f"{dtype} {r}+{d}"
                add = partial(_configuration, found, machine, dtype)
                add(f"decode {tail} {heads} heads", partial(_decode, target, layout, heads))
                if (r, heads) == (512, 16):
                    bounded = partial(_decode, target, layout, heads, queries=4, window=4096, softcap=50.0)
                    add(f"decode {tail} {heads} heads, 4 queries, window, soft-cap", bounded)
                    add(f"prefill {tail} {heads} heads", partial(_prefill, target, layout, heads))
                if heads != 128:
                    add(f"write {tail}", partial(_write, target, layout))
                if (dtype, r, heads) == ("int4", 512, 16):
                    clips = _empty(layout.scales, dtype=torch.float32)
                    add(f"write {tail}, ranges by group", partial(_write, target, layout, clips))
        for width in (128, 192):
            _configuration(found, machine, "bf16", f"explicit {width}+128 16 heads", partial(_explicit, target, width))
        _configuration(found, machine, "bf16", "merge 512", partial(_merge, target))
    return found


def compile_launch(launch: Launch, target: Target) -> dict[str, int]:
    """Compile for a machine, and count.

    Returns:
        registers of a thread (lane), spills (loads and stores of local memory; on AMD spilled registers), shared_bytes of a
        program, and instructions: tensor_core, async_copies, loads_128.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        # What Triton makes of arguments at a launch: ones become constants, multiples of 16 are known as such.
        if parameter.is_constexpr or isinstance(value, bool) or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    gpu = GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu, options=launch.options)
    counted = _count_amd(compiled.asm["amdgcn"]) if target.backend == "hip" else _count_nvidia(compiled.asm["cubin"])
    return {"shared_bytes": compiled.metadata.shared, **counted}


def faults(configuration: Configuration, counts: dict[str, int]) -> list[str]:
    """What a configuration does not hold of what it must."""
    target = TARGETS[configuration.machine]
    wrong = []
    if counts["spills"]:
        wrong.append(f"{counts['spills']} spills")
    if counts["shared_bytes"] > target.shared_bytes:
        wrong.append(f"{counts['shared_bytes']} bytes of shared memory, of {target.shared_bytes}")
    # A wave of 64 lanes reads a narrow latent with less.
    if not counts["loads_128"] and (configuration.attention or target.backend == "cuda"):
        wrong.append("no load of 128 bits")
    if configuration.attention and not counts["tensor_core"]:
        wrong.append("no tensor cores")
    if configuration.attention and configuration.plain and target.backend == "cuda" and not counts["async_copies"]:
        wrong.append("no asynchronous copies")
    return wrong


def _configuration(
    found: list[Configuration], machine: str, dtype: str, name: str, launch: Callable[[], Launch]
) -> None:
    attention = not name.startswith(("write", "merge"))
    found.append(Configuration(name, machine, launch, attention, dtype == "bf16"))


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _decode(
    target: Target,
    layout: PageLayout,
    heads: int,
    queries: int = 1,
    window: int | None = None,
    softcap: float | None = None,
) -> Launch:
    batch, splits, r = 32, 8, layout.kv_lora_rank
    rows = batch * queries * heads
    return decode.plan(
        _empty(batch, queries, heads, r + layout.qk_rope_head_dim),
        layout.pool(64, "meta"),
        layout,
        _empty(batch, 512, dtype=torch.int32),
        _empty(batch, dtype=torch.int32),
        0.1,
        target,
        window,
        softcap,
        splits,
        _empty(splits, rows, r, dtype=torch.float32),
        _empty(splits, rows, dtype=torch.float32),
    )


def _prefill(target: Target, layout: PageLayout, heads: int) -> Launch:
    batch, tokens, r = 4, 2048, layout.kv_lora_rank
    return prefill.plan(
        _empty(tokens, heads, r + layout.qk_rope_head_dim),
        _empty(batch + 1, dtype=torch.int32),
        layout.pool(64, "meta"),
        layout,
        _empty(batch, 512, dtype=torch.int32),
        _empty(batch, dtype=torch.int32),
        0.1,
        target,
        512,
        None,
        None,
        True,
        _empty(tokens, heads, r),
        _empty(tokens, heads, dtype=torch.float32),
    )


def _explicit(target: Target, width: int) -> Launch:
    tokens, heads, v = 2048, 16, 128
    q = _empty(tokens, heads, width)
    out, lse = _empty(tokens, heads, v), _empty(tokens, heads, dtype=torch.float32)
    return prefill.plan_explicit(
        q, q, _empty(tokens, heads, v), _empty(5, dtype=torch.int32), 0.1, target, 512, None, None, out, lse
    )


def _write(target: Target, layout: PageLayout, clip: float | Tensor = 1e4) -> Launch:
    tokens, r, d = 64, layout.kv_lora_rank, layout.qk_rope_head_dim
    angles = _empty(tokens, d // 2, dtype=torch.float32)
    slots, flag = _empty(tokens, dtype=torch.int64), _empty(1, dtype=torch.int32)
    pool = layout.pool(64, "meta")
    return write.plan(
        _empty(tokens, r),
        _empty(tokens, d),
        angles,
        angles,
        slots,
        pool,
        layout,
        flag,
        target,
        _empty(r),
        1e-6,
        False,
        clip,
    )


def _merge(target: Target) -> Launch:
    parts, lses = _empty(8, 512, 512, dtype=torch.float32), _empty(8, 512, dtype=torch.float32)
    return merge.plan(parts, lses, target, _empty(512, 512), _empty(512, dtype=torch.float32))


def _count_nvidia(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    return {
        "registers": int(registers[1]) if registers else -1,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "tensor_core": len(re.findall(_TENSOR_CORES["cuda"], code)),
        "async_copies": len(re.findall(r"\bLDGSTS\b", code)),
        "loads_128": len(re.findall(_WIDE_LOADS["cuda"], code)),
    }


def _count_amd(code: str) -> dict[str, int]:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        return int(found[1]) if found else -1

    return {
        "registers": field("vgpr_count"),
        "spills": field("vgpr_spill_count"),
        "tensor_core": len(re.findall(_TENSOR_CORES["hip"], code)),
        "async_copies": 0,
        "loads_128": len(re.findall(_WIDE_LOADS["hip"], code)),
    }


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia as nvidia

    program = os.path.join(os.path.dirname(str(nvidia.__file__)), "bin", name)
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
