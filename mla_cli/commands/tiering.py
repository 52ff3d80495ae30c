"""`latent_attention.tiers` and `prefetch` of `mla.yaml`: where kept prompts go that the pool has no place for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cli import console
from mla_cli.runtime import choices

if TYPE_CHECKING:
    from mla_cli.runtime.engine import Engine
    from mla_cli.runtime.kept_file import KeptFile


@contextmanager
def tiered(values: Mapping[str, Any], engine: Engine) -> Iterator[None]:
    """Have the tiers that a configuration asks for while this lasts.

    Raises:
        MlaError: the file cannot be had.
    """
    said = {name.removeprefix("latent_attention."): value for name, value in values.items()}
    ahead = said.get("prefetch.enabled", False)
    chunk = said.get("chunk_size", choices.CHUNK_TOKENS) // choices.PAGE_TOKENS
    host, path = said.get("tiers.host_size"), said.get("tiers.file")
    if not (ahead or host or path):
        yield
        return
    from mla_cli.model.page_bytes import PageBytes
    from mla_cli.runtime.tiers import Prefetch, Tiers

    generator = engine.generator
    pages = PageBytes(generator.pool.storage)
    file = None
    if path is not None:
        slots = said.get("tiers.file_size", choices.DEFAULT_FILE_CHUNKS) * chunk
        file = _kept_file(Path(path).expanduser(), engine, pages.form(), pages.page_bytes, slots)
    if host is None:  # prefetching needs something to fetch from
        host_pages = generator.pool.limit if ahead and path is None else 0
    else:
        host_pages = host * chunk
    prefetch = None
    if ahead:
        prefetch = Prefetch(
            said.get("prefetch.lookahead", choices.LOOKAHEAD),
            said.get("prefetch.threshold", choices.LOOK_THRESHOLD),
            said.get("fallback.threshold", choices.FALLBACK_THRESHOLD),
            said.get("fallback.cool_down", choices.COOL_DOWN),
        )
    tiers = Tiers(generator.pool, host_bytes=host_pages * pages.page_bytes, file=file, prefetch=prefetch)
    generator.statistics.tiers = tiers.counts
    try:
        yield
    finally:
        tiers.close(keep=said.get("tiers.keep_file", True))


def _kept_file(path: Path, engine: Engine, form: str, page_bytes: int, slots: int) -> KeptFile:
    import torch

    from mla_cli import __version__
    from mla_cli.checkpoint.digest import digest_of
    from mla_cli.runtime.batch import LONGEST_CHUNK, MIDDLE_CHUNK, SHORTEST_CHUNK
    from mla_cli.runtime.kept_file import KeptFile
    from mla_cli.runtime.result_journal import model_digest

    model, decoder = engine.model, engine.generator.decoder
    how = {
        "dtype": str(decoder.dtype), "device": str(decoder.device), "kernels": decoder.computed_by, "threads":
        torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip
    facts = {
        "version": [__version__, torch.__version__, SHORTEST_CHUNK, MIDDLE_CHUNK, LONGEST_CHUNK],
        "model": model_digest(model.source.folder, model.source.sha256()),
        "cache_form": digest_of([form, engine.cache_form]),
        "way_of_computing": digest_of(how),
    }
    return KeptFile(path, facts, page_bytes, slots, console.note)
