"""One tiny model and one server on it, for the tests that change neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_cli.runtime.engine import Engine, open_engine
from tests.runtime.stand_ins import save_tiny_with_tokenizer
from tests.server.support import Running, running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_tiny_with_tokenizer(folder, max_position_embeddings=1024)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    """The same model beside the server."""
    return open_engine(str(model))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model) as found:
        yield found
        assert found.faults == []
        found.wait_idle()


@pytest.fixture
def client(server: Running) -> Any:
    import openai

    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
