"""Markup that the sections of the report page share. Everything that is said is text by others, and is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(caption: str, names: Sequence[str], rows: Iterable[Sequence[str]], *, tall: bool = False) -> str:
    """A table under its caption; `tall`: it scrolls by itself."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    # A region that scrolls must be reachable by keyboard.
    kind = "wide tall" if tall else "wide"
    return (
        f'<div class="{kind}" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def soft(text: str) -> str:
    """A remark below something."""
    return f'<p class="soft">{escape(text)}</p>' if text else ""
