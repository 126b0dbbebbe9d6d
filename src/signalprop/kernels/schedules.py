"""How much attention may mix at each layer of a signal-preserving stack, with and without skips.

Decays stand as e^-gamma, from 0 (independent tokens, gamma infinite) up to 1. He et al. 2023 (SPA), sections 3 and 4,
appendices C and F; what is exact in their place: `docs/papers/without-shortcuts.md`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from signalprop.errors import InputError
from signalprop.kernels.causal_shaping import gamma_of
from signalprop.network.moments import FloatArray


class Filter(NamedTuple):
    """The three numbers of an E-SPA matrix (`signalprop.kernels.causal_shaping.ESPA`)."""

    zero: float
    pole: float
    gain: float


def rho_schedule(n_layers: int, last: float, first: float = 0.0) -> FloatArray:
    """rho_0 .. rho_L of U-SPA, linear in depth, (n_layers + 1,) (SPA appendix C).

    Raises:
        InputError: rho would not grow, or leaves [0, 1).
    """
    if not 0 <= first < 1 or not first < last < 1:
        raise InputError(
            f"U-SPA: rho goes from {first:.6g} to {last:.6g}; expected a last value above the first and below 1"
        )
    return np.linspace(first, last, n_layers + 1)


def decay_schedule(n_layers: int, gamma: float, rule: str = "diagonal") -> FloatArray:
    """e^-gamma_0 .. e^-gamma_L of E-SPA, gamma_0 infinite and gamma_L given, (n_layers + 1,).

    `diagonal` keeps the diagonal of every attention matrix the same, a_l = a_L^(l/L) (SPA appendix C); `tanh` its gain
    on slow signals, tanh(gamma_l / 2) = tanh(gamma_L / 2)^(l/L) (docs/papers/without-shortcuts.md).

    Raises:
        InputError: gamma is not positive, or an unknown rule.
    """
    if not 0 < gamma < 40:
        raise InputError(f"E-SPA: gamma is {gamma!r}; expected a number above 0 and below 40")
    share = np.arange(n_layers + 1) / n_layers
    if rule == "diagonal":  # decay^2 = 1 - a_L^(2 share)
        out = np.sqrt(-np.expm1(share * _log_complement(2 * gamma)))
    elif rule == "tanh":  # decay = (1 - t) / (1 + t) = tanh(-ln(t) / 2), t = tanh(gamma / 2)^share
        out = np.tanh(-share * (_log_complement(gamma) - math.log1p(math.exp(-gamma))) / 2)
    else:
        raise InputError(f"E-SPA: schedule {rule!r}; expected diagonal or tanh")
    return np.asarray(out)


def _log_complement(x: float) -> float:
    """ln(1 - e^-x) for x > 0, to full precision."""
    return math.log(-math.expm1(-x)) if x < math.log(2) else math.log1p(-math.exp(-x))


def uniform_behind_skip(rho: float, rho_out: float, skip: float) -> float:
    """rho of the attention branch that takes the stream from rho to rho_out beside a normalised skip, exactly.

    skip^2 Sigma(rho) + (1 - skip^2) Sigma(result) = Sigma(rho_out) (SPA section 3.4).

    Raises:
        InputError: the skip is too large for the step; the message says how large it may be.
    """
    _check_skip(skip)
    result = rho + (rho_out - rho) / (1 - skip**2)
    if result >= 1:
        bound = math.sqrt((1 - rho_out) / (1 - rho))
        raise InputError(
            f"U-SPA: a skip of {skip:.6g} is too large for the step from rho {rho:.6g} to {rho_out:.6g}; expected a "
            f"skip below {bound:.6g}, more layers, or a smaller last rho"
        )
    return result


def _check_skip(skip: float) -> None:
    if not 0 <= skip < 1:
        raise InputError(f"a normalised skip of {skip!r}; expected a number from 0 up to, but not, 1")


def step_bound(decay: ArrayLike, decay_out: ArrayLike, *, exact: bool) -> FloatArray:
    """The largest normalised skip for a step of E-SPA from one decay to another, of any shape.

    By the paper's rule (below it) the diagonal of the plain matrix; exactly (up to it)
    (tanh(gamma_out / 2) / tanh(gamma / 2))^1/2.
    """
    r, s = np.asarray(decay, np.float64), np.asarray(decay_out, np.float64)
    if exact:
        return np.asarray(np.sqrt((1 - s) / (1 + s) / ((1 - r) / (1 + r))))
    return np.asarray(np.sqrt((1 - s) * (1 + s) / ((1 - r) * (1 + r))))


def exponential_behind_skip(decay: float, decay_out: float, skip: float) -> Filter:
    """The filter of the attention branch beside a normalised skip by the paper's rule (SPA appendix F).

    It matches how much a token's part is diluted, and leaves the rest: near the largest skip the kernel misses its
    target by far (docs/papers/without-shortcuts.md has numbers).

    Raises:
        InputError: the skip is not smaller than the diagonal of the matrix beside it.
    """
    _check_skip(skip)
    innovation2, out2 = (1 - decay) * (1 + decay), (1 - decay_out) * (1 + decay_out)
    gain2 = (out2 / innovation2 - skip**2) / (1 - skip**2)
    if gain2 <= 0:
        raise InputError(
            _too_large(decay, decay_out, skip, f"below {float(step_bound(decay, decay_out, exact=False)):.6g}")
        )
    return Filter(decay, math.sqrt(1 - gain2 * innovation2), math.sqrt(gain2))


def exact_behind_skip(decay: float, decay_out: float, skip: float) -> Filter:
    """The filter with skip^2 Sigma(decay) + (1 - skip^2) A Sigma(decay) A^T = Sigma(decay_out), away from the start.

    Spectral factorisation, docs/papers/without-shortcuts.md. Near the first token the diagonal exceeds 1, by
    0.14 at most where measured there.

    Raises:
        InputError: skip^2 > tanh(gamma_out / 2) / tanh(gamma / 2).
    """
    _check_skip(skip)
    bound = float(step_bound(decay, decay_out, exact=True))
    if skip**2 > bound**2 * (1 + 1e-12):
        raise InputError(_too_large(decay, decay_out, skip, f"at most {bound:.6g}"))
    innovation2, out2 = (1 - decay) * (1 + decay), (1 - decay_out) * (1 + decay_out)
    skipped2, over = skip**2, (1 - skip**2) * innovation2
    even = (out2 * (1 + decay**2) - skipped2 * innovation2 * (1 + decay_out**2)) / over
    odd = (out2 * decay - skipped2 * innovation2 * decay_out) / over
    gain2 = (even + math.sqrt(max(even**2 - 4 * odd**2, 0.0))) / 2
    # at the largest skip the zero is -1, beyond it by rounding only
    return Filter(max(odd / gain2, -1.0), decay_out, math.sqrt(gain2))


def _too_large(decay: float, decay_out: float, skip: float, bound: str) -> str:
    return (
        f"E-SPA: a skip of {skip:.6g} is too large for the step from gamma {gamma_of(decay):.6g} to "
        f"{gamma_of(decay_out):.6g}; expected {bound}, more layers, or a larger last gamma"
    )
