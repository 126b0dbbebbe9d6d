"""Signal-preserving attention matrices against NumPy's Cholesky factors; the numbers of docs/theory/shaping.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.linalg import expm, solve_triangular
from scipy.special import softmax

from signalprop.errors import InputError
from signalprop.kernels import dense_shaping
from signalprop.kernels.dense_shaping import (
    ALiBi,
    BidirectionalESPA,
    BidirectionalUSPA,
    Calibrated,
    CorrectedESPA,
    alibi_slopes,
)
from signalprop.kernels.schedules import decay_schedule, rho_schedule
from signalprop.kernels.shaping import (
    ESPA,
    USPA,
    AttentionShape,
    decay_of,
    exponential_kernel,
    gamma_of,
    gradient_step,
    kernel_step,
    repeated_diagonal,
    uniform_kernel,
)
from signalprop.kernels.transforms import dks, tat
from signalprop.network.duals import dual

EXACT = 1e-10
LENGTHS = st.integers(1, 80)
RHOS = st.floats(0, 0.99)
REPEATS = st.sampled_from([0.0, 0.008, 0.05, 0.5])
# gamma from 0.005, the paper's smallest; infinite: independent tokens
GAMMAS = st.just(math.inf) | st.floats(math.log(0.005), math.log(5)).map(math.exp)


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


def uspa_stack(n_blocks: int, last: float = 0.8, first: float = 0.0) -> list[USPA]:
    rhos = rho_schedule(n_blocks, last, first)
    return [USPA(before, after) for before, after in pairwise(rhos)]


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
    """Any family, with its rows calibrated or not."""
    before, after = draw(espa_pairs())  # type: ignore[arg-type, misc]
    rho, rho_out = ordered(draw, RHOS)
    shape: AttentionShape = draw(  # type: ignore[assignment]
        st.sampled_from(
            [
                ESPA.between(before, after, draw(REPEATS)),
                ESPA(-0.3, decay_of(after), gain=0.6),
                USPA(rho, rho_out),
                BidirectionalUSPA(rho, rho_out),
                BidirectionalESPA(decay_of(max(before, 0.05)), decay_of(max(after, 0.05))),
                ALiBi(decay_of(after)),
                CorrectedESPA(
                    decay_of(max(before, 0.05)),
                    decay_of(min(max(after, 0.05), 0.9 * max(before, 0.05))),
                    dks("gelu", 36),
                ),
            ]  # type: ignore[arg-type]
        )
    )
    if draw(st.booleans()) and shape.causal:  # type: ignore[arg-type]
        return Calibrated(shape, 0.5 + np.cos(np.arange(100.0)) ** 2)
    return shape


# --- closed forms --------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(pair=espa_pairs(), repeats=REPEATS, n=st.integers(1, 512))
def test_espa_is_a_quotient_of_cholesky_factors(pair: tuple[float, float], repeats: float, n: int) -> None:
    found = ESPA.between(*pair, repeats).matrix(n)
    np.testing.assert_allclose(found, dense_espa(*pair, repeats, n), atol=EXACT)


@settings(max_examples=50, deadline=None)
@given(pair=st.tuples(RHOS, RHOS).map(sorted), n=st.integers(1, 512))
def test_uspa_is_a_quotient_of_cholesky_factors(pair: list[float], n: int) -> None:
    rho, rho_out = pair
    expected = quotient(uniform_kernel(rho_out, n), uniform_kernel(rho, n))
    np.testing.assert_allclose(USPA(rho, rho_out).matrix(n), expected, atol=EXACT)


@pytest.mark.parametrize(("before", "after"), [(math.inf, 1.06), (math.inf, 0.005), (0.3, 0.25), (0.0057, 0.005)])
@pytest.mark.parametrize("repeats", [0.0, 0.05])
def test_closed_forms_at_512_tokens(before: float, after: float, repeats: float) -> None:
    found = ESPA.between(before, after, repeats).matrix(512)
    np.testing.assert_allclose(found, dense_espa(before, after, repeats, 512), atol=EXACT)
    rho, rho_out = 0.8 * math.exp(-before), 0.8 * math.exp(-after)
    expected = quotient(uniform_kernel(rho_out, 512), uniform_kernel(rho, 512))
    np.testing.assert_allclose(USPA(rho, rho_out).matrix(512), expected, atol=EXACT)


@settings(max_examples=80, deadline=None)
@given(gammas=st.tuples(GAMMAS, GAMMAS), rhos=st.tuples(RHOS, RHOS), n=st.integers(3, 40))
def test_weights_are_positive_exactly_when_the_kernel_grows(
    gammas: tuple[float, float], rhos: tuple[float, float], n: int
) -> None:
    """SPA theorems 1 and 2, and their converses; the classes refuse the other direction in one line."""
    before, after = gammas
    assume(math.isfinite(after) and abs(before - after) > 1e-3 * after)
    lowest = dense_espa(before, after, 0.0, n).min()
    if after < before:
        assert lowest > -1e-12
        assert ESPA.between(before, after).matrix(n).min() >= 0
    else:
        assert lowest < -1e-12
        with pytest.raises(InputError, match="decays have to fall with depth") as caught:
            ESPA.between(before, after)
        assert "\n" not in str(caught.value)
    rho, rho_out = rhos
    assume(abs(rho - rho_out) > 1e-3)
    lowest = quotient(uniform_kernel(rho_out, n), uniform_kernel(rho, n)).min()
    if rho_out > rho:
        assert lowest > -1e-12
        assert USPA(rho, rho_out).matrix(n).min() >= 0
    else:
        assert lowest < -1e-12
        for family in (USPA, BidirectionalUSPA):
            with pytest.raises(InputError, match="rho has to grow with depth") as caught:
                family(rho, rho_out)
            assert "\n" not in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(rho=st.floats(0.001, 0.95), n=st.integers(2, 60))
def test_the_generator_of_uspa(rho: float, n: int) -> None:
    """dL/drho = G L with G lower triangular and not negative off its diagonal: theorem 1 in one line."""
    p = 1 + (np.arange(n + 1) - 1) * rho  # p_{i-2}, p_{i-1}
    q = 1 / (p[:-1] * p[1:])
    g = np.tril(np.add.outer(q, q) / 2, -1) + np.diag(q - 1 / (1 - rho)) / 2
    sigma = uniform_kernel(rho, n)
    np.testing.assert_allclose(g @ sigma + sigma @ g.T, 1 - np.eye(n), atol=EXACT)
    h = 1e-5 * (1 - rho) * rho
    slope = (np.linalg.cholesky(uniform_kernel(rho + h, n)) - np.linalg.cholesky(uniform_kernel(rho - h, n))) / (2 * h)
    np.testing.assert_allclose(slope, g @ np.linalg.cholesky(sigma), atol=1e-5 / (1 - rho) ** 2)
    # one short step of A is the exponential of G
    step = USPA(rho - h, rho + h).matrix(n)
    np.testing.assert_allclose(step, expm(2 * h * g), atol=1e-8)


def test_uspa_repeats_its_own_schedule_backwards_with_negative_weights() -> None:
    assert quotient(uniform_kernel(0.3, 20), uniform_kernel(0.5, 20)).min() == pytest.approx(-0.25, abs=0.005)


# --- whole schedules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_blocks", [36, 100])
@pytest.mark.parametrize("repeats", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("rule", ["diagonal", "tanh"])
def test_espa_telescopes(n_blocks: int, repeats: float, rule: str) -> None:
    """The product of all matrices is Dbar^-1/2 L_L, and no block leaves the diagonal of the average kernel."""
    n, product, kernel = 128, np.eye(128), uniform_kernel(repeats, 128)
    for shape in espa_stack(n_blocks, repeats=repeats, rule=rule):
        product, kernel = shape.apply(product), kernel_step(shape, kernel)
        np.testing.assert_allclose(np.diagonal(kernel), 1, atol=EXACT)
    factor = np.linalg.cholesky(exponential_kernel(decay_of(0.005), n))
    scale = np.diagonal(factor @ uniform_kernel(repeats, n) @ factor.T) ** -0.5
    np.testing.assert_allclose(product, scale[:, None] * factor, atol=EXACT)


@pytest.mark.parametrize("n_blocks", [36, 100])
@pytest.mark.parametrize("repeats", [0.0, 0.02, 0.05])
def test_uspa_telescopes(n_blocks: int, repeats: float) -> None:
    n, product, kernel = 128, np.eye(128), uniform_kernel(repeats, 128)
    for shape in uspa_stack(n_blocks, first=repeats):
        product, kernel = shape.apply(product), kernel_step(shape, kernel)
        np.testing.assert_allclose(np.diagonal(kernel), 1, atol=EXACT)
        np.testing.assert_allclose(kernel, uniform_kernel(shape.rho_out, n), atol=EXACT)
    np.testing.assert_allclose(product, quotient(uniform_kernel(0.8, n), uniform_kernel(repeats, n)), atol=EXACT)


def test_schedules_at_512_tokens() -> None:
    for stack, target in (
        (espa_stack(36), exponential_kernel(decay_of(0.005), 512)),
        (uspa_stack(36), uniform_kernel(0.8, 512)),
    ):
        kernel = np.eye(512)
        for shape in stack:
            kernel = kernel_step(shape, kernel)
        np.testing.assert_allclose(kernel, target, atol=EXACT)


def test_repeated_tokens_in_closed_form() -> None:
    """Dbar of SPA's appendix B against diag(L Sigma_0 L^T); numbers of the docs."""
    for gamma, repeats, wanted in (
        (0.02, 0.05, (1, 1.019410, 3.142746, 4.784708)),
        (0.005, 0.02, (1, 1.003970, 1.506055, 2.397309)),
    ):
        found = repeated_diagonal(decay_of(gamma), repeats, 100)
        np.testing.assert_allclose(found[[0, 1, 49, 99]], wanted, atol=5e-7)
        factor = np.linalg.cholesky(exponential_kernel(decay_of(gamma), 100))
        dense = np.diagonal(factor @ uniform_kernel(repeats, 100) @ factor.T)
        np.testing.assert_allclose(found, dense, rtol=EXACT)


