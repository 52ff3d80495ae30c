"""A generator's figures in Prometheus's text format: to a file that is replaced as a whole, or answered at a port."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest, write_to_textfile

from mla_cli.checkpoint.disk import check_writable, disk_error
from mla_cli.errors import MlaError, OutputError
from mla_cli.runtime.monitor import Monitor
from mla_cli.runtime.statistics import Statistics
from mla_cli.runtime.tier_counts import TierCounts
from mla_cli.runtime.times import Times

QUANTILES = (0.5, 0.9, 0.99)
FIRST_LINE = b"# HELP mla_"

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Figures:
    """A collector of `prometheus_client`: nothing until `follow` was called, then what is counted and last seen."""

    def __init__(self) -> None:
        self._followed: tuple[Statistics, Monitor] | None = None

    def follow(self, statistics: Statistics, monitor: Monitor) -> None:
        """Give these figures from now on."""
        self._followed = (statistics, monitor)

    def collect(self) -> Iterable[Family]:
        """All metrics; any thread may ask."""
        return () if self._followed is None else _families(*self._followed)


def registry_of(figures: Figures) -> CollectorRegistry:
    """A registry of these figures alone: Python's own, of the process, are none of a model's."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(figures)
    return registry


def figures_text(figures: Figures) -> tuple[bytes, str]:
    """What holds now, and its content type."""
    return generate_latest(registry_of(figures)), CONTENT_TYPE_LATEST


