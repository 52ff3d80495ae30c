"""The wheel: three linked folders as real files, side by side with Hugging Face's package named `kernels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "converters", "calibration")


def run_python(code: str, *, cwd: Path, paths: list[Path]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, so that no build folder is left in the checkout
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    readme = ROOT / "README.md"
    (source / "README.md").write_bytes(readme.read_bytes() if readme.exists() else b"")
    for name in ("mla_cli", *LINKED):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], capture_output=True, timeout=120, check=True)
    return target


@pytest.fixture(scope="module")
def hub_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for Hugging Face's `kernels`: a package and the metadata that transformers looks for."""
    site = tmp_path_factory.mktemp("site")
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("OWNER = 'huggingface'\n")
    metadata = site / "kernels-0.12.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.12.0\n")
    return site


def test_the_wheel_holds_the_linked_folders_as_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in LINKED:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".json") and "__pycache__" not in path.parts:
                assert f"mla_cli/{path.relative_to(ROOT).as_posix()}" in names
    assert "mla_cli/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"mla_cli"}  # no top-level `kernels`, no tests


def test_the_wheel_works_beside_transformers_and_hub_kernels(
    installed: Path, hub_kernels: Path, tmp_path: Path
) -> None:
    code = f"""
    import kernels
    assert kernels.OWNER == "huggingface"
    import mla_cli.kernels, mla_cli.converters, mla_cli.calibration, mla_cli.calibration.texts
    for package in (mla_cli.kernels, mla_cli.converters, mla_cli.calibration):
        assert list(package.__path__)[0].startswith({str(installed)!r}), list(package.__path__)
    import transformers.activations  # every model loads it, and it looks for `kernels`
    from mla_cli.app import main
    main(["--version"])
    """
    assert run_python(code, cwd=tmp_path, paths=[installed, hub_kernels]).startswith("mla ")


def test_the_console_script_is_installed(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    script = installed / "bin" / "mla"
    done = subprocess.run([script, "--help"], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "Usage: mla" in done.stdout
    metadata = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "mla = mla_cli.__main__:run" in metadata.read_text()  # which hears Ctrl-C from its first moment on


def test_the_repository_root_shadows_nothing(hub_kernels: Path) -> None:
    # `python -c` puts the current folder first; a folder without __init__.py yields to any real package after it.
    code = """
    import kernels
    assert kernels.OWNER == "huggingface", kernels.__path__
    import mla_cli.kernels
    """
    run_python(code, cwd=ROOT, paths=[hub_kernels])
    run_python("import transformers.activations", cwd=ROOT, paths=[])
