"""The residual recursion on scalars: one stream ahead, its gradient back (docs/theory/network.md)."""

from __future__ import annotations

import numpy as np

from signalprop.network.layout import stacks_of
from signalprop.network.moments import Array, FloatArray, Moments
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.network.residual import NORM_ON_BRANCH, back_through, step, step_back, through
from signalprop.results.profile import POINTS
from signalprop.results.series import Series
from signalprop.theory.branch_inputs import LARGEST_MEAN, as_stream, read_memory, read_normed, read_raw, with_bias
from signalprop.theory.branches import (
    ForwardState,
    backward_maps,
    branches_of,
    from_the_sum,
    log_on_branch,
)
from signalprop.theory.log_arithmetic import (
    NO_SIGNAL,
    correlation,
    exp,
    log,
    log_add,
    row,
    rows_of,
    safe_exp,
    to_fill,
    within,
)
from signalprop.theory.signals import normed

Stream = tuple[Array, Array, Array]  # log variance, token correlation, mean
Gradient = tuple[Array, Array]  # log variance, token correlation
Output = tuple[Array, Array]  # log variance and token correlation of a branch's output
Share = tuple[Array, Array, Array]  # of a gradient: log of a factor, variance and covariance in units of it
Read = tuple[Array, Array, Array]  # second moment, its correlation, log of what it was divided by to be held


