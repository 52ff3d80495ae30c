"""What tests of whole conversions share: a tiny source with text beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import save_text, save_tiny, save_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer, and `text.txt` beside it."""
    folder = tmp_path / "source"
    save_tiny(folder, "llama")
    save_tokenizer(folder)
    save_text(tmp_path / "text.txt")
    return folder
