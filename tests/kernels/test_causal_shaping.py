"""Signal-preserving attention matrices against NumPy's Cholesky factors; docs/papers/without-shortcuts.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.linalg import solve_triangular
from scipy.special import softmax

from signalprop.kernels.causal_shaping import (
    ESPA,
    USPA,
    ALiBi,
    AttentionShape,
    alibi_slopes,
    exponential_kernel,
    uniform_kernel,
)
from signalprop.kernels.schedules import decay_schedule

EXACT = 1e-10
LENGTHS = st.integers(1, 80)
RHOS = st.floats(0, 0.99)
REPEATS = st.sampled_from([0.0, 0.008, 0.05, 0.5])
# gamma from 0.005, the paper's smallest; infinite: independent tokens
GAMMAS = st.just(math.inf) | st.floats(math.log(0.005), math.log(5)).map(math.exp)


def decay_of(gamma: float) -> float:
    return math.exp(-gamma)


def quotient(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """L' L^-1 by dense factors."""
    return solve_triangular(np.linalg.cholesky(before), np.linalg.cholesky(after).T, lower=True, trans="T").T


def dense_espa(gamma: float, gamma_out: float, repeats: float, n: int) -> np.ndarray:
    """SPA's construction for E-SPA, with the repeated-token factors of its appendix B, from dense matrices only."""

    def kernel(g: float) -> np.ndarray:
        lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
        return np.eye(n) if math.isinf(g) else np.exp(-g * lag)

    def diagonal(g: float) -> np.ndarray:
        factor = np.linalg.cholesky(kernel(g))
        return np.diagonal(factor @ ((1 - repeats) * np.eye(n) + repeats) @ factor.T)

    a = quotient(kernel(gamma_out), kernel(gamma))
    return a * np.sqrt(np.outer(1 / diagonal(gamma_out), diagonal(gamma)))


def espa_stack(n_blocks: int, gamma: float = 0.005, repeats: float = 0.0, rule: str = "diagonal") -> list[ESPA]:
    decays = decay_schedule(n_blocks, gamma, rule)
    return [ESPA(before, after, repeats=repeats) for before, after in pairwise(decays)]


def ordered(draw: Callable[..., float], values: st.SearchStrategy[float]) -> tuple[float, float]:
    low, high = sorted((draw(values), draw(values)))
    return low, high


@st.composite
def espa_pairs(draw: Callable[..., float]) -> tuple[float, float]:
    """(gamma before, gamma after), falling."""
    low, high = ordered(draw, GAMMAS)
    assume(math.isfinite(low))
    return high, low


@st.composite
def shapes(draw: Callable[..., float]) -> AttentionShape:
    """Any family."""
    before, after = draw(espa_pairs())  # type: ignore[arg-type, misc]
    rho, rho_out = ordered(draw, RHOS)
    shape: AttentionShape = draw(  # type: ignore[assignment]
        st.sampled_from(
            [
                ESPA(decay_of(before), decay_of(after), repeats=draw(REPEATS)),
                ESPA(-0.3, decay_of(after), gain=0.6),
                USPA(rho, rho_out),
                ALiBi(decay_of(after)),
            ]  # type: ignore[arg-type]
        )
    )
    return shape


# --- closed forms --------------------------------------------------------------------------------------------------


@given(pair=espa_pairs(), repeats=REPEATS, n=st.integers(1, 512))
def test_espa_is_a_quotient_of_cholesky_factors(pair: tuple[float, float], repeats: float, n: int) -> None:
    found = ESPA(*map(decay_of, pair), repeats=repeats).matrix(n)
    np.testing.assert_allclose(found, dense_espa(*pair, repeats, n), atol=EXACT)


@given(pair=st.tuples(RHOS, RHOS).map(sorted), n=st.integers(1, 512))
def test_uspa_is_a_quotient_of_cholesky_factors(pair: list[float], n: int) -> None:
    rho, rho_out = pair
    expected = quotient(uniform_kernel(rho_out, n), uniform_kernel(rho, n))
    np.testing.assert_allclose(USPA(rho, rho_out).matrix(n), expected, atol=EXACT)


# --- whole schedules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_blocks", [36, 100])
@pytest.mark.parametrize("repeats", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("rule", ["diagonal", "tanh"])
def test_espa_telescopes(n_blocks: int, repeats: float, rule: str) -> None:
    """The product of all matrices is Dbar^-1/2 L_L, and no block leaves the diagonal of the average kernel."""
    n, product, kernel = 128, np.eye(128), uniform_kernel(repeats, 128)
    for shape in espa_stack(n_blocks, repeats=repeats, rule=rule):
        product, kernel = shape.apply(product), shape.step(kernel)
        np.testing.assert_allclose(np.diagonal(kernel), 1, atol=EXACT)
    factor = np.linalg.cholesky(exponential_kernel(decay_of(0.005), n))
    scale = np.diagonal(factor @ uniform_kernel(repeats, n) @ factor.T) ** -0.5
    np.testing.assert_allclose(product, scale[:, None] * factor, atol=EXACT)


# --- products, B and D ---------------------------------------------------------------------------------------------


@given(shape=shapes(), n=LENGTHS, columns=st.integers(1, 3), seed=st.integers(0, 100))
def test_fast_products_rows_and_softmax(shape: AttentionShape, n: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, n, columns))
    a = shape.matrix(n)
    np.testing.assert_allclose(shape.apply(x), a @ x, atol=EXACT)
    np.testing.assert_allclose(shape.apply_transposed(x), a.T @ x, atol=EXACT)
    np.testing.assert_allclose((shape.apply(x) * y).sum(), (x * shape.apply_transposed(y)).sum(), atol=1e-9)
    np.testing.assert_allclose(shape.rescale(n), a.sum(1), rtol=EXACT)
    np.testing.assert_allclose(shape.rescale(n)[:, None] * softmax(shape.log_weights(n), axis=1), a, atol=EXACT)
    assert (a >= 0).all()
    assert (a == np.tril(a)).all()
    assert (shape.log_weights(n)[np.triu_indices(n, 1)] == -math.inf).all()
    kernel = x @ x.T
    np.testing.assert_allclose(shape.step(kernel), a @ kernel @ a.T, atol=1e-9)
    np.testing.assert_allclose(shape.step_back(kernel), a.T @ kernel @ a, atol=1e-9)


