"""What launchers share: the machine a kernel is for, the checks of its arguments, and the launch itself.

A launcher first makes `Launch` objects, which name the kernel and all its arguments, and then runs them. Ahead-of-time
compilation makes the same objects from tensors without storage, so what is proved is what runs.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mla_cli.errors import MlaError


@dataclass(frozen=True)
class Target:
    """A machine that kernels are compiled for.

    Attributes:
        backend: `cuda`, `hip`, or `interpreter` (Triton's own, on CPU tensors).
        arch: compute capability times ten (`90`), or AMD's name (`gfx942`).
        processors: streaming multiprocessors (compute units), which the number of splits is chosen for.
    """

    backend: str
    arch: int | str
    processors: int

    @property
    def warp_size(self) -> int:
        """Lanes of a warp (AMD: wave)."""
        return 64 if self.backend == "hip" else 32

    @property
    def fp8(self) -> bool:
        """Whether the machine converts FP8-E4M3 itself; otherwise kernels take its bits apart."""
        return self.backend == "interpreter" or (isinstance(self.arch, int) and self.arch >= 89)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program, bytes (CUDA programming guide, table of compute capabilities; CDNA3 guide)."""
        by_arch = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
        return 1024 * (64 if not isinstance(self.arch, int) else by_arch.get(self.arch, 99))


INTERPRETER = Target("interpreter", 0, 4)


def interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors in this process (it looks once, when it is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def target_of(device: torch.device) -> Target:
    """The machine behind a device.

    Raises:
        MlaError: Triton has no way to run there.
    """
    if device.type == "cuda":
        return _gpu(device.index if device.index is not None else torch.cuda.current_device())
    if device.type == "cpu" and interpreted():
        return INTERPRETER
    raise MlaError(
        f"Triton kernels run on CUDA and ROCm devices, not on {device.type!r}",
        fix="use --backend auto, or a machine with a GPU",
    )


@cache
def _gpu(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True)
class Launch:
    """One kernel with all it needs.

    Attributes:
        kernel: a function under `triton.jit`; arguments: by name, constants included.
        grid: programs in each direction.
        num_warps, num_stages: how it is compiled.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """How the kernel is compiled. Fused multiply-adds are asked for: Triton is about to change its default."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self, device: torch.device) -> None:
        """Start the kernel; a grid without programs starts none."""
        if 0 in self.grid:
            return
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)


def check(
    where: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Refuse an argument that a kernel would misread.

    Args:
        where: the launcher; name: the argument.
        shape: what it must be; None: any size.
        dtypes: any of these.
        device: where it must be.

    Raises:
        MlaError: it is not so, by name.
    """
    if tensor.dim() != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise MlaError(f"{name} has the shape {list(tensor.shape)}, not [{wanted}]", where=where)
    if tensor.dtype not in dtypes:
        raise MlaError(f"{name} is {_short(tensor.dtype)}, not {' or '.join(map(_short, dtypes))}", where=where)
    if device is not None and tensor.device != device:
        raise MlaError(f"{name} is on {tensor.device}, not on {device}", where=where)
    if not tensor.is_contiguous():
        raise MlaError(
            f"{name} has the strides {list(tensor.stride())}, which are not contiguous",
            where=where,
            fix=f"pass {name}.contiguous()",
        )


def check_pool(where: str, pool: Tensor, page_bytes: int, device: torch.device) -> None:
    """Refuse a pool whose pages are not where the layout says, by name."""
    check(where, "pool", pool, (None, page_bytes), (torch.uint8,), device)
    if pool.device.type != "meta" and pool.data_ptr() % 16:
        raise MlaError("pool does not start at a multiple of 16 bytes", where=where)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
