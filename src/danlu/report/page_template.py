"""The frame of every page: the document, the logo, facts and tiles at the top, the footer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from danlu.spec.text import printable
from danlu.version import __version__

_FLAME = (
    '<svg width="16" height="18" viewBox="0 0 16 18" aria-hidden="true"><path fill="currentColor" d="M8.6 0C9 3.4 14 '
    "5.6 14 11a6 6 0 0 1-12 .3C1.9 8.6 3.5 7 4.3 5.2c.9 1 1.2 2 1.2 3C7.6 6.2 8.8 3.6 8.6 0Zm-."
    '5 9.5C7.8 11 6 11.6 6 13.6a2.2 2.2 0 0 0 4.4 0c0-1.7-1.3-2.5-2.3-4.1Z"/></svg>'
)
LOGO = f'<div class="mark">{_FLAME}Danlu</div>'


def render_document(title: str, body: str, *, styles: Sequence[str], scripts: Sequence[str] = ()) -> str:
    """A complete page around its body, with inline style and script: no library, no network."""
    package = files("danlu.report")
    style, script = (
        "".join(package.joinpath(name).read_text(encoding="utf-8") for name in names) for names in (styles, scripts)
    )
    return printable(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Danlu</title><style>{style}</style></head>"
        f"<body><main>{body}</main>{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def prose(text: str) -> str:
    """A sentence of the terminal for a page: what stands in backticks there is code here."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def facts_list(facts: Mapping[str, str]) -> str:
    """Names and values in one line under the title."""
    shown = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{shown}</dl>'


def tile_row(tiles: Sequence[tuple[str, str, str]]) -> str:
    """The main numbers, each a name, a value and a note; the first is highlighted."""
    shown = "".join(
        f'<dl class="tile{" first" if index == 0 else ""}"><dt>{name}</dt><dd>{escape(value)}</dd>'
        f"<dd>{escape(note)}</dd></dl>"
        for index, (name, value, note) in enumerate(tiles)
    )
    return f'<div class="tiles">{shown}</div>'


def figures_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A card with a table of figures, which scrolls where it is wider than the page."""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f'<div class="card scroll"><table class="figures"><tr>{top}</tr>{body}</table></div>'


def page_footer() -> str:
    """The version that wrote the page, and when."""
    return f"<footer>Written by Danlu {__version__} on {format_time(datetime.now(UTC).timestamp())}.</footer>"


def format_time(time: float) -> str:
    """A time as `3 May 2025, 14:05 UTC`."""
    at = datetime.fromtimestamp(time, UTC)
    return f"{at.day} {at:%B %Y, %H:%M} UTC"