class Ahead:
    """The way forward: the algebra of scalars, and the values on it. Columns are (sublayers, ...) while it runs.

    Attributes:
        second, r_read: second moment of what each branch reads, and its token correlation.
        norm: log of the variance (plus epsilon) by which each norm divides, before the branch or after the sum; 0
            without one. raw_branch: log variance of the branch before a norm on it.
        memory: second moment and correlation of the encoder's normed output. memory_norm: log of what its norm divides
            by.
    """

    def __init__(self, p: Parametrization) -> None:
        self.p, self.a = p, p.architecture
        self.lead = p.skip.shape[:-1]
        self.epsilon = log(float(self.a.norm_eps))
        self.shifts = p.norm_shift if p.norm_bias.any() else None
        self.branches = branches_of(p)
        self.placements = [PLACEMENTS[code] for code in p.placement.tolist()]
        names = ("stream_in", "stream_out", "branch", "r_in", "r_out", "r_branch", "mean_in", "mean_out", "second",
                 "r_read", "norm", "raw_branch")  # fmt: skip
        self.recorded = {name: to_fill(p.n_sublayers, self.lead) for name in names}
        self.memory: tuple[Array, Array] | None = None
        self.memory_norm: Array = 0.0

    def run(self, starts: list[Moments]) -> Stream:
        """The last stream, from what enters each stack."""
        p, parallel = self.p, self.p.parallel.tolist()
        # what a row needs: log skip^2, skip, log branch^2, norms' gains squared and their logs
        norm2, second2 = p.norm_output**2, p.post_norm_gain**2
        on_branch = log(np.where(p.placement == PLACEMENTS.index("sandwich"), second2, norm2))
        columns = [log(p.skip**2), p.skip, log(p.branch**2), norm2, log(norm2), on_branch]
        numbers = rows_of(np.stack(columns))

        def one(i: int, read: Stream, onto: Stream | None) -> tuple[Output, Stream]:
            self.log_skip2, self.skip, self.log_branch2, self.gain2, self.log_gain2, self.log_on_branch = numbers[i]
            return step(self, i, self.placements[i], read, onto)

        stream: Stream | None = None
        for (_, rows), moments in zip(stacks_of(self.p), starts, strict=True):
            if stream is not None:
                self.memory, self.memory_norm = read_memory(self.p, stream[0], stream[1])
            beside = parallel[rows.start : rows.stop]
            stream = through(rows, beside, one, as_stream(moments, self.lead), self.record)
        assert stream is not None
        return stream

    def read(self, i: int, stream: Stream) -> Read:
        """A stream as it is, of any size: the branch is computed at a held one."""
        second, r_read, held = read_raw(self.a, *stream)
        recorded = self.recorded
        recorded["second"][i], recorded["r_read"][i], recorded["norm"][i] = second, r_read, 0.0
        return second, r_read, held

    def read_normed(self, i: int, stream: Stream) -> Read:
        """A stream after a norm."""
        second, r_read, norm = read_normed(self.a, self.gain2, self.epsilon, *stream)
        if self.shifts is not None:
            second, r_read = with_bias(second, r_read, row(self.shifts, i))
        recorded = self.recorded
        recorded["second"][i], recorded["r_read"][i], recorded["norm"][i] = second, r_read, norm
        return second, r_read, 0.0

    def output(self, i: int, read: Read) -> Output:
        """Log variance and correlation of the branch's output."""
        second, r_read, beyond = read
        output = self.branches[i].forward(i, (second, r_read), self.memory)
        raw = log(output.per_token) + beyond
        self.recorded["raw_branch"][i] = raw
        r = correlation(output.shared, output.per_token)
        if self.placements[i] in NORM_ON_BRANCH:
            return normed(raw, self.epsilon)[0] + self.log_on_branch, r
        return raw, r

    def skipped(self, i: int, stream: Stream) -> Stream:
        """The stream times its multiplier; a mean of extreme size is held where its square is a double."""
        return self.log_skip2 + stream[0], stream[1], within(stream[2] * self.skip, LARGEST_MEAN)

    def plus(self, i: int, skipped: Stream, output: Output) -> Stream:
        """Independent variances add up; a branch has mean 0."""
        log_branch = self.log_branch2 + output[0]
        total = log_add(skipped[0], log_branch)
        share = exp(log_branch - total)  # of the branch in the sum's variance
        return total, share * output[1] + (1 - share) * skipped[1], skipped[2]

    def norm_sum(self, i: int, total: Stream) -> Stream:
        """The sum after a post-norm."""
        out, divisor = normed(total[0], self.epsilon)
        self.recorded["norm"][i] = divisor
        if self.shifts is None:
            return out + self.log_gain2, total[1], total[2] * 0.0
        log_v, bias2 = out + self.log_gain2, row(self.shifts, i)
        return log_add(log_v, log(bias2)), with_bias(safe_exp(log_v), total[1], bias2)[1], total[2] * 0.0

    def record(self, i: int, read: Stream, output: Output, out: Stream) -> None:
        """Keep the moments of the three probe points."""
        recorded = self.recorded
        recorded["stream_in"][i], recorded["r_in"][i], recorded["mean_in"][i] = read
        recorded["branch"][i], recorded["r_branch"][i] = output
        recorded["stream_out"][i], recorded["r_out"][i], recorded["mean_out"][i] = out

    def columns(self, name: str) -> FloatArray:
        """A column of what was seen, (..., sublayers)."""
        return np.moveaxis(np.asarray(self.recorded[name]), 0, -1)

    def state(self) -> ForwardState:
        """What the backward maps need of the way forward."""
        names = ("second", "r_read", "norm", "raw_branch")
        return ForwardState(**{name: self.columns(name) for name in names}, memory=self.memory)

    def series(self) -> dict[str, Series]:
        """Moments at every probe point."""
        c = self.columns
        return {
            "stream_in": Series.of(log_variance=c("stream_in"), token_correlation=c("r_in"), mean=c("mean_in")),
            "branch": Series.of(log_variance=c("branch"), token_correlation=c("r_branch")),
            "stream_out": Series.of(log_variance=c("stream_out"), token_correlation=c("r_out"), mean=c("mean_out")),
        }


