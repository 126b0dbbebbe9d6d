"""Dual activations on kernels whose positions differ in variance; and what they lead to in stacks without norms."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from choice import some
from signalprop.errors import InputError
from signalprop.kernels.stack import Stack
from signalprop.kernels.transforms import tat
from signalprop.network.activations import activation
from signalprop.network.architecture import Architecture
from signalprop.network.duals import dual, hermite
from signalprop.schemes import scheme
from signalprop.theory import duals_of_nodes
from signalprop.theory.duals_of_nodes import dual_of, entry_by_entry
from signalprop.theory.signals import Signal

DKS = "transformed(gelu, 0.2985, 0.2443, -0.1779, 4.842)"  # about `dks("gelu", 36)`
SHARED_KINK = (
    "relu",
    "leaky_relu",
    "leaky_relu(0.3)",
    "relu2",
    "elu",
    tat(36),
    "transformed(relu, 1.5, 0.0, 0.5, 2.0)",
)
SMOOTH = ("gelu", "erf", "identity", "silu", "tanh", "sigmoid", DKS, "transformed(gelu, 0.7, 0.0, 0.3, 2.0)")
# One of every way to compute an entry; the others are slow tests.
WAYS = ("relu2", "transformed(relu, 1.5, 0.0, 0.5, 2.0)", "elu", "gelu", "erf", "tanh", DKS)
every_activation = pytest.mark.parametrize("name", some(SHARED_KINK + SMOOTH, WAYS))


def dual_of_kernel(name: str, variance: Any, correlation: np.ndarray, derivative: int = 0) -> np.ndarray:
    return entry_by_entry(dual_of(name, derivative, variance), correlation, np.ones(len(correlation)))


def slope_of_kernel(name: str, variance: Any, correlation: np.ndarray) -> np.ndarray:
    return dual_of_kernel(name, variance, correlation, derivative=1)


def correlations(n: int, seed: int = 0, features: int = 6) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(n, features))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    r = np.clip(x @ x.T, -1, 1)
    np.fill_diagonal(r, 1.0)
    return r


def by_quadrature(f: Any, p: float, q: float, r: float) -> float:
    """E f(x) f(y) in polar coordinates: kinks at 0 are rays, and the integrand is smooth between them."""
    phi = math.asin(r)

    def ray(angle: float) -> float:  # x = sqrt(p) t sin(angle + phi), y = sqrt(q) t sin(angle): correlation cos(phi')
        a, b = math.sqrt(p) * math.cos(angle), math.sqrt(q) * math.sin(angle + phi)
        found, _ = quad(
            lambda t: float(np.prod(f(np.array([a, b]) * t))) * t * math.exp(-t * t / 2), 0, 12, epsabs=1e-11, limit=100
        )
        return found

    edges = sorted({-math.pi / 2, math.pi / 2, -phi, math.pi - phi, 3 * math.pi / 2})
    edges = [e for e in edges if -math.pi / 2 <= e <= 3 * math.pi / 2]
    total = sum(quad(ray, left, right, epsabs=1e-10)[0] for left, right in pairwise(edges))
    return total / (2 * math.pi)


@every_activation
def test_two_variances_by_quadrature(name: str) -> None:
    act = activation(name)
    p, q, r = 1.3, 0.2, -0.3
    matrix = np.array([[1.0, r], [r, 1.0]])
    s = np.array([p, q])
    for found, f in (
        (dual_of_kernel(name, s, matrix), act.function),
        (slope_of_kernel(name, s, matrix), act.derivative),
    ):
        size = math.sqrt(found[0, 0] * found[1, 1])
        exact = by_quadrature(f, p, q, r)
        assert found[0, 1] == found[1, 0] == pytest.approx(exact, abs=(1e-9 if f is act.function else 3e-7) * size)


@given(
    name=st.sampled_from([*SHARED_KINK[:5], *SMOOTH]),
    logs=st.lists(st.floats(-9, 5), min_size=2, max_size=12),
    seed=st.integers(0, 9),
    features=st.integers(1, 6),
)
def test_kernels_stay_kernels(name: str, logs: list[float], seed: int, features: int) -> None:
    """Finite, symmetric, positive, and within Cauchy and Schwarz; also where positions point the same way."""
    s, r = np.exp(np.array(logs)), correlations(len(logs), seed, features)
    for of_kernel in (dual_of_kernel, slope_of_kernel):
        k = of_kernel(name, s, r)
        own = np.sqrt(np.diagonal(k))
        assert np.isfinite(k).all()
        np.testing.assert_array_equal(k, k.T)
        size = np.maximum(np.outer(own, own), 1e-300)
        assert np.abs(k / size).max() <= 1 + 2e-7
        assert np.linalg.eigvalsh(k / size).min() > -1e-4


@pytest.mark.parametrize("name", ["relu", "relu2", "gelu", "erf", DKS, "silu"])
def test_positions_of_variance_zero_and_of_any_size(name: str) -> None:
    s = np.array([0.0, 1e-40, 1e-9, 1.0, 1e6])
    r = correlations(5)
    for k in (dual_of_kernel(name, s, r), slope_of_kernel(name, s, r)):
        assert np.isfinite(k).all()
    np.testing.assert_array_equal(
        dual_of_kernel(name, np.array([-1e-18, 1.0]), np.eye(2)), dual_of_kernel(name, np.array([0.0, 1.0]), np.eye(2))
    )
    with pytest.raises(InputError, match="variance is negative or not finite"):
        dual_of_kernel(name, np.array([1.0, math.nan]), np.eye(2))


# --- feed-forwards without norms -----------------------------------------------------------------------------------


def stack_of(gated: bool, act: str = "gelu") -> Stack:
    a = Architecture(
        kind="decoder", n_layers=1, d_model=16, n_heads=2, d_ff=24, vocab_size=9, seq_len=6, norm_placement="none",
        final_norm=False, gated=gated, activation=act,
    )  # fmt: skip
    p = scheme("xavier")(a).with_columns(bias__up=0.3, **({"bias__gate": 0.5} if gated else {}))
    stack = Stack(p)
    block: Any = stack.branches[1]
    block.kind = replace(block.kind, d_model=10**12)  # no overlaps by chance: kernels are what tokens share
    return stack


def test_overlaps_by_chance_of_a_gated_block() -> None:
    """What two normed tokens share after silu(gate) * up, 200,000 draws: five standard errors and 2 %."""
    correlation, d, gate, up, draws, rng = 0.1, 32, 0.1, 0.7, 10_000, np.random.default_rng(1)
    a = Architecture(
        kind="decoder", n_layers=1, d_model=d, n_heads=2, d_ff=24, vocab_size=9, seq_len=6, gated=True,
        activation="silu", norm="rmsnorm",
    )  # fmt: skip
    p = scheme("xavier")(a).with_columns(weight__gate=(gate / d) ** 0.5, weight__up=(up / d) ** 0.5)
    block: Any = Stack(p).branches[1]
    row = block.kind.at(1)
    means = []
    for _ in range(20):
        x, y = rng.normal(size=(2, draws, d))
        y = correlation * x + math.sqrt(1 - correlation**2) * y
        overlap = (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))
        g, h = rng.normal(size=(2, draws)) * math.sqrt(gate)
        h = overlap * g + np.sqrt(1 - overlap**2) * h
        f = activation("silu").function
        means.append((f(g) * f(h) * overlap).mean() * up)
    found = block.forward(1, np.array([[1.0, correlation], [correlation, 1.0]]))[0, 1] / row.down
    error = float(np.std(means) / math.sqrt(len(means)))
    assert abs(np.mean(means) - found) < 5 * error + 0.02 * found
    average = block.kind.forward(1, Signal(1.0, correlation))
    assert average.shared == pytest.approx(found * row.down, rel=1e-6)


@pytest.mark.parametrize(("gated", "act"), [(False, "relu"), (False, "gelu"), (True, "silu")])
def test_feed_forwards_of_positions_of_all_sizes_by_sampling(gated: bool, act: str) -> None:
    """Forward kernel and backward factor: means over pre-activations drawn from their kernel, five standard errors."""
    stack, draws, n = stack_of(gated, act), 50_000, 6
    rng, rows, i = np.random.default_rng(5), stack.branches[1].kind.at(1), 1
    x = rng.normal(size=(n, 16)) * np.geomspace(0.2, 3, n)[:, None]
    kernel = x @ x.T / 16

    def sampled(weight: float, bias: float) -> np.ndarray:
        return np.linalg.cholesky(kernel * weight + bias) @ rng.normal(size=(n, draws))

    f = activation(act)
    up = sampled(rows.up, rows.up_bias)
    gate = sampled(rows.gate, rows.gate_bias) if gated else up
    hidden, slope = f.function(gate) * (up if gated else 1.0), f.derivative(gate)
    back = rows.down_back * rows.up_back / rows.up

    def check(theory: np.ndarray, pairs: Any) -> None:
        for a in range(n):
            for b in range(n):
                sample = pairs(a, b)
                error = sample.std() / math.sqrt(draws)
                assert abs(sample.mean() - theory[a, b]) < 5 * error + 1e-12, (a, b)

    check(stack.branches[i].forward(i, kernel), lambda a, b: rows.down * hidden[a] * hidden[b] + rows.down_bias)
    if gated:
        check(
            stack.branches[i].backward(i, kernel, np.ones((n, n))),
            lambda a, b: (
                back
                * (rows.up * f.function(gate[a]) * f.function(gate[b]) + rows.gate * (up * slope)[a] * (up * slope)[b])
            ),
        )
    else:
        check(stack.branches[i].backward(i, kernel, np.ones((n, n))), lambda a, b: back * rows.up * slope[a] * slope[b])


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_two_tokens_at_every_position_give_what_they_give_in_any_order(name: str, apart: float) -> None:
    """As on a grid, where one block of four says all; in another order it has no such blocks."""
    rng = np.random.default_rng(0)
    half = 30
    x = rng.normal(size=(half, 12))
    off = x @ x.T / np.sqrt(np.outer((x**2).sum(1), (x**2).sum(1)))
    np.fill_diagonal(off, 0.9)
    r, variance = np.tile(off, (2, 2)), np.tile(1 + apart * rng.random(half), 2)
    np.fill_diagonal(r, 1.0)
    order = rng.permutation(2 * half)
    for of_kernel in (dual_of_kernel, slope_of_kernel):
        found = of_kernel(name, variance, r)
        other = of_kernel(name, variance[order], r[np.ix_(order, order)])
        np.testing.assert_allclose(found[np.ix_(order, order)], other, rtol=1e-12)


@pytest.mark.parametrize("name", ["relu", "gelu", "erf", "silu"])
@pytest.mark.parametrize("n", [1, 2, 128, 129, 300])
@pytest.mark.parametrize("alike", [True, False])
def test_one_variance_entry_by_entry(name: str, n: int, alike: bool) -> None:
    r = np.full((n, n), 0.3) if alike else correlations(n)
    np.fill_diagonal(r, 1.0)
    expected = dual(name, 1.7, r)
    for found, moment, tolerance in (
        (dual_of_kernel(name, np.full(n, 1.7), r), expected.covariance_moment, 1e-11),
        (slope_of_kernel(name, np.full(n, 1.7), r), expected.slope_moment, 1e-6),
    ):
        assert np.abs(found - moment).max() <= tolerance * np.abs(moment).max()


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_rounding_beyond_1_counts_as_1(name: str) -> None:
    """Also where rows are equal in pairs, as all are when tokens are one direction."""
    found = dual_of_kernel(name, 1.0, np.full((8, 8), 1 + 2**-52))
    np.testing.assert_allclose(found, dual_of_kernel(name, 1.0, np.ones((8, 8))), rtol=1e-12)


def test_series_of_many_variances_are_interpolated() -> None:
    act, s = activation("gelu"), np.geomspace(0.9, 1.3, 40)
    found = duals_of_nodes._interpolated(act, s, math.log(0.9), math.log(1.3), 16)
    assert found is not None
    exact, terms = hermite(act, s, duals_of_nodes._MOST_TERMS), len(found.slopes)
    order = np.arange(1, len(exact.slopes) + 1)[:, None]
    assert ((s * exact.slopes**2 / order)[terms:].sum(0) <= 1e-12 * exact.variance).all()
    for column, one in zip(found, exact._replace(slopes=exact.slopes[:terms]), strict=True):
        np.testing.assert_allclose(column, one, atol=1e-6)


def test_a_table_reaches_both_ends() -> None:
    """Correlations of exactly 1 and -1, of so many pairs that a table is used."""
    angles = np.linspace(0, math.pi, 100)
    found = dual_of_kernel("tanh", 0.8, np.cos(np.subtract.outer(angles, angles)))
    expected = np.asarray(dual("tanh", 0.8, np.array([1.0, -1.0])).covariance_moment)
    np.testing.assert_allclose([found[0, 0], found[0, -1]], expected, rtol=1e-6)
