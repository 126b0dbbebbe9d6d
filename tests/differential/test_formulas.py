"""Formulas of the theory against quadrature, multiple precision and enumeration that share no code with them.

Those that other tests check in the same way are not repeated: tests/README.md lists all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from choice import some
from signalprop.network.activations import activation
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import from_tokens
from signalprop.schemes import scheme
from signalprop.sublayers.feed_forward import signal as feed_forward
from signalprop.theory import log_arithmetic as logs
from signalprop.theory.branches import OneNode, returned
from signalprop.theory.embedding import activated
from signalprop.theory.loss_gradient import coincidences
from signalprop.theory.network import predict_moments
from signalprop.theory.softmax import softmax_moments

Function = Callable[[np.ndarray], np.ndarray]


def expectation(f: Callable[[np.ndarray, np.ndarray], np.ndarray], s: float, r: float) -> float:
    """E f(x, y) over a Gaussian pair of variance s and correlation r: trapezoids, exact for smooth integrands."""
    z = np.linspace(-9, 9, 401)
    weight = np.exp(-z * z / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    x, y = z[:, None], r * z[:, None] + math.sqrt(1 - r * r) * z
    return float(weight @ np.broadcast_to(f(math.sqrt(s) * x, math.sqrt(s) * y), y.shape) @ weight)


@pytest.mark.parametrize(
    ("length", "s"), some(itertools.product((2, 3), (0.01, 0.5, 3.0)), ((2, 0.5), (3, 0.01), (3, 3.0)))
)
def test_softmax_over_few_logits(length: int, s: float) -> None:
    """All six moments, by a product rule of Gauss and Hermite over the logits themselves."""
    z, weight = np.polynomial.hermite_e.hermegauss(90)
    weight = weight / weight.sum()
    grid = np.stack(np.meshgrid(*[z] * length, indexing="ij")).reshape(length, -1)
    share = np.prod(np.stack(np.meshgrid(*[weight] * length, indexing="ij")).reshape(length, -1), axis=0)
    a = np.exp(math.sqrt(s) * grid)
    a /= a.sum(0)
    second = (a**2).sum(0)
    jacobian = np.array(
        [np.sum((np.diag(column) - np.outer(column, column)) ** 2) for column in a.T[:: max(1, len(share) // 9000)]]
    )
    squares = second - 2 * (a**3).sum(0) + second**2  # |diag A - A A^T|^2 written out
    np.testing.assert_allclose(squares[:: max(1, len(share) // 9000)], jacobian, atol=1e-14)
    found = softmax_moments(s, length)
    tilt = (share @ (a**2 * grid**2).sum(0) - share @ second) / (4 * s * (share @ second))
    wanted = {
        "second": share @ second,
        "third": share @ (a**3).sum(0),
        "second_squared": share @ second**2,
        "jacobian": share @ squares,
        "mean_score_squared": share @ (a * grid).sum(0) ** 2,
    }
    for name, value in wanted.items():
        assert float(getattr(found, name)) == pytest.approx(float(value), rel=2e-6), name
    # a quotient of differences near s = 0
    assert float(found.squared_tilt) == pytest.approx(float(tilt), rel=2e-6, abs=1e-6 / s)


@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid"])
def test_gated_feed_forwards(name: str) -> None:
    """f(g) u of a gate and a value that are independent of each other, and its way back: both factors' derivatives."""
    a = Architecture(n_layers=1, d_model=16, d_ff=40, gated=True, activation=name, dropout=0.2, seq_len=4)
    p = scheme("fixed", std=0.3)(a).with_columns(
        weight__up=[0.0, 0.2], bias__gate=[0.0, 0.4], bias__up=[0.0, 0.1], bias__down=[0.0, 0.6]
    )
    made = OneNode(feed_forward.of(p, 0), 0.2)
    second, r = 1.7, 0.35
    act = activation(name)
    gate, gate_shared = 16 * 0.09 * second + 0.16, 16 * 0.09 * second * r + 0.16
    up, up_shared = 16 * 0.04 * second + 0.01, 16 * 0.04 * second * r + 0.01

    def moment(f: Function, correlation: float) -> float:
        return expectation(lambda x, y: f(x) * f(y), gate, correlation)

    f, slope, c = act.function, act.derivative, gate_shared / gate
    found = made.forward(1, (second, r))
    keep, down = 0.8, 40 * 0.09
    assert found.per_token == pytest.approx((down * moment(f, 1.0) * up + 0.36) / keep, rel=1e-9)
    met = second**2 * (1 - r**2) ** 2 / 16  # the square of an overlap by chance, which either map sees
    by_chance = 16 * 0.09 * moment(slope, 0.0) * 16 * 0.04 * met
    assert found.shared == pytest.approx(down * (moment(f, c) * up_shared + by_chance) + 0.36, rel=1e-9)
    back = made.backward(np.array([1]), (np.array([second]), np.array([r]))).stream
    own = 16 * 0.04 * moment(f, 1.0) + 16 * 0.09 * up * moment(slope, 1.0)
    shared = 16 * 0.04 * moment(f, c) + 16 * 0.09 * up_shared * moment(slope, c)
    # d_model sigma_down^2 over d_ff hidden features, of which each sees d_model inputs: d_ff / d_model in all
    assert back.vv[0] == pytest.approx(16 * 0.09 * (40 / 16) * own / keep, rel=1e-9)
    assert back.cc[0] == pytest.approx(16 * 0.09 * (40 / 16) * shared, rel=1e-9)
    assert back.vc[0] == back.cv[0] == 0


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "glu"])
@pytest.mark.parametrize(("s", "r"), [(0.3, 0.8), (2.5, -0.4)])
def test_activations_between_convolutions(name: str, s: float, r: float) -> None:
    """Mean, variance and covariance; `glu` gates one half of the features with the sigmoid of the other."""
    mean, variance, covariance = activated(name, s, r)
    if name == "glu":
        gate = activation("sigmoid").function
        assert mean == 0
        assert variance == pytest.approx(s * expectation(lambda x, _: gate(x) ** 2, s, r), rel=1e-10)
        assert covariance == pytest.approx(r * s * expectation(lambda x, y: gate(x) * gate(y), s, r), rel=1e-10)
        return
    f = activation(name).function
    found = expectation(lambda x, _: f(x), s, r)
    assert mean == pytest.approx(found, abs=1e-12)
    assert variance == pytest.approx(expectation(lambda x, _: f(x) ** 2, s, r) - found**2, rel=1e-10)
    assert covariance == pytest.approx(expectation(lambda x, y: f(x) * f(y), s, r) - found**2, abs=1e-11)


