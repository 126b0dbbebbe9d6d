"""The small formulas that the moments of every kind are made of, and the values that they take and return.

A signal is a pair here: mean square of one entry, and mean product of the same feature at two tokens; floats, or arrays
that broadcast. A gradient has mean 0, so its pair is variance and covariance. Derivations: `docs/theory/components.md`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from signalprop.network.duals import dual
from signalprop.network.moments import Array, FloatArray
from signalprop.theory.logs import correlation, log_add

Rowset = NDArray[np.intp]  # indices of sublayers
Pair = tuple[Array, Array]


class Branch(NamedTuple):
    """What a branch adds to the stream before its multiplier: variance and token covariance."""

    variance: Array
    covariance: Array


class BranchBackward(NamedTuple):
    """The gradient that a branch sends to its input: variance = vv G + vc Gamma, covariance = cv G + cc Gamma.

    G and Gamma are the gradient's variance and token covariance at the branch's output.
    """

    vv: FloatArray
    vc: FloatArray
    cv: FloatArray
    cc: FloatArray


class Sent(NamedTuple):
    """Where a branch sends its gradient: to the stream, and to the encoder's output where it reads that."""

    stream: BranchBackward
    memory: BranchBackward | None = None

    @classmethod
    def apart(cls, variance: Array, covariance: Array) -> Sent:
        """To the stream, where variance and covariance of a gradient do not mix: these are the factors on each."""
        v, c = np.asarray(variance), np.asarray(covariance)
        zero = np.zeros_like(v)
        return cls(BranchBackward(v, zero, zero, c))


class BranchMoments(Protocol):
    """What `of(parametrization, stack)` in a kind's `moments.py` gives: the branches of its sublayers in one stack.

    Kinds derive from it.
    """

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        """What sublayer i, or several, adds.

        Args:
            i: row of the table, or rows. read: second moment of what it reads, and the correlation of second moments
                of two tokens. memory: the same of the encoder's output.
        """

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """The backward map of `forward`, for many sublayers at once; arrays (..., len(i))."""


def linear(x: Pair, gain: Array, bias: Array = 0.0) -> Pair:
    """A linear map of independent weights of mean 0, `gain` = fan_in * variance; exact (TGS v1 B.2).

    One draw of a random bias, of variance `bias`, serves all tokens. A gradient goes back with fan_out * variance.
    """
    return gain * x[0] + bias, gain * x[1] + bias


def dropped(x: Pair, p: float) -> Pair:
    """Dropout of probability p with independent masks, kept entries divided by 1 - p; exact (TGS v1 B.3)."""
    return x[0] / (1 - p), x[1]


def activated(x: Pair, name: str) -> Pair:
    """An element-wise activation of a Gaussian of mean 0; as exact as `signalprop.network.duals.dual`."""
    q = dual(name, x[0], correlation(x[1], x[0]))
    return q.second_moment, q.covariance_moment


def activated_back(g: Pair, x: Pair, name: str) -> Pair:
    """The gradient before an activation of x, from the one after it."""
    q = dual(name, x[0], correlation(x[1], x[0]))
    return g[0] * q.slope_second_moment, g[1] * q.slope_moment


def squashed(name: str, slope: Array, second: Array, r: Array) -> tuple[Array, Array, Array, Array]:
    """What an activation that stands in for a norm, f(slope x), makes of a Gaussian stream.

    Its mean square, its correlation; and the factors on the variance of a gradient that comes back, and on what two
    tokens share of it. Beyond a mean square of 1e4 in units of the slope f is a sign.
    """
    q = dual(name, np.minimum(slope**2 * second, 1e4), r)
    back = slope**2 * q.slope_second_moment, slope**2 * q.slope_moment
    return q.second_moment, correlation(q.covariance_moment, q.second_moment), *back


def normed(log_second: Array, log_epsilon: float) -> tuple[Array, Array]:
    """(log of the mean square after a norm of gain 1, log of what the norm divides mean squares by).

    Of infinite width: successive norms project out nearly the same directions, so terms in 1/d do not add up. Gradients
    on their way back are divided by the same number.
    """
    divisor = log_add(log_second, log_epsilon)
    return log_second - divisor, divisor


def inner_correlation(r: Array, width: int) -> Array:
    """Correlation over r of two vectors of so many features, mapped from tokens of correlation r, after their norm.

    E cos to first order in 1 / width.
    """
    return 1 - (1 - r * r) / (2 * width)


def through_inner_norm(r: Array, d: int, width: int) -> Array:
    """What a norm on vectors that are mapped from the stream does to the gradient at two tokens, of one where r = 1.

    It takes out the vector's own direction and, with it, the token's (of d features); and divides by sizes that differ.
    """
    return np.maximum(1 - (2 - r * r) / d - (1 - 3 * r * r) / (2 * width), 0.0)
