"""The result type: invariants of predictions, JSON both ways, averages, damaged files."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from choice import some
from commandline import refusal_of
from profile_checks import check_prediction
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.prediction import predict
from signalprop.results.profile import POINTS, Profile, average
from signalprop.results.series import Series
from signalprop.schemes import scheme
from signalprop.theory.bounds import identity_distances
from signalprop.theory.network import is_shaped
from strategies import architectures, schemes, statistics, table_or_none


def prediction(n_layers: int = 2, backward: bool = True, **changes: Any) -> Profile:
    a = Architecture(**{"n_layers": n_layers, "d_model": 8, "seq_len": 16, **changes})
    return predict(scheme("xavier")(a), fidelity="moments", backward=backward)


class TestInvariants:
    @given(st.data())
    def test_any_architecture_scheme_and_input(self, data: st.DataObject) -> None:
        a = data.draw(architectures())
        made_by, inputs = data.draw(schemes()), data.draw(statistics(a))
        p = table_or_none(made_by, a, inputs)
        if p is None:
            return
        profile = predict(p, inputs, fidelity="kernel" if is_shaped(p) else "moments")
        check_prediction(profile)
        if p.shaping.kind == "none":
            distances = identity_distances(p, profile)
            assert distances.shape == (a.n_layers_total,) and (distances >= 0).all() and np.isfinite(distances).all()

    @given(st.data())
    def test_any_numbers_in_the_table(self, data: st.DataObject) -> None:
        a = data.draw(architectures(deepest=3))
        p = scheme("xavier")(a)
        sizes = st.sampled_from([0.0, 1e-30, 1e-8, 0.3, 1.0, 20.0, 1e8, 1e12])
        columns = {
            name.replace(".", "__"): data.draw(sizes)
            for name in data.draw(st.sets(st.sampled_from(sorted(p.columns())), max_size=5))
            if name != "norm_bias" and (name != "value_skip" or a.kind != "encoder-decoder")  # refused in some networks
        }
        check_prediction(predict(p.with_columns(**columns), data.draw(statistics(a)), fidelity="moments"))

    @pytest.mark.parametrize("activation", some(("relu2", "silu", "gelu", "tanh"), ("relu2", "silu")))
    def test_streams_without_norm_that_leave_the_range_of_doubles(self, activation: str) -> None:
        a = Architecture(n_layers=300, d_model=8, norm_placement="none", activation=activation, seq_len=16)
        profile = predict(scheme("xavier", gain=30.0)(a), fidelity="moments")
        check_prediction(profile)
        out = profile.forward["stream_out"]
        assert out.log_variance[-1] > 1000 and out.variance[-1] == pytest.approx(np.finfo(float).max)
        assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile

    def test_gradients_that_vanish_below_the_range_of_doubles(self) -> None:
        a = Architecture(n_layers=600, d_model=8, seq_len=16)
        profile = predict(scheme("xavier")(a).with_columns(skip=0.5, branch=0.0), fidelity="moments")
        first = profile.gradient["stream_in"]
        assert first.variance[0] == 0.0 and first.log_variance[0] == pytest.approx(1200 * math.log(0.25))
        assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


class TestSeries:
    def test_the_logarithm_goes_where_doubles_end(self) -> None:
        s = Series.of(log_variance=[-1e4, -740.0, 0.0, 709.0, 1e4, -math.inf])
        assert s.variance[0] == 0 and 0 < s.variance[1] < 1e-300 and s.variance[2] == 1.0
        assert s.variance[4] == pytest.approx(np.finfo(float).max)
        assert s.log_variance.tolist() == pytest.approx([-1e4, -740.0, 0.0, 709.0, 1e4, -math.inf])

    @given(
        st.lists(
            st.floats(-1e6, 1e6)
            | st.floats(-760, -690)
            | st.floats(700, 720)
            | st.sampled_from([0.0, -math.inf, -1e12, math.log(5e-324), math.log(np.finfo(float).max)]),
            min_size=1,
            max_size=6,
        ),
        st.booleans(),
    )
    def test_rows_give_the_same_series_back(self, logs: list[float], with_errors: bool) -> None:
        extra = {"variance_se": 0.1, "token_correlation_se": 1 / 3, "feature_correlation": -0.5} if with_errors else {}
        s = Series.of(log_variance=logs, token_correlation=0.1, mean=-2.5, **extra)
        assert Series.from_rows(json.loads(json.dumps(s.rows(), allow_nan=False))) == s
        assert s.at(-1) == s.rows()[-1]

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"variance": 1.0, "log_variance": 0.0},
            {"variance": -1.0},
            {"variance": float("nan")},
            {"variance": float("inf")},
            {"log_variance": float("nan")},
            {"log_variance": float("inf")},
            {"variance": 1.0, "token_correlation": 1.1},
            {"variance": 1.0, "token_correlation": float("nan")},
            {"variance": 1.0, "mean": float("nan")},
            {"variance": 1.0, "variance_se": float("inf")},
        ],
        ids=str,
    )
    def test_bad_numbers(self, fields: dict[str, float]) -> None:
        refusal_of(lambda: Series.of(**fields))

    def test_parts_of_a_sweep(self) -> None:
        s = Series.of([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], variance_se=0.5)
        parts = [Series.of(s.variance[k], s.token_correlation[k], variance_se=0.5) for k in (slice(0, 1), slice(1, 3))]
        assert Series.joined(parts) == s


def test_without_gradient() -> None:
    profile = prediction(backward=False)
    again = Profile.from_json(profile.to_json())
    assert profile.gradient is None and again == profile and again.gradient is None


def test_files(tmp_path: Path) -> None:
    profile = replace(prediction(), notes=("one", "two"), n_seeds=3, gradient_scale=1 / 3)
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == profile and again.notes == ("one", "two")
    assert again != replace(profile, n_seeds=4) and again != prediction(3) and again != 5
    assert "cannot write" in refusal_of(lambda: profile.save(tmp_path / "none" / "p.json"))


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "schema": lambda d: d.update(schema="signalprop/profile/0"),
    "expected schema": lambda d: d.pop("schema"),
    "source": lambda d: d.update(source="guessed"),
    "scheme: Field required": lambda d: d.pop("scheme"),
    "did you mean notes": lambda d: d.update(note=[]),
    "input.variance": lambda d: d["input"].update(variance="1"),
    "3 rows; the architecture has 4": lambda d: d["sublayers"].pop(),
    "sublayers has a dict": lambda d: d.update(sublayers={}),
    "sublayer 0 is not 'attention'": lambda d: d["sublayers"].__setitem__(0, 7),
    "sublayer 1 is not 'feed_forward'": lambda d: d["sublayers"][1].update(kind="attention"),
    "sublayer 2 has no moments at branch": lambda d: d["sublayers"][2].pop("branch"),
    "gradient of sublayer 3 has no moments": lambda d: d["sublayers"][3].pop("gradient"),
    "gradient of sublayer 1 has no moments at branch": lambda d: d["sublayers"][1]["gradient"].pop("branch"),
    "variance of sublayer 1 is None": lambda d: d["sublayers"][1]["branch"].pop("variance"),
    "variance of sublayer 1 is '1'": lambda d: d["sublayers"][1]["branch"].update(variance="1"),
    "variance of sublayer 1 is True": lambda d: d["sublayers"][1]["branch"].update(variance=True),
    "variance of sublayer 1 is 1000": lambda d: d["sublayers"][1]["branch"].update(variance=10**400),
    "a variance is negative": lambda d: d["sublayers"][1]["branch"].update(variance=-1.0),
    "a token correlation is 2.0": lambda d: d["sublayers"][1]["branch"].update(token_correlation=2.0),
    "unknown moments 'varience'": lambda d: d["sublayers"][1]["branch"].update(varience=1.0),
    "log_variance of sublayer 1": lambda d: d["sublayers"][1]["branch"].update(log_variance="0"),
    "a log variance is NaN": lambda d: d["sublayers"][1]["branch"].update(log_variance=float("nan")),
    "variance_se of sublayer 0 is None": lambda d: d["sublayers"][1]["branch"].update(variance_se=0.1),
    "n_layers": lambda d: d["architecture"].update(n_layers=0),
    "statistics": lambda d: d.update(statistics=[]),
    "notes": lambda d: d.update(notes=[3]),
}


DOCUMENT = prediction().to_json()


@pytest.mark.parametrize("part", DAMAGE)
def test_damage_gets_one_line(part: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    DAMAGE[part](document)
    assert part in refusal_of(lambda: Profile.from_json(document))


class TestSensitivity:
    def test_a_layer_counts_with_its_sublayers_over_the_stream_that_enters_it(self) -> None:
        a = Architecture(n_layers=2, d_model=8)
        forward = {
            "stream_in": Series.of([1.0, 4.0, 8.0, 2.0]),
            "branch": Series.of([3.0, 4.0, 4.0, 2.0]),
            "stream_out": Series.of(1.0 + np.arange(4)),
        }
        profile = Profile(source="theory", architecture=a, scheme="x", input={}, forward=forward)
        assert profile.sensitivity_ratios.tolist() == pytest.approx([3.0, 1.0, 0.5, 1.0])
        assert profile.sensitivity() == {"mean": pytest.approx(7.0 + 0.75), "median": pytest.approx(7.0 + 0.75)}
        gain = replace(profile, statistics={"branch_gain": [2.0, 2.0, 0.5, 0.5]})
        assert gain.sensitivity()["mean"] == pytest.approx(2 * 7.0 + 0.5 * 0.75)


class TestAverage:
    def profiles(self, logs: list[list[float]]) -> list[Profile]:
        a = Architecture(n_layers=1, d_model=8)
        made = []
        for i, log in enumerate(logs):
            s = Series.of(log_variance=log, token_correlation=0.1 * i, mean=float(i))
            made.append(
                Profile("simulated", a, "x", {"variance": float(i)}, dict.fromkeys(POINTS, s), dict.fromkeys(POINTS, s))
            )
        return made

    def test_means_and_standard_errors(self) -> None:
        values = np.array([[1.0, 5.0], [2.0, 5.0], [6.0, 5.0]])
        mean = average(self.profiles(np.log(values).tolist()))
        s = mean.forward["branch"]
        assert s.variance == pytest.approx([3.0, 5.0]) and s.mean == pytest.approx([1.0, 1.0])
        expected = values[:, 0].std(ddof=1) / math.sqrt(3) / 3.0
        assert s.variance_se == pytest.approx([expected, 0.0])
        assert s.token_correlation == pytest.approx([0.1] * 2)
        assert s.token_correlation_se == pytest.approx([0.1 / math.sqrt(3)] * 2)
        assert (mean.n_seeds, mean.input["variance"], mean.gradient_scale) == (3, 1.0, None)
        assert Profile.from_json(mean.to_json()) == mean

    def test_a_gradient_needs_all_to_have_one(self) -> None:
        first, second = self.profiles([[0.0, 1.0], [0.0, 1.0]])
        assert average([first, replace(second, gradient=None)]).gradient is None
        scaled = [replace(p, gradient_scale=s) for p, s in ((first, 1.0), (second, 3.0))]
        assert average(scaled).gradient_scale == 2.0

    def test_bad_requests(self) -> None:
        assert "at least one" in refusal_of(lambda: average([]))
        assert "different architectures" in refusal_of(lambda: average([prediction(2), prediction(3)]))


def test_statistics_of_the_input_reach_the_profile() -> None:
    a = Architecture(n_layers=1, d_model=8)
    x = InputStatistics(kind="stream", variance=2.0, token_correlation=0.5)
    assert predict(scheme("xavier")(a), x).input == {"mean": 0.0, "variance": 2.0, "token_correlation": 0.5}
