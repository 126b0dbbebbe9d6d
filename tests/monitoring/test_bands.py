"""Bands: the growth laws they are made of, and who has left them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.monitoring.bands import TOLERANCES, Band, Departure, Watch, bands
from signalprop.monitoring.logs import Logs
from signalprop.monitoring.places import Place
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import from_tokens
from signalprop.prediction import predict
from signalprop.report.monitored import events_of, line_of_log
from signalprop.schemes import scheme

SMALL = Architecture.preset("tgs", n_layers=6).replace(d_model=64, n_heads=4, seq_len=32, vocab_size=500)


@pytest.mark.parametrize("name", ["xavier", "deepnorm", "lns", "gpt2"])
def test_growth_laws(name: str) -> None:
    """From variances that add to standard deviations that add, each widened; written out by hand for pre-norm."""
    p = scheme(name)(SMALL)
    found = bands(p)
    profile = predict(p, fidelity="moments")
    variance = profile.forward["stream_out"].variance
    band = found["variance"]
    assert (band.low <= variance).all() and (variance <= band.high).all()
    if name == "deepnorm":  # post-norm: the norm sets the variance
        np.testing.assert_allclose(band.high / band.low, TOLERANCES["variance"] ** 2, rtol=1e-6)
        return
    start, branch = profile.forward["stream_in"].variance[0], profile.forward["branch"].variance * p.branch**2
    factor = TOLERANCES["variance"]
    aligned = (np.sqrt(start) + np.cumsum(np.sqrt(branch))) ** 2
    np.testing.assert_allclose(band.high, factor * aligned, rtol=1e-9)
    np.testing.assert_allclose(band.low, (start + np.cumsum(branch)) / factor, rtol=1e-6)


def test_the_other_quantities() -> None:
    p = scheme("xavier")(SMALL)
    found = bands(p, tolerances={"gradient": 3.0, "token_correlation": 5.0})
    profile = predict(p, fidelity="moments")
    gradient = profile.gradient["stream_out"].variance[1::2]
    np.testing.assert_allclose(found["gradient"].low, np.minimum(gradient, 1) / 3)
    np.testing.assert_allclose(found["gradient"].high, np.maximum(gradient, 1) * 3)
    r = profile.forward["stream_out"].token_correlation
    np.testing.assert_allclose(1 - found["token_correlation"].high, (1 - r) / 5)
    assert (found["token_correlation"].low == -np.inf).all()


@pytest.mark.parametrize("changes", [{"norm_placement": "sandwich"}, {"parallel": True}, {"kind": "decoder"}])
def test_other_networks_have_bands(changes: dict[str, object]) -> None:
    a = SMALL.replace(**changes)
    found = bands(scheme("xavier")(a), seq_len=16)
    profile = predict(scheme("xavier")(a.replace(seq_len=16)), fidelity="moments")
    assert not found["variance"].outside(profile.forward["stream_out"].variance).any()
    assert not found["token_correlation"].outside(profile.forward["stream_out"].token_correlation).any()


def test_shaped_attention_has_bands() -> None:
    found = bands(scheme("e-spa")(SMALL.replace(kind="decoder", norm_placement="none")), seq_len=4096)
    assert set(found) == {"variance", "token_correlation", "gradient"}
    assert all(np.isfinite(band.high).all() for band in found.values())


def test_input_statistics_count() -> None:
    p = scheme("xavier")(SMALL)
    alike = from_tokens(np.random.default_rng(0).integers(0, 2, (4, 32)))
    assert (bands(p, alike)["token_correlation"].high > bands(p)["token_correlation"].high).all()


@given(st.lists(st.floats(1e-30, 1e30), min_size=4, max_size=4), st.integers(0, 3))
def test_watch_tells_every_layer_once(values: list[float], repeats: int) -> None:
    band = Band(np.full(4, 1e-3), np.full(4, 1e3))
    watch = Watch({"variance": band})
    wrong = {k for k, value in enumerate(values) if not 1e-3 <= value <= 1e3}
    first = watch.check(7, {"variance": values}, {})
    assert {k for item in first for k in item.layers} == wrong == watch.outside["variance"]
    for item in first:
        assert item.text.startswith("step 7: signal variance after layer") and "\n" not in item.text
        worst = max(wrong, key=lambda k: abs(np.log(values[k])))
        assert abs(np.log(values[item.layer])) == abs(np.log(values[worst])) and item.value == values[item.layer]
    for step in range(repeats):
        assert watch.check(8 + step, {"variance": values}, {}) == []
    everyone = watch.check(20, {"variance": [1e40] * 4}, {})
    assert {k for item in everyone for k in item.layers} == set(range(4)) - wrong
    assert watch.check(21, {"variance": [1.0] * 4}, {}) == [] and watch.outside["variance"] == set()


def test_either_band_counts_and_both_are_named() -> None:
    watch = Watch({"variance": Band(np.array([1.0, 1.0]), np.array([10.0, 10.0]))})
    today = {"variance": Band(np.array([1.0, 100.0]), np.array([10.0, 1000.0]))}
    (found,) = watch.check(3, {"variance": [5.0, 5.0]}, today)
    assert found.layers == (1,)
    assert found.text == (
        "step 3: signal variance after layer 1 left the predicted band: 5, earlier weights "
        "predict 1 to 10, today's 100 to 1e+03"
    )
    assert watch.check(4, {"speed": [1.0], "variance": [None, 5.0]}, {}) == []  # not known, not measured


def test_correlations_are_bounded_above() -> None:
    watch = Watch({"token_correlation": Band(np.full(3, -np.inf), np.full(3, 0.999))})
    (found,) = watch.check(1, {"token_correlation": [-0.5, 0.9995, 0.9999]}, {})
    assert found.layers == (1, 2) and found.layer == 2
    assert "token correlation after layers 1-2" in found.text and "at most 0.999" in found.text


def test_a_log_keeps_the_cause_and_remedy_of_every_warning(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    logs = Logs(None, path, None)
    logs.tell([Departure(3, "expert_load", (Place(1),), Place(1), 0.0, "layer 1: an expert gets nothing")])
    logs.write({"loss": 2.0}, 3)
    logs.close()
    (found,) = events_of(line_of_log(path.read_text(), "log"))
    assert (found.name, found.layers, found.step) == ("idle expert", (1,), 3)
    assert "a router that sends nothing" in found.cause and "load-balancing" in found.remedy
