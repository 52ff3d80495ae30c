"""Compare our evaluation, item by item, with lm-evaluation-harness's own class for Hugging Face models.

    python scripts/compare_with_harness.py --data ../shared/data

Both run the same tasks on the same model in float32 on the CPU. Exit code 1 where a log-likelihood differs by more than
1e-3, an accuracy differs, or a generated text differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

TOLERANCE = 1e-3  # nats, of one item
TASKS = ("lambada", "hellaswag", "gsm8k")


def main() -> int:
    """Run both, print both tables and the largest difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="folder, Hub id or built-in name")
    parser.add_argument("--data", type=Path, required=True, help="folder with lambada/, hellaswag/, gsm8k/")
    for task, items in zip(TASKS, (300, 100, 10), strict=True):
        parser.add_argument(f"--{task}", type=int, default=items, metavar="N", help=f"items (default {items}; 0: none)")
    parser.add_argument("--batch-size", type=int, default=8, help="of the harness's class (ours chooses its own)")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    limits = {task: getattr(options, task) for task in TASKS if getattr(options, task)}

    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    ours, theirs = open_both(options.model, options.batch_size)
    from mla_cli.evaluation.tasks import load_tasks, plan_tasks

    rows, worst, failures = [], 0.0, []
    for task, limit in limits.items():
        plan = plan_tasks((task,), options.data)
        with tempfile.TemporaryDirectory(prefix="mla-compare-") as folder:
            loaded = load_tasks(plan, Path(folder))
            found, seconds = zip(*(run(model, loaded, limit) for model in (ours, theirs)), strict=True)
        name = plan.harness[0]
        values = [metrics(result["results"][name]) for result in found]
        largest, unlike = difference(*(result["samples"][name] for result in found))
        worst = max(worst, largest)
        if largest > TOLERANCE or unlike:
            failures.append(f"{task}: largest difference {largest:.2e}, {unlike} items with another answer")
        for metric, value in values[0].items():
            rows.append((task, metric, limit, value, values[1][metric], seconds))
            if metric != "perplexity" and value != values[1][metric]:
                failures.append(f"{task}: {metric} is {value}, the harness has {values[1][metric]}")
        print(
            f"{task}: ours {seconds[0]}, lm-eval {seconds[1]}, largest difference {largest:.2e} nats",
            flush=True,
        )
    _print_table(rows)
    print(f"largest difference of a log-likelihood: {worst:.2e} nats (allowed {TOLERANCE:g})")
    for failure in failures:
        print(f"DIFFERENT {failure}")
    return 1 if failures else 0


def open_both(name: str, batch_size: int) -> tuple[Any, Any]:
    """Our adapter and the harness's class, on one model in float32."""
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    from mla_cli.checkpoint.load import load_decoder, open_model
    from mla_cli.evaluation.harness import HarnessModel
    from mla_cli.model.tokenizer import load_tokenizer

    model = open_model(name)
    folder = model.source.folder
    tokenizer = load_tokenizer(folder)
    ours = HarnessModel(load_decoder(model, dtype=torch.float32), tokenizer)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # tokenizer.json as it stands: AutoTokenizer rebuilds it for some classes, with other splits than it was trained on.
    special = {key: value for key, value in tokenizer.special_tokens.items() if isinstance(value, str)}
    fast_class: Any = transformers.PreTrainedTokenizerFast
    fast = fast_class(tokenizer_file=str(folder / "tokenizer.json"), **special)
    return ours, HFLM(pretrained=reference, tokenizer=fast, batch_size=batch_size, device="cpu")


def run(model: Any, loaded: Mapping[str, Any], limit: int) -> tuple[Any, str]:
    """The harness's results of loaded tasks on one model, and the time it took."""
    from lm_eval.evaluator import evaluate

    from mla_cli.evaluation.tasks import FEWSHOT_SEED, quiet_harness

    for task in loaded["tasks"].values():
        task.set_fewshot_seed(FEWSHOT_SEED)
    started, used = perf_counter(), process_time()
    with quiet_harness():
        found = evaluate(model, loaded, limit=limit, bootstrap_iters=0)
    return found, f"{perf_counter() - started:.1f} s ({process_time() - used:.1f} s of CPU)"


def metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """A task's numbers by the name of their metric."""
    return {key.removesuffix(",none"): value for key, value in results.items() if isinstance(value, float)}


def difference(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """Largest difference of a log-likelihood, and how many answers (greedy flags, texts) differ."""
    worst, unlike = 0.0, 0
    for mine, other in zip(ours, theirs, strict=True):
        if mine["arguments"] != other["arguments"]:
            raise RuntimeError(f"item {mine['doc_id']} is not the same for both")
        for got, expected in zip(mine["resps"], other["resps"], strict=True):
            if isinstance(got[0], str):
                unlike += got != expected
            else:
                worst = max(worst, abs(got[0][0] - expected[0][0]))
                unlike += got[0][1] != expected[0][1]
    return worst, unlike


def _print_table(rows: Sequence[tuple[Any, ...]]) -> None:
    print(f"\n{'task':10} {'metric':30} {'items':>5} {'ours':>10} {'lm-eval':>10}")
    for task, metric, items, value, expected, _ in rows:
        print(f"{task:10} {metric:30} {items:5} {value:10.4f} {expected:10.4f}")
    print()


if __name__ == "__main__":
    sys.exit(main())
