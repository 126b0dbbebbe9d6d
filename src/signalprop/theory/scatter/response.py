"""How far single networks of a given width lie from the mean that is predicted: linear response to the weights' draws.

A stream's moments are two modes, what all tokens share and what is their own, each the length of a Gaussian vector of
d_model features. Every sublayer adds noise of relative variance O(1 / d_model) to both, forward and back, and passes on
what came before by the derivative of its moments. Derivation, and measured against networks: `docs/theory/network.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from signalprop.network.kinds import rows_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.theory.branches import backward_maps, branches_of, forward_state_of, from_the_sum, placed
from signalprop.theory.scatter.error_chains import (
    affine,
    banded,
    bend_of_ratio,
    chained,
    congruent,
    of_gaussian_sizes,
    to_state,
)
from signalprop.theory.signals import BranchBackward

_STEP = 1e-4  # of the differences that stand for derivatives of moments
_HELD = 50.0  # ln of a ratio that is still a double when it is squared
_UP = slice(None, None, -1)  # sublayers from the last to the first


class Overlaps(NamedTuple):
    """The similarity of token kernels, sum_ij A_ij B_ij / (tr A tr B): of skip and branch, of a branch with itself.

    Arrays (sublayers, 2). Position averages (v, c) over T tokens give (v v' + (T - 1) c c') / (T v v').
    """

    forward: FloatArray
    backward: FloatArray | None


class Point(NamedTuple):
    """Every sublayer at one forward signal, (sublayers,)."""

    branch: tuple[FloatArray, FloatArray]  # ln variance and correlation
    total: tuple[FloatArray, FloatArray]  # of the sum, before a norm after it
    share: FloatArray  # of the branch in the sum's variance
    skip2: FloatArray  # factor on a gradient along the skip, norms included
    maps: BranchBackward

    def back(self, r: FloatArray) -> tuple[FloatArray, FloatArray]:
        """ln of the variance, and correlation, of what a gradient of variance 1 and correlation r becomes."""
        v = self.skip2 + self.maps.vv + self.maps.vc * r
        return np.log(v), (self.skip2 * r + self.maps.cv + self.maps.cc * r) / v


class WayBack(NamedTuple):
    """The linear response of the gradient, (sublayers, ...).

    Attributes:
        r: correlation of what arrives at a sublayer. v: variance after the sublayer of a gradient of
            variance 1 before it. sent: the branch's share of it.
        through: derivative by what arrives, by_signal: by the stream that is read, in (ln variance, correlation).
        to_state: as the function. noise, beyond: as of sums, of the gradient: all, and what is beyond averages.
    """

    r: FloatArray
    v: FloatArray
    sent: FloatArray
    through: FloatArray
    by_signal: FloatArray
    to_state: FloatArray
    noise: FloatArray
    beyond: FloatArray


class Response:
    """Of one network and its profile, to the draws of its weights."""

    def __init__(self, p: Parametrization, profile: Profile, overlaps: Overlaps | None) -> None:
        self.p, self.profile, self.overlaps = p, profile, overlaps
        a = p.architecture
        self.n, self.d, self.tokens = p.n_sublayers, a.d_model, float(a.seq_len)
        self.after = np.broadcast_to(placed(p, NORM_AFTER), self.n)
        self.branches = branches_of(p)
        self.here = self.at(0.0, 0.0)
        stream = profile.forward["stream_in"].token_correlation
        self.turn = np.where(stream > 0.5, -_STEP, _STEP)
        self.by_v, self.by_r = self.at(_STEP, 0.0), self.at(0.0, self.turn)
        self.attends = rows_where(p, lambda kind: kind.attends)
        # random maps in a branch, in units of one to d_model features: values and output; down
        self.maps_in_a_row = np.where(self.attends, 1.0 + self.d / (a.n_kv_heads * a.d_head), 1.0)
        skipped, added = self.modes(1 - self.here.share, stream), self.modes(self.here.share, self.here.branch[1])
        self.beyond = self._beyond_averages(skipped, added, None if overlaps is None else overlaps.forward)
        self.raw_noise = self.noise(skipped, added) + self.beyond
        self.to_state = to_state(self.here.total[1], ~self.after)
        self.passed = self.derivative(lambda point: point.total)
        self.passed[self.after, 0] = 0.0

    def at(self, log_v: float, r: FloatArray | float) -> Point:
        """Every sublayer, its input's ln variance and correlation moved by so much."""
        p, stream = self.p, self.profile.forward["stream_in"]
        moved = np.clip(stream.token_correlation + r, -1.0, 1.0)
        read = replace(stream, log_variance=stream.log_variance + log_v, token_correlation=moved)
        forward = {**self.profile.forward, "stream_in": read}
        state, output = forward_state_of(p, self.branches, replace(self.profile, forward=forward))
        added = np.log(p.branch**2) + output[0]
        total = np.logaddexp(np.log(p.skip**2) + read.log_variance, added)
        share = np.exp(added - total)
        maps = from_the_sum(p, state, backward_maps(p, self.branches, state)[0])
        norm = np.logaddexp(total, np.log(float(p.architecture.norm_eps)))
        out = np.exp(np.where(self.after, np.log(p.norm_output**2) - norm, 0.0))
        sums = total, share * output[1] + (1 - share) * moved
        return Point(output, sums, share, out * p.skip**2, BranchBackward(*(out * column for column in maps)))

    def derivative(self, of: Callable[[Point], tuple[FloatArray, FloatArray]]) -> FloatArray:
        """Of (ln variance, correlation) of something by those of the stream that is read, (sublayers, 2, 2)."""
        at = [of(point) for point in (self.here, self.by_v, self.by_r)]
        columns = [[(moved - base) / step for base, moved in zip(at[0], there, strict=True)]
                   for there, step in ((at[1], _STEP), (at[2], self.turn))]  # fmt: skip
        return np.moveaxis(np.array(columns), (0, 1), (2, 1))

    # --- noise ---

    def modes(self, v: FloatArray, r: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Variance of what all tokens share, times T, and of what is a token's own."""
        return v * (1 + (self.tokens - 1) * r), v * (1 - r)

    def noise(self, skipped: tuple[FloatArray, FloatArray], added: tuple[FloatArray, FloatArray]) -> FloatArray:
        """Covariance of the noise in (variance, covariance) of a sum of variance 1, (sublayers, 2, 2)."""
        t = self.tokens
        vectors = (1.0, np.array([1.0, 1.0]) / t), (max(t - 1, 1.0), np.array([t - 1, -1.0]) / t)
        out = np.zeros((self.n, 2, 2))
        for skip, branch, (members, by) in zip(skipped, added, vectors, strict=True):
            out += (self._of_sum(skip * branch, branch**2) / members)[:, None, None] * np.outer(by, by)
        return out

    def _beyond_averages(
        self, skipped: tuple[FloatArray, FloatArray], added: tuple[FloatArray, FloatArray], known: FloatArray | None
    ) -> FloatArray:
        """The same of what kernels know beyond position averages: noise in the size of the sum alone."""
        if known is None:
            return np.zeros((self.n, 2, 2))
        t = self.tokens
        by_mode = [self._pair(modes) for modes in (skipped, added)]
        of_average = [(a[0] * b[0] + (t - 1) * a[1] * b[1]) / t**2 for a, b in ((skipped, added), (added, added))]
        v, w = (pair[:, 0] for pair in by_mode)
        cross, specific = np.maximum(known.T * [v * w, w * w] - of_average, 0.0)
        total = by_mode[0] + by_mode[1]
        return np.asarray(self._of_sum(cross, specific)[:, None, None] * total[:, :, None] * total[:, None, :])

    def _pair(self, modes: tuple[FloatArray, FloatArray]) -> FloatArray:
        """(variance, covariance) of modes, (sublayers, 2)."""
        (shared, specific), t = modes, self.tokens
        return np.stack([(shared + (t - 1) * specific) / t, (shared - specific) / t], -1)

    def _of_sum(self, cross: FloatArray, specific: FloatArray) -> FloatArray:
        """Variance of the size of a sum, by the products of skip and branch, and of the branch with itself."""
        return np.asarray((4 * cross + 2 * self.maps_in_a_row * specific) / self.d)

    # --- propagation ---

    def told(self) -> Profile:
        """The profile with its standard deviations."""
        profile = self.profile
        r = float(profile.forward["stream_in"].token_correlation[0])
        start = self._start(r, 0.0 if self.p.architecture.embedding_norm else 1.0)
        branch = self.derivative(lambda point: point.branch)
        none = 0 * self.here.share
        specific = self.noise((none, none), self.modes(np.ones(self.n), self.here.branch[1]))
        covariances = self.spread_ahead(branch, start, self.raw_noise, specific)
        means = self._means(branch, specific)
        for name, covariance in covariances.items():
            means[name][:, 0] += covariance[:, 0, 0] / 2  # of the mean, not the mean of ln
        forward = {name: banded(profile.forward[name], covariances[name], *mean.T) for name, mean in means.items()}
        if profile.gradient is None:
            return replace(profile, forward=forward)
        found, excess = self._back(self.way, covariances["stream_in"], means["stream_in"])
        g = profile.gradient
        top = self._start(float(g["stream_out"].token_correlation[-1]), 0.0)
        above = np.concatenate([found[1:], top[None]]), np.append(excess[1:], 0.0)
        gradient = {
            **g,
            "stream_in": banded(g["stream_in"], found, excess),
            "stream_out": banded(g["stream_out"], *above),
        }
        return replace(profile, forward=forward, gradient=gradient)

    def spread_ahead(
        self, branch: FloatArray, start: FloatArray, sums: FloatArray, specific: FloatArray
    ) -> dict[str, FloatArray]:
        """Covariances of (ln variance, correlation) by point, of noise in sums and in what branches give."""
        out = chained(self.passed, congruent(self.to_state, sums), start)
        entering = np.concatenate([start[None], out[:-1]])
        at_branch = congruent(branch, entering) + congruent(to_state(self.here.branch[1]), specific)
        return {"stream_in": entering, "branch": at_branch, "stream_out": out}

    def _start(self, r: float, size: float) -> FloatArray:
        """Covariance of (ln variance, correlation) of Gaussian tokens; size 0: relative to their own variance."""
        return congruent(np.array([[size, 0.0], [-r, 1.0]]), self._gaussian(r))

    def _gaussian(self, r: float) -> FloatArray:
        """Covariance of (variance, covariance) of Gaussian tokens of variance 1."""
        t = self.tokens
        shared, specific = 1 + (t - 1) * r, 1 - r
        one, other = np.array([1.0, 1.0]) / t, np.array([t - 1, -1.0]) / t
        raw = shared**2 * np.outer(one, one) + specific**2 / max(t - 1, 1) * np.outer(other, other)
        return np.asarray(2 / self.d * raw)

    def _means(self, by_stream: FloatArray, specific: FloatArray) -> dict[str, FloatArray]:
        """Means of (ln variance, correlation) over what is predicted, to second order, by point; (sublayers, 2).

        Args:
            by_stream: derivative of the branch by the stream that it reads. specific: covariance of the branch's own
                noise in its (variance, covariance).
        """
        stream, here = self.profile.forward["stream_in"].token_correlation, self.here
        before = np.broadcast_to(placed(self.p, NORM_BEFORE), self.n)
        lengths = of_gaussian_sizes(stream, self.d)
        at_branch = np.einsum("nij,nj->ni", by_stream, np.stack([0 * stream, np.where(before, lengths, 0.0)], -1))
        f, branch_r, total_r = here.share, here.branch[1], here.total[1]
        to_sum = np.moveaxis(np.array([[f, 0 * f], [f * (branch_r - total_r), f]]), -1, 0)
        at_sum = np.einsum("nij,nj->ni", to_sum, at_branch) + bend_of_ratio(total_r, self.raw_noise)
        at_sum[self.after, 0] = 0.0
        start = bend_of_ratio(stream[0], self._gaussian(stream[0]))
        if self.p.architecture.embedding_norm:
            start = np.array([0.0, start[1] + lengths[0]])
        out = affine(self.passed, at_sum, start)
        above = np.concatenate([start[None], out[:-1]])
        branch = np.einsum("nij,nj->ni", by_stream, above) + at_branch + bend_of_ratio(branch_r, specific)
        return {"stream_in": above, "branch": branch, "stream_out": out}

    @cached_property
    def way(self) -> WayBack:
        """The linear response of the gradient."""
        gradient = self.profile.gradient
        assert gradient is not None
        r = gradient["stream_out"].token_correlation
        turn = np.where(r > 0.5, -_STEP, _STEP)
        base, moved = self.here.back(r), self.here.back(r + turn)
        through = np.zeros((self.n, 2, 2))
        through[:, 0, 0] = 1.0
        for k in (0, 1):
            through[:, k, 1] = (moved[k] - base[k]) / turn
        if self.p.architecture.causal:
            recalibrate(through, r, gradient, self.here.maps, self.here.skip2)
        by_signal = self.derivative(lambda point: point.back(r))
        v, maps = np.exp(base[0]), self.here.maps
        sent, shared = (maps.vv + maps.vc * r) / v, (maps.cv + maps.cc * r) / v
        skipped, added = self.modes(self.here.skip2 / v, r), (sent + (self.tokens - 1) * shared, sent - shared)
        beyond = self._beyond_averages(skipped, added, None if self.overlaps is None else self.overlaps.backward)
        noise = self.noise(skipped, added) + beyond
        return WayBack(r, v, sent, through, by_signal, to_state(base[1]), noise, beyond)

    def sources(
        self, way: WayBack, entering: FloatArray, sums: FloatArray, noise: FloatArray, top: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Covariances of the gradient at every sublayer's input, by the signals that it meets and by the maps.

        Args:
            entering: of the stream that is read. sums, noise: of sums and of gradients there. top: of the last.
        """
        by_signals, by_maps = np.zeros((2, self.n, 2, 2))
        by_stream, from_sums = np.zeros((2, 2, 2))
        for i in range(self.n - 1, -1, -1):
            through = way.through[i]
            by_sum = through @ by_stream @ self.to_state[i]
            by_sum[0, 0] -= self.after[i]  # the norm after a sum divides gradients by its size
            from_sums = congruent(through, from_sums) + congruent(by_sum, sums[i])
            top = congruent(through, top) + congruent(way.to_state[i], noise[i])
            by_stream = through @ by_stream @ self.passed[i] + way.by_signal[i]
            by_signals[i], by_maps[i] = from_sums + congruent(by_stream, entering[i]), top
        return by_signals, by_maps

    def _back(self, way: WayBack, entering: FloatArray, mean: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Covariances of the gradient at every sublayer's input, and ln of its mean over the prediction.

        Args:
            entering, mean: of the stream that is read; (ln of the mean variance, mean correlation) over the prediction.
        """
        top, sent = self._start(float(way.r[-1]), 0.0), way.sent
        by_signals, by_maps = self.sources(way, entering, self.raw_noise, way.noise, top)
        summed = congruent(self.derivative(lambda point: point.total), entering) + self.raw_noise
        before = np.broadcast_to(placed(self.p, NORM_BEFORE), self.n)
        bend = np.where(before, sent * (2 - sent), 0.0) * entering[:, 0, 0] / 2
        bend = np.where(self.after, self._by_own_sizes(sent) - summed[:, 0, 0] / 2, bend)
        lifted = affine(way.through[_UP], np.einsum("nij,nj->ni", way.by_signal, mean)[_UP], np.zeros(2))[_UP, 0]
        excess = np.cumsum(bend[_UP])[_UP] + by_signals[:, 0, 0] / 2 + lifted
        return by_signals + by_maps, excess

    def _by_own_sizes(self, sent: FloatArray) -> FloatArray:
        """ln of the mean of what a post-norm's own token sizes make of a gradient, less what a branch does not see.

        Args:
            sent: share of the branch in the gradient of the stream that is read.
        """
        share = self.here.share
        sizes = self._of_sum(share * (1 - share), share**2)
        if not self.p.architecture.embedding_norm:
            sizes[0] += 2 * (1 - share[0]) ** 2 / self.d  # rows of the embedding are Gaussian
        unseen = sent * self._of_sum(1 - share, share) / 2  # the norm's gradient is orthogonal to the sum
        return np.asarray(sizes - unseen)


def recalibrate(
    through: FloatArray, r: FloatArray, gradient: Mapping[str, Series], maps: BranchBackward, skip: FloatArray
) -> None:
    """What averages over positions get wrong in a causal stack, from what its kernels say of the same step.

    There the gradient's variance and correlation become known numbers; the parts that come from the correlation
    are given the size that makes it so.
    """
    inner, outer = gradient["stream_in"], gradient["stream_out"]
    v = np.exp(np.clip(inner.log_variance - outer.log_variance, -_HELD, _HELD))
    r_in = inner.token_correlation
    by_v, by_c = maps.vc * r, maps.cc * r
    v_scale = np.where(by_v > 1e-9, np.clip((v - skip - maps.vv) / by_v, 0.0, 3.0), 1.0)
    c_scale = np.where(by_c > 1e-9, np.clip((r_in * v - skip * r - maps.cv) / by_c, 0.0, 3.0), 1.0)
    to_v, to_c = maps.vc * v_scale, skip + maps.cc * c_scale
    through[:, 0, 1] = to_v / v
    through[:, 1, 1] = (to_c - r_in * to_v) / v
