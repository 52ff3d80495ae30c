"""What a conversion did, for people: `mla_report.html`, one file that needs nothing else, and the same plots as a picture.

Both are made from the report alone (`mla_report.json`), so that an old report can be shown again. Everything in it is text
by others (names, paths, notes) and is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mla_cli.console import note
from mla_cli.errors import MlaError
from mla_cli.report.cache import cache_section
from mla_cli.report.chart_svg import STYLE as CHART_STYLE
from mla_cli.report.chart_svg import svg
from mla_cli.report.charts import Chart, charts, stages
from mla_cli.report.tables import soft, table
from mla_cli.report.values import increase, mapping, number, numbers, objects, over, shown, span

PAGE, PICTURE = "mla_report.html", "mla_report.png"
LONGEST_TITLE = 90

_STYLE = (
    """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2127; --soft: #57606a; --line: #d8dee4; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181d; --ink: #e6e9ec; --soft: #9aa4ae; --line: #343b44; --card: #1c2127; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; border-bottom: 1px solid var(--line); padding-bottom: 0.25rem; margin: 2rem 0 1rem; }
p, li, dd { overflow-wrap: anywhere; }
.soft, figcaption span { color: var(--soft); font-size: 0.9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.75rem; padding: 0; margin: 1rem 0; }
.cards > div { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.6rem 0.8rem; }
.cards dt { color: var(--soft); font-size: 0.85rem; }
.cards dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
.cards dd + dd { font-size: 0.9rem; font-weight: 400; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 0.25rem; }
figcaption span { display: block; font-weight: 400; }
.wide { overflow-x: auto; margin: 1rem 0; max-width: 100%; }
.tall { width: max-content; max-height: 26rem; overflow-y: auto; border: 1px solid var(--line); }
.tall thead th { position: sticky; top: 0; background: var(--card); }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
thead th { white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.75rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; }
dl.facts { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.15rem 1rem; font-size: 0.92rem; }
dl.facts dt { color: var(--soft); overflow-wrap: anywhere; }
dl.facts dd { margin: 0; }
"""
    + CHART_STYLE
)
# Nothing is loaded and nothing runs, whatever a name in the report may try.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_SOURCE = {"source": "name", "source_revision": "revision", "source_sha256": "sha256", "dtype": "written in"}
_FACTS = ("calibration", "options", "verification", "versions")


def report_page(report: Mapping[str, Any]) -> str:
    """The report as one HTML page: no script, no network, for light and dark screens of any width."""
    report = _clean(report)
    drawn = {chart.key: chart for chart in charts(report)}
    heldout, layers = mapping(report.get("heldout")), objects(report.get("layers"))
    sections = (
        ("What it cost", _figures(drawn, "stages") + _stage_table(heldout)),
        ("Layers", _figures(drawn, "errors", "widths", "spectra") + _layer_table(layers)),
        ("Healing", _healing(report, drawn)),
        ("Reading a part of the latent", _figures(drawn, "strength") + _strength_table(report)),
        ("Cache", _figures(drawn, "trade") + cache_section(mapping(report.get("calibration_kv")))),
        ("Objectives compared", _figures(drawn, "objectives") + _objective_table(report, heldout)),
        ("Time", _figures(drawn, "seconds")),
        ("How it was made", _made(report)),
    )
    title = f"{_plain(report.get('source'), 'a model')} with latent attention"
    body = "\n".join(f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections if content)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_middle(title))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>{_headline(report, heldout)}</header>\n<main>\n{body}\n</main>\n"
        f'<footer><p class="soft">Written by mla {escape(_plain(mapping(report.get("versions")).get("mla"), ""))}; '
        "the same figures are in <code>mla_report.json</code>.</p></footer>\n</body>\n</html>\n"
    )


def report_plot(report: Mapping[str, Any]) -> bytes:
    """The plots of the page as one PNG.

    Raises:
        MlaError: matplotlib cannot be loaded.
    """
    from mla_cli.report.chart_png import png

    report = _clean(report)
    heldout, cache = mapping(report.get("heldout")), mapping(report.get("cache_bytes_per_token"))
    told = [f"{_middle(_plain(report.get('source'), 'a model'))} with latent attention"]
    if number(cache.get("source")) is not None:
        told.append(
            f"cache {shown(cache.get('mla'))} instead of {shown(cache.get('source'))} bytes a token "
            f"(ratio {shown(report.get('ratio'), 'unknown')}), "
            f"perplexity {over(heldout.get('ppl_final'), heldout.get('ppl_source'))}"
        )
    return png(charts(report), "\n".join(told))


def files_for_people(report: Mapping[str, Any]) -> dict[str, bytes]:
    """The page, and the picture where it can be drawn, by their names."""
    files = {PAGE: report_page(report).encode()}
    try:
        files[PICTURE] = report_plot(report)
    except MlaError as error:  # the page has the same plots
        note(f"no {PICTURE}: {error.what}")
    return files


def _headline(report: Mapping[str, Any], heldout: Mapping[str, Any]) -> str:
    cache, seconds = mapping(report.get("cache_bytes_per_token")), mapping(report.get("seconds"))
    cards: list[tuple[str, str, str]] = []
    if cache:
        cards.append((
            "Cache, bytes a token", f"{shown(cache.get('source'), '?')} → {shown(cache.get('mla'), '?')}",
            f"ratio {shown(report.get('ratio'), 'unknown')}",
        ))  # fmt: skip
    if "ppl_final" in heldout:
        source = heldout.get("ppl_source")
        share = increase(heldout["ppl_final"], source) or "increase unknown"
        cards.append((
            "Perplexity, held-out text", f"{shown(source)} → {shown(heldout['ppl_final'])}",
            f"{share}, on {shown(heldout.get('tokens'), '?')} tokens",
        ))  # fmt: skip
    if "kl_final" in heldout:
        cards.append(("KL to the source", shown(heldout["kl_final"]), "nats a token"))
    if number(seconds.get("total")) is not None:
        peak = number(report.get("peak_rss_bytes"))
        cards.append(("Time", _duration(float(seconds["total"])), f"peak memory {peak / 1e9:.1f} GB" if peak else ""))
    if report.get("format"):
        cards.append(("Form", _plain(report["format"]), _plain(report.get("format_reason"), "")))
    return (
        '<dl class="cards">'
        + "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd>{f'<dd>{escape(more)}</dd>' if more else ''}</div>"
            for name, value, more in cards
        )
        + "</dl>"
        if cards
        else ""
    )


def _figures(drawn: Mapping[str, Chart], *keys: str) -> str:
    found = [drawn[key] for key in keys if key in drawn]
    figures = "".join(
        f"<figure><figcaption>{escape(chart.title)}"
        f"{f'<span>{escape(chart.note)}</span>' if chart.note else ''}</figcaption>{svg(chart)}</figure>"
        for chart in found
    )
    return f'<div class="plots">{figures}</div>' if figures else ""


def _stage_table(heldout: Mapping[str, Any]) -> str:
    found = stages(heldout)
    if not found:
        return ""
    source = heldout.get("ppl_source")
    rows = [(name, shown(value), "" if name == "source" else increase(value, source) or "–") for name, value in found]
    told = f"KL(source, final): {shown(heldout['kl_final'])} nats a token. " if "kl_final" in heldout else ""
    if number(heldout.get("tokens")) is not None:
        told += f"Measured on {shown(heldout['tokens'])} tokens of calibration text that no stage has seen."
    return table("Perplexity of each stage", ("stage", "perplexity", "over the source"), rows) + soft(told)


def _layer_table(layers: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        ("kv_lora_rank", "kv_lora_rank"),
        ("qk_rope_head_dim", "qk_rope_head_dim"),
        ("rope_split_error", "rotary split error"),
        ("factorization_error", "factorisation error"),
        ("refit_error", "refit error"),
        ("healed_error", "healed error"),
    )
    present = [(key, name) for key, name in columns if any(layer.get(key) is not None for layer in layers)]
    if not present:
        return ""
    rows = [(str(i), *(shown(layer.get(key), "–") for key, _ in present)) for i, layer in enumerate(layers)]
    return table("Shape and error of each layer", ("layer", *(name for _, name in present)), rows, tall=len(rows) > 20)


def _healing(report: Mapping[str, Any], drawn: Mapping[str, Chart]) -> str:
    healing = mapping(report.get("healing"))
    return _healed(healing) + _figures(drawn, "healing", "gains") + _gate_table(mapping(healing.get("gate")))


def _healed(healing: Mapping[str, Any]) -> str:
    if not healing:
        return ""
    curve = objects(healing.get("curve"))
    told = f"Healing: {_plain(healing.get('mode'), 'unknown')}."
    if curve and number(curve[-1].get("tokens")) is not None:
        told += f" Trained on {shown(curve[-1]['tokens'])} tokens in {shown(curve[-1].get('minutes'), '?')} minutes."
    ranks = [rank for rank in numbers(mapping(healing.get("milder")).get("kv_lora_rank")) if rank is not None]
    if ranks:
        told += f" In two stages: first with latents of {span(ranks)} channels."
    return f"<p>{escape(told)}</p>"


def _gate_table(gate: Mapping[str, Any]) -> str:
    rows = [
        (str(i), shown(row.get("before"), "?"), shown(row.get("after"), "?"), "yes" if row.get("kept") else "no")
        for i, row in enumerate(objects(gate.get("layers")))
    ]
    names = ("layer", "error without gate", "error with gate", "kept")
    return table("Gates between chunks", names, rows, tall=True) if rows else ""


def _strength_table(report: Mapping[str, Any]) -> str:
    found = objects(report.get("latent_strength"))
    if not found:
        return ""
    rows = [
        (
            shown(row.get("strength"), "?"), shown(row.get("cache_bytes_per_token"), "–"), shown(row.get("perplexity")),
            increase(row.get("perplexity"), row.get("source_perplexity")) or "–", shown(row.get("kl")),
        )
        for row in found
    ]  # fmt: skip
    names = ("strength", "cache (bytes a token)", "perplexity", "over the source", "KL (nats a token)")
    told = "The first channels of each latent are a smaller latent; --latent-strength reads them alone."
    if number(found[0].get("tokens")) is not None:
        told += f" Measured on {shown(found[0]['tokens'])} held-out tokens."
    return table("Loss by share of the latent", names, rows) + soft(told)


def _objective_table(report: Mapping[str, Any], heldout: Mapping[str, Any]) -> str:
    source = heldout.get("ppl_source")
    rows = [
        (
            _plain(row.get("objective"), "?"), shown(row.get("perplexity")), increase(row.get("perplexity"), source) or "–",
            shown(row.get("kl")), shown(row.get("seconds"), "–"),
        )
        for row in objects(report.get("objectives"))
    ]  # fmt: skip
    names = ("objective", "perplexity", "over the source", "KL (nats a token)", "time (s)")
    return table("Objectives compared", names, rows) if rows else ""


def _made(report: Mapping[str, Any]) -> str:
    parts = []
    if report.get("command"):
        parts.append(f"<h3>Command</h3><pre><code>{escape(_plain(report['command']))}</code></pre>")
    notes = report.get("notes")
    if isinstance(notes, (list, tuple)) and notes:
        parts.append("<h3>Notes</h3><ul>" + "".join(f"<li>{escape(_plain(note))}</li>" for note in notes) + "</ul>")
    source = {name: report[key] for key, name in _SOURCE.items() if report.get(key) is not None}
    groups = (("Source", source), *((key.title(), mapping(report.get(key))) for key in _FACTS))
    parts += [f"<h3>{name}</h3>{_facts(facts)}" for name, facts in groups if facts]
    return "".join(parts)


def _facts(facts: Mapping[str, Any]) -> str:
    rows = (f"<dt>{escape(_plain(key))}</dt><dd>{escape(_plain(value, '–'))}</dd>" for key, value in facts.items())
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _plain(value: object, absent: str = "") -> str:
    """Any value of a cleaned report as text."""
    if value is None:
        return absent
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _clean(value: Any) -> Any:
    """A report without what no page or picture can hold: control characters and lone surrogates are spelled out."""
    if isinstance(value, str):
        text = value.encode("utf-8", "backslashreplace").decode()
        return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, (list, tuple)) else value


def _middle(text: str) -> str:
    """A name as one line, a long one without its middle: the end of a path tells more than its start."""
    text = " ".join(text.split())
    if len(text) <= LONGEST_TITLE:
        return text
    half = LONGEST_TITLE // 2
    return f"{text[: half - 1]}…{text[-half:]}"
