"""How far single networks of a given width lie from the mean that is predicted: linear response to the weights' draws.

A stream's moments are two modes, what all tokens share and what is their own, each the length of a Gaussian vector of
d_model features. Every sublayer adds noise of relative variance O(1 / d_model) to both, forward and back, and passes on
what came before by the derivative of its moments. Derivation, and measured against networks: `docs/theory/network.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.network.kinds import rows_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE
from signalprop.results.profile import Profile
from signalprop.theory.branches import ForwardState, backward_maps, branches_of, forward_state_of, from_the_sum, placed
from signalprop.theory.scatter.error_chains import (
    affine,
    banded,
    bend_of_ratio,
    chained,
    congruent,
    of_own_sizes,
    outer,
    root,
    to_state,
)
from signalprop.theory.scatter.hidden_units import hidden_units
from signalprop.theory.scatter.token_sizes import bend_of_own_sizes, own_part
from signalprop.theory.scatter.way_back import WayBack, recalibrate
from signalprop.theory.signals import BranchBackward

_STEP = 1e-4  # of the differences that stand for derivatives of moments
_UP = slice(None, None, -1)  # sublayers from the last to the first


class Overlaps(NamedTuple):
    """The similarity of token kernels, sum_ij A_ij B_ij / (tr A tr B): of skip and branch, of a branch with itself.

    Arrays (sublayers, 2). Position averages (v, c) over T tokens give (v v' + (T - 1) c c') / (T v v').
    """

    forward: FloatArray
    backward: FloatArray | None


class _Ahead(NamedTuple):
    """Every sublayer at one forward signal: ln variance and correlation of branch and sum."""

    branch: tuple[FloatArray, FloatArray]
    total: tuple[FloatArray, FloatArray]  # before a norm after it
    share: FloatArray  # of the branch in the sum's variance
    state: ForwardState


class _Point(NamedTuple):
    """The same, and the way back."""

    branch: tuple[FloatArray, FloatArray]
    total: tuple[FloatArray, FloatArray]
    share: FloatArray
    state: ForwardState
    skip2: FloatArray  # factor on a gradient along the skip, norms included
    maps: BranchBackward

    def back(self, r: FloatArray) -> tuple[FloatArray, FloatArray]:
        """ln of the variance, and correlation, of what a gradient of variance 1 and correlation r becomes."""
        v = self.skip2 + self.maps.vv + self.maps.vc * r
        return np.log(v), (self.skip2 * r + self.maps.cv + self.maps.cc * r) / v


class Response:
    """Of one network and its profile, to the draws of its weights."""

    def __init__(self, p: Parametrization, profile: Profile, overlaps: Overlaps | None) -> None:
        self.p, self.profile = p, profile
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
        self.hidden = np.where(self.attends, 0.0, 1.0)[:, None] * hidden_units(
            p, self.here.state, self.here.state.r_read, self._gradient_r()
        )
        skipped, added = (
            self._modes(1 - self.here.share, stream), self._modes(self.here.share, self.here.branch[1])
        )  # fmt: skip
        known = None if overlaps is None else overlaps.forward
        self.beyond = self._beyond_averages(skipped, added, known)
        self.raw_noise = self.noise(skipped, added, self.hidden[:, 0]) + self.beyond
        self.to_state = to_state(self.here.total[1], ~self.after)
        self.passed = self.derivative(lambda point: point.total)
        self.passed[self.after, 0] = 0.0
        self.overlaps = overlaps

    def ahead(self, log_v: FloatArray | float, r: FloatArray | float) -> _Ahead:
        """The forward signal of every sublayer, its input's ln variance and correlation moved by so much."""
        p, stream = self.p, self.profile.forward["stream_in"]
        moved = np.clip(stream.token_correlation + r, -1.0, 1.0)
        lv = stream.log_variance + log_v
        read = replace(stream, log_variance=lv, token_correlation=moved)
        state, output = forward_state_of(
            p, self.branches, replace(self.profile, forward={**self.profile.forward, "stream_in": read})
        )
        skipped, added = np.log(p.skip**2) + lv, np.log(p.branch**2) + output[0]
        total = np.logaddexp(skipped, added)
        share = np.exp(added - total)
        return _Ahead(output, (total, share * output[1] + (1 - share) * moved), share, state)

    def _gradient_r(self) -> FloatArray:
        gradient = self.profile.gradient
        return np.zeros(self.n) if gradient is None else gradient["stream_out"].token_correlation

    def at(self, log_v: float, r: FloatArray | float) -> _Point:
        """The same, with the way back."""
        p, ahead = self.p, self.ahead(log_v, r)
        maps = from_the_sum(p, ahead.state, backward_maps(p, self.branches, ahead.state)[0])
        norm = np.logaddexp(ahead.total[0], np.log(float(p.architecture.norm_eps)))
        out = np.exp(np.where(self.after, np.log(p.norm_output**2) - norm, 0.0))
        return _Point(*ahead, out * p.skip**2, BranchBackward(*(out * column for column in maps)))

    def derivative(self, of: Callable[[_Point], tuple[FloatArray, FloatArray]]) -> FloatArray:
        """Of (ln variance, correlation) of something by those of the stream that is read, (sublayers, 2, 2)."""
        at = [of(point) for point in (self.here, self.by_v, self.by_r)]
        columns = [[(moved - base) / step for base, moved in zip(at[0], there, strict=True)]
                   for there, step in ((at[1], _STEP), (at[2], self.turn))]  # fmt: skip
        return np.moveaxis(np.array(columns), (0, 1), (2, 1))

    def hidden_between(self, r: FloatArray, r_g: FloatArray) -> FloatArray:
        """`hidden` of two sequences whose tokens have these correlations, and their gradients."""
        return np.where(self.attends, 0.0, 1.0)[:, None] * hidden_units(
            self.p, self.here.state, r, r_g, one_sequence=False
        )

    # --- noise ---

    def _modes(self, v: FloatArray, r: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Variance of what all tokens share, times T, and of what is a token's own."""
        return v * (1 + (self.tokens - 1) * r), v * (1 - r)

    def _mean(self, one: tuple[FloatArray, FloatArray], other: tuple[FloatArray, FloatArray]) -> FloatArray:
        """Product of two signals' kernels over all pairs of tokens, per T^2."""
        return np.asarray((one[0] * other[0] + (self.tokens - 1) * one[1] * other[1]) / self.tokens**2)

    def _pair(self, modes: tuple[FloatArray, FloatArray]) -> FloatArray:
        """(variance, covariance) of modes, (sublayers, 2)."""
        shared, specific = modes
        t = self.tokens
        return np.stack([(shared + (t - 1) * specific) / t, (shared - specific) / t], -1)

    def noise(
        self, skipped: tuple[FloatArray, FloatArray], added: tuple[FloatArray, FloatArray], hidden: FloatArray
    ) -> FloatArray:
        """Covariance of the noise in (variance, covariance) of a sum of variance 1, (sublayers, 2, 2)."""
        t = self.tokens
        vectors = (1.0, np.array([1.0, 1.0]) / t), (max(t - 1, 1.0), np.array([t - 1, -1.0]) / t)
        out = np.zeros((self.n, 2, 2))
        for skip, branch, (members, by) in zip(skipped, added, vectors, strict=True):
            variance = self._of_sum(skip * branch, branch**2) / members
            out += variance[:, None, None] * np.outer(by, by)
        out += hidden[:, None, None] * outer(self._pair(added))
        return out

    def _beyond_averages(
        self, skipped: tuple[FloatArray, FloatArray], added: tuple[FloatArray, FloatArray], known: FloatArray | None
    ) -> FloatArray:
        """The same of what kernels know beyond position averages: noise in the size of the sum alone."""
        if known is None:
            return np.zeros((self.n, 2, 2))
        v, w = self._pair(skipped)[:, 0], self._pair(added)[:, 0]
        cross = np.maximum(known[:, 0] * v * w - self._mean(skipped, added), 0.0)
        specific = np.maximum(known[:, 1] * w * w - self._mean(added, added), 0.0)
        return self._of_sum(cross, specific)[:, None, None] * outer(self._pair(skipped) + self._pair(added))

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
        specific = self.noise((none, none), self._modes(np.ones(self.n), self.here.branch[1]), self.hidden[:, 0])
        covariances = self.spread_ahead(branch, start, self.raw_noise, specific)
        means = self._means(covariances["stream_in"], branch, specific)
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
        turn = np.array([[size, 0.0], [-r, 1.0]])
        return congruent(turn, self._gaussian(r))

    def start_between(self, r: float, size: float) -> FloatArray:
        """As `_start`, between two sequences; r: correlation of their tokens, which is that of one's."""
        turn = np.array([[size, 0.0], [-r, 1.0]])
        return congruent(turn, np.full((2, 2), 2 / self.d * r**2))

    def _gaussian(self, r: float) -> FloatArray:
        """Covariance of (variance, covariance) of Gaussian tokens of variance 1."""
        t = self.tokens
        shared, specific = 1 + (t - 1) * r, 1 - r
        one, other = np.array([1.0, 1.0]) / t, np.array([t - 1, -1.0]) / t
        raw = shared**2 * np.outer(one, one) + specific**2 / max(t - 1, 1) * np.outer(other, other)
        return np.asarray(2 / self.d * raw)

    # --- means ---

    def _means(self, entering: FloatArray, by_stream: FloatArray, specific: FloatArray) -> dict[str, FloatArray]:
        """Means of (ln variance, correlation) over what is predicted, to second order, by point; (sublayers, 2).

        Args:
            entering: covariance of the stream that is read. by_stream: derivative of the branch by that stream's. own:
                covariance of the branch's own noise in its (variance, covariance).
        """
        stream, here, d = self.profile.forward["stream_in"].token_correlation, self.here, self.d
        before = np.broadcast_to(placed(self.p, NORM_BEFORE), self.n)
        at_branch, at_sum = self._bends(entering, ~self.attends & (before | self.after))
        lengths = of_own_sizes(stream, 2 / d, 2 * stream / d, 2 * stream**2 / d)  # of Gaussian tokens
        read = np.stack([0 * stream, np.where(before, lengths, 0.0)], -1)
        at_branch += np.einsum("nij,nj->ni", by_stream, read)
        f, made_r, total_r = here.share, here.branch[1], here.total[1]
        to_sum = np.moveaxis(np.array([[f, 0 * f], [f * (made_r - total_r), f]]), -1, 0)
        at_sum += np.einsum("nij,njk,nk->ni", to_sum, by_stream, read) + bend_of_ratio(total_r, self.raw_noise)
        at_sum[:, 1] += np.where(self.after, self._of_token_sizes(lengths), 0.0)
        at_sum[self.after, 0] = 0.0
        start = bend_of_ratio(stream[0], self._gaussian(stream[0]))
        if self.p.architecture.embedding_norm:
            start = np.array([0.0, start[1] + lengths[0]])
        out = affine(self.passed, at_sum, start)
        above = np.concatenate([start[None], out[:-1]])
        branch = np.einsum("nij,nj->ni", by_stream, above) + at_branch + bend_of_ratio(made_r, specific)
        return {"stream_in": above, "branch": branch, "stream_out": out}

    def _bends(self, entering: FloatArray, by_pairs: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
        """What curvature adds to the means of branch and sum, (sublayers, 2): averages over four points around here.

        Args:
            by_pairs: which branches take a function of every pair of tokens, whose own scatter bends it too.
        """
        r = self.profile.forward["stream_in"].token_correlation
        around = entering.copy()
        around[:, 1, 1] += np.where(by_pairs, (1 - r) ** 2 * (1 + 2 * r - r**2) / self.d, 0.0)
        steps = np.sqrt(2) * root(around)
        points = [self.ahead(*(sign * steps[:, :, k]).T) for k in (0, 1) for sign in (1, -1)]

        def mean(at: Sequence[tuple[FloatArray, FloatArray]], here: tuple[FloatArray, FloatArray]) -> FloatArray:
            return np.asarray(np.mean([np.stack(x, -1) for x in at], 0) - np.stack(here, -1))

        return mean([x.branch for x in points], self.here.branch), mean([x.total for x in points], self.here.total)

    def _of_token_sizes(self, at_start: FloatArray) -> FloatArray:
        """What norms of every token by its own size add to the correlation of sums, over what one size would.

        Args:
            at_start: as much, of Gaussian tokens.
        """
        f, r, made_r = self.here.share, self.profile.forward["stream_in"].token_correlation, self.here.branch[1]
        cross = f * (1 - f)
        sizes = [
            self._of_sum(cross * c, f**2 * o) for c, o in ((1, 1), ((r + made_r) / 2, made_r), (r * made_r, made_r**2))
        ]
        found = of_own_sizes(self.here.total[1], *sizes)
        if not self.p.architecture.embedding_norm:
            found[0] += (1 - f[0]) ** 2 * at_start[0]
        return found

    @cached_property
    def way(self) -> WayBack:
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
        skipped, added = self._modes(self.here.skip2 / v, r), (sent + (self.tokens - 1) * shared, sent - shared)
        known = None if self.overlaps is None else self.overlaps.backward
        beyond = self._beyond_averages(skipped, added, known)
        noise = self.noise(skipped, added, self.hidden[:, 1]) + beyond
        turned = np.einsum("nij,nlk->nikjl", through, self.passed).reshape(self.n, 4, 4)  # Z -> M Z T
        z = affine(turned[_UP], by_signal.reshape(self.n, 4)[_UP], np.zeros(4))[_UP].reshape(-1, 2, 2)
        above = np.concatenate([z[1:], np.zeros((1, 2, 2))])
        at_norm = np.zeros((self.n, 2, 2))
        at_norm[self.after, 0, 0] = -1.0  # the norm after a sum divides gradients by its size
        by_sums = through @ above @ self.to_state + at_norm
        return WayBack(r, v, sent, through, by_signal, z, by_sums, to_state(base[1]), noise, beyond)

    def sources(
        self, way: WayBack, entering: FloatArray, sums: FloatArray, noise: FloatArray, top: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Covariances of the gradient at every sublayer's input, by the signals that it meets and by the maps.

        Args:
            entering: of the stream that is read. sums, noise: of sums and of gradients there. top: of the last.
        """
        through, nothing = way.through[_UP], np.zeros((2, 2))
        by_signals = chained(through, congruent(way.by_sums, sums)[_UP], nothing)[_UP] + congruent(way.z, entering)
        return by_signals, chained(through, congruent(way.to_state, noise)[_UP], top)[_UP]

    def _back(self, way: WayBack, entering: FloatArray, mean: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Covariances of the gradient at every sublayer's input, and ln of its mean over the prediction.

        Args:
            entering, mean: of the stream that is read; (ln of the mean variance, mean correlation) over the prediction.
        """
        top, sent = self._start(float(way.r[-1]), 0.0), way.sent
        by_signals, by_maps = self.sources(way, entering, self.raw_noise, way.noise, top)
        summed = congruent(self.derivative(lambda point: point.total), entering) + self.raw_noise
        before = np.broadcast_to(placed(self.p, NORM_BEFORE), self.n)
        bend = np.where(before, sent * (2 - sent), 0.0) * entering[:, 0, 0] / 2 + self._by_own_norms(sent, before)
        bend = np.where(self.after, self._by_own_sizes(sent) - summed[:, 0, 0] / 2, bend)
        lifted = affine(way.through[_UP], np.einsum("nij,nj->ni", way.by_signal, mean)[_UP], np.zeros(2))[_UP, 0]
        excess = np.cumsum(bend[_UP])[_UP] + by_signals[:, 0, 0] / 2 + lifted
        return by_signals + by_maps, excess

    def _by_own_norms(self, sent: FloatArray, before: NDArray[np.bool_]) -> FloatArray:
        """ln of the mean of what norms before branches make of a gradient, beyond what one size of all tokens would."""
        a, f, made_r = self.p.architecture, self.here.share, self.here.branch[1]
        r, many = self.profile.forward["stream_in"].token_correlation, 1 - 1 / self.tokens
        skipped = np.where(before, 1 - f, 1.0) * ~self.after
        drawn = ~self.after * self._of_sum(f * (1 - f) * (1 - r * made_r), f**2 * (1 - made_r**2))
        start = 0.0 if a.embedding_norm else 2 * (1 - r[0] ** 2) / self.d
        specific, through = own_part(skipped, many * drawn, float(many * start)), np.where(before, sent, 0.0)
        return bend_of_own_sizes(specific, skipped, through, ~self.attends, a.has_final_norm) - through / self.d

    def _by_own_sizes(self, sent: FloatArray) -> FloatArray:
        """ln of the mean of what a post-norm's own token sizes make of a gradient, less what a branch does not see.

        Args:
            sent: share of the branch in the gradient of the stream that is read.
        """
        share = self.here.share
        sizes = self._of_sum(share * (1 - share), share**2) + self.hidden[:, 0] * share**2
        if not self.p.architecture.embedding_norm:
            sizes[0] += 2 * (1 - share[0]) ** 2 / self.d  # rows of the embedding are Gaussian
        unseen = sent * self._of_sum(1 - share, share) / 2  # the norm's gradient is orthogonal to the sum
        return np.asarray(sizes - unseen)
