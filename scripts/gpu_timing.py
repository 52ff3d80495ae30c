"""Kernels against the ceilings of the machine, PyTorch's attention, FlashInfer and FlashMLA, for `gpu_check.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from scripts.gpu_correctness import DTYPES, RANK, ROPE

BATCHES, CONTEXTS, HEADS = (32, 1, 128, 8), (8192, 1024, 32768, 131072), (16, 128)
MOST_BYTES = 0.6  # of the device's memory, for one cache


def random_pool(layout: Any, pages: int, device: Any) -> Any:
    """Any finite numbers: every byte below 64 is a small positive number in all types."""
    import torch

    pool = torch.empty(pages, layout.page_bytes, dtype=torch.uint8, device=device)
    for part in pool.split(max(1, 2**30 // layout.page_bytes)):
        part.random_(0, 64)
    return pool


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
