"""Causal attention that preserves the signal (SPA): A = L' L^-1, with L L^T a kernel before attention, L' L'^T after.

Where queries and keys give no scores, attention is D softmax(B), with B = log A and D = A 1 the row sums of A. Each
class is one family at one sublayer, for any number n of tokens. A is lower triangular and its rows do not depend on n:
the matrix of a shorter sequence is the leading block of a longer one's. He et al. 2023 (SPA), section 3 and appendices
B to D; derivations and numerics: `docs/papers/without-shortcuts.md`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from signalprop.errors import InputError
from signalprop.network.kinds import kind_of
from signalprop.network.layout import STACKS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization

# Rows that are filtered as one matrix product.
_CHUNK = 32


class AttentionShape(ABC):
    """One sublayer's attention matrix A at zero scores."""

    @abstractmethod
    def matrix(self, n: int) -> FloatArray:
        """A, (n, n)."""

    def log_weights(self, n: int) -> FloatArray:
        """B = log A, (n, n), up to a constant per row; -inf where A is 0. A softmax over the last axis gives A / D."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.matrix(n)))

    def rescale(self, n: int) -> FloatArray:
        """D, the row sums of A, (n,)."""
        return np.asarray(self.matrix(n).sum(1))

    def apply(self, x: FloatArray) -> FloatArray:
        """A x for x of shape (n, columns), in O(n) per column where a family knows how."""
        return np.asarray(self.matrix(len(x)) @ x)

    def apply_transposed(self, x: FloatArray) -> FloatArray:
        """A^T x for x of shape (n, columns)."""
        return np.asarray(self.matrix(len(x)).T @ x)

    def step(self, kernel: FloatArray) -> FloatArray:
        """A K A^T for a symmetric K, (n, n)."""
        return self.apply(self.apply(kernel).T)

    def step_back(self, kernel: FloatArray) -> FloatArray:
        """A^T G A for a symmetric G, (n, n)."""
        return self.apply_transposed(self.apply_transposed(kernel).T)


# One sublayer's attention matrices at zero scores, one per kind of head; none: scores make the matrix.
Shapes = tuple[AttentionShape, ...]


def exponential_kernel(decay: float, n: int) -> FloatArray:
    """Sigma_ij = decay^|i - j|, (n, n): the target of E-SPA with decay = e^-gamma (SPA section 3.2)."""
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return np.asarray(np.where(lag == 0, 1.0, float(decay) ** lag), dtype=np.float64)


def uniform_kernel(rho: float, n: int) -> FloatArray:
    """Sigma = (1 - rho) I + rho 1 1^T, (n, n): the target of U-SPA, and a kernel of tokens that repeat (SPA eq. 12)."""
    return np.full((n, n), float(rho)) + (1 - rho) * np.eye(n)


def repeated_diagonal(decay: float, repeats: float, n: int) -> FloatArray:
    """Diag(L Sigma_0 L^T) with L of the exponential kernel, Sigma_0 = uniform_kernel(repeats): Dbar, (n,).

    SPA appendix B in closed form: 1 - r + r m_i^2, m = L 1 = k - (k - 1) decay^(i - 1), k = coth(gamma / 2)^(1/2).
    """
    kappa = math.sqrt((1 + decay) / (1 - decay))
    total = kappa - (kappa - 1) * float(decay) ** np.arange(n)
    return np.asarray(1 - repeats + repeats * total**2)


def lags(n: int) -> FloatArray:
    """i - j, (n, n)."""
    return np.subtract.outer(np.arange(n), np.arange(n)).astype(np.float64)


@dataclass(frozen=True)
class ESPA(AttentionShape):
    """Causal E-SPA: y_1 = x_1, y_i = pole y_{i-1} + gain (x_i - zero x_{i-1}) (SPA theorem 3).

    Attributes:
        zero: e^-gamma of the kernel before, 0 for independent tokens (gamma infinite). pole: e^-gamma after.
        gain: diagonal of A beyond the first token; None: a(gamma') / a(gamma), a = sqrt(1 - e^-2 gamma), which makes
            A Sigma(gamma) A^T = Sigma(gamma') exact. Skips need others.
        repeats: pair-repeat probability r of tokens. A keeps the diagonal at 1 on the average kernel (1-r) I + r 1 1^T
            instead of on I (SPA appendix B): Dbar'^-1/2 A Dbar^1/2.

    Raises:
        InputError: numbers out of range, or some entries of A were negative (gamma grows).
    """

    zero: float
    pole: float
    gain: float | None = None
    repeats: float = 0.0

    def __post_init__(self) -> None:
        lowest = 0.0 if self.gain is None else -1.0  # a filter beside a skip may have its zero on the other side
        for name, low in (("zero", lowest), ("pole", 0.0), ("repeats", 0.0)):
            value = getattr(self, name)
            if not low <= value < 1:
                raise InputError(f"E-SPA: {name} is {value!r:.40}; expected a number from {low:g} up to, but not, 1")
        if self.repeats and self.gain is not None:
            raise InputError("E-SPA: repeats belong to a matrix whose gain is not given; leave one of them out")
        if not 0 < self.diagonal <= 1e30:
            raise InputError(f"E-SPA: gain is {self.gain!r}; expected a positive number")
        if self.pole < self.zero:
            raise InputError(
                f"E-SPA: decay {gamma_of(self.pole):.6g} after the layer is larger than {gamma_of(self.zero):.6g} "
                "before it, which needs negative attention weights; decays have to fall with depth"
            )
        if self.pole < self.diagonal * self.zero:
            raise InputError(
                f"E-SPA: gain is {self.diagonal:.6g}; expected at most {self.pole / self.zero:.6g} (pole over zero), "
                "beyond which attention to the first token is negative"
            )

    @property
    def diagonal(self) -> float:
        """The gain, also where it was not given."""
        if self.gain is not None:
            return self.gain
        return math.sqrt((1 - self.pole) * (1 + self.pole) / ((1 - self.zero) * (1 + self.zero)))

    def matrix(self, n: int) -> FloatArray:
        return np.exp(self.log_weights(n)) / self._factor(self.pole, n)[:, None]

    def log_weights(self, n: int) -> FloatArray:
        # in logarithms throughout: entries of A underflow a double from a few hundred tokens apart
        lag = lags(n)
        log_pole = math.log(self.pole) if self.pole > 0 else -math.inf
        first, later = self.offsets
        with np.errstate(invalid="ignore"):  # 0 * inf, where the pole is 0
            falling = np.where(lag > 1, (lag - 1) * log_pole, 0.0)
        out = np.where(lag > 0, later + falling, -math.inf)
        out[1:, 0] = first + falling[1:, 0]
        np.fill_diagonal(out, math.log(self.diagonal))
        out[:1, :1] = 0.0
        return np.asarray(out + np.log(self._factor(self.zero, n)))

    @property
    def offsets(self) -> tuple[float, float]:
        """Logarithms of A at lag 1: in the first column, and in later ones."""
        first, later = self.pole - self.diagonal * self.zero, self.diagonal * (self.pole - self.zero)
        return (math.log(first) if first > 0 else -math.inf, math.log(later) if later > 0 else -math.inf)

    def _factor(self, decay: float, n: int) -> FloatArray:
        """What repeated tokens multiply columns with (decay `zero`) and divide rows by (`pole`), (n,); else 1."""
        return np.sqrt(repeated_diagonal(decay, self.repeats, n))

    def rescale(self, n: int) -> FloatArray:
        if self.repeats == 0:  # D_inf - (D_inf - 1) pole^(i-1), with D_inf = gain (1 - zero) / (1 - pole)
            top = self.diagonal * (1 - self.zero) / (1 - self.pole)
            return np.asarray(top + (1 - top) * self.pole ** np.arange(n))
        return self.apply(np.ones((n, 1)))[:, 0]

    def apply(self, x: FloatArray) -> FloatArray:
        columns, rows = self._factor(self.zero, len(x)), 1 / self._factor(self.pole, len(x))
        return self._filtered(x, (1 - self.diagonal) * x[0], columns, rows)

    def apply_transposed(self, x: FloatArray) -> FloatArray:
        columns, rows = self._factor(self.zero, len(x)), 1 / self._factor(self.pole, len(x))
        out = self._filtered(x[::-1], np.zeros(x.shape[1]), rows[::-1], columns[::-1])[::-1]
        out[0] += (1 - self.diagonal) * ((self.pole ** np.arange(len(x)) * rows) @ x)
        return out

    def _filtered(self, x: FloatArray, carry: FloatArray, before: FloatArray, after: FloatArray) -> FloatArray:
        """y_i = pole y_{i-1} + gain (x_i - zero x_{i-1}) along the first axis, in O(n): one product for each chunk.

        Args:
            carry: what the first row gets besides gain x_1. before, after: factors on the rows of x, and of y.
        """
        size = min(_CHUNK, len(x))
        lag = lags(size)
        block = np.where(lag > 0, self.diagonal * (self.pole - self.zero) * self.pole ** np.maximum(lag - 1, 0), 0.0)
        np.fill_diagonal(block, self.diagonal)
        powers = (self.pole ** np.arange(size))[:, None]
        out = np.empty(x.shape)
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            m = len(x[rows])
            weights = block[:m, :m] * before[rows]
            part = weights @ x[rows]
            part += powers[:m] * carry
            carry = self.pole * part[-1] - self.diagonal * self.zero * before[start + m - 1] * x[start + m - 1]
            np.multiply(part, after[rows, None], out=out[rows])
        return out


@dataclass(frozen=True)
class USPA(AttentionShape):
    """Causal U-SPA: from (1-rho) I + rho 1 1^T to the same with rho_out (SPA theorem 1), from closed factors.

    Raises:
        InputError: rho out of range, or falling (some entries of A were negative).
    """

    rho: float
    rho_out: float

    def __post_init__(self) -> None:
        _check_uniform(self.rho, self.rho_out)

    def terms(self, n: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(diagonal of A, u, w), each (n,): A_ij = u_j - w_i below the diagonal. Needs float64 for long sequences."""
        d, _, e, _ = _uniform_factor(self.rho, n)
        d_out, c_out, _, _ = _uniform_factor(self.rho_out, n)
        total = np.cumsum(c_out * e)
        return d_out / d, c_out / d + total, total - c_out * e + d_out * e

    def matrix(self, n: int) -> FloatArray:
        diagonal, u, w = self.terms(n)
        return np.maximum(_block(diagonal, u, w), 0.0)

    def rescale(self, n: int) -> FloatArray:
        *_, total = _uniform_factor(self.rho, n)
        d, c, _, _ = _uniform_factor(self.rho_out, n)
        return np.asarray(d * total + np.cumsum(c * total) - c * total)

    def apply(self, x: FloatArray) -> FloatArray:
        return _summed(x, *self.terms(len(x)))

    def apply_transposed(self, x: FloatArray) -> FloatArray:
        diagonal, u, w = (column[::-1] for column in self.terms(len(x)))
        return _summed(x[::-1], diagonal, -w, -u)[::-1]


def _summed(x: FloatArray, diagonal: FloatArray, u: FloatArray, w: FloatArray) -> FloatArray:
    """The product with a matrix of `terms` in O(n) per column: below a chunk of rows and columns it has rank 2."""
    out = np.empty(x.shape)
    weighted, plain = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = x[rows]
        out[rows] = _block(diagonal[rows], u[rows], w[rows]) @ part
        out[rows] += weighted - w[rows, None] * plain
        weighted = weighted + u[rows] @ part
        plain = plain + part.sum(0)
    return out


def _check_uniform(rho: float, rho_out: float) -> None:
    for value in (rho, rho_out):
        if not 0 <= value < 1:
            raise InputError(f"U-SPA: rho is {value!r:.40}; expected a number from 0 up to, but not, 1")
    if rho_out < rho:
        raise InputError(
            f"U-SPA: rho {rho_out:.6g} after the layer is smaller than {rho:.6g} before it, which needs negative "
            "attention weights; rho has to grow with depth"
        )


def _uniform_factor(rho: float, n: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """(d, c, e, v): the Cholesky factor of the uniform kernel is diag(d) + strictly_lower(1 c^T), its inverse
    diag(1/d) - strictly_lower(e 1^T), and v = L^-1 1."""
    before = 1 + (np.arange(n) - 1) * rho  # p_{j-2}; 1 - rho for the first
    including = before + rho
    root = np.sqrt(including * before)
    d = np.sqrt((1 - rho) * including / before)
    c = rho * math.sqrt(1 - rho) / root
    return d, c, c / (1 - rho), math.sqrt(1 - rho) / root


def _block(diagonal: FloatArray, u: FloatArray, w: FloatArray) -> FloatArray:
    """A stretch of U-SPA's rows and the same columns."""
    out = np.tril(np.subtract.outer(-w, -u), -1)
    np.fill_diagonal(out, diagonal)
    return out


def gamma_of(decay: float) -> float:
    """-ln decay, infinite for 0."""
    return -math.log(decay) if decay > 0 else math.inf


@dataclass(frozen=True)
class ALiBi(AttentionShape):
    """Causal softmax of the bias -slope (i - j) of one head (Press et al. 2022): not signal-preserving, for comparison.

    A running mean with weights that fall by `decay` = e^-slope per token.
    """

    decay: float

    @staticmethod
    def heads(n_heads: int) -> tuple[ALiBi, ...]:
        """All heads, with the slopes of `alibi_slopes`."""
        return tuple(ALiBi(math.exp(-slope)) for slope in alibi_slopes(n_heads))

    def matrix(self, n: int) -> FloatArray:
        return np.exp(self.log_weights(n))

    def log_weights(self, n: int) -> FloatArray:
        lag = lags(n)
        return np.asarray(np.where(lag >= 0, lag * math.log(self.decay), -math.inf) - np.log(self._sums(n))[:, None])

    def _sums(self, n: int) -> FloatArray:
        return np.asarray(-np.expm1(np.arange(1, n + 1) * math.log(self.decay)) / (1 - self.decay))

    def rescale(self, n: int) -> FloatArray:
        return np.ones(n)

    def _filter(self) -> ESPA:
        return ESPA(0.0, self.decay, gain=1.0)

    def apply(self, x: FloatArray) -> FloatArray:
        return np.asarray(self._filter().apply(x) / self._sums(len(x))[:, None])

    def apply_transposed(self, x: FloatArray) -> FloatArray:
        return self._filter().apply_transposed(x / self._sums(len(x))[:, None])


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Slopes of ALiBi: 2^(-8 h / H) for a power of two H; else those of the next smaller one, then every other of the
    next larger one (Press et al. 2022, section 3 and their released code)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(n_heads - power)]
    return tuple(slopes)


def row_shape(p: Parametrization, i: int) -> AttentionShape | None:
    """The matrix that a sublayer's attention is shaped to; None where it is not shaped.

    What U-SPA does about repeated tokens is in its numbers: Shaping's repeats say only how they were chosen.

    Raises:
        InputError: numbers that need negative attention weights, or attention without a mask.
    """
    if p.shaping.kind == "none" or not kind_of(p, i).attends_itself:
        return None
    if STACKS[p.stack[i]] != "decoder":
        raise InputError(f"{p.shaping.kind} shapes causal attention, and encoders see all tokens; choose a decoder")
    before, after, gain = float(p.shape_in[i]), float(p.shape_out[i]), float(p.shape_gain[i])
    if p.shaping.kind == "u-spa":
        if gain:
            raise InputError(f"U-SPA: shape_gain of sublayer {i} is {gain!r}; only E-SPA has one, expected 0")
        return USPA(before, after)
    return ESPA(before, after, gain or None, p.shaping.repeats)
