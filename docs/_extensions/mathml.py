"""Formulas as MathML, which browsers draw by themselves: the site needs no script and no network for them.

A formula that docutils cannot read is a warning, so a slip in one is found when the site is built.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

# LaTeX that docutils reads in another spelling only.
SPELLINGS = (
    (re.compile(r"\\([bB]igg?)(?![a-zA-Z])"), r"\\\1l"),
    (re.compile(r"\\dots(?![a-zA-Z])"), r"\\ldots"),
    (re.compile(r"\\texttt(?![a-zA-Z])"), r"\\mathtt"),
    # 12 after \frac is one number to docutils, not numerator and denominator
    (re.compile(r"(\\[td]?frac)(?![a-zA-Z])\s*([^\s{\\])"), r"\1{\2}"),
    (re.compile(r"(\\[td]?frac(?:\{[^{}]*\}|\\[a-zA-Z]++))\s*([^\s{\\])"), r"\1{\2}"),
    # an index would stand under an accent
    (re.compile(r"(\\(?:bar|hat|tilde)\s*(?:[a-zA-Z]|\\[a-zA-Z]+|\{[^{}]*\}))_"), r"\1{}_"),
)
log = logging.getLogger(__name__)


def mathml(formula: str, node: nodes.Element, *, block: bool) -> str:
    """The MathML of a formula in LaTeX; its source, where it cannot be read."""
    for spelling, known in SPELLINGS:
        formula = spelling.sub(known, formula)
    try:
        return tex2mathml(formula, as_block=block)
    except MathError as error:
        log.warning("formula: %s: %s", error, " ".join(formula.split()), location=node)
        return f"<code>{escape(formula)}</code>"


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext(), node, block=False))
    raise nodes.SkipNode


def displayed(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{mathml(node.astext(), node, block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
