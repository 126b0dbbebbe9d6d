"""Attention moments against a head written out in NumPy, exact limits and invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from signalprop.theory import attention, attention_scores
from signalprop.theory.attention import Sizes

Matrix = NDArray[np.float64]


def _rotate(x: Matrix, sign: float = 1.0) -> Matrix:
    half = x.shape[1] // 2
    angle = np.arange(len(x))[:, None] * 1e4 ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * sign * angle)
    return np.concatenate([turned.real, turned.imag], axis=1)


def _tokens(rng: np.random.Generator, n: int, width: int, r: float) -> tuple[Matrix, Matrix]:
    common = rng.standard_normal(width)
    common *= math.sqrt(width) / np.linalg.norm(common)
    return math.sqrt(r) * common + math.sqrt(1 - r) * rng.standard_normal((n, width)), common


def _moments(x: Matrix) -> list[float]:
    n = len(x)
    square = (x**2).sum()
    return [square / x.size, ((x.sum(axis=0) ** 2).sum() - square) / (x.size * (n - 1))]


def _head(
    rng,
    *,
    n_keys,
    d,
    head,
    p,
    s0,
    r,
    r_g,
    n_queries=None,
    r_query=None,
    causal=False,
    rotary=False,
    bias=0.0,
    skip=0.0,
    gain=1.0,
):  # type: ignore[no-untyped-def]
    """One draw: forward, gradient at queries, at keys/values, at both; then control variates of expectation 0."""
    y, y_common = _tokens(rng, n_keys, d, r)
    x, x_common = (y, y_common) if n_queries is None else _tokens(rng, n_queries, d, r_query)
    g, g_common = _tokens(rng, len(x), head, r_g)
    wq, wk, wv = (rng.standard_normal((d, head)) / math.sqrt(d) for _ in range(3))
    weight = (s0 * (1 - bias)) ** 0.25
    b = rng.standard_normal(head) * math.sqrt(bias * s0) / weight
    q, k, v = x @ wq * weight + b, y @ wk * weight, y @ wv
    if rotary:
        q, k = _rotate(q), _rotate(k)
    scores = q @ k.T / math.sqrt(head)
    if causal:
        scores[np.triu_indices(n_keys, 1)] = -np.inf
    a = np.exp(scores - scores.max(axis=1, keepdims=True))
    a /= a.sum(axis=1, keepdims=True)
    dropped = a * (rng.random(a.shape) >= p) / (1 - p)
    ds = gain * dropped * (g @ v.T)
    ds = (ds - a * ds.sum(axis=1, keepdims=True)) / math.sqrt(head)
    dq, dk = ds @ k, ds.T @ q
    if rotary:
        dq, dk = _rotate(dq, -1), _rotate(dk, -1)
    unit = math.sqrt(d / head)
    at_values = gain * dropped.T @ g + (skip * g if skip else 0.0)
    at_query, at_key = dq @ wq.T * weight * unit, (dk @ wk.T * weight + at_values @ wv.T) * unit
    both = at_query + at_key if n_queries is None else at_key
    controls = [
        ((y_common @ wv) ** 2).sum() / head - 1,
        ((wv @ g_common) ** 2).sum() / head - 1,
        (wv**2).sum() / head - 1,
        ((wk @ (x_common @ wq * weight + b) * weight) ** 2).sum() / (head * s0) - 1,
        ((wq.T @ wq) * (wk.T @ wk)).sum() / head - 1,
        (y**2).mean() - 1,
        (g**2).mean() - 1,
    ]
    out = gain * dropped @ v + (skip * v if skip else 0.0)
    return _moments(out) + _moments(both) + _moments(at_query), controls


def _simulate(samples: int, seed: int = 0, **case):  # type: ignore[no-untyped-def]
    """Mean and standard error of each moment, after regression on the controls."""
    rng = np.random.default_rng(seed)
    drawn = [_head(rng, **case) for _ in range(samples)]
    raw, controls = np.array([x[0] for x in drawn]), np.array([x[1] for x in drawn])
    design = np.column_stack([np.ones(samples), controls])
    fit = np.linalg.lstsq(design, raw, rcond=None)[0]
    rest = ((raw - design @ fit) ** 2).sum(axis=0) / (samples - design.shape[1])
    return fit[0], np.sqrt(rest * np.linalg.inv(design.T @ design)[0, 0])


def _assert_close(predicted, simulated, error, tolerance=0.02):  # type: ignore[no-untyped-def]
    """Within `tolerance` (the formula's own error) of the variance before it, plus four standard errors."""
    scale = np.repeat(np.asarray(simulated)[::2], 2)
    size = np.maximum(np.abs(simulated), 0.1 * scale)
    assert np.all(np.abs(np.asarray(predicted) - simulated) < tolerance * size + 4 * error), (
        predicted,
        simulated,
        error,
    )


_SHAPE = {"n_keys": 256, "d": 128, "head": 64, "p": 0.1}
_CASES = [{"s0": 1.0, "r": 0.5, "r_g": 0.5}, {"s0": 1.0, "r": 0.9, "r_g": 0.1, "p": 0.5}]


# Of independent tokens over a third of the gradient comes through queries.
_THROUGH_QUERIES = {"s0": 1.0, "r": 0.0, "r_g": 0.0, "n_keys": 64}
# One with neither; each alone, with scores of order 1; both with much dropout.
_MASKED_OR_TURNED = [
    (_CASES[1], True, True, 0.05),
    (_CASES[0], True, False, 0.02),
    (_CASES[0], False, True, 0.03),
]


@pytest.mark.parametrize(
    ("case", "causal", "rotary", "tolerance"),
    [(_CASES[0], False, False, 0.02), (_THROUGH_QUERIES, False, False, 0.02), *_MASKED_OR_TURNED],
)
def test_self_attention(case, causal, rotary, tolerance) -> None:  # type: ignore[no-untyped-def]
    case = _SHAPE | case
    simulated, error = _simulate(150, causal=causal, rotary=rotary, **case)
    options = {}
    if rotary:
        options = {
            "omega": attention_scores.rotary_coherence(256, 64, causal="pairs" if causal else None),
            "omega_rows": attention_scores.rotary_coherence(256, 64, causal="rows" if causal else None),
        }
    sizes = Sizes(case["n_keys"], case["n_keys"], case["d"], case["p"], causal=causal, **options)
    x = sizes.on_itself(case["r"], case["s0"], r_g=case["r_g"])
    predicted = [*attention.forward(x), *attention.backward(x)]
    _assert_close(predicted, simulated[:4], error[:4], tolerance)


@pytest.mark.parametrize(("skip", "gain"), [(1.0, 1.0), (0.3, 1.0), (1.0, 0.2), (-0.4, 0.7)])
@pytest.mark.parametrize(("causal", "rotary"), [(False, False), (True, False), (False, True)])
def test_value_skip(skip: float, gain: float, causal: bool, rotary: bool) -> None:
    case = {"r": 0.3, "s0": 1.0, "d": 128, "p": 0.1}
    length, head, r_g = 64, 32, 0.4
    shape = {"n_keys": length, "head": head, "r_g": r_g, "causal": causal, "rotary": rotary}
    simulated, error = _simulate(200, skip=skip, gain=gain, **shape, **case)
    omega = attention_scores.rotary_coherence(length, head) if rotary else 1.0
    sizes = Sizes(length, length, case["d"], case["p"], causal=causal, omega=omega)
    x = sizes.on_itself(case["r"], case["s0"], r_g=r_g)
    predicted = [
        *attention.mixture(*attention.forward(x), case["r"], skip, gain, length, causal=causal),
        *attention.mixture(*attention.backward(x), r_g, skip, gain, length, causal=causal),
    ]
    _assert_close(predicted, simulated[:4], error[:4], tolerance=0.03)


@pytest.mark.parametrize(("n_queries", "r_query", "r", "bias"), [(64, 0.0, 0.7, 0.0), (200, 0.9, 0.3, 0.5)])
def test_cross_attention(n_queries: int, r_query: float, r: float, bias: float) -> None:
    case = _SHAPE | {"s0": 1.0, "r": r, "r_g": 0.3}
    simulated, error = _simulate(200, n_queries=n_queries, r_query=r_query, bias=bias, **case)
    x = Sizes(n_queries, 256, 128, 0.1).across(r_query, r, 1.0, r_g=0.3, query_bias=bias)
    query, key = attention.backward_apart(x)
    predicted = [*attention.forward(x), *key, *query]
    _assert_close(predicted, simulated, error, 0.03)


def test_query_bias_in_self_attention_and_key_bias_without_effect() -> None:
    case = _SHAPE | {"s0": 1.0, "r": 0.2, "r_g": 0.5}
    simulated, error = _simulate(150, bias=0.6, **case)
    sizes = Sizes(256, 256, 128, 0.1)
    biased, plain = (attention.backward(sizes.on_itself(0.2, 1.0, r_g=0.5, query_bias=share)) for share in (0.6, 0.0))
    _assert_close(biased, simulated[2:4], error[2:4], 0.03)
    assert plain[0] < 0.95 * simulated[2]  # the bias does matter here


def test_outputs_vary_along_their_queries() -> None:
    """Keys of eight features overlap by chance: the variance within four standard errors and 1 %, 7 % too small
    without. The covariance that this adds is left out (docs/limits.md): 8 % of it here."""
    rng, draws, r, n, d, head, s0 = np.random.default_rng(0), 1000, 1 / 3, 32, 8, 64, 2.0
    common = rng.normal(size=(draws, 1, d))
    common *= math.sqrt(d) / np.linalg.norm(common, axis=2, keepdims=True)
    x = math.sqrt(1 - r) * rng.normal(size=(draws, n, d)) + math.sqrt(r) * common
    q, k = (x @ rng.normal(size=(draws, d, head)) / math.sqrt(d) for _ in range(2))
    a = np.exp(q @ k.swapaxes(1, 2) * math.sqrt(s0 / head))
    a /= a.sum(2, keepdims=True)
    simulated = np.array([_moments(out) for out in a @ x])
    mean, error = simulated.mean(0), simulated.std(0) / math.sqrt(draws)
    variance, covariance = attention.forward(Sizes(n, n, d).on_itself(r, s0))
    assert abs(variance - mean[0]) < 4 * error[0] + 0.01 * mean[0]
    assert 0.05 < 1 - covariance / mean[1] < 0.1


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("length", [1, 2, 7, 300])
def test_uniform_weights_are_exact(length: int, p: float) -> None:
    r, r_g = 0.3, 0.6
    x = Sizes(length, length, 100, p).on_itself(r, 0.0, r_g=r_g)
    variance, covariance = attention.forward(x)
    assert variance == pytest.approx(r + (1 - r) / length / (1 - p) + r * p / (1 - p) / length)
    assert covariance == pytest.approx(min(r + (1 - r) / length, variance))
    variance, covariance = attention.backward(x)
    assert variance == pytest.approx(1 / length / (1 - p) + r_g * (length - 1) / length)
    if length > 1:
        assert covariance == pytest.approx(r_g + (1 - r_g) / length)


@pytest.mark.parametrize("length", [1, 2, 7, 300])
def test_uniform_causal_weights_are_exact(length: int) -> None:
    """Position averages of 1/i weights, summed directly; the table is interpolated over positions, hence 0.3 %."""
    i = np.arange(1, length + 1)
    m = np.tril(np.ones((length, length))) / i[:, None]
    r, r_g, p = 0.3, 0.6, 0.4
    kernel = np.full((length, length), r) + (1 - r) * np.eye(length)
    gradient = np.full((length, length), r_g) + (1 - r_g) * np.eye(length)
    out, back = m @ kernel @ m.T, m.T @ gradient @ m
    extra = p / (1 - p) * (m**2)
    off = ~np.eye(length, dtype=bool)
    x = Sizes(length, length, 100, p, causal=True).on_itself(r, 0.0, r_g=r_g)
    variance, covariance = attention.forward(x)
    assert variance == pytest.approx((out.diagonal() + extra.sum(axis=1)).mean(), rel=3e-3)
    if length > 1:
        assert covariance == pytest.approx(out[off].mean(), rel=1e-6)
    variance, covariance = attention.backward(x)
    assert variance == pytest.approx((back.diagonal() + extra.sum(axis=0)).mean(), rel=3e-3)
    if length > 1:
        assert covariance == pytest.approx(back[off].mean(), rel=3e-3)


def test_arrays_agree_with_numbers() -> None:
    r = np.array([0.0, 0.4, 1.0])[:, None]
    length, d = np.array([1.0, 50.0, 300.0, 300.0]), np.array([64.0, 64.0, 128.0, 64.0])
    variance, covariance = attention.backward(Sizes(length, length, d, 0.1, causal=True).on_itself(r, 2.0, r_g=0.3))
    assert np.shape(variance) == np.shape(covariance) == (3, 4)
    for i in range(3):
        for j in range(4):
            n = int(length[j])
            sizes = Sizes(n, n, int(d[j]), 0.1, causal=True)
            one = attention.backward(sizes.on_itself(float(r[i, 0]), 2.0, r_g=0.3))
            assert one == pytest.approx((variance[i, j], covariance[i, j]), rel=1e-12)
            assert isinstance(one[0], float)


@given(
    r=st.floats(-1, 1),
    r_g=st.floats(-1, 1),
    s0=st.one_of(st.floats(0, 1e6), st.floats(0, 10)),
    length=st.sampled_from([1, 2, 3, 17, 300, 100_000]),
    d=st.sampled_from([1, 2, 16, 1024]),
    p=st.floats(0, 0.99),
    causal=st.booleans(),
    omega=st.floats(0, 1),
    query_bias=st.floats(0, 1),
)
def test_invariants(r, r_g, s0, length, d, p, causal, omega, query_bias) -> None:  # type: ignore[no-untyped-def]
    sizes = Sizes(length, length, d, p, causal=causal, omega=omega)
    x = sizes.on_itself(r, s0, r_g=r_g, query_bias=query_bias)
    y = Sizes(2 * length, length, d, p).across(r, r_g, s0, r_g=r_g)
    for variance, covariance in (
        attention.forward(x), attention.backward(x), attention.forward(y), *attention.backward_apart(y)
    ):  # fmt: skip
        assert math.isfinite(variance) and math.isfinite(covariance)
        assert variance >= 0 and abs(covariance) <= variance * (1 + 1e-9)


@pytest.mark.parametrize(("length", "head", "fraction"), [(1, 64, 1.0), (256, 64, 1.0), (300, 64, 0.5), (50, 8, 0.0)])
def test_rotary_coherence_is_the_sum_it_replaces(length: int, head: int, fraction: float) -> None:
    rotated = round(fraction * head)
    theta = 1e4 ** (-np.arange(0, rotated, 2) / max(rotated, 1))
    waves = np.exp(1j * np.arange(length)[:, None] * theta)
    prefix = np.abs(np.cumsum(waves, axis=0) / np.arange(1, length + 1)[:, None]) ** 2
    per_row = 1 - fraction + fraction * (prefix.mean(axis=1) if rotated else 0.0)
    per_row = np.broadcast_to(per_row, (length,))
    assert attention_scores.rotary_coherence(length, head, fraction=fraction) == pytest.approx(per_row[-1])
    n = np.arange(1, length + 1)
    pairs = attention_scores.rotary_coherence(length, head, fraction=fraction, causal="pairs")
    assert pairs == pytest.approx(per_row.mean(), rel=5e-3)
    if length > 1:
        weight = (1 - 1 / n) / n
        expected = (weight * per_row).sum() / weight.sum()
        rows = attention_scores.rotary_coherence(length, head, fraction=fraction, causal="rows")
        assert rows == pytest.approx(expected, rel=5e-3)


def test_harmonic_sums() -> None:
    n = np.array([1.0, 2.0, 7.0, 100.0])
    for power, found in ((1, attention._harmonic(n, np)), (2, attention._harmonic_squares(n))):
        expected = [sum(1.0 / k**power for k in range(1, int(last) + 1)) for last in n]
        np.testing.assert_allclose(found, expected, rtol=2e-10)


@pytest.mark.parametrize("tokens", [2, 5])
def test_so_many_tokens_are_not_less_correlated_than_possible(tokens: int) -> None:
    """n vectors whose sum vanishes have correlations of -1 / (n - 1)."""
    assert Sizes(tokens, tokens, 64).least == pytest.approx(-1 / (tokens - 1))


@pytest.mark.parametrize("case", [{"r_g": 0.0, "p": 0.5}, {"r_g": 0.6, "p": 0.0}])
def test_gradients_of_few_features(case) -> None:  # type: ignore[no-untyped-def]
    """24 features and tokens: that scores of heads differ in size is left out, 5 % of the gradient (records/terms.md).
    Through the queries within 1.5 % of the variance beside three standard errors; without the tilt of what scores send
    back 5 % more is missing."""
    shape = {"r": 0.2, "s0": 1.0, "n_keys": 24, "d": 24, "head": 64, **case}
    simulated, error = _simulate(1500, **shape)
    x = Sizes(24, 24, 24, case["p"]).on_itself(0.2, 1.0, r_g=case["r_g"])
    predicted = np.array([*attention.backward(x), *attention.backward_apart(x)[0]])
    size = np.repeat(simulated[2::2], 2)
    predicted[0] += 0.05 * size[0]
    assert (np.abs(predicted - simulated[2:]) < 0.015 * size + 3 * error[2:]).all()
