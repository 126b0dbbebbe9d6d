"""The examples of docs/schemes.md run as they stand and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from signalprop.schemes import SCHEMES, scheme

PAGE = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text(encoding="utf-8")


def test_the_examples_run_and_print_what_the_page_says() -> None:
    before = dict(SCHEMES)
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)
    assert len(blocks) == 2 and blocks[-1][1]
    try:
        for code, expected in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "docs/schemes.md", "exec", dont_inherit=True), {"__name__": __name__})
            assert printed.getvalue() and (not expected or printed.getvalue() == expected)
    finally:
        SCHEMES.clear()
        SCHEMES.update(before)


def test_every_scheme_and_option_is_on_the_page() -> None:
    for name in SCHEMES:
        row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert all(f"`{option}`" in row for option in scheme(name).options()) or "same" in row
