"""Conversions that keep what is held by layer in files: the same bytes out, in memory that does not grow with the layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_cli.calibration.offload import Series, Workplace
from mla_cli.converters.factorize import best_factors
from mla_cli.model import widened
from mla_cli.model.widened import widened_linear
from tests.tiny import run_convert

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_kept_in_files_gives_the_same_bytes_and_leaves_none(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, kept = source.parent / "out", source.parent / "kept"
    assert run_convert(source, "--ratio", 4, "--heal", "none") == 0
    expected = (out / "model.safetensors").read_bytes()
    assert run_convert(source, "--ratio", 4, "--heal", "none", "--force", "--offload", kept) == 0
    assert (out / "model.safetensors").read_bytes() == expected
    assert "goes to files" in capsys.readouterr().err
    assert list(kept.iterdir()) == []
    # Far less than it takes with everything in memory, and more than the least.
    assert run_convert(source, "--ratio", 4, "--heal", "none", "--force", "--max-memory", "2.4GB") == 0
    assert (out / "model.safetensors").read_bytes() == expected
    assert "goes to files" in capsys.readouterr().err
    assert [file.name for file in source.parent.glob(".*")] == []


def test_memory_that_cannot_be_enough_is_refused_before_any_work(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_convert(source, "--max-memory", "100MB") == 2
    assert "GB of memory at the least" in capsys.readouterr().err
    assert run_convert(source, "--offload", source / "config.json") != 0
    assert "config.json" in capsys.readouterr().err
    assert not (source.parent / "out").exists()


def test_files_hold_the_numbers_that_were_put_there(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    rows = place.rows((5, 3), torch.device("cpu"))
    assert rows[1:3].tolist() == [[0, 0, 0], [0, 0, 0]]
    values = torch.randn(2, 3)
    rows[3:5] = values
    assert torch.equal(rows[3:9], values)
    series: Series[torch.Tensor] = Series(place.series())
    for number in range(3):
        series.append(values.double() + number)
    series[1] = values
    assert torch.equal(series[-1], values.double() + 2)
    assert torch.equal(series[1], values)
    assert len(list(series)) == 3
    del rows, series
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rows", "columns"), [(7, 12), (12, 7)])
def test_factors_are_the_weighted_optimum(rows: int, columns: int) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generator = torch.Generator().manual_seed(0)
    a, f, c = random(rows, columns), random(rows, rows), random(columns, columns)
    f, c = (m @ m.T + torch.eye(len(m)) for m in (f, c))  # damping is small beside what they hold
    full, read, energy = best_factors(a, 12, c, f)
    torch.testing.assert_close(full @ read, a)  # nothing is lost at full rank
    for rank in (1, 3, 6):
        up, down, _ = best_factors(a, rank, c, f)
        rest = a - up @ down
        loss = float((f @ rest @ c @ rest.T).trace())
        assert loss == pytest.approx(float(energy[rank:].sum()), rel=0.01)
        # No step from it lowers the loss: the slope with respect to both factors is zero.
        slope = f @ rest @ c
        size = float((f @ a @ c).norm())
        assert float((slope @ down.T).norm()) < 1e-2 * size * float(down.norm())
        assert float((up.T @ slope).norm()) < 1e-2 * size * float(up.norm())


def test_a_head_that_is_widened_in_parts_gives_the_same_scores_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    weight, bias, slope = torch.randn(20, 8).bfloat16(), torch.randn(20), torch.randn(3, 20)
    whole = widened_linear(x, weight, bias)
    (expected,) = torch.autograd.grad(whole, x, slope)
    monkeypatch.setattr(widened, "AT_ONCE", 24)
    parts = widened_linear(x, weight, bias)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, x, slope)[0], expected)


def peak_of_conversion(folder: Path, layers: int) -> int:
    """Bytes that a conversion of a checkpoint of Llama-3.2-1B's widths holds at the most."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = ROOT / "scripts" / "make_shaped_checkpoint.py"
    shape = ["--shape", "llama-3-1b", "--layers", str(layers), "--vocab", "16384"]
    subprocess.run([sys.executable, script, folder / "source", *shape], env=environment, check=True, timeout=600)
    words = [
        "convert", folder / "source", folder / "out", "--calib", folder / "source" / "text.txt", "--samples", "6",
        "--seq-len", "32", "--heal", "none", "--ratio", "4", "--qk-rope-head-dim", "32", "--format", "deepseek",
        "--offload", folder / "files", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mla_cli", *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["peak_rss_bytes"])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    few, many = (peak_of_conversion(tmp_path / str(layers), layers) for layers in (5, 10))
    width, inner, vocab, cached = 2048, 8192, 16384, 1024
    layer = 4 * (2 * width * width + 2 * width * cached // 2 + 3 * width * inner)
    tables = 2 * 2 * vocab * width
    statistics = 4 * 8 * ((width + 1) ** 2 + cached**2)  # of one layer: the source's, the split one's, and sums of both
    runtime = 450 << 20  # Python and PyTorch
    print(f"5 layers: {few / 1e9:.2f} GB, 10 layers: {many / 1e9:.2f} GB, a layer: {layer / 1e9:.2f} GB")
    assert many < few + layer / 4
    assert many < 3 * layer + tables + statistics + runtime
