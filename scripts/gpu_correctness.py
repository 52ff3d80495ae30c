"""Every Triton kernel and data type against the float64 formula, for `gpu_check.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

DTYPES = ("bf16", "int8", "fp8", "int4")
RANK, ROPE = 512, 64
# Products take bfloat16 numbers, sums float32 ones; int4 latents are rounded to bfloat16 after their scale met them.
TOLERANCE, INT4_TOLERANCE = 1e-2, 1e-1


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
        yield f"end to end {dtype}", lambda t=dtype: generated(t, device)  # type: ignore[misc]
        if not small:  # beyond what 32 bits count, 2 GiB
            many = 2**31 // PageLayout(dtype, RANK, ROPE).page_bytes + 5000  # type: ignore[arg-type]
            yield f"decode {dtype} beyond 2 GiB", lambda a=(dtype, RANK, ROPE, 16, 1, many, 0.05): decoded(*a)  # type: ignore[misc]
    for width in (128, 192):
        yield f"explicit {width}+128", lambda w=width: rebuilt(w)  # type: ignore[misc]
    yield "merge", merged


def generated(dtype: str, device: Any) -> float:
    """Greedy text of a tiny random model through a pool of pages, by the kernels: how far its scores are beyond rounding.

    Infinite where a token is not the formula's choice, or where the kernels were not used.
    """
    import torch

    from mla_cli.kernels.quantized import LatentQuantizer
    from mla_cli.model.decoder import Decoder
    from mla_cli.model.page_pool import PagePool
    from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, RotarySpec
    from mla_cli.runtime.triton_kernels import add_triton

    shape = {"num_heads": 6, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    layers = [
        LatentAttentionSpec(**shape, scale=0.2, rotary=RotarySpec(8), norm_eps=1e-5, window=window)
        for window in (None, 9)
    ]
    torch.manual_seed(6)
    decoder = Decoder(DecoderSpec("tiny", 97, 64, 96, 256, "rms", 1e-5, "silu", True, False, True, tuple(layers)))
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    decoder.requires_grad_(False).eval().to(device)
    quantizers = None if dtype == "bf16" else (LatentQuantizer(dtype),) * 2  # type: ignore[arg-type]
    prompt, runs = torch.randint(0, 97, (3, 61), generator=torch.Generator().manual_seed(1)).to(device), []
    notes = add_triton(decoder, quantizers, "triton")
    if not all(decoder.kernels) or any("PyTorch" in note for note in notes):
        return float("inf")
    for kernels, backend in ((decoder.kernels, "torch"), ((), "reference")):
        decoder.kernels, decoder.backend = kernels, backend
        pool = PagePool(lambda b, n: decoder.make_cache(b, n, quantizers, torch.bfloat16), 8)
        pages = [pool.take(2) or [] for _ in range(3)]
        cache = pool.view(pages, [0, 0, 0])
        hidden = decoder(prompt, cache, torch.tensor([61, 33, 5]))[torch.arange(3), torch.tensor([60, 32, 4])]
        scores = [decoder.logits(hidden).cpu().double()]
        for step in range(4):  # the formula is fed what the kernels chose
            token = (runs[0] if runs else scores)[step].argmax(dim=-1, keepdim=True).to(device)
            scores.append(decoder.logits(decoder(token, cache)[:, 0]).cpu().double())
        runs.append(scores)
    mine, theirs = (torch.stack(scores) for scores in runs)  # [5, 3, V]
    apart = float((mine - theirs).abs().max() / theirs.abs().max())
    if not torch.equal(mine.argmax(dim=-1), theirs.argmax(dim=-1)):
        return float("inf")
    return 0.0 if apart <= 0.05 else apart  # NaN is not


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
