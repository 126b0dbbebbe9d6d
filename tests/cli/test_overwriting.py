"""No command replaces a file in silence: every option that names one to write asks for --overwrite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

from commandline import TINY, Command
from signalprop.cli import all_commands, command_line
from signalprop.cli.options import FILES

# What a command needs beside its outputs; none of it exists, so that what is said of an output comes before all work.
NEEDED = {
    "advise": ["no"], "anatomy": ["no"], "apply": ["no", "--scheme", "xavier", "--out", "new"],
    "check": ["no", "--scheme", "xavier"], "compare": ["no"],
    "diagnose": ["no"], "fit": ["no", "--out", "new"], "fold": ["no", "--out", "new"],
    "kernel": ["no"], "measure": ["no"], "predict": ["no"], "report": ["no"], "reproduce": ["tgs-fig1"],
    "schemes": [], "train": ["no"], "verify": [],
}  # fmt: skip
ENDINGS = {"plot": ".png", "plot_curves": ".png", "matrices": ".npz"}


def written() -> list[tuple[str, str, str]]:
    """(command, option, ending of the file) of every option that names a file to write."""
    commands = typer.main.get_command(command_line(all_commands())).commands  # type: ignore[attr-defined]
    names = {"write", *ENDINGS, *FILES}
    return [
        (name, option.opts[0], ENDINGS.get(option.name, ".html"))
        for name, command in commands.items()
        for option in command.params
        if option.name in names and option.metavar == "FILE"
    ]


def test_every_command_that_writes_is_here() -> None:
    assert {name for name, _, _ in written()} == set(NEEDED)


@pytest.mark.parametrize(("name", "option", "ending"), written())
def test_what_is_there_is_refused_before_the_work(
    name: str, option: str, ending: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = Path(f"there{ending}")
    there.write_text("of somebody")
    line = refused(name, *NEEDED[name], option, str(there))
    assert line == f"signalprop: cannot write {there}: it is there already; give --overwrite, or choose another name\n"
    assert there.read_text() == "of somebody" and list(tmp_path.iterdir()) == [tmp_path / there]


def test_overwriting_is_asked_for_each_time(command: Command, refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    asked = ("predict", "tgs", *TINY, "--json", str(file))
    assert command(*asked).status == 0
    file.write_text("old")
    assert command(*asked, "--overwrite").status == 0 and file.read_text() != "old"
    assert "--overwrite" in refused(*asked)
    assert command("predict", "tgs", *TINY, "--json", "/dev/null").status == 0  # no file


def test_a_page_that_nobody_named_gets_a_number(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    assert command("predict", "tgs", *TINY, "--json", "p.json").status == 0
    for name in ("report-p.html", "report-p-2.html"):
        assert command("report", "p.json").out.split() == ["report", name] and Path(name).is_file()


def test_pictures_of_reproductions(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "tgs-fig1.json").write_text("{}")
    assert "tgs-fig1.json: it is there already" in refused("reproduce", "tgs-fig1", "--out", str(tmp_path))
