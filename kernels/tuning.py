"""How kernels are cut for each machine: rows and keys of a tile, warps, pipeline stages, and the number of splits."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cli.errors import UnsupportedError
from mla_cli.kernels.launch import Target
from mla_cli.kernels.pages import LatentDtype, PageLayout

MAX_RANK = 1024  # channels of a latent whose accumulator still fits the registers of one program
MAX_SPLITS = 128
SPLIT_KEYS = 256  # fewest keys that pay for a split's own partial result
RESIDENT = 2  # programs of decode whose registers a processor holds at a time


@dataclass(frozen=True)
class Tile:
    """Rows (heads of queries) and keys of one step of a program, and how it is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def max_rank(target: Target, dtype: LatentDtype) -> int:
    """Channels of the widest latent. On AMD, int4 codes and both halves of their accumulator fill the registers sooner."""
    return 512 if target.backend == "hip" and dtype == "int4" else MAX_RANK


def tile_for(target: Target, layout: PageLayout, rows: int, masked: bool) -> Tile:
    """The tile of an attention kernel over latents, for `rows` query rows a sequence (at most).

    Args:
        masked: rows differ in what they see, or scores are capped, which takes registers.

    Raises:
        UnsupportedError: the latent is too wide for a program.
    """
    width = next_power_of_2(layout.kv_lora_rank)
    most = max_rank(target, layout.dtype)
    if width > most:
        raise UnsupportedError(
            f"the Triton kernels hold {layout.dtype} latents of at most {most} channels here, not {layout.kv_lora_rank}",
            fix="use --backend cpu",
        )
    if target.backend == "interpreter":
        return Tile(16 if rows <= 16 else 64, 32, 4, 1)
    # What each choice must hold is in docs/kernels/aot.json: no spills. Found by compiling, not by timing.
    block = 16 if rows <= 16 or width > 512 else 32
    if target.backend == "hip":
        # A wave has 512 registers a lane; eight waves would share them.
        if layout.dtype == "int4" and masked:
            return Tile(16, 16, 4, 2)
        return Tile(block, 16 if width > 512 or block == 32 else 32, 4, 2)
    if width > 512:
        return Tile(16, 16, 8, 2)
    if layout.dtype == "bf16":
        if block == 16:
            return Tile(16, 32, 4, 3)  # as it is in shared memory: few registers
        if rows > 32 and target.arch == 90 and not masked:
            return Tile(64, 16, 8, 3)  # 64 rows are what the matrix instructions of Hopper and Blackwell need
        if rows > 32 and target.arch == 100:
            return Tile(64, 32 if masked else 64, 8, 2)  # Blackwell keeps the accumulator in a memory of its own
    # Codes are widened in registers: twice the threads.
    return Tile(
        block, 16 if layout.dtype == "int4" and block == 32 else 32, 4 if width <= 256 and block == 16 else 8, 2
    )


def splits_for(target: Target, programs: int, keys: int) -> int:
    """Into how many splits the keys of each sequence are cut, so that few processors wait at the end.

    Of all numbers of splits whose last wave is nearly as full as the fullest, the smallest is taken: each split writes a
    partial result that the merge reads.

    Args:
        programs: of one split; keys: of the longest sequence.
    """
    most = max(1, min(MAX_SPLITS, keys // SPLIT_KEYS))
    slots = RESIDENT * target.processors
    if programs >= 2 * slots:
        return 1

    def fullness(splits: int) -> float:
        waves = programs * splits / slots
        return waves / -(-programs * splits // slots)

    fullest = max(fullness(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if fullness(splits) >= 0.9 * fullest)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def explicit_tile(target: Target, width: int) -> Tile:
    """The tile of attention over explicit keys, for heads of at most `width` channels."""
    if target.backend == "interpreter":
        return Tile(32, 32, 4, 1)
    return Tile(64, 64 if width <= 128 and target.arch in (90, 100) else 32, 4, 2)
