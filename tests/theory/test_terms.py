"""The table of finer terms: each stands in the source, and the test that fails without it exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.terms import TERMS, Term

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in (ROOT / "records" / "terms.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| term", "| ---"))
]


def test_every_term_is_in_the_table() -> None:
    assert [row[0] for row in ROWS] == [term.what for term in TERMS]
    assert [row[3] for row in ROWS] == [str(term.size) for term in TERMS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_test_exists(row: list[str]) -> None:
    file, _, name = row[1].strip("`").partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.what)
def test_it_stands_once_in_the_source(term: Term) -> None:
    assert (ROOT / term.file).read_text(encoding="utf-8").count(term.source) == 1
    term.tree()
