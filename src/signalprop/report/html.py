"""The page: one HTML file that opens offline, whose charts plotly.py draws.

Names that come from a file are HTML text, escaped here, or JSON that plotly.py escapes; a content security policy
allows no scripts but those that it wrote, and no connection. Colours of texts and lines follow the system, and are
dark on paper, by the style sheet (`page.css`) alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from signalprop.errors import require
from signalprop.files.storage import real_path, write_text
from signalprop.files.validation import typed
from signalprop.report.documents import Item, document, read
from signalprop.report.plotly_figures import CONFIG, chart_figure, escaped, map_figure
from signalprop.report.sections import Card, Chart, Document, HeatMap, Link, Section, Table, Text
from signalprop.results.text import number, spread

__all__ = ["Item", "document", "read", "render", "write_report"]

# A page stays within 5 MB, of which plotly.js is 4.8: bytes for all drawings and tables, and of a drawing without its
# numbers, of a point with its band, of an entry of a map, of a cell. Where there is more, every n-th is shown.
_ROOM, _FIGURE, _POINT, _ENTRY, _CELL = 125_000, 2_400, 22, 5, 25
_CELLS, _ROWS = 2_000, 400  # cells of tables under drawings, all together; rows of a table
_ICONS = {"fault": "✕", "warning": "!", "note": "i", "good": "✓"}
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
<script>$library</script>
</head>
<body>
<a class="skip" href="#content">Skip to the charts</a>
<header><div class="wide"><p class="brand">signalprop</p><h1>$title</h1><p class="subtitle">$subtitle</p></div></header>
<nav aria-label="Sections"><div class="wide"><a href="#summary">Summary</a>$navigation</div></nav>
<main id="content">
<section id="summary"><div class="wide"><h2>Summary</h2><ul class="cards">$cards</ul>$notes</div></section>
$sections
</main>
<footer><div class="wide"><p>Made by signalprop. This file needs no network. Charts: plotly.js, Copyright Plotly, Inc.,
MIT license; without JavaScript the tables under them have their numbers.</p></div></footer>
</body>
</html>
""")


@typed
def write_report(
    path: str | Path, items: Mapping[str, Item] | Sequence[tuple[str, Item]], *, title: str | None = None
) -> None:
    """Write the report of profiles, comparisons, diagnoses, traces, parametrizations, runs and sweeps.

    One HTML file of about 5 MB that opens offline, written whole or not at all.

    Args:
        path: of the file. title: of the page; default: after what is in it.
        items: by names that distinguish them (schemes and models are named differently in the report).

    Raises:
        InputError: nothing to report, a sweep, or a path that cannot be written. MissingExtra: plotly is not installed.
    """
    write_text(path, render(document(items, title=title, beside=real_path(path).parent)))


@typed
def render(content: Document) -> str:
    """The HTML of a document.

    Args:
        content: the document, as `signalprop.report` makes it of results.

    Raises:
        MissingExtra: plotly is not installed.
    """
    page = _Page(content)
    sections = "\n".join(page.section(k, section) for k, section in enumerate(content.sections))
    scripts = [_library(), *re.findall(r"<script[^>]*>(.*?)</script>", sections, re.S)]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    notes = "".join(f"<li>{escaped(note)}</li>" for note in content.notes)
    return _PAGE.substitute(
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        title=escaped(content.title),
        subtitle=escaped(content.subtitle),
        style=resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
        library=_library(),
        navigation="".join(f'<a href="#s{k}">{escaped(item.title)}</a>' for k, item in enumerate(content.sections)),
        cards="\n".join(_card(card) for card in content.cards),
        notes=f'<details class="notes"><summary>Notes</summary><ul>{notes}</ul></details>' if notes else "",
        sections=sections,
    )


@lru_cache(maxsize=1)
def _library() -> str:
    """plotly.js, as plotly.py brings it."""
    return str(require("plotly.offline", "report").get_plotlyjs())


