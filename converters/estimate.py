"""What a conversion will take, for `--dry-run`: memory, disk and time, from counted work and a short measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_cli.calibration.layer_bank import KEEP_BYTES
from mla_cli.calibration.layerwise import SCORES_AT_ONCE
from mla_cli.calibration.memory import available_bytes
from mla_cli.calibration.offload import ROUND_IN_MEMORY
from mla_cli.checkpoint.load import ModelSource, layer_bytes
from mla_cli.converters.compensate import TOKENS
from mla_cli.converters.options import FORWARD_OBJECTIVES, HELD_OUT, PILOT_SAMPLES, SPLIT_SAMPLES, ConvertOptions
from mla_cli.converters.plan import ConversionPlan, standard_layers
from mla_cli.errors import UsageError

# Share of a plain matrix product's rate that a whole layer reaches (norms, softmax, copies, moments in float64).
EFFICIENCY = 0.6
# Python, PyTorch and its threads.
RUNTIME_BYTES = 500 << 20
# Of the memory that is free, a conversion takes so much before it keeps anything in files: others work on the machine too.
FREE_SHARE = 0.5


def matmul_rate(size: int = 1536) -> float:
    """Floating-point operations a second of a float32 matrix product on this machine."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = math.inf
    for _ in range(4):  # the first one warms up
        begun = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


@dataclass(frozen=True)
class Memory:
    """Bytes of memory that a conversion takes: with everything in it, and with what is kept by layer in files."""

    whole: int
    offloaded: int

    def needed(self, offloaded: bool) -> int:
        """In one of the two ways."""
        return self.offloaded if offloaded else self.whole


def memory_of(model: ModelSource, plans: Sequence[ConversionPlan], options: ConvertOptions) -> Memory:
    """What a conversion takes without healing, from the shapes alone (float32 layers, float64 statistics and factors)."""
    spec, infos = model.spec, model.source.tensors.infos
    by_layer = layer_bytes(model)
    small = sum(by_layer) <= KEEP_BYTES
    tables = [rule.source for name, rule in model.rules.items() if ".layers." not in name]
    frame = sum(math.prod(infos[name].shape) * (4 if small else infos[name].dtype.itemsize) for name in tables)
    hidden, first = spec.hidden_size, plans[0].layers[0]
    cached = max(a.cached_per_token for a in standard_layers(spec))
    moments = 8 * ((hidden + 1) ** 2 + cached**2)
    heads = max(a.num_heads * (2 * a.head_dim + first.qk_rope_head_dim) for a in standard_layers(spec))
    wide = 8 * (hidden * (heads + cached) + heads * cached)
    scores = 4 * 4 * min(SCORES_AT_ONCE, options.seq_len * spec.vocab_size)
    own = frame + scores + RUNTIME_BYTES
    # Split and narrow layers; the source's statistics and the split layers'. Of one layer: those, and what they are made of.
    held = spec.num_layers * (2 * wide + 2 * moments)
    kept = sum(by_layer) if small else 2 * max(by_layer)
    return Memory(own + kept + held + 2 * ROUND_IN_MEMORY, own + 2 * max(by_layer) + 2 * wide + 4 * moments)


def offloads(memory: Memory, options: ConvertOptions) -> bool:
    """Whether a conversion keeps in files what it keeps by layer: asked for, or more than half of what memory there is.

    Raises:
        UsageError: not even that fits into the memory that it may take.
    """
    if options.max_memory is not None and memory.offloaded > options.max_memory:
        raise UsageError(
            f"the conversion needs about {memory.offloaded / 1e9:.1f} GB of memory at the least",
            where=f"--max-memory {options.max_memory / 1e9:g}GB",
            fix="allow that much, or shorten the sequences with --seq-len",
        )
    if options.offload is not None:
        return True
    if options.max_memory is not None:
        return memory.whole > options.max_memory
    free = available_bytes()
    return free is not None and memory.whole > free * FREE_SHARE


def estimate(model: ModelSource, options: ConvertOptions, plans: Sequence[ConversionPlan]) -> dict[str, Any]:
    """`{"peak_bytes", "output_bytes", "seconds"}` of a conversion."""
    spec, infos = model.spec, model.source.tensors.infos
    numbers = {name: math.prod(infos[rule.source].shape) for name, rule in model.rules.items()}
    layers = sum(n for name, n in numbers.items() if ".layers." in name)
    head = spec.vocab_size * spec.hidden_size
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
    memory = memory_of(model, plans, options)
    element = model.stored_dtype.itemsize
    heal = options.heal
    # With a number of steps instead of minutes, their cost: source and student forward, and back through the student.
    step = 2 * (4 * layers + 3 * head) * heal.batch_tokens
    healing = 0.0
    if heal.mode != "none":
        healing = 60 * heal.minutes if heal.steps is None else heal.steps * step / (matmul_rate() * EFFICIENCY)
    return {
        "peak_bytes": memory.needed(offloads(memory, options)),
        "output_bytes": sum(numbers.values()) * element,
        "seconds": operations / (matmul_rate() * EFFICIENCY) + healing,
    }
