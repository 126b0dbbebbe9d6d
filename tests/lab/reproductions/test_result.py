"""Checks, verdicts, and what is stored of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop_lab.reproductions import ROWS, Settings, find, run
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Reproduction, fitted_line, verdict_of

NUMBERS = st.floats(-1e6, 1e6)


def check(ours: float, low: float = -math.inf, high: float = math.inf, error: float = 0.0) -> Check:
    return Check("a quantity", "a number", ours, low, high, error)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_an_exact_number_holds_or_fails(ours: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert check(ours, low, high).state == ("holds" if low <= ours <= high else "fails")


@given(NUMBERS, st.floats(1e-3, 1e3), st.floats(0, 10))
def test_two_standard_errors_decide_beyond_a_bound(bound: float, error: float, far: float) -> None:
    state = check(bound + far * error, high=bound, error=error).state
    beyond = (bound + far * error) - bound
    assert state == ("holds" if beyond <= 0 else "open" if beyond <= 2 * error else "fails")


def test_a_number_known_worse_than_its_bounds_is_open() -> None:
    assert check(1.0, 0.9, 1.1, 0.11).state == "open"
    assert check(1.0, 0.9, 1.1, 0.09).state == "holds"
    assert check(1.0, low=0.9, error=50.0).state == "holds"  # a half line is as wide as any error


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ("", "not run"),
        ("h", "confirmed"),
        ("hhh", "confirmed"),
        ("hf", "partly"),
        ("ho", "partly"),
        ("o", "partly"),
        ("f", "contradicted"),
        ("fo", "contradicted"),
        ("ff", "contradicted"),
    ],
)
def test_verdicts(states: str, verdict: str) -> None:
    made = {"h": check(0.5, 0, 1), "o": check(1.1, 0, 1, 0.1), "f": check(2.0, 0, 1)}
    assert verdict_of(tuple(made[state] for state in states)) == verdict


def reproduction(*checks: Check) -> Reproduction:
    x = np.linspace(0, 1, 1000)
    curves = (Curve("ours", x, x**2, "measured", x / 10), Curve("theirs", x, x, "paper"))
    panel = Panel("a panel", "x", "y", curves)
    findings = Findings(checks, "nothing", (panel,), ("a note",), {"numbers": np.array([1.0, math.nan])})
    return Reproduction("tgs-fig1/2", "a title", "a paper", "a claim", "small", findings, 1.23)


def test_the_json_is_complete_and_small() -> None:
    text = json.dumps(reproduction(check(math.inf, high=1.0)).to_json(), allow_nan=False)
    found = json.loads(text)
    assert found["schema"] == "signalprop/reproduction/1"
    assert (found["verdict"], found["seconds"], found["details"]) == ("contradicted", 1.2, {"numbers": [1.0, None]})
    assert found["checks"][0]["ours"] is None  # JSON has no infinity
    measured, paper = found["panels"][0]["curves"]
    assert len(measured["x"]) == 97 and (measured["x"][0], measured["x"][-1]) == (0.0, 1.0)
    assert "error" in measured and "error" not in paper
    assert len(text) < 10_000
    assert reproduction().slug == "tgs-fig1-2"


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=30, unique_by=lambda point: round(point[0])))
def test_lines_are_least_squares(points: list[tuple[float, float]]) -> None:
    x, y = np.array(points).T
    slope, start, r2 = fitted_line(x, y)
    design = np.column_stack([x, np.ones(len(x))])
    np.testing.assert_allclose(
        design @ (slope, start), design @ np.linalg.lstsq(design, y, rcond=None)[0], atol=1e-5 * (1 + np.abs(y).max())
    )
    assert r2 <= 1 + 1e-12


# --- the list of figures and tables


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
