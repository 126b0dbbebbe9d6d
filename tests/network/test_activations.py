"""Dual activations against quadrature in two dimensions and mpmath."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop.network.activations import ACTIVATIONS, activation, register
from signalprop.network.duals import central_dual, dual

NAMES = sorted({a.name for a in ACTIVATIONS.values()})
WITH_NUMBERS = [
    "leaky_relu(0.35)",
    "leaky_relu(-1)",
    "leaky_relu(3)",
    "transformed(gelu, 0.29854, 0.24432, -0.17792, 4.84174)",
    "transformed(silu, -1.5, -2, 0.1, 0.6)",
    "transformed(tanh, 2, 3, -0.8, -1.7)",
    "transformed(relu, 0.5, 0, -1, 2)",
    "transformed(leaky_relu(0.35112), 1.0, 0.0, 0.0, 1.33435)",
    "transformed(transformed(gelu, 0.3, 0, 0, 2), 2, 1, 0.2, 0.5)",
    "transformed(transformed(erf, 0.3, 0, 0, 2), -2, 0, 0.2, 0.5)",
]


_NODES = np.polynomial.legendre.leggauss(14)


def _panels(edges):
    x, w = _NODES
    left, width = edges[:-1, None], np.diff(edges)[:, None]
    return (left + width * (x + 1) / 2).ravel(), (width * w / 2).ravel()


def _two_dimensional(f, s, r):
    """E f(x) f(y) by nested Gauss-Legendre panels that break where x = 0 or y = 0, so kinks do no harm."""
    grid = np.concatenate([[0.0], np.geomspace(2e-2, 1, 6), np.arange(2, 10.1)])
    edges = np.concatenate([-grid[:0:-1], grid])
    z, w = _panels(edges)
    w = w * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
    rest = np.sqrt((1 - r) * (1 + r))
    inner = np.empty_like(z)
    for i, zi in enumerate(z):
        cuts = np.concatenate([-r * zi / rest + edges / rest, edges])
        v, wv = _panels(np.unique(np.clip(cuts, -10, 10)))
        weight = wv * np.exp(-v * v / 2) / np.sqrt(2 * np.pi)
        inner[i] = weight @ f(np.sqrt(s) * (r * zi + rest * v))
    return float((w * f(np.sqrt(s) * z)) @ inner)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 2)) for i, n in enumerate(NAMES + WITH_NUMBERS)]
)
@pytest.mark.parametrize(
    ("s", "r"), [(1.0, -0.8), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((0.1, 0.3), (10.0, 0.99)))]
)
def test_agrees_with_two_dimensional_quadrature(name, s, r):
    d = dual(name, s, r)
    act = activation(name)
    z, w = _panels(np.linspace(-10, 10, 41))
    mean = w * np.exp(-z * z / 2) @ act.function(np.sqrt(s) * z) / np.sqrt(2 * np.pi)
    assert d.mean == pytest.approx(mean, rel=1e-9, abs=1e-10)
    assert d.covariance_moment == pytest.approx(
        _two_dimensional(act.function, s, r), rel=1e-8, abs=1e-11 * d.second_moment
    )
    assert d.slope_moment == pytest.approx(
        _two_dimensional(act.derivative, s, r), rel=1e-8, abs=1e-11 * d.slope_second_moment
    )


MPMATH = {
    "relu": lambda x: x if x > 0 else mpmath.mpf(0),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "quick_gelu": lambda x: x / (1 + mpmath.exp(-mpmath.mpf("1.702") * x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "tanh": mpmath.tanh,
    "leaky_relu": lambda x: x if x > 0 else x / 100,
    "relu2": lambda x: x**2 if x > 0 else mpmath.mpf(0),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "identity": lambda x: x,
    "erf": mpmath.erf,
    "mish": lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))),
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
    "elu": lambda x: x if x > 0 else mpmath.expm1(x),
}


# Of every activation one test is fast: this one, or the quadrature above.
@pytest.mark.parametrize(
    ("name", "s"),
    [
        pytest.param(name, (0.01, 4.0)[i % 2], marks=[pytest.mark.slow] * (NAMES.index(name) % 2 == 0))
        for i, name in enumerate(MPMATH)
    ],
)
def test_one_dimensional_moments_agree_with_mpmath(name, s):
    f = MPMATH[name]
    breaks = [-12, -6, -3, -1, 0, 1, 3, 6, 12]
    with mpmath.workdps(20):
        root = mpmath.sqrt(mpmath.mpf(s))
        mean, second, stein = (
            mpmath.quad(lambda z, g=g: g(z) * mpmath.npdf(z), breaks)
            for g in (lambda z: f(root * z), lambda z: f(root * z) ** 2, lambda z: z * f(root * z))
        )
    d = dual(name, s, 0.0)
    assert d.mean == pytest.approx(float(mean), rel=1e-11, abs=1e-13)
    assert d.second_moment == pytest.approx(float(second), rel=1e-11)
    # At r = 0 the slope moment is (E f')^2, and E f' = E z f(sqrt(s) z) / sqrt(s) whatever f is.
    assert d.slope_moment == pytest.approx(float(stein / root) ** 2, rel=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_invariants_over_the_whole_range(name):
    s = np.array([0.0, 1e-300, 1e-12, 1e-3, 1.0, 7.0, 100.0, 1e6])[:, None]
    r = np.array([-1.0, -0.999, -0.5, 0.0, 1e-9, 0.5, 0.99, 1 - 1e-12, 1.0])
    for d in (dual(name, s, r), central_dual(name, s, r)):
        assert all(np.isfinite(x).all() and x.shape == (8, 9) for x in d)
    c = central_dual(name, s, r)
    assert (c.variance >= 0).all() and (np.abs(c.covariance) <= c.variance).all()
    assert (np.abs(c.slope_moment) <= c.slope_second_moment).all()
    assert (c.covariance[:, -1] == c.variance[:, -1]).all()
    assert (c.slope_moment[:, -1] == c.slope_second_moment[:, -1]).all()
    assert np.abs(c.covariance[:, 3]).max() <= 1e-12 * c.variance.max()  # r = 0
    # Q and Qdot have non-negative power series in r, so both rise on [0, 1].
    assert (np.diff(c.covariance[:, 3:], axis=1) >= -1e-12 * c.variance[:, :1]).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("relu", "leaky_relu", "relu2", "elu")])
def test_small_variance_limit_is_the_tangent_without_cancellation(name):
    s = 1e-14
    slope = float(ACTIVATIONS[name].derivative(np.zeros(1))[0])
    c = central_dual(name, s, 0.25)
    assert c.variance == pytest.approx(s * slope**2, rel=1e-6)
    assert c.covariance == pytest.approx(0.25 * s * slope**2, rel=1e-6)


def test_derivatives_match_functions():
    x, h = np.linspace(-8.05, 8.05, 56), 1e-6
    for name in NAMES:
        a = ACTIVATIONS[name]
        difference = (a.function(x + h) - a.function(x - h)) / (2 * h)
        assert np.allclose(a.derivative(x), difference, atol=1e-7), name


def test_bad_input_is_one_line():
    for s, r in [(-1.0, 0.0), (np.nan, 0.0), (1.0, 1.1), (1.0, np.nan)]:
        with pytest.raises(InputError):
            dual("silu", s, r)
    assert dual("silu", np.zeros((0,)), 0.5).mean.shape == (0,)


def test_register_a_users_own_activation():
    try:
        register("cube_for_test", lambda x: x**3, lambda x: 3 * x**2)
        d = dual("cube_for_test", 2.0, 0.3)
        # E x^3 y^3 = s^3 (9 r + 6 r^3) and E 9 x^2 y^2 = 9 s^2 (1 + 2 r^2), by Isserlis.
        assert d.covariance_moment == pytest.approx(8 * (2.7 + 6 * 0.027), rel=1e-12)
        assert d.slope_moment == pytest.approx(36 * 1.18, rel=1e-12)
        assert d.second_moment == pytest.approx(120, rel=1e-12)
    finally:
        ACTIVATIONS.pop("cube_for_test", None)
    with pytest.raises(InputError, match="does not match"):
        register("wrong", lambda x: x**3, lambda x: x**2)
    assert "wrong" not in ACTIVATIONS


PIECES = st.sampled_from(
    [*NAMES, "leaky_relu(", "transformed(", "transformed(gelu, 1, 0, 0, 1)", "(", ")", ",", ", ", " ", "1", "-0.5", "0",
     "1e400", "nan", "1_0", "٣", "1e-320", "\x00", "\n", "é"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=14).map("".join)))
@settings(max_examples=20)
def test_any_string_is_an_activation_or_one_line_that_says_what_is_wrong(name):
    try:
        act = activation(name)
    except InputError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert "\n" not in said and len(said) < 500
        return
    assert np.isfinite(act.function(np.array([-1.0, 0.0, 2.0]))).all()
    assert all(np.isfinite(x) for x in dual(name, 1.0, 0.5))


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_pytorch_computes_the_same_function_and_gradient(name):
    torch = pytest.importorskip("torch")
    from signalprop.models.activations import torch_activation

    x = torch.linspace(-4, 4, 33, dtype=torch.float64, requires_grad=True)
    y = torch_activation(name)(x)
    y.sum().backward()
    at, away = x.detach().numpy(), x.detach().numpy() != 0
    assert y.detach().numpy() == pytest.approx(activation(name).function(at), abs=1e-13)
    assert x.grad.numpy()[away] == pytest.approx(activation(name).derivative(at)[away], abs=1e-13)
