"""Schedules of signal-preserving attention and its rules beside skips: exactness, bounds, and measured inaccuracy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop.kernels.causal_shaping import (
    ESPA,
    USPA,
    exponential_kernel,
    gamma_of,
    uniform_kernel,
)
from signalprop.kernels.schedules import (
    Filter,
    decay_schedule,
    exact_behind_skip,
    exponential_behind_skip,
    rho_schedule,
    step_bound,
    uniform_behind_skip,
)

GAMMAS = st.floats(math.log(0.005), math.log(5)).map(math.exp)
SKIPS = st.floats(0, 0.999)
# alpha, and the smallest gamma_L that the paper's rule allows it at 32 and at 36 layers
SMALLEST = {
    32: {0.9: 0.0006, 0.98: 0.160, 0.99: 0.373, 0.995: 0.647, 0.9975: 0.955, 0.999: 1.390},
    36: {0.9: 0.0003, 0.98: 0.133, 0.99: 0.332, 0.995: 0.597, 0.9975: 0.901, 0.999: 1.333},
}


def decay_of(gamma: float) -> float:
    return math.exp(-gamma)


def stack(n_layers: int, gamma: float, skip: float, *, exact: bool) -> list[ESPA]:
    rule = exact_behind_skip if exact else exponential_behind_skip
    decays = decay_schedule(n_layers, gamma, "tanh" if exact else "diagonal")
    return [ESPA(*rule(before, after, skip)) for before, after in pairwise(decays)]


def beside_skip(kernel: np.ndarray, branch: np.ndarray, skip: float) -> np.ndarray:
    return skip**2 * kernel + (1 - skip**2) * branch


# --- schedules -----------------------------------------------------------------------------------------------------


@given(n_layers=st.integers(1, 2000), gamma=st.floats(math.log(1e-4), math.log(30)).map(math.exp))
def test_decays_fall_and_what_each_rule_holds_constant(n_layers: int, gamma: float) -> None:
    for rule in ("diagonal", "tanh"):
        decays = decay_schedule(n_layers, gamma, rule)
        assert decays[0] == 0 and not np.signbit(decays[0]) and (np.diff(decays) > 0).all()
        assert gamma_of(decays[-1]) == pytest.approx(gamma, rel=1e-9)
        first = ESPA(decays[0], decays[1])
        last = ESPA(decays[-2], decays[-1])
        if rule == "diagonal":
            assert first.diagonal == pytest.approx(last.diagonal, rel=1e-9)
        else:
            slow = [m.diagonal * (1 - m.zero) / (1 - m.pole) for m in (first, last)]
            assert slow[0] == pytest.approx(slow[1], rel=1e-8)
            assert slow[0] == pytest.approx(math.tanh(gamma / 2) ** (-0.5 / n_layers), rel=1e-9)


# --- skips: U-SPA --------------------------------------------------------------------------------------------------


@given(rhos=st.tuples(st.floats(0, 0.98), st.floats(0, 0.98)).map(sorted), skip=SKIPS)
def test_uspa_beside_a_skip_is_exact_up_to_its_bound(rhos: list[float], skip: float) -> None:
    rho, rho_out = rhos
    bound = math.sqrt((1 - rho_out) / (1 - rho))
    assume(abs(skip - bound) > 1e-6)
    if skip > bound:
        with pytest.raises(InputError, match=f"skip below {bound:.6g}, more layers, or a smaller last rho"):
            uniform_behind_skip(rho, rho_out, skip)
        return
    kernel = uniform_kernel(rho, 30)
    branch = USPA(rho, uniform_behind_skip(rho, rho_out, skip)).step(kernel)
    np.testing.assert_allclose(beside_skip(kernel, branch, skip), uniform_kernel(rho_out, 30), atol=1e-10)


@pytest.mark.parametrize(("skip", "bound", "first"), [(0.98, 0.7255, 16), (0.995, 0.2744, 1)])
def test_skips_of_the_papers_table_7_do_not_go_with_its_rho(skip: float, bound: float, first: int) -> None:
    """32 layers, rho_L = 0.8: infeasible from a block on; no schedule exceeds 1 - skip^64, a geometric one nears it."""
    rhos = rho_schedule(32, 0.8)
    feasible = []
    for before, after in pairwise(rhos):
        try:
            uniform_behind_skip(before, after, skip)
            feasible.append(True)
        except InputError:
            feasible.append(False)
    assert feasible.index(False) + 1 == first and not any(feasible[first - 1 :])
    assert 1 - skip**64 == pytest.approx(bound, abs=5e-5)
    last = 1 - skip**64 - 1e-4
    geometric = 1 - (1 - last) ** (np.arange(33) / 32)
    for before, after in pairwise(geometric):
        assert uniform_behind_skip(before, after, skip) < 1


# --- skips: E-SPA --------------------------------------------------------------------------------------------------


def smallest_gamma(n_layers: int, skip: float, *, exact: bool = False) -> float:
    """By hand: of the schedule `diagonal` under the paper's rule, of `tanh` exactly."""
    kept = skip ** (2 * n_layers)
    return 2 * math.atanh(kept) if exact else -0.5 * math.log1p(-kept)


def largest_skip(n_layers: int, gamma: float, *, exact: bool = False) -> float:
    decay = decay_schedule(n_layers, gamma, "tanh" if exact else "diagonal")
    return float(step_bound(decay[:-1], decay[1:], exact=exact).min())


