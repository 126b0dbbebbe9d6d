"""Checks, verdicts, and what is stored of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop.kernels.causal_shaping import exponential_kernel
from signalprop.network.moments import FloatArray
from signalprop.schemes import scheme
from signalprop_lab.reproductions import ROWS, Settings, find, run
from signalprop_lab.reproductions.correlation import (
    ffn_map,
    paper_fixed_point,
    relu_map,
)
from signalprop_lab.reproductions.kernels_in_training import by_lag, mean_of
from signalprop_lab.reproductions.networks import agreement, both, photographs, tgs
from signalprop_lab.reproductions.normality import embedded_images, explained
from signalprop_lab.reproductions.orders import law_check, orders
from signalprop_lab.reproductions.pictures import save
from signalprop_lab.reproductions.removal import removal_checks
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Reproduction, fitted_line, verdict_of
from signalprop_lab.studies.growth import Growth

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


# --- figures and tables: quick ones as a whole, of slow ones the parts that decide


def sampled_relu(r: float, n: int = 400_000) -> tuple[float, float]:
    """(correlation, normalised second moment) of ReLU of two Gaussians of correlation r."""
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((2, n))
    a, b = np.maximum(x, 0), np.maximum(r * x + math.sqrt(1 - r * r) * z, 0)
    return float(np.corrcoef(a, b)[0, 1]), float((a * b).mean() / math.sqrt((a * a).mean() * (b * b).mean()))


@pytest.mark.parametrize("r", [0.0, 0.3, 0.7, 0.95])
def test_correlation_maps_are_those_of_samples(r: float) -> None:
    at = np.array([r])
    correlation, second = sampled_relu(r)
    assert relu_map(at)[0] == pytest.approx(correlation, abs=5e-3)
    assert ffn_map(at)[0] == pytest.approx(second, abs=5e-3)


def test_the_paper_s_fixed_point() -> None:
    r = paper_fixed_point(2.2, 0.4, by_variance=False)
    assert r == pytest.approx(0.886, abs=1e-3)
    relu = float(ffn_map(np.array([r]))[0])
    assert r == pytest.approx(0.9 * (2.2 + 0.4 * relu) / 2.6, abs=1e-9)


def test_a_kernel_by_distance_and_its_mean() -> None:
    cosines = exponential_kernel(0.8, 12)
    np.testing.assert_allclose(by_lag(cosines), 0.8 ** np.arange(12), rtol=1e-12)
    assert mean_of(cosines) == pytest.approx(cosines[~np.eye(12, dtype=bool)].mean())


@pytest.mark.parametrize("name", ["tgs-fig12", "tgs-tab24"])
def test_closed_forms_are_confirmed(name: str, tmp_path: Path) -> None:
    found = run(find(name), Settings())
    assert found.verdict == "confirmed", found.reason
    stored, drawn = save(tmp_path, found)
    assert read_json(stored)["verdict"] == "confirmed"
    assert drawn.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("paper", "growth", "state"),
    [
        ("O(1)", Growth("constant", 0.001), "holds"),
        ("O(1)", Growth("power", 0.3), "fails"),
        ("O(N)", Growth("power", 0.97), "holds"),
        ("O(N)", Growth("exp", 0.97), "fails"),
        ("O(log N)", Growth("log", 0.11), "holds"),
        ("O(N^-0.5)", Growth("power", -0.52), "holds"),
        ("O(e^{±N})", Growth("exp", -0.04), "holds"),
        ("O(e^{±N})", Growth("power", -0.9), "fails"),
    ],
)
def test_laws_of_table_3(paper: str, growth: Growth, state: str) -> None:
    assert law_check("a quantity", paper, growth).state == state


def test_orders_of_a_scheme_and_of_one_that_refuses() -> None:
    found = orders("xavier", "pre", (12, 48, 192))
    assert found.laws["forward"] == str(found.growth["forward"])
    assert found.growth["forward"].exponent == pytest.approx(1, abs=0.05)
    assert "choose a decoder" in orders("e-spa", "pre", (12, 48, 192)).refused


DEPTHS = np.arange(30) / 30


@pytest.mark.parametrize(
    ("cost", "post", "states"),
    [
        (10 * np.exp(-8 * DEPTHS), False, ["holds", "holds", "holds"]),
        (0.1 * np.exp(4 * DEPTHS), False, ["fails", "fails", "fails"]),
        (0.1 * np.exp(4 * DEPTHS), True, ["holds", "holds"]),
        (10 * np.exp(-8 * DEPTHS), True, ["fails", "fails"]),
    ],
)
def test_what_removals_must_look_like(cost: FloatArray, post: bool, states: list[str]) -> None:
    checks = removal_checks(DEPTHS, cost, 0.001 * cost, post=post)
    assert [check.state for check in checks] == states


def test_jackknife_errors_of_a_mean_are_its_standard_errors() -> None:
    a = tgs(Settings(), "pre", 2, d_model=32, seq_len=16, vocab_size=200)
    pair = both(scheme("xavier")(a), Settings(), 4)
    last = pair.measured.forward["stream_out"]
    error = pair.error_of(lambda profile: float(profile.forward["stream_out"].variance[-1]))
    assert error == pytest.approx(float(last.variance_se[-1] * last.variance[-1]), rel=1e-9)
    median, explained = agreement("stream", pair, "forward")
    assert median.ours < 0.5 and median.standard_error > 0
    assert explained.low == 0.998


def test_photographs_are_standardised_and_alike_across_patches() -> None:
    a = find_vit()
    batch = photographs(a, 0)
    assert batch.patches is not None and batch.patches.shape == (2, 64, 48)
    statistics = batch.statistics(a)
    assert statistics.variance == pytest.approx(1, abs=0.2)
    assert statistics.token_correlation > 0.1
    assert not np.array_equal(batch.patches, photographs(a, 1).patches)


def find_vit() -> object:
    from signalprop.network.architecture import Architecture

    fields = {"n_layers": 2, "d_model": 32, "n_heads": 2, "patch_dim": 48, "n_classes": 10, "seq_len": 65}
    return Architecture.preset("vit-base", **fields)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.runs and not row.checkpoint], ids=lambda row: row.id)
def test_every_row_runs(row: object, tmp_path: Path) -> None:
    found: Reproduction = run(row, Settings())  # type: ignore[arg-type]
    assert found.verdict in ("confirmed", "partly"), found.reason
    stored, drawn = save(tmp_path, found)
    assert read_json(stored)["checks"]
    assert drawn.is_file()


def test_normality_tells_normal_values_from_others() -> None:
    rng = np.random.default_rng(0)
    assert explained(rng.normal(3.0, 2.0, 20_000)) > 0.9995
    assert explained(rng.uniform(size=20_000)) < 0.97
    assert explained(rng.standard_t(3, 20_000)) < 0.95
    assert 0.97 < explained(embedded_images(Settings(), 0)) < 0.995
