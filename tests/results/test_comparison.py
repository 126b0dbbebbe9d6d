"""Agreement of two profiles: errors, R², shapes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.comparison import compare, r_squared, relative_errors
from signalprop.results.profile import POINTS, Profile
from signalprop.results.series import Series
from signalprop.schemes import scheme


def profile(series: Series, n_layers: int = 2, gradient: Series | None = None) -> Profile:
    a = Architecture(n_layers=n_layers, d_model=8)
    backward = None if gradient is None else dict.fromkeys(POINTS, gradient)
    return Profile("theory", a, "x", {}, dict.fromkeys(POINTS, series), backward)


def test_relative_errors() -> None:
    predicted = Series.of([2.0, 0.5, 1.0, 3.0], [0.5, 0.5, 0.0, -0.2])
    reference = Series.of([1.0, 1.0, 1.0, 4.0], [0.25, 0.05, 0.0, -0.4])
    variance, correlation = relative_errors(predicted, reference)
    assert variance == pytest.approx([math.log(2), -math.log(2), 0.0, math.log(0.75)])  # half is as far as twice
    assert correlation == pytest.approx([1.0, 4.5, 0.0, 0.5])


def test_r_squared() -> None:
    x = np.array([0.0, 1.0, 2.0, 4.0])
    assert r_squared(x, x) == 1.0
    y = x + np.array([0.1, -0.1, 0.1, -0.1])
    assert r_squared(y, x) == pytest.approx(1 - 0.04 / np.sum((x - x.mean()) ** 2))
    assert r_squared(np.full(4, x.mean()), x) == pytest.approx(0.0)
    assert r_squared(x, np.full(4, 1.0)) is None  # nothing varies
    assert r_squared(x[:2], x[:2]) is None
    error = x.std() / 2
    assert r_squared(y, x, np.full(4, 0.99 * error)) is not None
    assert r_squared(y, x, np.full(4, 1.01 * error)) is None  # noise has nothing to explain
    nothing = np.array([-math.inf, 0.0, 1.0, 2.0])
    assert r_squared(nothing, nothing) == 1.0


def test_the_agreement_of_a_prediction_with_itself() -> None:
    a = Architecture(n_layers=5, d_model=16, seq_len=32)
    p = predict(scheme("xavier")(a), fidelity="moments")
    result = compare(p, p)
    assert [item.quantity for item in result.agreements] == [
        f"{name} {quantity}"
        for name in ("forward", "branch", "gradient")
        for quantity in ("variance", "token correlation")
    ]
    assert all(item.median == item.percentile_95 == 0.0 for item in result.agreements)
    assert all(item.r_squared in (None, 1.0) and item.standard_error is None for item in result.agreements)
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["schema"] == "signalprop/comparison/1"
    assert Profile.from_json(document["measured"]) == p and document["agreement"][0]["median"] == 0.0


def test_errors_and_error_bars() -> None:
    reference = Series.of([1.0, 2.0, 4.0, 8.0], 0.5, variance_se=[0.1, 0.2, 0.3, 0.4], token_correlation_se=0.05)
    predicted = Series.of([1.1, 2.2, 4.4, 8.8], 0.6)
    result = compare(profile(predicted, gradient=predicted), profile(reference, gradient=reference))
    by_name = {item.quantity: item for item in result.agreements}
    variance, correlation = by_name["forward variance"], by_name["forward token correlation"]
    assert (variance.median, variance.percentile_95) == pytest.approx((math.log(1.1), math.log(1.1)))
    assert variance.standard_error == pytest.approx(0.25)
    assert correlation.median == pytest.approx(0.2) and correlation.standard_error == pytest.approx(0.1)
    assert by_name["gradient variance"].median == pytest.approx(math.log(1.1))


def sweep() -> Profile:
    p = scheme("xavier")(Architecture(n_layers=2, d_model=8, seq_len=4))
    return predict(Parametrization.sweep([p, p]), fidelity="moments")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (profile(Series.of(np.ones(4))), profile(Series.of(np.ones(6)), n_layers=3)),
        (sweep(), sweep()),
        (sweep(), profile(Series.of(np.ones(4)))),
    ],
    ids=["depths", "sweeps", "sweep and profile"],
)
def test_what_cannot_be_compared(first: Any, second: Any) -> None:
    with pytest.raises(InputError, match="cannot compare"):
        compare(first, second)
