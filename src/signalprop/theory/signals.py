"""The small formulas of which kinds of sublayers consist, and the values that they take and return.

Derivations: `docs/theory/components.md`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from signalprop.network.duals import dual
from signalprop.network.moments import Array, FloatArray
from signalprop.network.products import pairs
from signalprop.theory import duals_of_nodes
from signalprop.theory.duals_of_nodes import dual_of_nodes
from signalprop.theory.log_arithmetic import correlation, inverse_roots, log_add

Rowset = NDArray[np.intp]  # indices of sublayers
Pair = tuple[Array, Array]


class Signal(NamedTuple):
    """What the features of tokens have in common: of a stream's entries, or a gradient's.

    Of one node, for equivalent tokens, two floats, or arrays over a sweep, or over sublayers; of n nodes, positions
    of a sequence, (n,) and (n, n), whose diagonal is of two tokens at one place; of members that are followed together
    (members, n) and (members, n, n).

    Attributes:
        per_token: mean square of a token's entry. shared: mean product of the same feature at two different tokens.
    """

    per_token: Array
    shared: Array

    @classmethod
    def of(cls, kernel: FloatArray) -> Signal:
        """Of the kernel of n tokens."""
        return cls(kernel.diagonal().copy(), kernel)

    def matrix(self) -> FloatArray:
        """The kernel of n tokens."""
        shared, per_token = np.asarray(self.shared), np.asarray(self.per_token)
        if np.array_equal(shared.diagonal(), per_token):
            return shared
        whole = shared.copy()
        np.fill_diagonal(whole, per_token)
        return whole

    @property
    def has_nodes(self) -> bool:
        """Whether it is of n nodes."""
        return isinstance(self[1], np.ndarray) and self[1].ndim > np.ndim(self[0])

    def cosine(self) -> Array:
        """Correlation of two tokens, within [-1, 1]; 0 of tokens without any signal."""
        if isinstance(self[1], float) or not self.has_nodes:
            return correlation(self[1], self[0])
        root = inverse_roots(np.asarray(self.per_token))
        return np.asarray((self.shared * pairs(root, root)).clip(-1.0, 1.0))

    def of_pairs(self, per_token: Array) -> Array:
        """Of a number per token, the product for every pair of them."""
        return pairs(np.asarray(per_token), np.asarray(per_token)) if self.has_nodes else per_token * per_token

    def times(self, other: Signal) -> Signal:
        """Products of features that are independent."""
        return Signal(self.per_token * other.per_token, self.shared * other.shared)

    def plus(self, other: Signal) -> Signal:
        """Sums of features that are independent."""
        return Signal(self.per_token + other.per_token, self.shared + other.shared)


class BranchBackward(NamedTuple):
    """The gradient that a branch sends to its input: variance = vv G + vc Gamma, covariance = cv G + cc Gamma.

    G and Gamma are the gradient's variance and token covariance at the branch's output.
    """

    vv: FloatArray
    vc: FloatArray
    cv: FloatArray
    cc: FloatArray


class SentMaps(NamedTuple):
    """Where a branch sends its gradient: to the stream, and to the encoder's output where it reads that."""

    stream: BranchBackward
    memory: BranchBackward | None = None


Rows = int | Rowset  # a row of the table, or several


class Sent(NamedTuple):
    """A gradient that a branch sends back: to the stream, and to the encoder's output where it reads that."""

    stream: Signal
    memory: Signal | None = None


class Sublayers(Protocol):
    """What `of(parametrization, stack, nodes)` in a kind's `signal.py` gives: its sublayers in one stack.

    Kinds derive from it. Dropout of the branch, its norm and its multiplier are not in it. `nodes` is a
    `kernels.nodes.Nodes`; None: one node. Of one node rows may be several, whose signals are arrays (..., rows).
    """

    def silent(self, i: int) -> bool:
        """Whether sublayer i gives nothing, and needs no work."""
        return False

    def forward(self, i: Rows, x: Signal, memory: Signal | None = None) -> Signal:
        """The outputs of sublayers i for what they read, and for the encoder's output."""

    def backward(self, i: Rows, x: Signal, g: Signal, memory: Signal | None = None) -> Sent:
        """The gradient at what they read, from the one at what they give; linear in it."""


def linear(x: Pair, gain: Array, bias: Array = 0.0) -> Signal:
    """A linear map of independent weights of mean 0, `gain` = fan_in * variance; exact (TGS v1 B.2).

    One draw of a random bias, of variance `bias`, serves all tokens. A gradient goes back with fan_out * variance.
    """
    if gain.__class__ is np.ndarray and np.ndim(x[1]) > np.ndim(x[0]):  # nodes of members
        gain, bias = gain[:, None], np.broadcast_to(bias, gain.shape)[:, None]
        return Signal(gain * x[0] + bias, gain[..., None] * x[1] + bias[..., None])
    if isinstance(bias, float) and bias == 0:
        return Signal(gain * x[0], gain * x[1])
    return Signal(gain * x[0] + bias, gain * x[1] + bias)


def dropped(x: Pair, p: float) -> Signal:
    """Dropout of probability p with independent masks, kept entries divided by 1 - p; exact (TGS v1 B.3)."""
    return Signal(x[0] / (1 - p), x[1])


def activated(x: Pair, name: str) -> Signal:
    """An element-wise activation of a Gaussian of mean 0, Q(r) of TGS; as exact as `signalprop.network.duals.dual`."""
    if isinstance(x[1], np.ndarray) and x[1].ndim > np.ndim(x[0]):
        return Signal(*dual_of_nodes(name, 0, np.asarray(x[0]), np.asarray(x[1])))
    q = dual(name, x[0], correlation(x[1], x[0]))
    return Signal(q.second_moment, q.covariance_moment)


def slope_of_unlike(x: Pair, name: str) -> Array:
    """E f'(x) f'(y) of two tokens of the size of each that share nothing."""
    if isinstance(x[1], np.ndarray) and x[1].ndim > np.ndim(x[0]):
        return duals_of_nodes.slope_of_unlike(name, np.asarray(x[0]))
    return dual(name, x[0], x[0] * 0.0).slope_moment


def activated_back(g: Pair, x: Pair, name: str) -> Signal:
    """The gradient before an activation of x, from the one after it; arrays of it may have more axes."""
    if isinstance(x[1], np.ndarray) and x[1].ndim > np.ndim(x[0]):
        per_token, shared = dual_of_nodes(name, 1, np.asarray(x[0]), np.asarray(x[1]))
        return Signal(g[0] * per_token, g[1] * shared)
    q = dual(name, x[0], correlation(x[1], x[0]))
    return Signal(g[0] * q.slope_second_moment, g[1] * q.slope_moment)


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

    It takes out the vector's direction and, with it, the token's (of d features); and divides by sizes that differ.
    """
    return np.maximum(1 - (2 - r * r) / d - (1 - 3 * r * r) / (2 * width), 0.0)
