"""Turns and ratios of the benchmarks; their page is that of their records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.accuracy_grid import Cell
from benchmarks.accuracy_rows import errors_of, needed_networks, row_of
from benchmarks.measured import Measured
from benchmarks.page import PAGE, RECORDS, SECTIONS, page

from signalprop.files.storage import read_json
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.results.profile import Profile, average
from signalprop.results.series import Series

WRITTEN = [name for name in SECTIONS if (RECORDS / f"{name}.json").is_file()]


@pytest.mark.skipif(not WRITTEN, reason="nothing has been measured")
def test_the_page_in_the_documentation_is_that_of_its_records() -> None:
    assert PAGE.read_text() == page({name: read_json(RECORDS / f"{name}.json") for name in WRITTEN})


def of_networks(values: np.ndarray) -> Profile:
    """The mean profile of networks whose ln variances are given, (networks, sublayers)."""

    def one(logs: np.ndarray) -> Profile:
        series = Series.of(log_variance=logs, token_correlation=np.tanh(logs))
        points = dict.fromkeys(("stream_in", "branch", "stream_out"), series)
        layers = Architecture(n_layers=len(logs) // 2, d_model=4, n_heads=1)
        return Profile(source="simulated", architecture=layers, scheme="xavier", input={"mean": 0.0, "variance": 1.0,
                       "token_correlation": 0.0}, forward=points, gradient=points, n_seeds=1)  # fmt: skip

    return average([one(logs) for logs in values])


def test_means_over_more_networks_are_those_over_all_of_them() -> None:
    logs = np.random.default_rng(0).normal(0, 0.3, (9, 200))
    some, others, every = (Measured.of(of_networks(part), 1.0) for part in (logs[:4], logs[4:], logs))
    found = some.and_more(others)
    assert found.networks == 9 and found.seconds == 2 and found.gradient is not None and every.gradient is not None
    assert len(found.gradient.variance) == 64
    assert np.allclose(found.gradient.variance, every.gradient.variance, rtol=1e-12)
    assert np.allclose(found.gradient.token_correlation, every.gradient.token_correlation, rtol=1e-12)
    # the standard error of the whole leaves out how far the two means lie apart, which is scatter too
    ratio = found.gradient.variance_se / every.gradient.variance_se
    assert np.median(ratio) == pytest.approx(1, abs=0.1)


def test_a_prediction_that_is_the_measurement_has_no_errors() -> None:
    profile = of_networks(np.random.default_rng(2).normal(0, 0.3, (3, 8)))
    kept = Measured.of(profile, 1.0)
    assert all(errors.p95 == 0 for errors in errors_of(profile, kept).values())
    twice = replace(kept, gradient=replace(kept.gradient, log_variance=kept.gradient.log_variance - np.log(2)))
    errors = errors_of(profile, twice)["gradient variance"]
    assert errors.median == pytest.approx(np.log(2)) and errors.signed == pytest.approx(np.log(2)) and errors.z is None


def test_a_cell_counts_from_as_many_networks_as_the_predicted_scatter_asks_for() -> None:
    cell = Cell("bidirectional", "tgs", 2, 64, "pre", "xavier", "relu", 0.0, seq_len=16)
    a = cell.architecture()
    profile = simulate(cell.parametrization(a), batch=cell.batch(a), n_seeds=2)
    lucky = {"variance_se": np.full(4, 1e-4), "token_correlation_se": np.full(4, 1e-4)}
    one = Measured.of(profile, 1.0)
    assert one.forward and one.gradient
    one = replace(one, forward=replace(one.forward, **lucky), gradient=replace(one.gradient, **lucky))
    assert not all(errors.counts for errors in row_of(cell, one).errors.values())
    enough = replace(one, networks=needed_networks(cell))
    assert all(errors.counts for errors in row_of(cell, enough).errors.values())