# --- products, B and D ---------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
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
    if shape.causal:
        assert (a == np.tril(a)).all()
        assert (shape.log_weights(n)[np.triu_indices(n, 1)] == -math.inf).all()
    kernel = x @ x.T
    np.testing.assert_allclose(kernel_step(shape, kernel), a @ kernel @ a.T, atol=1e-9)
    np.testing.assert_allclose(gradient_step(shape, kernel), a.T @ kernel @ a, atol=1e-9)


@settings(max_examples=80, deadline=None)
@given(shape=shapes(), n=LENGTHS, longer=st.integers(0, 19))
def test_causal_rows_do_not_depend_on_the_length(shape: AttentionShape, n: int, longer: int) -> None:
    assume(shape.causal)
    np.testing.assert_allclose(shape.matrix(n + longer)[:n, :n], shape.matrix(n), atol=EXACT)
    np.testing.assert_allclose(shape.rescale(n + longer)[:n], shape.rescale(n), atol=EXACT)
    near = np.tril_indices(min(n, 10))
    np.testing.assert_allclose(shape.log_weights(n + longer)[near], shape.log_weights(n)[near], atol=1e-8)


def test_products_at_512_tokens() -> None:
    x = np.random.default_rng(0).normal(size=(512, 4))
    for shape in (*espa_stack(36, repeats=0.02)[::7], *uspa_stack(36)[::7], *ALiBi.heads(8)):
        a = shape.matrix(512)
        np.testing.assert_allclose(shape.apply(x), a @ x, atol=EXACT)
        np.testing.assert_allclose(shape.apply_transposed(x), a.T @ x, atol=EXACT)
        np.testing.assert_allclose(shape.rescale(512), a.sum(1), rtol=EXACT)