# --- logarithms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_blocks", "lowest", "shares"),
    [
        pytest.param(36, -4338, {1: 0.95, 2: 0.93, 18: 0.29, 36: 0.0}, marks=pytest.mark.slow),
        pytest.param(108, -6501, {1: 0.97, 2: 0.96, 54: 0.30, 108: 0.0}, marks=pytest.mark.slow),
    ],
)
def test_bias_is_finite_where_weights_underflow(n_blocks: int, lowest: float, shares: dict[int, float]) -> None:
    """4,096 tokens, gamma_L = 0.005; the shares are of entries that float32 holds as 0."""
    n = 4096
    stack, seen = espa_stack(n_blocks), np.tri(n, dtype=bool)
    for block, share in shares.items():
        bias = stack[block - 1].log_weights(n)[seen].astype(np.float32)
        assert np.isfinite(bias).all()
        assert (np.exp(bias) == 0).mean() == pytest.approx(share, abs=0.01)
        if block == 1:
            assert bias.min() == pytest.approx(lowest, abs=0.5)


def test_bias_matches_multiple_precision() -> None:
    """Entries of all sizes against 60 digits: theorem 3 from gamma itself."""
    mpmath = pytest.importorskip("mpmath")
    stack, n = espa_stack(36), 600
    with mpmath.workdps(60):
        one = mpmath.mpf(1)
        for block in (1, 2, 18, 36):
            shape = stack[block - 1]
            r, s = mpmath.mpf(float(shape.zero)), mpmath.mpf(float(shape.pole))
            lam = mpmath.sqrt((one - s**2) / (one - r**2))
            bias = shape.log_weights(n)
            for i, j in ((1, 0), (599, 0), (1, 1), (2, 1), (599, 1), (599, 300), (599, 598), (599, 599)):
                if i == j:
                    exact = mpmath.log(lam)
                else:
                    step = s - lam * r if j == 0 else lam * (s - r)
                    exact = mpmath.log(step) + (i - j - 1) * mpmath.log(s)
                assert bias[i, j] == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


# --- ALiBi ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # imports transformers
def test_alibi_slopes_are_those_of_bloom() -> None:
    import torch
    from transformers.models.bloom import modeling_bloom as bloom

    for n_heads in (1, 2, 8, 12, 16, 25, 112):
        bias = bloom.build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), n_heads, torch.float32)
        np.testing.assert_allclose(alibi_slopes(n_heads), bias[:, 0, 1].numpy(), rtol=1e-6)


# --- printed numbers -----------------------------------------------------------------------------------------------


def test_what_the_paper_prints_otherwise() -> None:
    """Errata of docs/papers/without-shortcuts.md that are numbers."""
    # footnote 7: the bound |a_i|^2 on (A K A^T)_ii needs K = I
    a, kernel = np.full(8, 1 / 8), uniform_kernel(0.9, 8)
    assert a @ kernel @ a == pytest.approx(0.9125) and a @ a == pytest.approx(0.125)

    # lemma 4: f_n is positive, and its numerator is 2 x p_n(y)^2 + y^2 p_{n-1}(x)
    def p(n: int, x: float) -> float:
        return 1 + n * x

    def d(n: int, x: float) -> float:
        return (1 - x) * p(n, x) / p(n - 1, x)

    def r(n: int, x: float) -> float:
        return math.sqrt(d(n, x) * p(n - 1, x))

    def f(n: int, x: float, y: float) -> float:
        own, next_one = math.sqrt(d(n, y) / d(n, x)), math.sqrt(d(n + 1, y) / d(n + 1, x))
        return x * y * (1 - y) / (r(n, x) * r(n, y)) + next_one * x / p(n, x) - own * x / p(n - 1, x)

    grid = np.linspace(0.05, 0.95, 10)
    assert min(f(n, x, y) for n in range(1, 30) for x in grid for y in grid if x < y) > 0
    n, x, y = 4, 0.2, 0.6
    left = p(n, y) ** 2 * p(n + 1, x) - p(n + 1, y) * p(n - 1, y) * p(n - 1, x)
    assert left == pytest.approx(2 * x * p(n, y) ** 2 + y**2 * p(n - 1, x))
    assert left == pytest.approx(5.20, abs=0.005)
    assert y**2 * p(n, x) + x * y**2 == pytest.approx(0.72, abs=0.005)
