"""What loading a model costs before its weights are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch
from mla_cli.checkpoint.load import load_decoder, open_model
with torch.no_grad():
    load_decoder(open_model(sys.argv[1]))(torch.tensor([[3, 4]]))
print([name for name in ("torch._dynamo", "sympy", "triton") if name in sys.modules])
"""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_loads_and_runs_without_the_compiler_of_torch(tmp_path: Path, family: str) -> None:
    # Seconds at every start; and Ctrl-C while it loads ends in an abort from within its C++ part, not in exit code 130.
    save_tiny(tmp_path / "model", family)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model")], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert found.stdout.strip() == "[]"
