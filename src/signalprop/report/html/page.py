"""The page: a document, our own style and scripts, and the plotting library, in one file that needs no network.

Everything that comes from a file reaches the page in one of two ways: as HTML text, escaped here, or as JSON, which the
scripts only ever put into text nodes. A content security policy allows no other script than these, and no connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from signalprop.errors import require
from signalprop.files.storage import finite, real_path, write_text
from signalprop.files.validation import typed
from signalprop.report.html.contents import Item, document

# The order in which the scripts are read: each uses those before it.
SCRIPTS = ("format.js", "charts.js", "heatmaps.js", "tables.js", "sections.js", "library.js", "start.js")
_LIBRARY = ("package_data", "plotly.min.js")
_ICONS = {"fault": "✕", "warning": "!", "note": "i", "good": "✓"}


@typed
def write_report(
    path: str | Path, items: Mapping[str, Item] | Sequence[tuple[str, Item]], *, title: str | None = None
) -> None:
    """Write the interactive report of profiles, comparisons, diagnoses, traces, parametrizations, runs and sweeps.

    One HTML file that opens offline, written whole or not at all.

    Args:
        path: of the file. title: of the page; default: after what is in it.
        items: by the names that tell them apart (schemes and models have names of their own in the report).

    Raises:
        InputError: nothing to report, a sweep, or a path that cannot be written. MissingExtra: plotly is not installed.
    """
    write_text(path, render(document(items, title=title, beside=real_path(path).parent)))


@typed
def render(content: Mapping[str, Any]) -> str:
    """The HTML of a document (`content`: see `signalprop.report.html.contents.document`).

    Raises:
        MissingExtra: plotly, whose JavaScript the page carries, is not installed.
    """
    script = "\n".join(asset(name) for name in SCRIPTS)
    return Template(asset("page.html")).substitute(
        library(script),
        title=html.escape(str(content["title"])),
        subtitle=html.escape(str(content["subtitle"])),
        findings="\n".join(_card(item) for item in content["findings"]),
        notes=_notes(content["notes"]),
        navigation="\n".join(_link(item) for item in content["sections"]),
        style=asset("page.css"),
        script=script,
        data=embedded({"sections": content["sections"]}),
    )


def embedded(value: Any) -> str:
    """JSON that is safe inside an HTML script element: pure ASCII, without any of < > &."""
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def library(script: str) -> dict[str, str]:
    """What a page that runs this script, and carries the plotting library compressed, says.

    `policy`: a content security policy that allows no other script and no connection; `library` and its `credit`.
    """
    packed, version, digest = _library()
    return {
        "policy": f"default-src 'none'; script-src '{_digest(script)}' '{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'",
        "library": packed,
        "credit": html.escape(f"Charts: {version}, Copyright Plotly, Inc., MIT license."),
    }


@lru_cache(maxsize=1)
def _library() -> tuple[str, str, str]:
    """The plotting library, compressed, in base64; its version in words; and its digest for the policy."""
    plotly = require("plotly", "report")
    data = resources.files(plotly).joinpath(*_LIBRARY).read_bytes().replace(b"\r\n", b"\n")
    words = next((line for line in data[:400].decode().split("\n") if "plotly.js v" in line), "plotly.js").strip("/* ")
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode(), words, _digest(data.decode())


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@lru_cache
def asset(name: str) -> str:
    """A script, style or page of the report."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _card(item: Mapping[str, Any]) -> str:
    severity = item["severity"]
    texts = "".join(f"<p>{html.escape(_sentence(text))}</p>" for text in item["texts"])
    cure = f'<p class="cure"><b>What would help:</b> {html.escape(item["cure"])}</p>' if item["cure"] else ""
    if item.get("more"):
        lines = "".join(f"<li>{html.escape(_sentence(text))}</li>" for text in item["more"])
        texts += f"<details><summary>Each of the {len(item['more'])}</summary><ul>{lines}</ul></details>"
    return (
        f'<li class="card {severity}"><span class="icon" aria-hidden="true">{_ICONS[severity]}</span>'
        f'<div><h3><span class="severity">{severity}</span> {html.escape(item["title"])}'
        f'<span class="subject">{html.escape(item["subject"])}</span></h3>{texts}{cure}</div></li>'
    )


def _sentence(text: str) -> str:
    """With a capital, unless its first word is a name such as fp16."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    lines = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<details class="notes"><summary>What to know ({len(notes)})</summary><ul>{lines}</ul></details>'


def _link(item: Mapping[str, Any]) -> str:
    return f'<a href="#{html.escape(item["id"])}">{html.escape(item["title"])}</a>'
