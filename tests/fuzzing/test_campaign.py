"""The campaign of `make fuzz`, a little of it."""

from __future__ import annotations

from pathlib import Path

import pytest

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
