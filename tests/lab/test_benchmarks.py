"""Turns and ratios of the benchmarks; their page is that of their records."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import yaml
from benchmarks.accuracy_grid import Cell
from benchmarks.accuracy_rows import errors_of, needed_networks, row_of
from benchmarks.gpu import ceilings, overheads, packing, wall
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.timed import write_records
from benchmarks.measured import Measured
from benchmarks.page import PAGE, RECORDS, SECTIONS, page

from signalprop.files.storage import read_json, write_json
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.results.profile import Profile, average
from signalprop.results.series import Series
from signalprop_lab.training.grid import Point, load_sweep
from signalprop_lab.training.tasks import prepare
from sweeping import SWEEP

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


# --- the command for a lent accelerator, rehearsed on the processor: packed, run, gone on with, put on the page


@pytest.mark.slow
def test_the_pack_has_the_texts_of_the_sweeps_as_tokens(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "kept")
    monkeypatch.setattr(packing, "_pip", lambda *_: None)  # wheels are not what is tried here
    monkeypatch.setattr(packing, "SWEEPS", (tmp_path / "tiny.yaml",))
    sweep = {key: value for key, value in SWEEP.items() if key != "tune"}
    sweep["base"] = SWEEP["base"] | {"data": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sweep))
    packed = tmp_path / "pack"
    assert 0 < packing.pack(packed, "3.12") < packing.LARGEST
    tokens = {file: file.stat().st_mtime_ns for file in packed.rglob("*.safetensors")}
    assert len(tokens) == 1 and os.environ["XDG_CACHE_HOME"] == "kept"
    monkeypatch.setenv("XDG_CACHE_HOME", str(packed / "cache"))
    grid = load_sweep(tmp_path / "tiny.yaml")
    prepare(grid.recipe(Point(list(grid.cells)[-1], None, 1)))
    assert {file: file.stat().st_mtime_ns for file in packed.rglob("*.safetensors")} == tokens


@pytest.mark.parametrize("part", ["ceilings", pytest.param("wall", marks=pytest.mark.slow),
                                  pytest.param("overheads", marks=pytest.mark.slow)])  # fmt: skip
def test_a_timed_part_goes_on_where_it_was_and_is_refused_elsewhere(part, tmp_path, capsys) -> None:
    assert main([part, "--rehearse", "--out", str(tmp_path)]) == 0
    path = tmp_path / f"{part}.json"
    store = read_json(path)
    module = {"ceilings": ceilings, "wall": wall, "overheads": overheads}[part]
    assert [row["case"] for row in store["rows"]] == module.cases(True)
    kept = store["rows"][1:]
    write_json(path, store | {"rows": [*kept, {"case": store["rows"][0]["case"], "error": "out of memory"}]})
    assert main([part, "--rehearse", "--out", str(tmp_path)]) == 0
    rows = read_json(path)["rows"]
    assert rows[:-1] == kept and "error" not in rows[-1]  # only what failed was tried again
    write_records(tmp_path, tmp_path / "records")
    record = read_json(tmp_path / "records" / f"gpu.{part}.json")
    text = page({f"gpu.{part}": record})
    assert f"Machine: {record['where']}." in text and record["section"] in text
    assert "failed" not in text and len(record["section"].splitlines()) > len(rows)

    write_json(path, store | {"environment": store["environment"] | {"device": "another"}})
    capsys.readouterr()
    assert main([part, "--rehearse", "--out", str(tmp_path)]) == 2
    assert "rows of device 'another'" in capsys.readouterr().err