class _Page:
    """The blocks of a page, each with the share of its points, entries and cells that keeps the page small."""

    def __init__(self, content: Document) -> None:
        blocks = [block for section in content.sections for block in section.blocks]
        charts = [block for block in blocks if isinstance(block, Chart)]
        maps = [block for block in blocks if isinstance(block, HeatMap)]
        curves, matrices = sum(len(chart.curves) for chart in charts), sum(len(item.frames) for item in maps)
        cells = sum(len(block.header) * min(len(block.rows), _ROWS) for block in blocks if isinstance(block, Table))
        room = max(24_000, _ROOM - _FIGURE * (len(charts) + len(maps)) - _CELL * cells) / (1 + bool(charts and maps))
        self._points = max(24, int(room / _POINT / max(curves, 1)))
        self._side = max(16, math.isqrt(int(room / _ENTRY / max(matrices, 1))))
        self._rows = max(8, _CELLS // max(sum(min(len(c.curves), 12) + 1 for c in charts) + 8 * len(maps), 1))
        self._drawn = 0

    def section(self, k: int, section: Section) -> str:
        """Its HTML, with plotly's scripts."""
        lead = f'<p class="lead">{escaped(section.lead)}</p>' if section.lead else ""
        blocks = "\n".join(self._block(block) for block in section.blocks)
        title = f"<h2>{escaped(section.title)}</h2>"
        return f'<section id="s{k}"><div class="wide">{title}{lead}<div class="blocks">{blocks}</div></div></section>'

    def _block(self, block: Chart | HeatMap | Table | Text) -> str:
        if isinstance(block, Text):
            folded = f"<summary>{escaped(block.title)}</summary><pre tabindex=0>{escaped(block.body)}</pre>"
            return f'<div class="block full"><details>{folded}</details></div>'
        if isinstance(block, Table):
            more = f"The first {_ROWS} of {len(block.rows)} rows. " if len(block.rows) > _ROWS else ""
            table = _table(block.header, block.rows[:_ROWS], block.left, block.title)
            caption = _caption(more + block.caption)
            return f'<div class="block full"><h3>{escaped(block.title)}</h3>{table}{caption}</div>'
        self._drawn += 1
        figure = chart_figure(block, self._points) if isinstance(block, Chart) else map_figure(block, self._side)
        io: Any = require("plotly.io", "report")
        drawn = io.to_html(
            figure, config=CONFIG, full_html=False, include_plotlyjs=False, div_id=f"c{self._drawn}", validate=False,
            auto_play=False, include_mathjax=False,
        )  # fmt: skip
        header, rows = chart_numbers(block, self._rows) if isinstance(block, Chart) else map_numbers(block)
        said = block.y if isinstance(block, Chart) else block.value
        return (
            f'<figure class="block"><h3>{escaped(block.title)}</h3><p class="unit">{escaped(said)}</p>'
            f'<div class="plot" role="group" aria-label="{escaped(described(block))}">{drawn}</div>'
            f"{_caption(block.caption)}<details><summary>Numbers</summary>"
            f"{_table(header, rows, 1, block.title)}</details></figure>"
        )


def _caption(text: str) -> str:
    return f'<p class="caption">{escaped(text)}</p>' if text else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str | Link]], left: int, name: str) -> str:
    """Cells without their end tags, which HTML does not need."""

    def row(cells: Sequence[str | Link]) -> str:
        return "<tr>" + "".join(f"<td{' class=w' * (k < left)}>{_cell(cell)}" for k, cell in enumerate(cells))

    head = "".join(f'<th scope="col"{" class=w" * (k < left)}>{escaped(name)}' for k, name in enumerate(header))
    body = "\n".join(map(row, rows))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(name)}">'
        f"<table><thead><tr>{head}</thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str | Link) -> str:
    if isinstance(cell, Link):
        return f'<a href="{html.escape(cell.target)}">{escaped(cell.text)}</a>'
    return escaped(cell)


def _card(card: Card) -> str:
    texts = "".join(f"<p>{escaped(text)}</p>" for text in card.texts)
    more = "".join(f"<p>{escaped(text)}</p>" for text in card.more)
    texts += f"<details><summary>All {len(card.more)}</summary>{more}</details>" if card.more else ""
    texts += f'<p class="advice"><b>What would help:</b> {escaped(card.advice)}</p>' if card.advice else ""
    return (
        f'<li class="card {card.severity}"><span class="icon" role="img" aria-label="{card.severity}">'
        f"{_ICONS[card.severity]}</span><div><h3>{escaped(card.title)} "
        f'<span class="subject">{escaped(card.subject)}</span></h3>{texts}</div></li>'
    )


# --- numbers under a drawing -------------------------------------------------------------------------------------


def chart_numbers(chart: Chart, rows: int) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the curves that a chart ends with; of long curves as many points, evenly spread."""
    curves = chart.at(chart.frames[-1] if chart.frames else None)[:12]
    known: dict[float, tuple[str, list[str]]] = {}
    for k, curve in enumerate(curves):
        names = curve.names or [f"{x:.5g}" for x in curve.x]
        for x, name, y in zip(curve.x.tolist(), names, curve.y.tolist(), strict=True):
            if x == x:
                known.setdefault(x, (name, [""] * len(curves)))[1][k] = number(y) if y == y else ""
    cells = [[name, *row] for _, (name, row) in sorted(known.items(), key=lambda item: item[0])]
    return [chart.x, *(curve.label for curve in curves)], spread(cells, rows)


def map_numbers(item: HeatMap) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the last matrix of a map, of a large one eight rows and columns."""
    frame, matrix = list(item.frames.items())[-1]
    rows, columns = (spread(list(range(n)), 8) for n in matrix.shape)

    def named(names: Sequence[str], k: int, axis: int) -> str:
        return names[k] if names else f"{item.origin[axis] + k:g}"

    head = f"{item.slider} {frame}" if len(item.frames) > 1 else item.y
    cells = [[named(item.rows, i, 1), *(number(float(matrix[i, j])) for j in columns)] for i in rows]
    return [head, *(named(item.columns, j, 0) for j in columns)], cells


def described(block: Chart | HeatMap) -> str:
    """A drawing in words, for those who do not see it."""
    if isinstance(block, HeatMap):
        return f"{block.title}: a map of {block.value}, {block.y} against {block.x}; numbers below"
    parts = []
    for curve in block.at(block.frames[-1] if block.frames else None)[:6]:
        known = curve.y[np.isfinite(curve.y)]
        if known.size:
            parts.append(f"{curve.label} from {number(float(known[0]))} to {number(float(known[-1]))}")
    return f"{block.title}, {block.y} against {block.x}: {'; '.join(parts) or 'no values'}"
