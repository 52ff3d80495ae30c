"""What a user may choose about how the generator runs, and the defaults."""

from __future__ import annotations

from mla_cli.errors import UsageError

BACKENDS = ("auto", "triton", "cpu", "reference")
KV_DTYPES = ("auto", "bf16", "int8", "fp8", "int4")
WEIGHTS = ("float", "int8")
KV_DTYPE_ALIASES = {"bfloat16": "bf16", "fp8_e4m3": "fp8", "e4m3": "fp8", "i8": "int8", "i4": "int4"}
ROPE_DTYPE_ALIASES = {"bf16": "bfloat16", "fp8_e4m3": "fp8", "e4m3": "fp8", "i8": "int8"}
DEFAULT_MAX_BATCH = 8  # a small model on a CPU: beyond it a step takes longer in proportion

DEFAULT_QUEUE = 256  # answers of a server that wait: a small model's queue of that length is worked off in minutes
DEFAULT_REQUEST_SECONDS = 600.0  # what OpenAI's own client waits for an answer

PROFILES = ("datacenter", "consumer", "edge")

MOST_WARMUPS = 20  # beginnings that are read before the first request, and the share of the pool that they may keep
WARM_SHARE = 0.05

PAGE_TOKENS = 64  # tokens of a page of the cache's pool (as in `cache_store`, which loads torch)
CHUNK_TOKENS = 256  # what the size of the cache's pool is counted in

DEFAULT_FILE_CHUNKS = 256  # of a file of kept prompts: of 256 tokens each, half a gigabyte of a model of 8 kB a token
LOOKAHEAD, LOOK_THRESHOLD, FALLBACK_THRESHOLD, COOL_DOWN = 3, 0.7, 0.85, 5  # of prefetching, unless said otherwise


def check_backend(backend: str) -> str:
    """Refuse a backend that does not exist, before any work.

    Raises:
        UsageError: an unknown backend.
    """
    if backend in BACKENDS:
        return backend
    fix = f"use one of {', '.join(BACKENDS)}"
    raise UsageError(f"there is no backend '{backend}'", where=f"--backend {backend}", fix=fix)