# --- logarithms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_blocks", "lowest", "shares"),
    [
        (36, -4338, {1: 0.95}),
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


def test_uspa_is_positive_at_4096_tokens() -> None:
    stack, n = uspa_stack(36), 4096
    lowest = []
    for block in (1, 2, 18, 36):
        diagonal, u, w = stack[block - 1].terms(n)
        assert (diagonal > 0).all()
        least = np.minimum.accumulate(u)[:-1] - w[1:]  # row i: min_j<i u_j - w_i
        assert (least > 0).all()
        lowest.append(least.min())
    assert min(lowest) == pytest.approx(2e-9, rel=0.3)
    assert np.isfinite(stack[35].log_weights(n)[np.tri(n, dtype=bool)]).all()


# --- without a mask ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 20, 100, 200])
def test_without_a_mask_symmetric_roots_telescope(n: int) -> None:
    decays, rhos = decay_schedule(12, 0.005), rho_schedule(12, 0.8)
    roots = []
    for decay in decays:
        values, vectors = np.linalg.eigh(exponential_kernel(decay, n))
        roots.append((vectors * np.sqrt(values)) @ vectors.T)
    for before, after in pairwise(roots):
        assert (after @ np.linalg.inv(before)).min() > -1e-14
    for families, target in (
        ([BidirectionalESPA(*pair) for pair in pairwise(decays)], exponential_kernel),
        ([BidirectionalUSPA(*pair) for pair in pairwise(rhos)], uniform_kernel),
    ):
        kernel, product = np.eye(n), np.eye(n)
        for shape in families:
            a = shape.matrix(n)
            assert a.min() >= 0
            if isinstance(shape, BidirectionalUSPA):  # both roots are functions of 1 1^T; those of E-SPA do not commute
                np.testing.assert_allclose(a, a.T, atol=EXACT)
            kernel, product = a @ kernel @ a.T, a @ product
            last = shape
        wanted = target(getattr(last, "pole", 0) or getattr(last, "rho_out", 0), n)
        np.testing.assert_allclose(kernel, wanted, atol=EXACT)
        values, vectors = np.linalg.eigh(wanted)
        np.testing.assert_allclose(product, (vectors * np.sqrt(values)) @ vectors.T, atol=EXACT)
        rows = last.rescale(n)
        np.testing.assert_allclose(rows, last.matrix(n).sum(1), rtol=EXACT)
        if isinstance(last, BidirectionalUSPA):
            assert np.ptp(rows) < 1e-15


# --- corrected for feed-forwards -----------------------------------------------------------------------------------


def after_activation(name: str, kernel: np.ndarray) -> np.ndarray:
    """Q(K) / Q(1)."""
    return np.asarray(dual(name, 1.0, kernel).covariance_moment) / float(dual(name, 1.0, 1.0).covariance_moment)


@pytest.mark.parametrize("n_layers", [12, 36])
def test_corrected_espa_meets_its_target_behind_dks(n_layers: int) -> None:
    """256 tokens: kernel through attention and activation in turn; no weight is negative in any block."""
    name, decays, kernel = dks("gelu", n_layers), decay_schedule(n_layers, 0.005), np.eye(256)
    for block in range(1, n_layers + 1):
        before, after = decays[block - 1 : block + 1]
        if block == 1:
            kernel = kernel_step(ESPA(before, after), kernel)
        else:
            behind = after_activation(name, kernel)
            shape = CorrectedESPA(before, after, name)
            assert shape.matrix(256).min() >= 0
            assert quotient(exponential_kernel(after, 256), behind).min() > -1e-12
            kernel = kernel_step(shape, behind)
        np.testing.assert_allclose(kernel, exponential_kernel(after, 256), atol=EXACT)


def test_dense_matrices_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, also in turn; the least recently used one goes first; one beyond the bound is kept until the next."""
    made: list[tuple[float, int]] = []
    kept = dense_shaping._Kept()

    def corrected(zero: float, pole: float, activation: str, n: int) -> np.ndarray:
        made.append((zero, n))
        return np.eye(n)

    monkeypatch.setattr(dense_shaping, "_KEPT", kept)
    monkeypatch.setattr(dense_shaping, "_corrected", corrected)
    monkeypatch.setattr(dense_shaping, "_MOST_KEPT", 250)

    def ask(zero: float, n: int) -> list[tuple[float, int]]:
        made.clear()
        CorrectedESPA(zero, 0.9, "gelu").matrix(n)
        return list(made)

    assert ask(0.1, 10) and ask(0.2, 10)
    assert not ask(0.1, 10) and not ask(0.2, 10) and not ask(0.1, 10)
    assert ask(0.3, 10)  # 300 numbers: that of 0.2 goes
    assert not ask(0.1, 10) and not ask(0.3, 10) and ask(0.2, 10)
    assert ask(0.5, 40) and not ask(0.5, 40) and ask(0.1, 10) and ask(0.5, 40)


def test_without_a_step_in_gamma_dks_too_is_negative_by_a_little() -> None:
    decay = 0.6922
    lowest = quotient(exponential_kernel(decay, 24), after_activation(dks("gelu", 36), exponential_kernel(decay, 24)))
    assert -1e-7 < np.tril(lowest).min() < -1e-9
    with pytest.raises(InputError, match="a softmax gives none below 0"):
        CorrectedESPA(decay, decay, dks("gelu", 36)).matrix(24)


@pytest.mark.parametrize("gamma", [0.005, 0.2, 1.0])
@pytest.mark.parametrize("rule", ["diagonal", "tanh"])
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh"])
def test_dks_can_be_corrected_over_whole_schedules(activation: str, rule: str, gamma: float) -> None:
    name = dks(activation, 12)
    for before, after in pairwise(decay_schedule(12, gamma, rule)[1:]):
        behind = after_activation(name, exponential_kernel(before, 100))
        assert np.tril(quotient(exponential_kernel(after, 100), behind)).min() > -1e-12


def test_a_longer_sequence_can_be_what_forbids_the_correction() -> None:
    """Rows do not depend on the length, so negative weights of late rows come with it."""
    decays = decay_schedule(36, 0.005)
    refused = []
    for n in (64, 256):
        count = 0
        for before, after in pairwise(decays[1:]):
            try:
                CorrectedESPA(before, after, "gelu").matrix(n)
            except InputError:
                count += 1
        refused.append(count)
    assert 0 < refused[0] < refused[1] == 35


@pytest.mark.parametrize(("name", "lowest"), [("relu", -0.23), ("gelu", -0.13), ("tat", -0.085)])
def test_other_activations_cannot_be_corrected(name: str, lowest: float) -> None:
    name = tat(36) if name == "tat" else name
    decays, found = decay_schedule(36, 0.005), []
    for before, after in pairwise(decays[1:]):
        behind = after_activation(name, exponential_kernel(before, 256))
        found.append(np.tril(quotient(exponential_kernel(after, 256), behind)).min())
        with pytest.raises(InputError, match="a softmax gives none below 0") as caught:
            CorrectedESPA(before, after, name).matrix(256)
        assert "\n" not in str(caught.value)
    assert min(found) == pytest.approx(lowest, abs=0.005)
    assert max(found) < 0


def test_uspa_is_corrected_exactly() -> None:
    """Q maps a uniform kernel to a uniform one, so rho before attention is C(rho) and nothing else changes."""
    name, rhos, kernel = dks("gelu", 36), rho_schedule(36, 0.8), np.eye(128)
    for block in range(1, 37):
        behind = kernel if block == 1 else after_activation(name, kernel)
        kernel = kernel_step(USPA(float(behind[1, 0]), rhos[block]), behind)
        np.testing.assert_allclose(kernel, uniform_kernel(rhos[block], 128), atol=EXACT)


@pytest.mark.parametrize(("name", "least"), [("relu", 0.978), ("tat", 0.896), ("gelu", 0.744)])
def test_least_rho_that_feed_forwards_leave_to_a_corrected_uspa(name: str, least: float) -> None:
    """After the 36th attention; the feed-forward behind it adds 0.001, 0.004 and 0.001."""
    name, c = tat(36) if name == "tat" else name, 0.0
    for _ in range(35):
        c = float(after_activation(name, np.array(min(c, 1.0))))
    assert c == pytest.approx(least, abs=6e-4)


# --- calibrated ----------------------------------------------------------------------------------------------------


def test_calibration_changes_rows_and_not_the_bias() -> None:
    shape, rows = ESPA.between(0.3, 0.25), np.linspace(0.5, 2, 40)
    made = Calibrated(shape, rows)
    np.testing.assert_allclose(made.matrix(30), rows[:30, None] * shape.matrix(30))
    np.testing.assert_array_equal(made.log_weights(30), shape.log_weights(30))
    np.testing.assert_allclose(made.rescale(30), rows[:30] * shape.rescale(30))
    with pytest.raises(InputError, match="calibrated for 40 tokens, not for 41"):
        made.matrix(41)
    with pytest.raises(InputError, match="calibrated for 40 tokens, not for 30"):
        Calibrated(BidirectionalUSPA(0.1, 0.2), rows).apply(np.ones((30, 1)))


# --- ALiBi ---------------------------------------------------------------------------------------------------------


def test_alibi_rows() -> None:
    found = [head.matrix(100)[-1, -1] for head in ALiBi.heads(8)]
    np.testing.assert_allclose(found, [0.393, 0.221, 0.118, 0.061, 0.032, 0.020, 0.014, 0.012], atol=5e-4)
    for head, slope in zip(ALiBi.heads(8), alibi_slopes(8), strict=True):
        lag = np.subtract.outer(np.arange(50), np.arange(50))
        explicit = softmax(np.where(lag >= 0, -slope * lag, -np.inf), axis=1)
        np.testing.assert_allclose(head.matrix(50), explicit, atol=1e-13)


def test_alibi_slopes() -> None:
    """Powers of two are geometric; others take every other slope of the next power, as BLOOM's and MPT's code does."""
    assert alibi_slopes(1) == (2.0**-8,)
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-h for h in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [2.0 ** (-h / 2) for h in range(1, 17)])
    for n_heads, power in ((3, 2), (6, 4), (12, 8), (20, 16), (71, 64)):
        wanted = (*alibi_slopes(power), *alibi_slopes(2 * power)[::2][: n_heads - power])
        np.testing.assert_allclose(alibi_slopes(n_heads), wanted)


@pytest.mark.slow  # imports transformers
def test_alibi_slopes_are_those_of_bloom() -> None:
    import torch
    from transformers.models.bloom import modeling_bloom as bloom

    for n_heads in (1, 2, 8, 12, 16, 25, 112):
        bias = bloom.build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), n_heads, torch.float32)
        np.testing.assert_allclose(alibi_slopes(n_heads), bias[:, 0, 1].numpy(), rtol=1e-6)


# --- gradients -----------------------------------------------------------------------------------------------------


def backward(stack: list[ESPA] | list[USPA], gradient: np.ndarray) -> list[np.ndarray]:
    """Gradient kernels at block 0, 1, .. L."""
    out = [gradient]
    for shape in reversed(stack):
        out.append(gradient_step(shape, out[-1]))
    return out[::-1]


WHITE = {
    0: (1.000, 99.9, 0.923, 0.0100),
    9: (0.245, 72.9, 0.114, 0.0315),
    18: (0.213, 49.3, 0.119, 0.0998),
    27: (0.358, 20.5, 0.319, 0.316),
    35: (0.881, 1.39, 0.880, 0.880),
}


def test_gradients_of_espa_are_uneven() -> None:
    """36 blocks, gamma_L = 0.005, 512 tokens, white gradients at the top: mean, first, middle, last position."""
    n, stack = 512, espa_stack(36)
    kernels, s = backward(stack, np.eye(n)), decay_of(0.005)
    for block, wanted in WHITE.items():
        own = np.diagonal(kernels[block])
        np.testing.assert_allclose([own.mean(), own[0], own[n // 2], own[-1]], wanted, rtol=0.006)
        # closed form: columns of L_L L_l^-1
        r = stack[block].zero
        gain, rest = math.sqrt((1 - s * s) / (1 - r * r)), n - np.arange(1, n + 1)
        later = gain**2 * (1 + (s - r) ** 2 * -np.expm1(2 * rest * math.log(s)) / (1 - s * s))
        np.testing.assert_allclose(own[1:], later[1:], rtol=1e-9)
        first = 1 + (s - gain * r) ** 2 * -math.expm1(2 * (n - 1) * math.log(s)) / (1 - s * s)
        assert own[0] == pytest.approx(first, rel=1e-9)
        bulk = (1 - 2 * s * r + r * r) / (1 - r * r)
        assert later[0] == pytest.approx(bulk, rel=0.01)
        assert own[-1] == pytest.approx(gain**2, rel=1e-9)
    np.testing.assert_allclose(np.trace(kernels[0]), n)  # what a unit diagonal implies
    assert kernels[0][0, 0] == pytest.approx(-math.expm1(-0.01 * n) / -math.expm1(-0.01), rel=1e-9)


@pytest.mark.parametrize(("c", "wanted"), [(0.1, (26.5, 6.9, 4.0, 1.85)), (1.0, (256, 67, 38, 15))])
def test_correlated_gradients_are_amplified(c: float, wanted: tuple[float, ...]) -> None:
    kernels = backward(espa_stack(36), uniform_kernel(c, 512))
    found = [np.diagonal(kernels[block]).mean() for block in (0, 9, 18, 27)]
    np.testing.assert_allclose(found, wanted, rtol=0.02)


def test_gradients_of_uspa_go_to_the_first_tokens() -> None:
    own = np.diagonal(backward(uspa_stack(36), np.eye(512))[0])
    assert own[0] == pytest.approx(1 + 511 * 0.8**2, rel=1e-12)  # 328.04
    np.testing.assert_allclose(own[[1, 2, 5]], [36.6, 14.2, 3.32], rtol=0.002)
    assert own[-1] == pytest.approx(0.2004, abs=5e-5) and np.median(own) == pytest.approx(0.2016, abs=5e-5)
    np.testing.assert_allclose(own.sum(), 512)


def test_unit_diagonal_means_conserved_gradient_energy() -> None:
    """tr A^T A = tr A A^T, from Sigma_0 = I: for every prefix of the stack."""
    product = np.eye(200)
    for shape in espa_stack(12):
        product = shape.apply(product)
        assert (product**2).sum() == pytest.approx(200)


# --- D -------------------------------------------------------------------------------------------------------------


def test_row_sums() -> None:
    stack = espa_stack(36)
    far = [shape.rescale(4096)[-1] for shape in (stack[0], stack[-1])]
    np.testing.assert_allclose(far, [1.436, 1.0665], atol=4e-4)
    limits = [
        math.sqrt(math.tanh(gamma_of(shape.zero) / 2) / math.tanh(gamma_of(shape.pole) / 2)) if shape.zero else
        math.sqrt(1 / math.tanh(gamma_of(shape.pole) / 2))
        for shape in stack
    ]  # fmt: skip
    assert math.prod(limits) == pytest.approx(1 / math.sqrt(math.tanh(0.0025)))  # 20.0
    for shape, limit in zip(stack, limits, strict=True):
        i = np.arange(300)
        np.testing.assert_allclose(shape.rescale(300), limit - (limit - 1) * shape.pole**i, rtol=EXACT)
    own = [shape.diagonal / limit for shape, limit in ((stack[0], limits[0]), (stack[-1], limits[-1]))]
    np.testing.assert_allclose(own, [0.653, 0.879], atol=6e-4)  # a token's weight on itself, far from the start


def bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(("n_blocks", "excess"), [(36, 0.06), pytest.param(108, 0.13, marks=pytest.mark.slow)])
def test_rounding_row_sums_to_bfloat16_makes_the_stream_grow(n_blocks: int, excess: float) -> None:
    """4,096 tokens: a nearly constant D is rounded to the same side in block after block."""
    x = np.random.default_rng(0).normal(size=(4096, 16))
    exact, rounded = x, x
    for shape in espa_stack(n_blocks):
        rows = shape.rescale(4096)
        exact, rounded = shape.apply(exact), shape.apply(rounded) * (bfloat16(rows) / rows)[:, None]
    assert (rounded**2).sum() / (exact**2).sum() - 1 == pytest.approx(excess, abs=0.005)


def test_uspa_row_sums_grow_with_the_logarithm_of_the_position() -> None:
    stack = uspa_stack(36)
    np.testing.assert_allclose(stack[0].rescale(4096)[[99, 511, 4095]], [2.16, 3.50, 5.48], atol=0.005)
    last = [stack[block - 1].rescale(4096)[-1] for block in (2, 3, 18, 36)]
    np.testing.assert_allclose(last, [1.384, 1.215, 1.029, 1.014], atol=6e-4)


def test_frequency_response_of_espa() -> None:
    """Gain D_inf for what is the same at all positions, 1 / D_inf for what alternates; 20 and 1/20 over the stack."""
    for shape in espa_stack(36)[::5]:
        top = shape.diagonal * (1 - shape.zero) / (1 - shape.pole)
        alternating = shape.diagonal * (1 + shape.zero) / (1 + shape.pole)
        assert alternating == pytest.approx(1 / top)
    n = 12_000
    signs = (-1.0) ** np.arange(n)
    x = np.stack([np.ones(n), signs], 1)
    for shape in espa_stack(36):
        x = shape.apply(x)
    np.testing.assert_allclose(np.abs(x[-1]), [20.0, 0.05], rtol=1e-4)


def test_without_rescaling_the_signal_fades() -> None:
    """P in place of D P, 36 blocks, 512 tokens: diagonal at the first, middle and last position, and its mean."""
    product = np.eye(512)
    for shape in espa_stack(36):
        product = shape.apply(product) / shape.rescale(512)[:, None]
    own = (product**2).sum(1)
    np.testing.assert_allclose(own[[0, 256, 511]], [1, 0.032, 0.0047], rtol=0.02)
    assert own.mean() == pytest.approx(0.104, abs=5e-4)
    assert (product.T @ product).trace() / 512 == pytest.approx(own.mean())


def test_gradients_of_values_and_scores_carry_the_row_factor() -> None:
    """dL/dV = P^T D g, dL/dS_ij = D_i P_ij (g_i v_j - sum_k P_ik g_i v_k), by central differences."""
    rng, n, shape = np.random.default_rng(0), 7, ESPA.between(0.8, 0.3)
    v, g = rng.normal(size=(2, n, 3))
    bias, rows = shape.log_weights(n), shape.rescale(n)

    def loss(scores: np.ndarray, values: np.ndarray) -> float:
        return float((g * (rows[:, None] * softmax(scores + bias, axis=1) @ values)).sum())

    zero, h = np.zeros((n, n)), 1e-5
    p = softmax(bias, axis=1)
    weights = g @ v.T
    by_score = rows[:, None] * p * (weights - (p * weights).sum(1, keepdims=True))
    by_value = p.T @ (rows[:, None] * g)
    for i in range(n):
        for j in range(n):
            at = zero.copy()
            at[i, j] = h
            assert (loss(at, v) - loss(-at, v)) / (2 * h) == pytest.approx(by_score[i, j], abs=1e-8)
        for j in range(3):
            at = np.zeros_like(v)
            at[i, j] = h
            assert (loss(zero, v + at) - loss(zero, v - at)) / (2 * h) == pytest.approx(by_value[i, j], abs=1e-8)


# --- printed numbers -----------------------------------------------------------------------------------------------


def test_small_matrices() -> None:
    a = ESPA.between(1, 0.5).matrix(4)
    np.testing.assert_allclose(a[:, 0], [1, 0.291987, 0.177099, 0.107416], atol=5e-7)
    np.testing.assert_allclose(np.diagonal(a)[1:], 0.855020, atol=5e-7)
    np.testing.assert_allclose([a[2, 1], a[3, 2], a[3, 1]], [0.204051, 0.204051, 0.123763], atol=6e-7)
    np.testing.assert_allclose(ESPA.between(1, 0.5).rescale(4), [1, 1.147006, 1.236170, 1.290250], atol=5e-7)
    shape = USPA(0.2, 0.5)
    np.testing.assert_allclose(shape.matrix(4)[3], [0.287746, 0.141299, 0.093175, 0.826797], atol=5e-7)
    np.testing.assert_allclose(shape.rescale(4), [1, 1.207107, 1.299138, 1.349017], atol=5e-7)


def test_what_the_paper_prints_otherwise() -> None:
    """Errata of docs/theory/shaping.md that are numbers."""
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


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ESPA(1.0, 0.5), "zero is 1.0; expected a number from 0 up to, but not, 1"),
        (lambda: ESPA(-0.1, 0.5), "zero is -0.1"),
        (lambda: ESPA(0.1, 1.5), "pole is 1.5"),
        (lambda: ESPA(0.1, math.nan), "pole is nan"),
        (lambda: ESPA(0.1, 0.5, repeats=1.0), "repeats is 1.0"),
        (lambda: ESPA(0.1, 0.5, gain=-1.0), "gain is -1.0; expected a positive number"),
        (lambda: ESPA(0.5, 0.6, gain=2.0), "gain is 2; expected at most 1.2"),
        (lambda: ESPA(0.1, 0.5, gain=0.5, repeats=0.1), "calibrate its rows instead"),
        (lambda: ESPA.between(0.5, 0.6), "decay 0.6 after the layer is larger than 0.5 before it"),
        (lambda: ESPA.between(0.0, 0.5), "gamma is 0.0; expected a positive number"),
        (lambda: USPA(0.5, 1.0), "rho is 1.0; expected a number from 0 up to, but not, 1"),
        (lambda: USPA(-0.1, 0.5), "rho is -0.1"),
        (lambda: USPA(0.5, 0.4), "rho 0.4 after the layer is smaller than 0.5 before it"),
        (lambda: BidirectionalESPA(0.6, 0.5), "decays have to fall with depth"),
    ],
)
def test_errors(make: Callable[[], AttentionShape], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_decays_and_gammas() -> None:
    assert decay_of(math.inf) == 0 and gamma_of(0.0) == math.inf
    assert gamma_of(decay_of(0.005)) == pytest.approx(0.005)
