"""What a monitor is made of: durations, energy counters, the pool's fragmentation."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_cli.model.page_pool import PagePool
from mla_cli.runtime.energy import EnergyMeter
from mla_cli.runtime.times import WINDOW, Times
from tests.runtime.latent import latent_decoder


@given(st.lists(st.floats(0, 100), max_size=200), st.floats(0, 1))
def test_durations_are_counted_by_their_bounds(values: list[float], share: float) -> None:
    times = Times((0.1, 1, 10))
    for value in values:
        times.append(value)
    assert len(times) == len(values) == sum(times.counts)
    assert times.total == pytest.approx(sum(values))
    for bound, below in ((0.1, times.counts[0]), (1, sum(times.counts[:2])), (10, sum(times.counts[:3]))):
        assert below == sum(value <= bound for value in values)
    found = times.quantile(share)
    if values:
        assert found is not None
        assert sum(value <= found for value in values) >= share * len(values)
    else:
        assert found is None


def test_a_long_run_keeps_the_latest_durations_only() -> None:
    times = Times((1.0,))
    for _ in range(WINDOW):
        times.append(5.0)
    for _ in range(WINDOW):
        times.append(0.5)
    assert (times.count, times.counts) == (2 * WINDOW, [WINDOW, WINDOW])
    assert times.quantile(1.0) == 0.5
    assert len(list(times)) == WINDOW


def test_another_thread_may_ask_while_times_are_counted() -> None:
    times, faults, done = Times((1.0,)), [], threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                times.quantile(0.5)
            except Exception as failure:
                faults.append(failure)

    reader = threading.Thread(target=ask)
    reader.start()
    try:
        for _ in range(WINDOW - 1):
            times.append(0.5)
    finally:
        done.set()
        reader.join()
    assert (faults, len(times)) == ([], WINDOW - 1)


def zone(folder: Path, name: str, kind: str, energy: int, most: int = 1000_000_000) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    for file, value in (("name", kind), ("energy_uj", energy), ("max_energy_range_uj", most)):
        (place / file).write_text(f"{value}\n")
    return place / "energy_uj"


def test_processors_are_counted_once_and_run_over(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 10)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 10)
    zone(tmp_path, "intel-rapl:2", "psys", 10)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    meter = EnergyMeter(powercap=tmp_path)
    assert meter.joules() == 0
    first.write_text("4000000")  # it has started again from 0
    second.write_text("2000000")
    assert meter.joules() == 7
    first.write_text("5000000")
    assert meter.joules() == 8
    first.write_text("what")
    assert meter.joules() is None


def test_no_counters_no_joules(tmp_path: Path) -> None:
    assert EnergyMeter(powercap=tmp_path).joules() is None
    assert EnergyMeter("GPU-1", powercap=tmp_path, nvml="no-such-library.so").joules() is None
    energy = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    energy.unlink()
    assert EnergyMeter(powercap=tmp_path).joules() is None


NVML = """
#include <string.h>
static unsigned long long calls = 0;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "GPU-1")) return 6;
    *device = &calls;
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
    if (device != &calls) return 2;
    *energy = 1000 * calls++;
    return 0;
}
"""


def test_a_gpu_is_counted_through_its_driver(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, to make a driver's library of the same interface")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nvml.c")], check=True)
    meter = EnergyMeter("GPU-1", powercap=tmp_path / "none", nvml=str(library))
    assert [meter.joules(), meter.joules()] == [1.0, 2.0]
    assert EnergyMeter("GPU-2", powercap=tmp_path / "none", nvml=str(library)).joules() is None


def test_fragmentation_is_what_used_pages_could_give_back() -> None:
    pool = PagePool(latent_decoder().make_cache, 64)
    assert pool.fragmentation(4) == 0
    pages = [pool.take(1) for _ in range(32)]
    assert pool.fragmentation(4) == 0
    for page in pages[1:]:
        assert page is not None
        if page[0] % 4 != 1:  # one of each chunk stays
            pool.release(page)
    assert pool.fragmentation(4) == pytest.approx(1 - 2 / 8)
    assert pool.fragmentation(1) == 0
