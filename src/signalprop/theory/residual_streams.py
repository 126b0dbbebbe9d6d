"""Several residual streams: what pairs of streams share, through every sublayer and back.

A state has parts, arrays of any shape behind their first axis: (variance, token covariance, squared mean) in fidelity
`moments`, token kernels in `kernel`. With fixed connections the parts are those of all n x n pairs of streams; with
gates, under which streams stay alike in law, the second moments of the mean stream and of the deviations from it.
`docs/theory/network.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from signalprop.network.layer_inputs import changed, matrices
from signalprop.network.layout import layer_starts
from signalprop.network.moments import FloatArray, Moments
from signalprop.network.parametrization import Parametrization
from signalprop.results.between_streams import STREAM_COVARIANCE, over_their_mean
from signalprop.theory.log_arithmetic import correlation, log, safe_exp
from signalprop.theory.scalar_recursion import Ahead, Back, Gradient, Output, Read, Share, Stream
from signalprop.theory.stream_gates import gates_of


def connections_of(p: Parametrization) -> Connections:
    """The connections of a table whose architecture has several streams."""
    streams = p.architecture.streams
    if streams is None:
        return Earlier(p)
    if streams.mixing == "siamese":
        return Siamese(p)
    return Gated(p) if streams.gated else Fixed(p)


def _apply(weights: FloatArray, parts: FloatArray) -> FloatArray:
    return np.asarray(np.tensordot(weights, parts, 1))


class Fixed:
    """How the sublayers of a table read, write and mix streams, by given numbers: parts (K, ...) are of n x n pairs.

    `rho` is of how alike the streams of two tokens are, as one of the parts.

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
        """What sublayer i reads, (...); of gated streams in units of the sum of its weights, which a norm divides."""
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

    def mixed_back(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        """The gradient that the skip path sends back."""
        return _apply(_both(self.m[i]).T, gradient)

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
        """Log of the square of what the head reads of a stream that entered, on the skip path alone."""
        carried, log_size = np.ones(len(self.last)), 0.0
        for i, matrix in enumerate(self.m):
            carried = matrix @ (self.before[i] @ carried if i in self.before else carried)
            size = float(np.abs(carried).max())
            if size == 0:
                break
            carried, log_size = carried / size, log_size + math.log(size)
        return float(2 * log_size + log((self.last @ carried) ** 2))

    def entering(self, i: int, parts: FloatArray) -> FloatArray:
        """The parts that sublayer i reads, of those after the one before it."""
        m = self.before.get(i)
        return parts if m is None else _apply(_both(m), parts)

    def entering_back(self, i: int, gradient: FloatArray) -> FloatArray:
        """The gradient after the sublayer before, of that of the parts that sublayer i reads."""
        m = self.before.get(i)
        return gradient if m is None else _apply(_both(m).T, gradient)


def _both(matrix: FloatArray) -> FloatArray:
    """A matrix on both streams of a pair."""
    return np.asarray(np.kron(matrix, matrix), np.float64)


def _pairs(weights: FloatArray) -> FloatArray:
    return np.multiply.outer(weights, weights).ravel()


class Earlier(Fixed):
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


class Siamese(Fixed):
    """Two streams of which the first is normed before every sublayer, and both are where they are read.

    Norms are factors of every token, on gradients too: their own directions are 1 of d_model.
    """

    def __init__(self, p: Parametrization) -> None:
        super().__init__(p)
        self.n_sublayers, self.epsilon, self.skip2 = p.n_sublayers, p.architecture.norm_eps, p.skip**2
        self.read_factors: dict[int, FloatArray] = {}  # factors on the parts of what is read, and of what is kept
        self.skip_factors: dict[int, FloatArray] = {}

    def norm_streams(self, i: int, parts: FloatArray, log_scale: float) -> None:
        kernels = parts.ndim == 3  # else moments, of one variance for all tokens
        own = np.diagonal(parts, axis1=1, axis2=2) if kernels else parts[:, :1]
        x, y = (1 / np.sqrt(own[k] * safe_exp(log_scale) + self.epsilon) for k in (0, 3))
        pairs = np.outer if kernels else np.multiply
        self.read_factors[i] = np.stack([pairs(a, b) for a in (x, y) for b in (x, y)])
        self.skip_factors[i] = np.stack([pairs(a, b) for a in (x, np.ones_like(x)) for b in (x, np.ones_like(x))])

    def read(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray((self.read_factors[i] * parts).sum(0))

    def mixed(self, i: int, parts: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray(self.skip2[i] * self.skip_factors[i] * parts)

    def sent(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        return self.read_factors[i] * gradient

    def mixed_back(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray(self.skip2[i] * self.skip_factors[i] * gradient)

    def head(self, parts: FloatArray) -> FloatArray:
        return self.read(self.n_sublayers, parts, parts)

    def head_sent(self, gradient: FloatArray) -> FloatArray:
        return self.sent(self.n_sublayers, gradient, gradient)


class Gated:
    """As `Fixed`, by gates: parts are second moments of the mean stream, and the mean ones of deviations from it."""

    def __init__(self, p: Parametrization) -> None:
        s = p.architecture.streams
        assert s is not None
        self.n, self.std = s.n, s.logit_std(p.architecture.d_model)
        self.gates, self.skip2 = gates_of(s, p.architecture.d_model), p.skip**2
        self.average, self.start = np.ones(2), np.array([1.0, 0.0])
        self.spread = self.n / (self.n - 1)

    def norm_streams(self, i: int, parts: FloatArray, log_scale: float) -> None:
        pass

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

    def mixed_back(self, i: int, gradient: FloatArray, rho: FloatArray) -> FloatArray:
        return self.mixed(i, gradient, rho)

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

    def entering(self, i: int, parts: FloatArray) -> FloatArray:
        return parts

    def entering_back(self, i: int, gradient: FloatArray) -> FloatArray:
        return gradient


Connections = Fixed | Gated


@dataclass(frozen=True)
class Several:
    """Parts (K, ...) times exp(log_scale), which keeps them within range."""

    parts: FloatArray
    log_scale: float

    def rescaled(self) -> Several:
        """The same, with a largest number of 1."""
        top = float(np.abs(self.parts).max())
        return Several(self.parts / top, self.log_scale + math.log(top)) if top > 0 else self

    def plus(self, parts: FloatArray, log_scale: float) -> Several:
        """The sum with parts times exp(log_scale)."""
        top = max(self.log_scale, log_scale)
        own, other = (math.exp(max(scale - top, -745.0)) for scale in (self.log_scale, log_scale))
        return Several(own * self.parts + other * parts, top).rescaled()

    def times(self, factor: float) -> Several:
        """The same times a number >= 0."""
        return Several(self.parts * factor, self.log_scale).rescaled()

    def mean(self, connections: Connections) -> FloatArray:
        """The mean over streams, in units of exp(log_scale)."""
        return _apply(connections.average, self.parts)


def _rho(mean: FloatArray) -> FloatArray:
    """How alike the streams of a token with itself, of two tokens, and again."""
    r = correlation(float(mean[1]), float(mean[0]))
    return np.array([1.0, r, r])


class AheadOfStreams(Ahead):
    """The way forward of (variance, token covariance, squared mean) of pairs of streams."""

    def __init__(self, p: Parametrization) -> None:
        super().__init__(p)
        self.connections = connections_of(p)
        self.before: dict[int, Several] = {}
        self.between: list[FloatArray] = []

    def enter(self, moments: Moments) -> Any:
        one = np.array([moments.variance, moments.covariance, float(moments.mean) ** 2], float)
        return Several(np.multiply.outer(self.connections.start, one), 0.0).rescaled()

    def leave(self, stream: Any) -> Stream:
        self.connections.norm_streams(self.p.n_sublayers, stream.parts, stream.log_scale)
        return _scalars(self.connections.head(stream.parts), stream.log_scale)

    def entering(self, i: int, stream: Any) -> Any:
        return Several(self.connections.entering(i, stream.parts), stream.log_scale).rescaled()

    def _of(self, i: int, stream: Several) -> Stream:
        self.before[i] = stream
        self.connections.norm_streams(i, stream.parts, stream.log_scale)
        read = self.connections.read(i, stream.parts, _rho(stream.mean(self.connections)))
        return _scalars(read, stream.log_scale)

    def read(self, i: int, stream: Any) -> Read:
        return super().read(i, self._of(i, stream))

    def read_normed(self, i: int, stream: Any) -> Read:
        return super().read_normed(i, self._of(i, stream))

    def skipped(self, i: int, stream: Any) -> Any:
        rho = _rho(stream.mean(self.connections))
        return Several(self.connections.mixed(i, stream.parts, rho), stream.log_scale).rescaled()

    def plus(self, i: int, skipped: Any, output: Output) -> Any:
        rho = _rho(self.before[i].mean(self.connections))
        branch = np.array([1.0, float(output[1]), 0.0])
        return skipped.plus(self.connections.written(i, branch, rho), float(self.log_branch2 + output[0]))

    def record(self, i: int, read: Any, output: Output, out: Any) -> None:
        one, other = (_scalars(x.mean(self.connections), x.log_scale) for x in (read, out))
        super().record(i, one, output, other)
        if self.a.streams is not None:
            self.between.append(over_their_mean(self.connections.between(out.parts[:, 0])))

    def statistics(self) -> dict[str, Any]:
        return {STREAM_COVARIANCE: np.array(self.between).tolist()} if self.between else {}


def _scalars(values: FloatArray, log_scale: float) -> Stream:
    v, c, m2 = (float(x) for x in values)
    return log(v) + log_scale, correlation(c, v), safe_exp((log(m2) + log_scale) / 2) if m2 > 0 else 0.0


class BackOfStreams(Back):
    """The way back of (variance, token covariance) of pairs of streams' gradients."""

    ahead: AheadOfStreams

    def enter(self, gradient: Gradient) -> Any:
        one = np.array([1.0, float(gradient[1])])
        return Several(self.ahead.connections.head_sent(one), float(gradient[0])).rescaled()

    def _rho(self, i: int) -> FloatArray:
        return _rho(self.ahead.before[i].mean(self.ahead.connections))[:2]

    def at_branch(self, i: int, at_sum: Any) -> Gradient:
        v, c = self.ahead.connections.arriving(i, at_sum.parts, self._rho(i)).tolist()
        return log(v) + at_sum.log_scale + float(self.log_branch2), correlation(c, v)

    def sent(self, i: int, at_sum: Any, at_branch: Gradient) -> Any:
        connections, rho, streams_before = self.ahead.connections, self._rho(i), self.ahead.before[i]
        of_branch = (at_branch[0] - self.log_branch2, at_branch[1])
        share: Share = super().sent(i, of_branch, at_branch)
        at_read, log_scale = np.array([float(share[1]), float(share[2])]), float(share[0])
        out = Several(connections.sent(i, at_read, rho), log_scale)
        if not isinstance(connections, Gated):
            return out
        streams = streams_before.parts[:, :2]
        variance = float(streams_before.mean(connections)[0])
        branch = safe_exp(float(self.log_branch2 + self.ahead.recorded["branch"][i]) - streams_before.log_scale)
        output = branch * np.array([1.0, float(self.ahead.recorded["r_branch"][i])])
        units = streams / variance, output / variance, at_read * safe_exp(log_scale - at_sum.log_scale)
        gates = connections.through_gates(i, at_sum.parts, *units, rho)
        return out.plus(gates, at_sum.log_scale)

    def skipped_back(self, i: int, at_sum: Any) -> Any:
        parts = self.ahead.connections.mixed_back(i, at_sum.parts, self._rho(i))
        return Several(parts, at_sum.log_scale).rescaled()

    def entering_back(self, i: int, gradient: Any) -> tuple[Any, Any]:
        connections = self.ahead.connections
        before = Several(connections.entering_back(i, gradient.parts), gradient.log_scale).rescaled()
        return gradient if isinstance(connections, Earlier) and i in connections.sums else before, before

    def together(self, one: Any, other: Any) -> Any:
        return one.plus(other.parts, other.log_scale)

    def whole(self, share: Any) -> Any:
        return share

    def record(self, point: str, i: int, gradient: Any) -> None:
        if isinstance(gradient, Several):
            v, c = gradient.mean(self.ahead.connections).tolist()
            gradient = (log(v) + gradient.log_scale, correlation(c, v))
        super().record(point, i, gradient)
