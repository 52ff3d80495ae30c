"""Compile every shipped kernel for every machine without one, and write docs/kernels/aot.json: `make kernels`.

    python scripts/compile_kernels.py [--only WORDS]

Exits with 1 if a configuration does not hold what it must (see `mla_cli.kernels.aot`). With `--only` the other rows stay as
they are, if the same version of Triton made them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "kernels" / "aot.json"
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Compile, print a line each, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="configurations whose name holds this, e.g. 'decode int8' or 'sm_90'"
    )
    only = parser.parse_args().only

    import triton

    from mla_cli.kernels import aot

    before = json.loads(TABLE.read_text(encoding="utf-8")) if only and TABLE.exists() else {}
    if only and before.get("triton") != triton.__version__:
        print(f"the table was made by triton {before.get('triton')}, not {triton.__version__}: compile all of it")
        return 1
    table: dict[str, dict[str, int]] = {}
    compiled = wrong = 0
    for configuration in aot.configurations():
        name = f"{configuration.machine} {configuration.name}"
        if only not in name:
            table |= {name: before["kernels"][name]} if name in before["kernels"] else {}
            continue
        counts = aot.compile_launch(configuration.launch(), aot.TARGETS[configuration.machine])
        found = aot.faults(configuration, counts)
        compiled, wrong = compiled + 1, wrong + bool(found)
        table[name] = counts
        print(name, counts, *(f"FAULT: {fault}" for fault in found), flush=True)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(counts)}" for name, counts in table.items())
    TABLE.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "kernels": {{\n{rows}\n  }}\n}}\n', encoding="utf-8")
    print(f"{compiled} configurations, {wrong} with faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
