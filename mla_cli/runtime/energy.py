"""Joules that a machine has used, where it counts them and lets us read: RAPL of its processors, NVML of a GPU.

The counters are of whole packages and devices: what else runs on them is counted, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class EnergyMeter:
    """Joules since it was made; read it more often than the counters run over (tens of minutes at full power).

    Args:
        device: UUID of a GPU to count beside the processors, as NVML writes it (`GPU-...`); None: none.
    """

    def __init__(self, device: str | None = None, powercap: Path | None = None, nvml: str = NVML) -> None:
        self._counters = _packages(powercap or POWERCAP)
        gpu = None if device is None else _gpu(device, nvml)
        if gpu is not None:
            self._counters.append((gpu, None))
        self._last = [read() for read, _ in self._counters]
        self._joules = 0.0

    def joules(self) -> float | None:
        """So far; None where nothing is counted, or may not be read."""
        for index, (read, period) in enumerate(self._counters):
            now, before = read(), self._last[index]
            if now is None or before is None:
                return None
            spent = now - before
            if spent < 0:
                if period is None:  # the counter was reset: what it had is unknown
                    return None
                spent += period
            self._joules += spent
            self._last[index] = now
        return self._joules if self._counters else None


Counter = tuple[Callable[[], float | None], float | None]  # joules, and where it starts again from 0


def _packages(powercap: Path) -> list[Counter]:
    """Whole processors; their parts, and the platform as a whole, would count the same twice."""
    found: list[Counter] = []
    for zone in sorted(powercap.glob("*rapl:*")):
        if zone.name.count(":") != 1 or "mmio" in zone.name:
            continue
        name, period = _text(zone / "name"), _microjoules(zone / "max_energy_range_uj")
        if name is not None and name.startswith("package"):
            found.append((lambda file=zone / "energy_uj": _microjoules(file), period))  # type: ignore[misc]
    return found


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):  # most systems let root alone read energy
        return None


def _microjoules(file: Path) -> float | None:
    text = _text(file)
    return int(text) / 1e6 if text is not None and text.isdecimal() else None


def _gpu(uuid: str, library: str) -> Callable[[], float | None] | None:
    """The energy counter of a GPU, through the driver's own library; None where there is none."""
    try:
        nvml = ctypes.CDLL(library)
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        total = nvml.nvmlDeviceGetTotalEnergyConsumption
    except (OSError, AttributeError):
        return None

    def read() -> float | None:
        millijoules = ctypes.c_ulonglong()
        return None if total(handle, ctypes.byref(millijoules)) else millijoules.value / 1e3

    return None if read() is None else read  # GPUs before Volta do not count
