"""What Markdown pages write for their readers on a code host, as Sphinx wants it: links are checked like any other."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

ANCHOR = re.compile(r'^<a id="([\w/-]+)"></a>$', re.MULTILINE)
README = re.compile(r"\]\((?:\.\./)+README\.md(?:#[\w-]+)?\)")


def rewrite(app: Sphinx, page: str, source: list[str]) -> None:
    """Anchors become targets of MyST; on the site the landing page stands for the README."""
    source[0] = README.sub("](/index.md)", ANCHOR.sub(r"(\1)=", source[0]))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
