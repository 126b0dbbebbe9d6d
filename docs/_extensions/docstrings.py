"""Docstrings are written as Markdown (code between backquotes, fenced blocks); autodoc reads reStructuredText."""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx

FENCE = re.compile(r"^(\s*)```(\w*)$")
PIECE = re.compile(r"(?P<code>`[^`]+`)|docs/(?P<page>[\w/-]+)\.md|(?P<mark>[*|\\]|_(?!\w))")


def restructured(lines: list[str]) -> list[str]:
    """The same docstring as reStructuredText; names of pages become links."""
    found: list[str] = []
    fenced = False
    for line in lines:
        fence = FENCE.match(line)
        if fence:
            fenced = not fenced
            found += [f"{fence[1]}.. code-block:: {fence[2] or 'text'}", ""] if fenced else [""]
        elif fenced:
            found.append(f"    {line}" if line.strip() else "")
        else:
            found.append(PIECE.sub(_piece, line))
    return found


def _piece(match: re.Match[str]) -> str:
    if match["code"]:
        return f"`{match['code']}`"
    if match["page"]:
        return f":doc:`/{match['page']}`"
    return f"\\{match['mark']}"


def rewrite(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured(lines)


def without_types(app: Sphinx, what: str, name: str, item: Any, *_: Any) -> tuple[str, str | None] | None:
    """The signature of a class, with names and defaults alone: its docstring says what its many fields are."""
    if what not in ("class", "exception"):
        return None
    try:
        signature = inspect.signature(item)
    except (TypeError, ValueError):
        return None
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty)), None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", rewrite, priority=400)  # before napoleon reads the sections
    app.connect("autodoc-process-signature", without_types)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
