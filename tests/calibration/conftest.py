"""What tests of calibration share: converted checkpoints, which none of them changes, and copies, which they may."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_cli.calibration import store
from mla_cli.report.page import PAGE, PICTURE, files_for_people, report_page
from tests.calibration.support import converted


@pytest.fixture(autouse=True, scope="session")
def _no_pictures() -> Iterator[None]:
    # Drawing takes ten times as long as calibrating a tiny model.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            store, "files_for_people", lambda report: {PAGE: report_page(report).encode(), PICTURE: b"a picture"}
        )
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw them after all."""
    monkeypatch.setattr(store, "files_for_people", files_for_people)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in the stock form, `text.txt` and its source beside it; not to be changed."""
    return converted(tmp_path_factory.mktemp("pristine"), form="deepseek")


@pytest.fixture(scope="session")
def pristine_native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in our own form."""
    return converted(tmp_path_factory.mktemp("pristine-native"))


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model in the stock form."""
    return copied(pristine, tmp_path / "stock")


@pytest.fixture
def native(pristine_native: Path, tmp_path: Path) -> Path:
    """A copy of the one in our own form."""
    return copied(pristine_native, tmp_path / "native")


def copied(pristine: Path, folder: Path) -> Path:
    """A copy of a checkpoint, with the text beside it."""
    shutil.copytree(pristine, folder / "mla")
    shutil.copy(pristine.parent / "text.txt", folder / "text.txt")
    return folder / "mla"