@pytest.mark.parametrize("n_layers", [32, 36])
def test_smallest_gammas_of_the_papers_rule(n_layers: int) -> None:
    for skip, least in SMALLEST[n_layers].items():
        found = smallest_gamma(n_layers, skip)
        assert found == pytest.approx(least, abs=5e-4 if least > 0.01 else 5e-5)
        assert largest_skip(n_layers, found) == pytest.approx(skip, rel=1e-9)
        stack(n_layers, found * 1.001, skip, exact=False)
        with pytest.raises(InputError, match="or a larger last gamma"):
            stack(n_layers, found * 0.999, skip, exact=False)
    # table 7's E-SPA, 0.9975 at 32 layers: of the grid .005 .2 .4 .7 1 only 1 is left; 0.999 has none
    assert 0.7 < smallest_gamma(32, 0.9975) < 1 < smallest_gamma(32, 0.999)


@pytest.mark.parametrize("over", [0.0, 2e-13])
def test_the_largest_skip_itself_is_accepted(over: float) -> None:
    """And what rounding has beyond it; not a billionth more."""
    bound = float(step_bound(0.5, 0.8, exact=True))
    assert exact_behind_skip(0.5, 0.8, bound * (1 + over)).zero == pytest.approx(-1.0, abs=1e-3)
    with pytest.raises(InputError, match="too large"):
        exact_behind_skip(0.5, 0.8, bound * (1 + 1e-9))


@given(gammas=st.tuples(GAMMAS | st.just(math.inf), GAMMAS).map(sorted), share=st.floats(0, 1))
def test_the_exact_filter_has_the_right_spectrum(gammas: list[float], share: float) -> None:
    """skip^2 S + (1 - skip^2) |A|^2 S = S' at every frequency, to the bound itself; its zero is below its pole."""
    after, before = gammas
    assume(before > after * (1 + 1e-6))
    decay, decay_out = decay_of(before), decay_of(after)
    skip = share * math.sqrt(math.tanh(after / 2) / math.tanh(before / 2))
    zero, pole, gain = exact_behind_skip(decay, decay_out, skip)
    ESPA(zero, pole, gain)  # accepted
    assert pole == decay_out and zero <= pole + 1e-12
    # innovations: gain^2 is at most what the paper's rule gives
    assert skip**2 + (1 - skip**2) * gain**2 <= ESPA(decay, decay_out).diagonal ** 2 + 1e-12
    z = np.exp(-1j * np.linspace(0, np.pi, 50))

    def spectrum(r: float) -> np.ndarray:
        return (1 - r * r) / np.abs(1 - r * z) ** 2

    answer = gain**2 * np.abs(1 - zero * z) ** 2 / np.abs(1 - pole * z) ** 2
    found = beside_skip(spectrum(decay), answer * spectrum(decay), skip)
    np.testing.assert_allclose(found, spectrum(decay_out), rtol=1e-8)


def dense_beside_skip(decay: float, decay_out: float, skip: float, n: int) -> np.ndarray:
    """The lower-triangular A with skip^2 S + (1 - skip^2) A S A^T = S' for n tokens, start included."""
    before, after = exponential_kernel(decay, n), exponential_kernel(decay_out, n)
    wanted = np.linalg.cholesky((after - skip**2 * before) / (1 - skip**2))
    return np.linalg.solve(np.linalg.cholesky(before).T, wanted.T).T


@pytest.mark.parametrize("skip", [0.3, 0.6, 0.9])
def test_the_exact_filter_is_the_last_row_of_the_dense_factor(skip: float) -> None:
    for before, after in ((math.inf, 4.0), (1.0, 0.9), (0.3, 0.25), (0.25, 0.22)):
        if math.isinf(before) and skip == 0.9:
            after = 5.0
        decay, decay_out = decay_of(before), decay_of(after)
        dense = dense_beside_skip(decay, decay_out, skip, 400)
        found = ESPA(*exact_behind_skip(decay, decay_out, skip)).matrix(400)
        np.testing.assert_allclose(found[-1], dense[-1], atol=1e-10)


def test_one_step_beside_a_skip() -> None:
    paper = exponential_behind_skip(decay_of(0.3), decay_of(0.25), 0.9)
    assert paper.gain == pytest.approx(0.571578, abs=5e-7)
    assert gamma_of(paper.pole) == pytest.approx(0.079735, abs=5e-7)  # SPA eq. 26; eq. 25 as printed gives 0.024678
    printed = -0.5 * math.log(1 - paper.gain**4 * (1 - math.exp(-0.6)))
    assert printed == pytest.approx(0.024678, abs=5e-7)
    with pytest.raises(InputError, match="at most"):
        exact_behind_skip(decay_of(0.3), decay_of(0.25), 1.01 * math.sqrt(math.tanh(0.125) / math.tanh(0.15)))
    exact = exact_behind_skip(decay_of(0.3), decay_of(0.25), 0.9)
    assert exact == pytest.approx(Filter(0.344793, decay_of(0.25), 0.481992), abs=5e-7)
    for rule in (exponential_behind_skip, exact_behind_skip):  # without a skip both are theorem 3
        made = rule(decay_of(0.3), decay_of(0.25), 0.0)
        assert made == pytest.approx((decay_of(0.3), decay_of(0.25), ESPA(decay_of(0.3), decay_of(0.25)).diagonal))
