"""How sublayers read, write and mix several residual streams: what pairs of streams share, there and back.

A state has parts, token kernels (K, T, T). With fixed connections the parts are those of all n x n pairs of streams;
with gates, under which all streams keep one distribution, they are the mean stream and the deviations from it.
`docs/theory/network.md`.
"""

from __future__ import annotations

import math

import numpy as np

from signalprop.kernels.streams.gates import gates_of
from signalprop.network.layer_inputs import changed, matrices
from signalprop.network.layout import layer_starts
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.theory.log_arithmetic import log, safe_exp


def connections_of(p: Parametrization) -> Connections:
    """The connections of a table whose architecture has several streams."""
    streams = p.architecture.streams
    if streams is None:
        return Earlier(p)
    if streams.mixing == "siamese":
        return Siamese(p)
    return Gated(p) if streams.gated else Connections(p)


def _apply(weights: FloatArray, parts: FloatArray) -> FloatArray:
    return np.asarray(np.tensordot(weights, parts, 1))


class Connections:
    """How the sublayers of a table read, write and mix streams, by given numbers: parts (K, ...) are of n x n pairs.

    `rho`, (T, T), is the correlation of the streams of two tokens.

    Attributes:
        before: what is done to the streams that enter a sublayer, where that is more than nothing.
        average: weights of the parts in the mean over streams. start: parts of equal streams of size 1.
    """

    def __init__(self, p: Parametrization) -> None:
        s = p.architecture.streams
        assert s is not None
        rows = [s.fixed(i, int(p.layer[i])) for i in range(p.n_sublayers)]
        self.a, self.b, self.m = (np.array([row[k] for row in rows]) for k in range(3))
        self.m *= p.skip[:, None, None]
        self.before: dict[int, FloatArray] = {}
        self.average = np.eye(s.n).ravel() / s.n
        self.start = np.ones(s.n**2)
        self.last = np.array(s.head())

    def norm_streams(self, i: int, parts: FloatArray, log_scale: float) -> None:
        """Note the streams before sublayer i (of all: what the head reads), parts times exp(log_scale)."""

    def read(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        """What sublayer i reads, (T, T); of gated streams in units of the sum of its weights, which a norm divides."""
        return _apply(_pairs(self.a[i]), parts)

    def written(self, i: int, output: FloatArray, rho: FloatArray) -> FloatArray:
        """Parts of a branch's output in the streams."""
        return np.multiply.outer(_pairs(self.b[i]), output)

    def mixed(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        """The parts on the skip path, mixed and times its multiplier."""
        return _apply(_both(self.m[i]), parts)

    def arriving(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        """The gradient at the branch's output, from that of the streams after it."""
        return _apply(_pairs(self.b[i]), gradient)

    def sent(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        """Parts of what a gradient at the read sends to the streams."""
        return np.multiply.outer(_pairs(self.a[i]), gradient)

    def mixed_back(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        """Parts of the gradient that the skip path sends back."""
        return _apply(_both(self.m[i]).T, parts)

    def between(self, parts: FloatArray) -> FloatArray:
        """The n x n covariance of the streams, of parts (K,)."""
        return parts.reshape(len(self.last), -1)

    def head(self, parts: FloatArray) -> FloatArray:
        """What the head reads, of the last streams."""
        return _apply(_pairs(self.last), parts)

    def head_sent(self, gradient: FloatArray) -> FloatArray:
        """Parts of the head's gradient at the last streams."""
        return np.multiply.outer(_pairs(self.last), gradient)

    def log_carried2(self) -> float:
        """ln of the square of what the head reads of a stream that entered, on the skip path alone."""
        carried, log_size = np.ones(len(self.last)), 0.0
        for i, matrix in enumerate(self.m):
            carried = matrix @ (self.before[i] @ carried if i in self.before else carried)
            size = float(np.abs(carried).max())
            if size == 0:
                break
            carried, log_size = carried / size, log_size + math.log(size)
        return float(2 * log_size + log((self.last @ carried) ** 2))


def _both(matrix: FloatArray) -> FloatArray:
    """A matrix on both streams of a pair."""
    return np.asarray(np.kron(matrix, matrix), np.float64)


def _pairs(weights: FloatArray) -> FloatArray:
    return np.multiply.outer(weights, weights).ravel()


class Earlier(Connections):
    """The stream and earlier ones, which layers read again (`Architecture.layer_inputs`): `sums` are the sublayers."""

    def __init__(self, p: Parametrization) -> None:
        assert p.architecture.layer_inputs is not None
        between = matrices(p.architecture.layer_inputs)
        starts = layer_starts(p).tolist()
        self.before = dict(zip(starts, between, strict=True))
        self.sums = {starts[layer] for layer in changed(p.architecture.layer_inputs)}
        n = between.shape[-1]
        first = np.eye(n)[0]
        self.last, self.average, self.start = first, _pairs(first), _pairs(between[0] @ np.ones(n))
        self.a = self.b = np.broadcast_to(first, (p.n_sublayers, n))
        self.m = np.broadcast_to(np.eye(n), (p.n_sublayers, n, n)).copy()
        self.m[:, 0, 0] = np.where(p.parallel, 1.0, p.skip)

    def entering(self, i: int, parts: FloatArray) -> FloatArray:
        """The parts that sublayer i reads, of those after the one before it."""
        return _apply(_both(self.before[i]), parts) if i in self.before else parts

    def entering_back(self, i: int, gradient: FloatArray) -> FloatArray:
        """The gradient after the sublayer before, of that of the parts that sublayer i reads."""
        return _apply(_both(self.before[i]).T, gradient) if i in self.before else gradient


class Siamese(Connections):
    """Two streams of which the first is normed before every sublayer, and both are where they are read.

    Norms are factors of every token, on gradients too: the directions they remove are 1 of d_model.
    """

    def __init__(self, p: Parametrization) -> None:
        super().__init__(p)
        self.n_sublayers, self.epsilon, self.skip2 = p.n_sublayers, p.architecture.norm_eps, p.skip**2
        self.read_factors: dict[int, FloatArray] = {}  # factors on the parts of what is read, and of what is kept
        self.skip_factors: dict[int, FloatArray] = {}

    def norm_streams(self, i: int, parts: FloatArray, log_scale: float) -> None:
        x, y = (1 / np.sqrt(np.diagonal(parts[k]) * safe_exp(log_scale) + self.epsilon) for k in (0, 3))
        one = np.ones_like(x)
        self.read_factors[i] = np.stack([np.outer(a, b) for a in (x, y) for b in (x, y)])
        self.skip_factors[i] = np.stack([np.outer(a, b) for a in (x, one) for b in (x, one)])

    def read(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray((self.read_factors[i] * parts).sum(0))

    def mixed(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray(self.skip2[i] * self.skip_factors[i] * parts)

    def sent(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        return self.read_factors[i] * gradient

    mixed_back = mixed

    def head(self, parts: FloatArray) -> FloatArray:
        return self.read(self.n_sublayers, parts, parts)

    def head_sent(self, gradient: FloatArray) -> FloatArray:
        return self.sent(self.n_sublayers, gradient, gradient)


class Gated(Connections):
    """By gates: parts are second moments of the mean stream, and the mean ones of deviations from it."""

    def __init__(self, p: Parametrization) -> None:
        s = p.architecture.streams
        assert s is not None
        self.n, self.std = s.n, s.logit_std(p.architecture.d_model)
        self.gates, self.skip2 = gates_of(s, p.architecture.d_model), p.skip**2
        self.average, self.start = np.ones(2), np.array([1.0, 0.0])
        self.spread = self.n / (self.n - 1)

    def read(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray(parts[0] + self.spread * self.gates.of("read", rho) * parts[1])

    def written(self, i: int, output: FloatArray, rho: FloatArray) -> FloatArray:
        total, apart = self.gates.of("write_sum", rho), self.gates.of("write", rho)
        return np.stack([total * output / self.n**2, apart * output / self.n])

    def mixed(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray(self.skip2[i] * np.stack([parts[0], self.gates.of("mix", rho) * parts[1]]))

    def arriving(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        total, apart = self.gates.of("write_sum", rho), self.gates.of("write", rho)
        return np.asarray(total * gradient[0] + self.spread * apart * gradient[1])

    def sent(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        return np.stack([gradient / self.n**2, self.gates.of("read", rho) * gradient / self.n])

    mixed_back = mixed

    def between(self, parts: FloatArray) -> FloatArray:
        mean, apart = parts.tolist()  # deviations from the mean of all sum to 0
        return np.asarray(mean - apart / (self.n - 1) + np.eye(self.n) * apart * self.spread)

    def head(self, parts: FloatArray) -> FloatArray:
        return np.asarray(parts[0])

    def head_sent(self, gradient: FloatArray) -> FloatArray:
        return np.stack([gradient / self.n**2, 0 * gradient])

    def through_gates(self, i: int, gradient: FloatArray, streams: FloatArray, branch: FloatArray, at_read: FloatArray,
                      rho: FloatArray) -> FloatArray:  # fmt: skip
        """Parts of the gradient that comes back through the gates.

        Args:
            gradient: parts after the sublayer. streams: parts before it, and branch: what is written, both in units of
                the streams' mean size at each token. at_read: the gradient there.
        """
        of = self.gates.of
        written = of("write_slope", rho) * branch * gradient.sum(0)
        read = of("read_slope", rho) * at_read * streams[1]
        mixed = self.skip2[i] * self.spread**2 / self.n * of("mix_slope", rho) * gradient[1] * streams[1]
        sent = self.std**2 * (written + read + mixed)
        return np.stack([sent / self.n, sent * (1 - 1 / self.n)])

    def log_carried2(self) -> float:
        return float(log(self.skip2).sum())
