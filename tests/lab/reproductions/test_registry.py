"""The list of figures and tables."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

from signalprop.errors import InputError
from signalprop_lab.reproductions import ROWS, Settings, find, run


def test_unknown_names_are_refused_with_near_ones() -> None:
    with pytest.raises(InputError, match=r"no figure or table 'tgs-fig77'; did you mean tgs.*reproduce shows all 39"):
        find("tgs-fig77")
    with pytest.raises(InputError, match="no figure or table 'x'; signalprop reproduce"):
        find("x")


@pytest.mark.parametrize("row", [row for row in ROWS if row.function], ids=lambda row: row.id)
def test_functions_exist(row: object) -> None:
    module, _, name = row.function.partition(":")  # type: ignore[attr-defined]
    assert callable(getattr(import_module(f"signalprop_lab.reproductions.{module}"), name))


def test_every_row_is_run_trained_or_says_what_it_needs() -> None:
    assert {row.needs for row in ROWS if row.runs} == {"any machine"}
    assert {row.id for row in ROWS if row.needs == "GPU"} == {"tgs-wall"}
    for row in ROWS:
        assert row.state
        assert not (row.runs and row.trained_by)
        if not row.runs and row.trained_by is None:
            assert row.state == f"not run: {row.why_not}"


def test_a_trained_row_names_its_sweep_and_its_page() -> None:
    row = replace(find("tgs-tab4"), trained_by="signalprop sweep depth-at-constant-size", missing="")
    assert row.result_page == "records/results.md#tgs-tab4-5"
    assert row.state == "trained by signalprop sweep depth-at-constant-size; result in records/results.md#tgs-tab4-5"
    assert run(row, Settings()).reason == row.state
    assert replace(row, missing="768 layers").state == f"{row.state}; not run: 768 layers"