def serve_figures(figures: Figures, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Answer `GET /metrics` from now on; the port that it is (of 0: a free one), and what ends it.

    Raises:
        MlaError: the address is taken, or not this machine's.
    """
    try:
        server, _ = start_http_server(port, host, registry_of(figures))
    except OSError as error:
        raise MlaError(
            f"cannot listen: {error.strerror or error}",
            where=f"--metrics {host}:{port}",
            fix="choose a free port, and an address of this machine",
        ) from error
    return server.server_port, server.shutdown


def check_figures_file(path: Path, *, force: bool) -> None:
    """Refuse a file that cannot be written, or that holds anything but metrics of ours.

    Raises:
        OutputError: it cannot, or does.
    """
    check_writable(path)
    if path.is_dir():
        raise OutputError("the metrics need a file, this is a folder", where=path, fix="give the name of a file")
    if not path.parent.is_dir():
        raise OutputError("the folder of the metrics does not exist", where=path.parent, fix="create it first")
    if path.exists() and not force:
        with open(path, "rb") as stream:
            begins = stream.read(len(FIRST_LINE))
        if begins and begins != FIRST_LINE:
            fix = "choose another name, or replace it with --force"
            raise OutputError("the file exists, and holds no metrics", where=path, fix=fix)


def write_figures(figures: Figures, path: Path) -> None:
    """Replace a file by what holds now.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        write_to_textfile(str(path), registry_of(figures))
    except OSError as error:
        raise disk_error(error, path, 0) from error


def _families(statistics: Statistics, monitor: Monitor) -> Iterable[Family]:
    s = statistics
    requests = CounterMetricFamily("mla_requests", "Requests that ended.", labels=["outcome"])
    requests.add_metric(["completed"], s.completed)
    requests.add_metric(["failed"], s.failed)
    yield requests
    yield CounterMetricFamily("mla_generated_tokens", "Tokens generated.", s.new_tokens)
    prompts = CounterMetricFamily("mla_prompt_tokens", "Tokens of prompts, by where they came from.", labels=["source"])
    prompts.add_metric(["read"], s.prompt_tokens)
    prompts.add_metric(["prefix_cache"], s.shared_tokens)
    yield prompts
    yield CounterMetricFamily("mla_admissions", "Times that a request got pages.", s.admissions)
    yield CounterMetricFamily("mla_prefix_hits", "Admissions that found a beginning of their prompt.", s.prefix_hits)
    yield CounterMetricFamily("mla_preemptions", "Times that a request lost its pages.", s.preemptions)
    yield CounterMetricFamily(
        "mla_fallbacks", "Times that memory ran out for the pool, and it was let rest.", s.fallbacks
    )
    yield CounterMetricFamily("mla_computed_apart", "Admissions to caches beside the pool.", s.computed_apart)
    yield CounterMetricFamily("mla_busy_seconds", "Time spent computing.", s.busy_s)
    yield CounterMetricFamily("mla_prefill_seconds", "Time spent computing prompts.", s.prefill_s)
    yield from _times("mla_time_to_first_token", "Time from a request's handing in to its first token", s.first_token_s)
    yield from _times("mla_time_per_token", "Time between two tokens of a request", s.between_tokens_s)
    yield _gauge("mla_cache_bytes_per_token", "Bytes of a cached token, over all layers.", s.cache_bytes_per_token)
    if s.tiers is not None:
        yield from _of_the_tiers(s.tiers)
    yield from _of_the_picture(monitor)


def _of_the_tiers(c: TierCounts) -> Iterable[Family]:
    found = CounterMetricFamily("mla_tier_chunks", "Chunks of prompts, by where they were found.", labels=["tier"])
    for tier, count in (
        ("pool", c.from_pool), ("host", c.from_host), ("file", c.from_file), ("none", c.from_nowhere)
    ):  # fmt: skip
        found.add_metric([tier], count)
    yield found
    text = "Chunks of prompts that made place for others."
    left = CounterMetricFamily("mla_tier_evictions", text, labels=["tier"])
    for tier, count in (("pool", c.pool_evictions), ("host", c.host_evictions), ("file", c.file_evictions)):
        left.add_metric([tier], count)
    yield left
    held = GaugeMetricFamily("mla_tier_bytes", "Bytes of chunks outside the pool.", labels=["tier"])
    held.add_metric(["host"], c.host_bytes)
    held.add_metric(["file"], c.file_bytes)
    yield held
    yield CounterMetricFamily("mla_tier_loaded_bytes", "Bytes brought back to the pool.", c.loaded_bytes)
    yield CounterMetricFamily("mla_tier_load_seconds", "Time that requests waited for chunks to come back.", c.load_s)
    yield CounterMetricFamily("mla_tier_damaged_chunks", "Chunks in the file that were not as written.", c.damaged)
    text = "Chunks brought back before a request came to them."
    yield CounterMetricFamily("mla_prefetched_chunks", text, c.prefetched)
    yield CounterMetricFamily("mla_prefetched_chunks_used", "Of these, those that a request then used.", c.wanted)
    text = "Time that requests would have waited for these."
    yield CounterMetricFamily("mla_prefetch_saved_seconds", text, c.saved_s)
    yield CounterMetricFamily("mla_prefetch_fallbacks", "Times that guessing was given up for a while.", c.fallbacks)


def _of_the_picture(monitor: Monitor) -> Iterable[Family]:
    picture = monitor.picture
    if picture is None:
        return
    yield _gauge("mla_requests_running", "Requests that have pages.", picture.running)
    yield _gauge("mla_requests_waiting", "Requests that wait for pages.", picture.waiting)
    pages = GaugeMetricFamily("mla_cache_pages", "Pages of the cache in memory, by use.", labels=["state"])
    for state, count in (
        ("used", picture.pages), ("kept", picture.kept), ("free", picture.held - picture.pages - picture.kept)
    ):  # fmt: skip
        pages.add_metric([state], count)
    yield pages
    yield _gauge("mla_cache_pages_limit", "Most pages that may be in memory.", picture.limit)
    yield _gauge("mla_cache_bytes", "Bytes of the pages in memory.", picture.bytes_allocated)
    yield _gauge("mla_cache_use_ratio", "Share of the most pages that requests use.", picture.use)
    yield _gauge("mla_cached_tokens", "Tokens cached, of requests that run.", picture.cached_tokens)
    text = "Share of the chunks in use that would be free if used pages lay together."
    yield _gauge("mla_cache_fragmentation_ratio", text, picture.fragmentation)
    if picture.ratio_drift is not None:
        text = "Compression ratio over the nominal one, minus 1: what partly empty pages cost and shared ones save."
        yield _gauge("mla_compression_ratio_drift", text, picture.ratio_drift)
    if picture.range_drift is not None:
        text = "How far latents reach over how far they did at calibration, where that is the most."
        yield _gauge("mla_latent_range_drift", text, picture.range_drift)
    if picture.joules is not None:
        text = "Energy of the processors and of the GPU in use, all that runs on them included."
        yield CounterMetricFamily("mla_energy_joules", text, picture.joules)
    alerts = GaugeMetricFamily("mla_alert", "1 while a figure is beyond its threshold.", labels=["name"])
    for name in monitor.alert_names:
        alerts.add_metric([name], name in picture.firing)
    yield alerts


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value)


def _times(name: str, text: str, times: Times) -> Iterable[Family]:
    counts, total, below = list(times.counts), times.total, 0
    buckets = []
    for bound, count in zip((*times.bounds, float("inf")), counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
    yield HistogramMetricFamily(f"{name}_seconds", f"{text}.", buckets=buckets, sum_value=total)
    known = [(share, times.quantile(share)) for share in QUANTILES]
    latest = GaugeMetricFamily(f"{name}_quantile_seconds", f"{text}, of the latest ones.", labels=["quantile"])
    for share, value in known:
        if value is not None:
            latest.add_metric([str(share)], value)
    yield latest