@given(st.integers(1, 3), st.integers(2, 6), st.data())
def test_coincidences_by_enumeration(rows: int, length: int, data: st.DataObject) -> None:
    ids = st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=rows, max_size=rows)
    aims = st.lists(st.lists(st.integers(-1, 3), min_size=length, max_size=length), min_size=rows, max_size=rows)
    tokens, targets = np.array(data.draw(ids)), np.array(data.draw(aims))
    if not (targets >= 0).any():
        return
    found = coincidences(Architecture(n_layers=1, d_model=4, seq_len=length), from_tokens(tokens, targets=targets))
    counts = np.zeros(4)
    pairs = positions = 0
    for x, y in zip(tokens, targets, strict=True):
        where = np.flatnonzero(y >= 0)
        for i, j in itertools.product(where, where):
            if i == j:
                counts[3] += x[i] == y[i]
                positions += 1
            else:
                counts[:3] += y[i] == y[j], x[i] == x[j], x[i] == y[j]
                pairs += 1
    np.testing.assert_allclose(found, counts / np.maximum([pairs, pairs, pairs, positions], 1), atol=1e-15)


@given(st.floats(-700, 700), st.floats(-700, 700))
def test_logarithms_against_multiple_precision(x: float, y: float) -> None:
    """For plain floats and for arrays, which take other ways."""
    with mpmath.workdps(60):
        wanted = float(mpmath.log(mpmath.exp(x) + mpmath.exp(y)))
    for one, other in ((x, y), (np.array([x]), np.array([y]))):
        np.testing.assert_allclose(np.ravel(logs.log_add(one, other)), wanted, rtol=1e-14, atol=1e-15)
    held = math.exp(min(max(x, -600.0), 600.0))
    for value in (x, np.array([x])):
        np.testing.assert_allclose(np.ravel(logs.safe_exp(value)), held, rtol=1e-15)
        np.testing.assert_allclose(np.ravel(logs.log(logs.safe_exp(value))), math.log(held), rtol=1e-14, atol=1e-14)
    assert logs.log(0.0) == logs.log(np.array([0.0]))[0] == logs.NO_SIGNAL
    assert logs.log_add(x, logs.NO_SIGNAL) == pytest.approx(x, abs=1e-300)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "none", "res-post"])
def test_what_comes_back_is_the_gradient_of_the_prediction(placement: str) -> None:
    """`returned` reads the forward signal of a Profile; its maps, one after the other, are the predicted gradient."""
    a = Architecture(
        n_layers=3, d_model=32, d_ff=64, seq_len=12, norm_placement=placement, activation="gelu", dropout=0.1
    )  # type: ignore[arg-type]
    p = scheme("xavier")(a).with_columns(skip=0.9, branch=0.6)
    profile = predict_moments(p, from_tokens(np.arange(24).reshape(2, 12) % 7))
    found = returned(p, profile)
    out, into = profile.gradient["stream_out"], profile.gradient["stream_in"]
    g, c = out.variance, out.variance * out.token_correlation
    variance = found.skip**2 * g + found.maps.vv * g + found.maps.vc * c
    covariance = found.skip**2 * c + found.maps.cv * g + found.maps.cc * c
    inner = slice(0, -1 if placement == "post" else None)  # a last post-norm takes the loss's own share away as well
    np.testing.assert_allclose(variance[inner], into.variance[inner], rtol=1e-9)
    np.testing.assert_allclose(
        covariance[inner], (into.variance * into.token_correlation)[inner], rtol=1e-9, atol=1e-12
    )
    assert ((found.skip_share > 0) & (found.skip_share < 1)).all()
