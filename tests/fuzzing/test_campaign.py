"""The campaign of `make fuzz`, a little of it: its lines and files, what it calls raw, and that a seed repeats them."""

from __future__ import annotations

from pathlib import Path

import pytest

from commandline import Result
from damage import problem_of
from fuzzing import campaign


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.filterwarnings("ignore")
def test_lines_end_in_one_clear_line(folder: Path) -> None:
    found = list(campaign.run_lines(0, 0, 60, folder))
    assert len(found) == 60 and len({kind for kind, _ in found}) > 5
    assert [problem for _, problem in found if problem] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_files_end_in_one_clear_line(folder: Path) -> None:
    found = list(campaign.run_files(0, 120, folder))
    assert len({kind for kind, _ in found}) > 30
    assert [problem for _, problem in found if problem] == []


def test_a_seed_and_a_number_repeat_a_line() -> None:
    lines = [campaign.line_of(3, number, ["a.json"]) for number in range(40)]
    assert lines == [campaign.line_of(3, number, ["a.json"]) for number in range(40)]
    assert len({tuple(line) for line in lines}) > 30
    assert lines != [campaign.line_of(4, number, ["a.json"]) for number in range(40)]


@pytest.mark.parametrize(
    "result",
    [
        Result(3, "", ""),
        Result(1, "", "signalprop: KeyError: 'x' (SIGNALPROP_DEBUG=1 shows where)\n"),
        Result(1, "", "Traceback (most recent call last):\n"),
        Result(2, "", ""),
        Result(2, "", "signalprop: one\nsignalprop: two\n"),
        Result(2, "half a table", "signalprop: one\n"),
        Result(2, "", "signalprop: \x1b[2J\n"),
        Result(2, "", "signalprop: " + "x" * 2000 + "\n"),
    ],
)
def test_what_is_raw(result: Result) -> None:
    assert problem_of(result) is not None


@pytest.mark.parametrize("result", [Result(0, "a", ""), Result(1, "a", "b\n"), Result(2, "", "signalprop: one\n")])
def test_what_is_not(result: Result) -> None:
    assert problem_of(result) is None
