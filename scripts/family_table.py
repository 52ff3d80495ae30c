"""Measure every family on tiny random models and write docs/families.md: `python scripts/family_table.py`.

For each: how far logits are from transformers' (parity), how far a conversion at full rank is from its source in float64
(exactness), and the held-out KL divergence of a conversion at half the cache, without healing. Random models have nothing to
compress: the last figure shows that conversion works, not what it costs a real model.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "families.md"
sys.path.insert(0, str(ROOT))

HEAD = """# Families

Written by `python scripts/family_table.py`, on tiny random models: do not edit. Parity: largest difference of logits from
transformers, float32, 2 x 100 tokens. Full rank: largest difference of a native conversion that drops nothing from its source,
float64, 2 x 250 tokens. Half rank: KL divergence (nats a token) on held-out text at `--ratio 2 --heal none`, and the form that
`auto` took.

| case | parity | full rank | half rank | form | reason |
|---|---|---|---|---|---|
"""
GGUF_HEAD = """
## From GGUF

The same, where the source is a `.gguf` file in float32 with llama.cpp's names and orders of rows: largest difference of logits
from transformers. Types of numbers: F32, F16, BF16, Q8_0, Q4 and Q5 in both forms, Q2_K to Q6_K, IQ1 to IQ4, TQ1, TQ2, MXFP4.

| case | GGUF architecture | parity |
|---|---|---|
"""
GGUF_END = """
GPT-J and OPT are not in GGUF. It has no key for, and llama.cpp does not compute: sliding windows of Mistral, Qwen and SmolLM3,
dynamic scaling, YaRN's `mscale`, GPT-2's scaling by layer, Falcon's ALiBi, and another scale of scores, pattern of windows or
interval of layers without rotary embedding than Gemma's and SmolLM3's released models have. Llama 3's scaling is read
with the parameters of Llama 3 alone. What a file says and is not read here is refused by name.
"""


def row(case: str, folder: Path) -> str:
    """One line of the table."""
    import torch

    from mla_cli.checkpoint.load import load_decoder, open_model
    from mla_cli.converters.heal_options import HealOptions
    from tests.converters.test_exactness import full_rank, run
    from tests.model.test_parity import ALL_CASES
    from tests.tiny import random_tokens

    family, changes = ALL_CASES[case]
    none = HealOptions(mode="none")
    half_folder, full_folder = folder / "half", folder / "full"
    reference, _, report = run(half_folder, family, changes, ratio=2.0, heal=none)
    source = half_folder / "source"
    _, whole, _ = run(full_folder, family, changes, format="native", heal=none, **full_rank(source))
    with torch.inference_mode():
        tokens, longer = random_tokens(2, 100), random_tokens(2, 250)
        decoder = load_decoder(open_model(str(source)))
        parity = float((decoder.logits(decoder(tokens)) - reference(tokens).logits).abs().max())
        exact, ours = (load_decoder(open_model(str(f)), dtype=torch.float64) for f in (source, whole))
        exactness = float((exact.logits(exact(longer)) - ours.logits(ours(longer))).abs().max())
    form, reason = report["format"], report.get("format_reason", "")
    return f"| {case} | {parity:.1e} | {exactness:.1e} | {report['heldout']['kl_final']:.3f} | {form} | {reason} |\n"


def gguf_row(case: str, folder: Path) -> str:
    """One line of the table of GGUF files."""
    import torch
    from gguf import GGUFReader

    from mla_cli.checkpoint.load import load_decoder, open_model
    from tests.checkpoint.test_gguf_families import FAMILIES, written
    from tests.tiny import random_tokens

    reference, file = written(folder, *FAMILIES[case])
    field = GGUFReader(file).get_field("general.architecture")
    assert field is not None
    with torch.inference_mode():
        tokens, decoder = random_tokens(2, 100), load_decoder(open_model(str(file)))
        difference = float((decoder.logits(decoder(tokens)) - reference(tokens).logits).abs().max())
    return f"| {case} | {field.contents()} | {difference:.1e} |\n"


def main() -> int:
    """Measure, print each line, write the table."""
    from tests.checkpoint.test_gguf_families import FAMILIES
    from tests.model.test_parity import ALL_CASES

    os.environ["MLA_CACHE"] = tempfile.mkdtemp()  # of unpacked GGUF files
    os.environ["MLA_CPU_KERNELS"] = "off"  # nothing of this is long enough to compile for
    parts: list[str] = []
    for head, cases, measure in ((HEAD, ALL_CASES, row), (GGUF_HEAD, FAMILIES, gguf_row)):
        parts.append(head)
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                parts.append(measure(case, Path(folder)))
            print(parts[-1], end="", flush=True)
    TABLE.write_text("".join([*parts, GGUF_END]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
