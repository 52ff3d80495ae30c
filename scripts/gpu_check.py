"""Check and time every Triton kernel on the GPU at hand: `make gpu-check`, at most 8 minutes on an H200.

    python scripts/gpu_check.py [--seconds 420] [--out build/gpu-check.json] [--tiles 64,16,8,3 32,32,8,2]

Runs from a plain checkout; needs torch and triton alone. First every kernel and data type against the float64 formula,
then decode, prefill and write against the ceilings measured on this machine (copy bandwidth, bfloat16 matrix product),
PyTorch's attention, and FlashInfer and FlashMLA where they are installed. What does not fit into the time is left out, and
listed. Exits with 1 if a result is wrong or there is no GPU. `--tiles` (rows, keys, warps, stages) times decode with other
tiles than those shipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DTYPES = ("bf16", "int8", "fp8", "int4")
BATCHES, CONTEXTS, HEADS = (32, 1, 128, 8), (8192, 1024, 32768, 131072), (16, 128)
RANK, ROPE = 512, 64
MOST_BYTES = 0.6  # of the device's memory, for one cache
# Products take bfloat16 numbers, sums float32 ones; int4 latents are rounded to bfloat16 after their scale met them.
TOLERANCE, INT4_TOLERANCE = 1e-2, 1e-1


def random_pool(layout: Any, pages: int, device: Any) -> Any:
    """Any finite numbers: every byte below 64 is a small positive number in all types."""
    import torch

    pool = torch.empty(pages, layout.page_bytes, dtype=torch.uint8, device=device)
    for part in pool.split(max(1, 2**30 // layout.page_bytes)):
        part.random_(0, 64)
    return pool


def written_cache(layout: Any, lengths: list[int], device: Any, pages: int, g: Any) -> tuple[Any, Any, Any]:
    """A poisoned pool with random tokens, by the formula's own codes; pages in random order from the end of the pool."""
    import torch

    from mla_cli.kernels.pages import put, slots_of

    columns = max(1, max(-(-n // 16) for n in lengths))
    pool = torch.full((pages, layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    order = pages - 1 - torch.randperm(len(lengths) * columns, generator=g).int()
    table = order.view(len(lengths), columns).to(device)
    for b, n in enumerate(lengths):
        latent = torch.randn(n, layout.kv_lora_rank, generator=g).bfloat16()
        k_rope = torch.randn(n, layout.qk_rope_head_dim, generator=g).bfloat16().to(device)
        slots = slots_of(table, torch.full((n,), b, device=device), torch.arange(n, device=device))
        codes, scales = (latent, None) if layout.quantizer is None else layout.quantizer.quantize(latent)
        put(pool, layout, slots, codes.to(device), None if scales is None else scales.to(device), k_rope)
    return pool, table, torch.tensor(lengths, dtype=torch.int32, device=device)


def right(name: str, error: float | str) -> bool:
    """Whether a check of that name may have this error (NaN may not)."""
    return not isinstance(error, str) and error <= (INT4_TOLERANCE if "int4" in name else TOLERANCE)


def difference(found: Any, expected: Any) -> float:
    """Largest error of the output, relative to its largest number, or of the log-sum-exp; infinite if not finite."""
    out, lse = (x.detach().cpu().double() for x in found)
    whole, whole_lse = (x.cpu().double() for x in expected)
    finite = whole_lse.isfinite()
    if not bool(out.isfinite().all()) or not bool((lse.isfinite() == finite).all()):
        return float("inf")
    scores = float((lse - whole_lse)[finite].abs().max()) if bool(finite.any()) else 0.0
    return max(float((out - whole).abs().max() / whole.abs().max().clamp(min=1e-9)), scores)


def checks(device: Any, small: bool = False) -> Iterator[tuple[str, Callable[[], float]]]:
    """Every kernel and data type: a name, and what gives the error."""
    import torch

    from mla_cli.kernels import paged
    from mla_cli.kernels.decode import decode
    from mla_cli.kernels.merge import merge
    from mla_cli.kernels.pages import PageLayout
    from mla_cli.kernels.prefill import explicit, prefill

    longest = 90 if small else 1500

    def on_cpu(*args: Any) -> list[Any]:
        return [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]

    def decoded(
        dtype: str, r: int, d: int, heads: int, queries: int, pages: int, scale: float, **options: Any
    ) -> float:
        g = torch.Generator().manual_seed(1)
        layout = PageLayout(dtype, r, d)  # type: ignore[arg-type]
        lengths = [longest, 0, 1, 17, longest // 2]
        pool, table, sizes = written_cache(layout, lengths, device, pages, g)
        q = torch.randn(len(lengths), queries, heads, r + d, generator=g).bfloat16().to(device)
        limits = {key: options[key] for key in ("window", "softcap") if key in options}
        # Only the pages in use go to the CPU: a pool may be larger than its memory.
        used = pool[-table.numel() :].cpu()
        moved = table.cpu() - (pages - table.numel())
        expected = paged.decode_reference(q.cpu(), used, layout, moved.int(), sizes.cpu(), scale, **limits)
        found = decode(q, pool, layout, table, sizes, scale, out_dtype=torch.float32, **options)
        again = decode(q, pool, layout, table, sizes, scale, out_dtype=torch.float32, **options)
        if not all(torch.equal(x, y) for x, y in zip(found, again, strict=True)):
            return float("inf")
        return difference(found, expected)

    def prefilled(dtype: str, heads: int, own: bool, **options: Any) -> float:
        g = torch.Generator().manual_seed(2)
        layout = PageLayout(dtype, RANK, ROPE)  # type: ignore[arg-type]
        chunks, past = ([5, 0, 33] if small else [300, 0, 129]), [longest // 3, 40, 0]
        lengths = [p + (c if own else 0) for p, c in zip(past, chunks, strict=True)]
        pool, table, sizes = written_cache(layout, lengths, device, 400, g)
        cu = torch.tensor([0, chunks[0], chunks[0], sum(chunks)], dtype=torch.int32, device=device)
        q = torch.randn(sum(chunks), heads, RANK + ROPE, generator=g).bfloat16().to(device)
        args = (q, cu, pool, layout, table, sizes, 0.05)
        expected = paged.prefill_reference(*on_cpu(*args), own=own, **options)
        found = prefill(*args, own=own, max_queries=max(chunks), out_dtype=torch.float32, **options)
        return difference(found, expected)

    def rebuilt(width: int) -> float:
        g = torch.Generator().manual_seed(3)
        chunks = [40, 0, 7] if small else [700, 0, 129]
        q, k, v = (torch.randn(sum(chunks), 4, n, generator=g).bfloat16() for n in (width, width, 128))
        cu = torch.tensor([0, chunks[0], chunks[0], sum(chunks)], dtype=torch.int32)
        outputs, lses = [], []
        for begin, end in ((0, chunks[0]), (chunks[0], sum(chunks))):
            a, b, c = (x[begin:end].double().transpose(0, 1) for x in (q, k, v))
            later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
            scores = (a @ b.transpose(1, 2) * 0.08).masked_fill(later, float("-inf"))
            outputs.append((scores.softmax(-1) @ c).transpose(0, 1))
            lses.append(scores.logsumexp(-1).transpose(0, 1))
        moved = [x.to(device) for x in (q, k, v, cu)]
        found = explicit(*moved, 0.08, max_queries=max(chunks), out_dtype=torch.float32)  # type: ignore[misc, arg-type]
        return difference(found, (torch.cat(outputs), torch.cat(lses)))

    def merged() -> float:
        g = torch.Generator().manual_seed(4)
        outputs, lses = torch.randn(7, 50, 512, generator=g), torch.randn(7, 50, generator=g) * 5
        lses[torch.rand(7, 50, generator=g) < 0.4] = float("-inf")
        lses[:, 3] = float("-inf")
        poisoned = outputs.masked_fill((lses == float("-inf"))[..., None], float("nan"))
        found = merge(poisoned.to(device), lses.to(device))
        return difference(found, paged.merge(poisoned, lses))

    pages = 1000
    for dtype in DTYPES:
        yield f"write {dtype}", lambda t=dtype: write_error(t, device)  # type: ignore[misc]
        for r, d, heads in (
            (RANK, ROPE, 16),
            (RANK, ROPE, 128),
            (256, 32, 9),
            (48, 20, 3),
            (320, 0, 12),
            (1024, 64, 16),
        ):
            for splits in (None, 1):
                name = f"decode {dtype} {r}+{d} {heads} heads, splits {splits or 'chosen'}"
                yield name, lambda a=(dtype, r, d, heads, 1, pages, 0.05), s=splits: decoded(*a, num_splits=s)  # type: ignore[misc]
        for scale in (1.0, 0.37):
            yield (
                f"decode {dtype}, 4 queries, window, soft-cap, scale {scale}",
                lambda a=(dtype, RANK, ROPE, 16, 4, pages, scale): decoded(*a, window=100, softcap=30.0),  # type: ignore[misc]
            )
        for own in (True, False):
            yield f"prefill {dtype}, own {own}", lambda t=dtype, o=own: prefilled(t, 16, o)  # type: ignore[misc]
        yield f"prefill {dtype}, 128 heads, window", lambda t=dtype: prefilled(t, 128, True, window=50)  # type: ignore[misc]
        if not small:  # beyond what 32 bits count, 2 GiB
            many = 2**31 // PageLayout(dtype, RANK, ROPE).page_bytes + 5000  # type: ignore[arg-type]
            yield f"decode {dtype} beyond 2 GiB", lambda a=(dtype, RANK, ROPE, 16, 1, many, 0.05): decoded(*a)  # type: ignore[misc]
    for width in (128, 192):
        yield f"explicit {width}+128", lambda w=width: rebuilt(w)  # type: ignore[misc]
    yield "merge", merged


def write_error(dtype: str, device: Any) -> float:
    """Other codes than PyTorch's, or a flag that does not rise: infinite. Otherwise how far tokens differ beyond rounding."""
    import torch

    from mla_cli.kernels import paged
    from mla_cli.kernels.pages import PageLayout, gather
    from mla_cli.kernels.write import write

    worst = 0.0
    for r, d, norm in ((RANK, ROPE, True), (RANK, ROPE, False), (40, 0, False), (1024, 64, False)):
        g = torch.Generator().manual_seed(5)
        layout = PageLayout(dtype, r, d)  # type: ignore[arg-type]
        latent = torch.randn(100, r, generator=g).bfloat16() * 3
        k_rope = torch.randn(100, d, generator=g).bfloat16()
        angles = torch.rand(100, d // 2, generator=g) * 6
        slots = torch.randperm(160, generator=g)[:100]
        slots[7] = -1
        weight = torch.rand(r, generator=g).bfloat16() if norm else None
        results = []
        for place, run in ((device, write), (torch.device("cpu"), paged.write)):
            pool = torch.full((10, layout.page_bytes), 0xFF, dtype=torch.uint8, device=place)
            flag = torch.zeros(1, dtype=torch.int32, device=place)
            tables = [x.to(place) if d else None for x in (k_rope, angles.cos(), angles.sin())]
            scales = None if weight is None else weight.to(place)
            run(latent.to(place), *tables, slots.to(place), pool, layout, flag, norm_weight=scales)
            broken = latent.clone()
            broken[3, 5] = float("nan")
            clean = int(flag)
            run(broken.to(place), *tables, slots.to(place), pool.clone(), layout, flag, norm_weight=scales)
            results.append((pool.cpu(), clean, int(flag)))
        (mine, *my_flags), (theirs, *flags) = results
        if my_flags != flags or flags != [0, 1]:
            return float("inf")
        # Without a norm nothing rounds differently: the same bits.
        if not norm and not torch.equal(mine[:, : layout.rope_offset], theirs[:, : layout.rope_offset]):
            return float("inf")
        table = torch.arange(10, dtype=torch.int32)[None]
        kept = slots[slots >= 0]
        for a, b in zip(
            gather(mine, layout, table, torch.tensor([160])),
            gather(theirs, layout, table, torch.tensor([160])),
            strict=True,
        ):
            if a.numel():
                step = {"bf16": 0.01, "int8": 0.013, "fp8": 0.07, "int4": 0.2}[dtype]
                apart = float((a - b)[0, kept].abs().max() / b[0, kept].abs().max())
                worst = max(worst, 0.0 if apart <= step else apart)
    return worst


class Timer:
    """Median milliseconds of a call on the GPU, caches emptied before each."""

    def __init__(self, device: Any) -> None:
        import torch

        self.device, self.flush = device, torch.empty(2**28, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], Any]) -> float:
        import torch

        for _ in range(2):
            call()
        torch.cuda.synchronize()
        found: list[float] = []
        while len(found) < 5 or (len(found) < 25 and sum(found) < 100):
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        return statistics.median(found)


def ceilings(timer: Timer) -> dict[str, float]:
    """Copy bandwidth, TB/s read and written, and bfloat16 matrix product, TFLOP/s."""
    import torch

    source = torch.empty(2**31, dtype=torch.uint8, device=timer.device).zero_()
    target = torch.empty_like(source)
    copy = timer(partial(target.copy_, source))
    a = torch.randn(8192, 8192, device=timer.device, dtype=torch.bfloat16)
    product = timer(lambda: a @ a)
    return {"copy_tb_s": 2 * 2**31 / copy / 1e9, "matmul_tflop_s": 2 * 8192**3 / product / 1e9}


def decode_cases(device: Any) -> Iterator[dict[str, Any]]:
    """Shapes, the ones with a target first; a cache that does not fit is left out."""
    import torch

    room = torch.cuda.get_device_properties(device).total_memory * MOST_BYTES
    for batch in BATCHES:
        for context in CONTEXTS:
            for heads in HEADS:
                if batch * context * (RANK + ROPE) * 2 <= room:
                    yield {"batch": batch, "context": context, "heads": heads}


def time_decode(case: dict[str, Any], timer: Timer, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """One result a data type, and one for each other implementation."""
    import torch

    from mla_cli.kernels.decode import decode
    from mla_cli.kernels.pages import PageLayout

    batch, context, heads = case["batch"], case["context"], case["heads"]
    device = timer.device
    q = torch.randn(batch, 1, heads, RANK + ROPE, device=device).bfloat16()
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    columns = context // 16
    flops = 2 * batch * heads * context * (2 * RANK + ROPE)
    for dtype in DTYPES:
        layout = PageLayout(dtype, RANK, ROPE)  # type: ignore[arg-type]
        pool = random_pool(layout, batch * columns, device)
        table = torch.randperm(batch * columns, device=device).int().view(batch, columns)
        milliseconds = timer(lambda p=pool, x=layout, t=table: decode(q, p, x, t, lengths, 0.04))  # type: ignore[misc]
        moved = batch * context * layout.bytes_per_token + 2 * q.numel() + 2 * batch * heads * RANK
        yield {
            **case, "what": dtype, "ms": milliseconds, "tb_s": moved / milliseconds / 1e9,
            "tflop_s": flops / milliseconds / 1e9, "of_copy": moved / milliseconds / 1e9 / ceiling["copy_tb_s"],
            "of_matmul": flops / milliseconds / 1e9 / ceiling["matmul_tflop_s"],
        }  # fmt: skip
        del pool, table
    for what, prepare in (("torch", _torch_attention), ("flashmla", _flashmla), ("flashinfer", _flashinfer)):
        try:
            call = prepare(q, batch, context, heads, lengths)
            if call is not None:
                milliseconds = timer(call)
                yield {**case, "what": what, "ms": milliseconds, "tflop_s": flops / milliseconds / 1e9}
                del call
        except Exception as error:  # another project's kernel: say so, go on
            yield {**case, "what": what, "error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
        torch.cuda.empty_cache()


def _torch_attention(q: Any, batch: int, context: int, heads: int, lengths: Any) -> Callable[[], Any] | None:
    """PyTorch's attention over the same latents, contiguous, with heads as query rows."""
    import torch

    key = torch.randn(batch, 1, context, RANK + ROPE, device=q.device, dtype=torch.bfloat16)
    rows = q.transpose(1, 2).reshape(batch, 1, heads, -1)
    return lambda: torch.nn.functional.scaled_dot_product_attention(rows, key, key[..., :RANK], scale=0.04)


def _flashmla(q: Any, batch: int, context: int, heads: int, lengths: Any) -> Callable[[], Any] | None:
    import torch

    try:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    except ImportError:
        return None
    blocks = context // 64
    cache = torch.randn(batch * blocks, 64, 1, RANK + ROPE, device=q.device, dtype=torch.bfloat16)
    table = torch.randperm(batch * blocks, device=q.device).int().view(batch, blocks)
    metadata, splits = get_mla_metadata(lengths, heads, 1)
    return lambda: flash_mla_with_kvcache(q, cache, table, lengths, RANK, metadata, splits, 0.04, True)


def _flashinfer(q: Any, batch: int, context: int, heads: int, lengths: Any) -> Callable[[], Any] | None:
    import torch

    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError:
        return None
    blocks, device = context // 64, q.device
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(2**27, dtype=torch.uint8, device=device))
    each = torch.arange(batch + 1, dtype=torch.int32, device=device)
    pages = torch.randperm(batch * blocks, device=device).int()
    bf16 = torch.bfloat16
    wrapper.plan(each, each * blocks, pages, lengths, heads, RANK, ROPE, 64, False, 0.04, bf16, bf16)
    latents = torch.randn(batch * blocks, 64, RANK, device=device, dtype=bf16)
    keys = torch.randn(batch * blocks, 64, ROPE, device=device, dtype=bf16)
    nope, rope = (x.squeeze(1).contiguous() for x in q.split((RANK, ROPE), dim=-1))
    return lambda: wrapper.run(nope, rope, latents, keys)


def time_others(timer: Timer, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Prefill in both forms, and write."""
    import torch

    from mla_cli.kernels.pages import PageLayout
    from mla_cli.kernels.prefill import explicit, prefill
    from mla_cli.kernels.write import write

    device, chunk, context = timer.device, 1024, 8192
    for dtype in ("bf16", "int8"):
        layout = PageLayout(dtype, RANK, ROPE)  # type: ignore[arg-type]
        pool = random_pool(layout, context // 16, device)
        table = torch.randperm(context // 16, device=device).int()[None]
        sizes = torch.tensor([context], dtype=torch.int32, device=device)
        cu = torch.tensor([0, chunk], dtype=torch.int32, device=device)
        for heads in HEADS:
            q = torch.randn(chunk, heads, RANK + ROPE, device=device).bfloat16()
            args = (q, cu, pool, layout, table, sizes, 0.04)
            ms = timer(lambda a=args: prefill(*a, max_queries=chunk))  # type: ignore[misc]
            flops = 2 * heads * chunk * (context - chunk / 2) * (2 * RANK + ROPE)
            yield {
                "what": f"prefill {dtype}", "heads": heads, "batch": 1, "context": context, "ms": ms,
                "tflop_s": flops / ms / 1e9, "of_matmul": flops / ms / 1e9 / ceiling["matmul_tflop_s"],
            }  # fmt: skip
        tokens = 65536
        latent = torch.randn(tokens, RANK, device=device).bfloat16()
        rope = torch.randn(tokens, ROPE, device=device).bfloat16()
        angles = torch.rand(tokens, ROPE // 2, device=device)
        big = layout.pool(tokens // 16, device)
        flag, slots = torch.zeros(1, dtype=torch.int32, device=device), torch.randperm(tokens, device=device)
        ms = timer(lambda a=(latent, rope, angles, angles, slots, big, layout, flag): write(*a))  # type: ignore[misc]
        moved = tokens * (2 * (RANK + ROPE) + 4 * ROPE + 8 + layout.bytes_per_token)
        yield {
            "what": f"write {dtype}", "batch": tokens, "ms": ms, "tb_s": moved / ms / 1e9,
            "of_copy": moved / ms / 1e9 / ceiling["copy_tb_s"],
        }  # fmt: skip
    batch, tokens, heads = 4, 4096, 16
    q, k = (torch.randn(batch * tokens, heads, 192, device=device).bfloat16() for _ in range(2))
    v = torch.randn(batch * tokens, heads, 128, device=device).bfloat16()
    cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
    flops = batch * heads * tokens * tokens * (192 + 128)  # half the pairs, two operations
    each = [
        x.view(batch, tokens, heads, -1).transpose(1, 2).contiguous()
        for x in (q, k, torch.nn.functional.pad(v, (0, 64)))
    ]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for what, call in (
        ("explicit", lambda: explicit(q, k, v, cu, 0.07, max_queries=tokens)),
        ("explicit torch", lambda: sdpa(*each, is_causal=True, scale=0.07)),
    ):
        ms = timer(call)
        yield {
            "what": what, "heads": heads, "batch": batch, "context": tokens, "ms": ms, "tflop_s": flops / ms / 1e9,
            "of_matmul": flops / ms / 1e9 / ceiling["matmul_tflop_s"],
        }  # fmt: skip


def time_tiles(tiles: list[str], timer: Timer, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Decode at batch 32 and 8k tokens, with tiles as given."""
    from mla_cli.kernels import decode
    from mla_cli.kernels.tuning import Tile

    shipped = decode.tile_for
    try:
        for given in tiles:
            tile = Tile(*map(int, given.split(",")))
            decode.tile_for = lambda *_, t=tile, **__: t  # type: ignore[misc]
            for heads in HEADS:
                for result in time_decode({"batch": 32, "context": 8192, "heads": heads}, timer, ceiling):
                    if result["what"] in DTYPES:
                        yield {**result, "what": f"{result['what']} {given}"}
    finally:
        decode.tile_for = shipped


def table_of(results: list[dict[str, Any]]) -> str:
    """The results, a line each."""
    columns = ("what", "batch", "context", "heads", "ms", "tb_s", "tflop_s", "of_copy", "of_matmul")
    lines = ["".join(f"{name:>12}" if name != "what" else f"{name:<24}" for name in columns)]
    for result in results:
        if "error" in result:
            lines.append(f"{result['what']:<24}{result['error']}")
            continue
        cells = [f"{result['what']:<24}"]
        for name in columns[1:]:
            value = result.get(name, "")
            cells.append(f"{value:>12.3f}" if isinstance(value, float) else f"{value:>12}")
        lines.append("".join(cells))
    return "\n".join(lines)


def targets(results: list[dict[str, Any]]) -> list[str]:
    """What decode must reach, at batch 32 and more and 8k tokens and more, 16 heads, and whether it does."""
    wide = [r for r in results if r.get("batch", 0) >= 32 and r.get("context", 0) >= 8192 and r.get("heads") == 16]
    plain = {(r["batch"], r["context"]): r for r in wide if r["what"] == "bf16"}
    lines = []
    for (batch, context), result in plain.items():
        faster = {
            r["what"]: result["ms"] / r["ms"]
            for r in wide
            if (r["batch"], r["context"]) == (batch, context) and r["what"] in ("int8", "fp8")
        }
        reached = result["of_copy"] >= 0.8 and all(ratio >= 1.6 for ratio in faster.values())
        ratios = ", ".join(f"{name} {ratio:.2f} times as fast" for name, ratio in faster.items())
        verdict = "reached" if reached else "MISSED"
        lines.append(
            f"{verdict}: batch {batch}, context {context}: bf16 at {result['of_copy']:.0%} of copying; {ratios}"
        )
    return lines


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
