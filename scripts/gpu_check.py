"""Check and time every Triton kernel on the GPU at hand: `make gpu-check`, at most 8 minutes on an H200.

    python scripts/gpu_check.py [--seconds 420] [--out build/gpu-check.json] [--tiles 64,16,8,3 32,32,8,2]

Runs from a plain checkout; needs torch and triton alone. First every kernel and data type against the float64 formula, and a
tiny model that generates by them; then decode, prefill and write against the ceilings measured on this machine (copy bandwidth,
bfloat16 matrix product), PyTorch's attention, and FlashInfer and FlashMLA where they are installed. What does not fit into the
time is left out, and listed. Exits with 1 if a result is wrong or there is no GPU. `--tiles` (rows, keys, warps, stages) times
decode with other tiles than those shipped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.gpu_correctness import checks, right  # noqa: E402
from scripts.gpu_timing import (  # noqa: E402
    Timer,
    ceilings,
    decode_cases,
    table_of,
    targets,
    time_decode,
    time_others,
    time_tiles,
)


def main() -> int:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420, help="start nothing new after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check.json")
    parser.add_argument(
        "--tiles", nargs="*", default=[], help="rows,keys,warps,stages of decode, timed before anything else"
    )
    options = parser.parse_args()
    try:
        import torch
        import triton
    except ImportError as error:
        print(f"gpu-check needs torch and triton: {error}")
        return 1
    if not torch.cuda.is_available():
        print("gpu-check needs a GPU: torch finds no CUDA or ROCm device here")
        return 1
    begun = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    report: dict[str, Any] = {"device": properties.name, "torch": torch.__version__, "triton": triton.__version__}
    print(report, flush=True)

    def late() -> bool:
        return time.monotonic() - begun > options.seconds

    errors: dict[str, Any] = {}
    skipped: list[str] = []
    for name, error_of in checks(device):
        if time.monotonic() - begun > 0.6 * options.seconds:
            skipped.append(name)
            continue
        try:
            error: float | str = error_of()
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
        errors[name] = error
        print(f"{'right' if right(name, error) else 'WRONG'} {name}: {error}", flush=True)
        torch.cuda.empty_cache()
    failed = [name for name, error in errors.items() if not right(name, error)]

    timer = Timer(device)
    ceiling = ceilings(timer)
    print(ceiling, flush=True)
    results: list[dict[str, Any]] = []

    def collect(name: str, found: Iterator[dict[str, Any]]) -> None:
        if late():
            skipped.append(name)
            return
        try:
            results.extend(found)
        except Exception as raised:
            results.append({"what": name, "error": f"{type(raised).__name__}: {str(raised)[:300]}"})
        torch.cuda.empty_cache()

    if options.tiles:
        collect("tiles", time_tiles(options.tiles, timer, ceiling))
    for place, case in enumerate(decode_cases(device)):
        collect(f"decode {case}", time_decode(case, timer, ceiling))
        if place == 3:
            collect("prefill and write", time_others(timer, ceiling))

    report |= {"ceilings": ceiling, "errors": errors, "failed": failed, "results": results, "not_run": skipped}
    report["seconds"] = round(time.monotonic() - begun)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    print(table_of(results))
    print("\n".join(targets(results)))
    print(f"{len(errors) - len(failed)} of {len(errors)} checks right, {len(skipped)} not run, {report['seconds']} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
