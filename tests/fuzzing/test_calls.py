"""The random calls and command lines of `make fuzz`: a few of them, and 5,000 calls among the slow tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import signalprop as sp
from fuzzing import calls, campaign


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n", [12, pytest.param(5_000, marks=pytest.mark.slow)])
def test_calls_end_in_a_value_or_in_one_clear_line(n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(calls.run_calls(0, 0, n))
    assert {kind for _, kind, _ in found} == {"returned", "refused"} and len({name for name, _, _ in found}) > 10
    assert [problem for _, _, problem in found if problem] == []


@pytest.mark.parametrize("name", sorted(sp.SCHEMES))
def test_a_scheme_takes_a_name_or_says_what_it_takes(name: str) -> None:
    made = sp.scheme(name)
    for wrong in (3, None, b"x", {}):
        with pytest.raises(sp.InputError, match="expected an Architecture, a preset's name or a configuration"):
            made(wrong)
    try:
        expected = made(sp.Architecture.preset("gpt2"))
    except sp.InputError:  # GPT-2 is no network for it
        with pytest.raises(sp.InputError):
            made("GPT2")
    else:
        assert made("GPT2").to_json() == expected.to_json()


@pytest.mark.filterwarnings("ignore")
def test_lines_end_in_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "place").mkdir()
    monkeypatch.chdir(folder)
    found = list(campaign.run_lines(0, 0, 30, folder))
    assert len(found) == 30 and len({kind for kind, _ in found}) > 5
    assert [problem for _, problem in found if problem] == []
