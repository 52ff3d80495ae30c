"""The whole path on a real model: fetch, convert, calibrate, evaluate against the source, generate; one table at the end.

Run it with `make demo`. It writes to `demo-out/` and may be run again. With a data folder in reach (`MLA_DATA`, or
`../shared/data` beside the repository) it calibrates on the texts there and evaluates LAMBADA and HellaSwag too; otherwise
the model writes its own calibration text and quality is measured on English prose that Python ships.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "smollm2-135m"
OUT = ROOT / "demo-out"
RATIO = "2"
PROMPT = "Explain in two sentences why the sky is blue."
# Enough for a fair picture within a quarter of an hour on two cores; the README says what full runs use.
SAMPLES, FISHER_SAMPLES, SELF_SAMPLES, CALIBRATION_SAMPLES, HEAL_MINUTES = "48", "32", "32", "24", "3"
WINDOWS, ITEMS = "8", "60"


def main() -> int:
    """Run every step and print the summary."""
    begun = time.monotonic()
    data = find_data()
    if data is not None:
        texts = ["--calib", str(data / "text" / "calibration"), "--samples", SAMPLES]
    else:
        texts = ["--calib", "self", "--samples", SELF_SAMPLES]
    checkpoint = OUT / "smollm2-135m-mla"

    step(1, "convert the model to latent attention, half the cache")
    converted = mla(
        "convert", SOURCE, checkpoint, "--ratio", RATIO, "--qk-rope-head-dim", "64", *texts,
        "--fisher-samples", FISHER_SAMPLES, "--heal", "layers", "--heal-minutes", HEAL_MINUTES, "--force", "--json",
    )  # fmt: skip
    step(2, "calibrate INT8 latents")
    calibrated = mla(
        "calibrate", checkpoint, "--kv-dtype", "int8", *texts[:2], "--samples", CALIBRATION_SAMPLES, "--json"
    )
    step(3, "measure both against the source")
    text = ["--data", str(data)] if data is not None else []
    compare = ["--baseline", SOURCE, "--max-drop", "1000", "--json", *text]
    quality = {
        kind: mla("eval", checkpoint, "--tasks", "ppl,kl", "--limit", WINDOWS, "--kv-dtype", kind, *compare)["tasks"]
        for kind in ("bf16", "int8")
    }
    tasks = {}
    if data is not None:
        tasks = mla("eval", checkpoint, "--tasks", "lambada,hellaswag", "--limit", ITEMS, *compare)["tasks"]
    step(4, "generate with INT8 latents")
    answer = mla("generate", checkpoint, PROMPT, "--chat", "--max-new-tokens", "64", "--json")

    print(summary(converted, calibrated, quality, tasks, answer, time.monotonic() - begun))
    if data is None:
        print(
            "Left out: LAMBADA, HellaSwag and GSM8K. Online, `mla eval ... --tasks lambada,hellaswag,gsm8k` fetches them; "
            "offline, put their files in a folder and set MLA_DATA (see README)."
        )
    return 0


def find_data() -> Path | None:
    """The data folder, if one is in reach."""
    folder = Path(os.environ.get("MLA_DATA", ROOT.parent / "shared" / "data")).expanduser()
    return folder.resolve() if (folder / "text" / "calibration").is_dir() else None


def step(number: int, what: str) -> None:
    """Say what comes next."""
    print(f"\n[{number}/4] {what}", file=sys.stderr, flush=True)


def mla(*arguments: object) -> dict[str, Any]:
    """Run one command as a user would, show it, and give what it prints; stop the demo where it fails."""
    words = [str(a) for a in arguments]
    print("$ mla " + shlex.join(words), file=sys.stderr, flush=True)
    run = subprocess.run([sys.executable, "-m", "mla_cli", *words], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    if run.returncode:
        sys.exit(run.returncode)
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def summary(
    converted: dict[str, Any],
    calibrated: dict[str, Any],
    quality: dict[str, Any],
    tasks: dict[str, Any],
    answer: dict[str, Any],
    seconds: float,
) -> str:
    """One table: cache bytes and quality of the source, the converted model, and the converted model with INT8 latents."""
    bf16, int8 = quality["bf16"], quality["int8"]
    cache = converted["cache_bytes_per_token"]
    layers = len(converted["layers"])
    int8_bytes = calibrated["bytes_per_token"]["quantised"]
    rows: list[tuple[str, str, str, str]] = [
        ("", "source", "latent", "latent, int8"),
        (
            "cache bytes a token and layer",
            f"{cache['source'] / layers:.0f}",
            f"{cache['mla'] / layers:.0f}",
            f"{int8_bytes / layers:.0f}",
        ),
        ("perplexity", *(_show(v) for v in (bf16["ppl"]["ppl"]["baseline"], *(_ppl(q) for q in (bf16, int8))))),
        ("KL to the source, nats a token", "0", *(_show(q["kl"]["kl"]["value"]) for q in (bf16, int8))),
    ]  # fmt: skip
    for name, metrics in tasks.items():
        for metric, entry in metrics.items():
            if metric in ("acc", "acc_norm"):
                rows.append((f"{name} {metric}", _show(entry["baseline"]), "", _show(entry["value"])))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    table.insert(1, "  ".join("-" * width for width in widths))
    text = " ".join(answer["text"].split())
    return "\n".join(
        ["", *table, "", f"> {PROMPT}", text, "", f"{seconds / 60:.1f} minutes; the checkpoint is in {OUT}"]
    )


def _ppl(tasks: dict[str, Any]) -> float | None:
    return tasks["ppl"]["ppl"]["value"]  # type: ignore[no-any-return]


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
