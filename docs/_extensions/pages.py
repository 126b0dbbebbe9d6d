"""What Markdown pages write for their readers on a code host, as Sphinx wants it: links are checked like any other."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

ANCHOR = re.compile(r'^<a id="([\w/-]+)"></a>$', re.MULTILINE)
README = re.compile(r"\]\((?:\.\./)+README\.md(?:#[\w-]+)?\)")
BESIDE = re.compile(r"\[[^\]]+\]\((?:\.\./)+(CONTRIBUTING\.md)\)")


def rewrite(app: Sphinx, page: str, source: list[str]) -> None:
    """Anchors become targets of MyST; the landing page stands for the README, and other files have but their name."""
    source[0] = BESIDE.sub(r"`\1`", README.sub("](/index.md)", ANCHOR.sub(r"(\1)=", source[0])))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
