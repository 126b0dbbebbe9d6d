"""The documentation site builds without a warning, is complete, and needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from signalprop.cli import all_commands, command_line
from signalprop.schemes import SCHEMES

pytest.importorskip("sphinx", reason="the site is built with pip install 'signalprop[docs]'")

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: every page, its links and its formulas read without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-d"]
    built = subprocess.run(
        [*command, folder / "trees", DOCS, folder / "html"], capture_output=True, text=True, timeout=600
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    page = (site / "cli.html").read_text(encoding="utf-8")
    sections = dict(re.findall(r'<section id="signalprop-(\w+)">(.*?)</section>', page, re.DOTALL))
    commands = typer.main.get_command(command_line(all_commands())).commands  # type: ignore[attr-defined]
    assert set(sections) == set(commands)
    for name, command in commands.items():
        text = re.sub(r"<[^>]+>", "", sections[name])
        names = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in names if option.lower() not in text.lower()] == [], name


def rows(page: str, columns: int) -> Iterator[list[str]]:
    """Rows of tables with so many columns that begin with the name of a scheme."""
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if re.match(r"\| \[?`", line) and len(cells) == columns:
            yield cells


def test_every_scheme_can_be_chosen_with_its_orders_of_growth() -> None:
    found: dict[str, list[list[str]]] = {}
    for name, placement, *orders in rows("../records/growth.md", 7):
        found.setdefault(name.strip("`"), []).append([placement, *orders])
    shown = {re.sub(r"\W*([\w-]+)`.*", r"\1", cells[0]): cells[1:] for cells in rows("choosing-a-scheme.md", 5)}
    assert set(shown) == set(SCHEMES)
    for name, (*orders, cost) in shown.items():
        assert cost, name
        for i, order in enumerate(orders, 1):
            measured = {row[0]: row[i] for row in found.get(name, [])}
            if len(set(measured.values())) > 1:
                assert order == "; ".join(f"{placement} {value}" for placement, value in measured.items()), name
            else:
                assert order == next(iter(measured.values()), "not defined"), name
