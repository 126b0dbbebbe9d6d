"""What Markdown pages write for their readers on a code host, as Sphinx wants it: links are checked like any other."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

ANCHOR = re.compile(r'^<a id="([\w/-]+)"></a>$', re.MULTILINE)
README = re.compile(r"\]\((?:\.\./)+README\.md(?:#[\w-]+)?\)")
BESIDE = re.compile(r"\[[^\]]+\]\((?:\.\./)+(CONTRIBUTING\.md)\)")
RECORD = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:records|tests)/[\w/.-]+)(?:#[\w-]+)?\)")


def rewrite(app: Sphinx, page: str, source: list[str]) -> None:
    """Anchors become targets of MyST, the landing page stands for the README, and records are files to download."""
    text = BESIDE.sub(r"`\1`", README.sub("](/index.md)", ANCHOR.sub(r"(\1)=", source[0])))
    source[0] = RECORD.sub(lambda match: f"{{download}}`{match[1].replace('`', '')} <{match[2]}>`", text)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
