"""What a conversion will take, for `--dry-run`: memory, disk and time, from counted work and a short measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from mla_cli.calibration.layer_bank import KEEP_BYTES
from mla_cli.checkpoint.load import ModelSource
from mla_cli.converters.compensate import TOKENS
from mla_cli.converters.options import FORWARD_OBJECTIVES, HELD_OUT, PILOT_SAMPLES, SPLIT_SAMPLES, ConvertOptions
from mla_cli.converters.plan import ConversionPlan

# Share of a plain matrix product's rate that a whole layer reaches (norms, softmax, copies, moments in float64).
EFFICIENCY = 0.6


def matmul_rate(size: int = 1536) -> float:
    """Floating-point operations a second of a float32 matrix product on this machine."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = math.inf
    for _ in range(4):  # the first one warms up
        begun = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def estimate(model: ModelSource, options: ConvertOptions, plans: Sequence[ConversionPlan]) -> dict[str, Any]:
    """`{"peak_bytes", "output_bytes", "seconds"}` of a conversion."""
    spec, infos = model.spec, model.source.tensors.infos
    numbers = {name: math.prod(infos[rule.source].shape) for name, rule in model.rules.items()}
    layers = sum(n for name, n in numbers.items() if ".layers." in name)
    head = spec.vocab_size * spec.hidden_size
    frame = sum(numbers.values()) - layers
    seen = options.samples if options.objective in FORWARD_OBJECTIVES else min(options.samples, SPLIT_SAMPLES)
    forward = seen * options.seq_len * 2 * layers
    fisher = 2 * (3 * layers + 2 * head) * options.seq_len
    pilots = PILOT_SAMPLES * len(plans) if len(plans) > 1 else 0
    gradients = options.objective == "fisher" or options.compare_objectives
    backward = fisher * ((options.fisher_samples if gradients else 0) + pilots)
    stages = 8 if options.compare_objectives else 4
    held_out = HELD_OUT * options.seq_len * 2 * (layers + head) * stages
    refit = 4 * layers * min(TOKENS, options.fisher_samples * options.seq_len) if options.refits else 0
    operations = forward + backward + held_out + refit
    wide = 8 * spec.num_layers * (3 * spec.hidden_size**2 + 4 * spec.hidden_size * plans[0].layers[0].cached_per_token)
    kept = min(4 * layers, KEEP_BYTES) if 4 * layers <= KEEP_BYTES else 8 * layers // spec.num_layers
    logits = 2 * 4 * options.seq_len * spec.vocab_size
    element = model.stored_dtype.itemsize
    heal = options.heal
    # With a number of steps instead of minutes, their cost: source and student forward, and back through the student.
    step = 2 * (4 * layers + 3 * head) * heal.batch_tokens
    healing = 0.0
    if heal.mode != "none":
        healing = 60 * heal.minutes if heal.steps is None else heal.steps * step / (matmul_rate() * EFFICIENCY)
    return {
        "peak_bytes": 4 * frame + kept + 2 * wide + 2 * (1 << 30) + logits,
        "output_bytes": sum(numbers.values()) * element,
        "seconds": operations / (matmul_rate() * EFFICIENCY) + healing,
    }