class Back:
    """The way back: the algebra of a gradient's scalars. Shares that are added up have one factor."""

    def __init__(self, p: Parametrization, ahead: Ahead, top: tuple[Array, Array, Array]) -> None:
        self.p, self.ahead = p, ahead
        self.lead = p.skip.shape[:-1]
        state = ahead.state()
        maps, to_memory = backward_maps(p, ahead.branches, state)
        after = log(p.norm_output**2) - state.norm
        self.numbers = rows_of(np.stack([p.skip**2, log(p.branch**2), after, *from_the_sum(p, state, maps)]))
        self.to_memory = None if to_memory is None else rows_of(np.stack(to_memory) * safe_exp(log_on_branch(p, state)))
        self.across: list[bool] = []
        if to_memory is not None:
            self.across = np.any(to_memory.vv.reshape(-1, p.n_sublayers), axis=0).tolist()
        self.placements, self.parallel = ahead.placements, p.parallel.tolist()
        self.out = {point: [to_fill(p.n_sublayers, self.lead) for _ in range(2)] for point in POINTS}
        self.top, self.skipped, self.orthogonal_r = (
            np.broadcast_to(np.asarray(x, float), self.lead).copy() if self.lead else float(x) for x in top
        )
        zero: Array = np.zeros(self.lead) if self.lead else 0.0
        self.zero = zero
        self.memory: Gradient = (zero + NO_SIGNAL, zero)

    def run(self) -> dict[str, Series]:
        """Gradients at every probe point, relative to the last stream."""
        p = self.p
        gradient: Gradient = (self.zero, self.top)
        for number, (_, rows) in enumerate(reversed(list(stacks_of(p)))):
            if number:  # the encoder's last stream is read through its final norm
                gradient = (self.memory[0] - self.ahead.memory_norm, self.memory[1])
            back_through(rows, self.parallel, self.sublayer, self.together, self.whole, gradient, self.record)
        last = np.array(self.out["stream_out"][0][-1])

        def series(point: str) -> Series:
            log_v, r = (np.asarray(column) for column in self.out[point])
            return Series.of(log_variance=np.moveaxis(log_v - last, 0, -1), token_correlation=np.moveaxis(r, 0, -1))

        return {point: series(point) for point in POINTS}

    def sublayer(self, i: int, gradient: Gradient) -> tuple[Gradient, Share]:
        """One sublayer, as `residual.back_through` asks for it."""
        self.skip2, self.log_branch2, self.log_after, self.vv, self.vc, self.cv, self.cc = self.numbers[i]
        return step_back(self, i, self.placements[i], self.parallel[i], gradient)

    def norm_sum_back(self, i: int, gradient: Gradient) -> Gradient:
        """Before a post-norm; the last one removes what the head's gradient has along the stream."""
        log_g = gradient[0] + self.log_after
        if i == self.p.n_sublayers - 1:
            return log_g + log(self.skipped), self.orthogonal_r
        return log_g, gradient[1]

    def at_branch(self, i: int, at_sum: Gradient) -> Gradient:
        """Times the branch's multiplier."""
        return at_sum[0] + self.log_branch2, at_sum[1]

    def sent(self, i: int, at_sum: Gradient, at_branch: Gradient) -> Share:
        """Through the branch, its norms and its multiplier, which are all in the maps."""
        log_sum, r = at_sum
        if self.to_memory is not None and self.across[i]:
            m_vv, m_vc, m_cv, m_cc = self.to_memory[i]
            v, c = m_vv + m_vc * r, m_cv + m_cc * r
            self.memory = _added(self.memory, at_branch[0] + log(v), correlation(c, v))
        v, c = self.vv + self.vc * r, self.cv + self.cc * r
        return log_sum, v, c

    def skipped_back(self, i: int, at_sum: Gradient) -> Share:
        """Times the skip's multiplier."""
        return at_sum[0], self.skip2, self.skip2 * at_sum[1]

    def together(self, one: Share, other: Share) -> Share:
        """Shares of one gradient."""
        return one[0], one[1] + other[1], one[2] + other[2]

    def whole(self, share: Share) -> Gradient:
        """The gradient that shares make."""
        return share[0] + log(share[1]), correlation(share[2], share[1])

    def record(self, point: str, i: int, gradient: Gradient) -> None:
        """Keep the moments of a probe point."""
        out = self.out[point]
        out[0][i], out[1][i] = gradient


def _added(state: Gradient, log_v: Array, r: Array) -> Gradient:
    total = log_add(state[0], log_v)
    share = exp(log_v - total)
    return total, share * r + (1 - share) * state[1]
