"""Several residual streams: the step of `kernels/stack.py` on the token kernels of their pairs, there and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.position_grid import Grid
from signalprop.kernels.scaled_kernel import State, normalised
from signalprop.kernels.stack import Back, Read, Stack
from signalprop.kernels.streams.connections import Connections, Earlier, Gated, connections_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.between_streams import over_their_mean
from signalprop.theory.log_arithmetic import inverse_roots, safe_exp
from signalprop.theory.network import log_of_row

Keep = NDArray[np.bool_] | Grid | None


@dataclass(frozen=True)
class Kernels:
    """Kernels of pairs of streams, (K, T, T), times exp(log_scale); read as a State is, their mean over streams."""

    parts: FloatArray
    log_scale: float
    connections: Connections

    def of(self, parts: FloatArray) -> Kernels:
        """Other parts, of the same scale."""
        return replace(self, parts=parts).rescaled()

    def rescaled(self) -> Kernels:
        """The same, with a largest number of 1."""
        top = float(np.abs(self.parts).max())
        if top == 0:
            return self
        return replace(self, parts=self.parts / top, log_scale=self.log_scale + math.log(top))

    def plus(self, parts: FloatArray, log_scale: float) -> Kernels:
        """The sum with parts times exp(log_scale)."""
        top = max(self.log_scale, log_scale)
        one, other = (math.exp(max(scale - top, -745.0)) for scale in (self.log_scale, log_scale))
        return Kernels(one * self.parts + other * parts, top, self.connections).rescaled()

    @property
    def kernel(self) -> FloatArray:
        """Of the mean over streams, in units of exp(log_scale)."""
        return np.asarray(np.tensordot(self.connections.average, self.parts, 1))

    def moments(self, keep: Keep = None) -> tuple[float, float]:
        """As of `State`."""
        return State(self.kernel, self.log_scale).moments(keep)

    def between(self, keep: Keep = None) -> FloatArray:
        """The n x n covariance of the streams over the mean of their variances; positions as of `State`."""
        return over_their_mean(self.connections.between(np.array([State(part).trace(keep) for part in self.parts])))

    def rho(self) -> FloatArray:
        """The correlation of the streams of two tokens, all together, (T, T)."""
        return np.clip(normalised(self.kernel), -1.0, 1.0)


class StackOfStreams(Stack):
    """A stack whose state is `Kernels`."""

    def __init__(self, p: Parametrization, grid: Grid | None = None) -> None:
        super().__init__(p, grid=grid, encoder_grid=grid)
        self.connections = connections_of(p)
        self.rho: FloatArray = np.zeros(0)  # of what the present sublayer reads

    def enter(self, start: State) -> Any:
        parts = np.multiply.outer(self.connections.start, start.kernel)
        return Kernels(parts, start.log_scale, self.connections).rescaled()

    def leave(self, last: Any) -> State:
        self.connections.norm_streams(self.n, last.parts, last.log_scale)
        return State(self.connections.head(last.parts), last.log_scale).rescaled()

    def back(self, gradient: State) -> Any:
        return Kernels(self.connections.head_sent(gradient.kernel), gradient.log_scale, self.connections).rescaled()

    def _of(self, i: int, stream: Kernels) -> State:
        self.rho = stream.rho()
        self.connections.norm_streams(i, stream.parts, stream.log_scale)
        return State(self.connections.read(i, stream.parts, self.rho), stream.log_scale).rescaled()

    def read(self, i: int, stream: Any) -> Read:
        return super().read(i, self._of(i, stream))

    def read_normed(self, i: int, stream: Any) -> Read:
        return super().read_normed(i, self._of(i, stream))

    def skipped(self, i: int, stream: Any) -> Any:
        return stream.of(self.connections.mixed(i, stream.parts, self.rho))

    def entering(self, i: int, stream: Any) -> Any:
        return stream.of(cast(Earlier, self.connections).entering(i, stream.parts))

    def log_token_share(self, log_norm: FloatArray) -> float:
        return float(log_of_row(self.p) + self.connections.log_carried2())

    def plus(self, i: int, skipped: Any, output: State) -> Any:
        added = output.times(float(self.p.branch[i]) ** 2)
        return skipped.plus(self.connections.written(i, added.kernel, self.rho), added.log_scale)


class BackOfStreams(Back):
    """The way back over a stretch of sublayers of a `StackOfStreams`."""

    def __init__(self, stack: StackOfStreams, across: State) -> None:
        super().__init__(stack, across, None)
        self.connections = stack.connections

    def _read(self, i: int) -> Kernels:
        return cast(Kernels, self.reads[i])

    def at_branch(self, i: int, at_sum: Any) -> State:
        arriving = self.connections.arriving(i, at_sum.parts, self._read(i).rho())
        return State(arriving, at_sum.log_scale).rescaled().times(float(self.p.branch[i]) ** 2)

    def sent(self, i: int, at_sum: Any, at_branch: State) -> Any:
        connections, streams = self.connections, self._read(i)
        rho = streams.rho()
        at_read = super().sent(i, at_branch, at_branch)
        out = Kernels(connections.sent(i, at_read.kernel, rho), at_read.log_scale, connections).rescaled()
        if isinstance(connections, Gated):
            given = self.stack.output(i, self.stack.what_is_read(i, self.reads[i]))
            added = given.times(float(self.p.branch[i]) ** 2)
            root = inverse_roots(np.diagonal(streams.kernel))
            size = root * root[:, None]
            branch = added.kernel * safe_exp(added.log_scale - streams.log_scale) * size
            in_units = at_read.kernel * safe_exp(at_read.log_scale - at_sum.log_scale)
            gates = connections.through_gates(i, at_sum.parts, streams.parts * size, branch, in_units, rho)
            out = out.plus(gates, at_sum.log_scale)
        return out

    def skipped_back(self, i: int, at_sum: Any) -> Any:
        return at_sum.of(self.connections.mixed_back(i, at_sum.parts, self._read(i).rho()))

    def entering_back(self, i: int, gradient: Any) -> tuple[Any, Any]:
        earlier = cast(Earlier, self.connections)
        before = gradient.of(earlier.entering_back(i, gradient.parts))
        return gradient if i in earlier.sums else before, before

    def together(self, one: Any, other: Any) -> Any:
        return one.plus(other.parts, other.log_scale)


def stack_of(p: Parametrization, grid: Grid | None = None) -> Stack:
    """The steps of a table on kernels: of one stream, or of several."""
    return StackOfStreams(p, grid=grid) if p.architecture.several_streams else Stack(p, grid=grid)


def back_of(stack: Stack, across: State, norm_streams: Callable[[int, State, State], None]) -> Back:
    """The way back through a stack."""
    return BackOfStreams(stack, across) if isinstance(stack, StackOfStreams) else Back(stack, across, norm_streams)
