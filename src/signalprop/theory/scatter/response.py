"""How far single networks of a given width lie from the mean that is predicted: linear response to the weights' draws.

A stream's moments are two modes, what all tokens share and what differs, each the length of a Gaussian vector of
d_model features. Every sublayer adds noise of relative variance O(1 / d_model) to both, forward and back, and passes on
what came before by the derivative of its moments. Derivation, and measured against networks: `docs/theory/network.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from signalprop.network.kinds import rows_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE
from signalprop.results.profile import Profile
from signalprop.theory.branches import backward_maps, branches_of, forward_state_of, from_the_sum, placed
from signalprop.theory.signals import BranchBackward

_STEP = 1e-4  # of the differences that stand for derivatives of moments
_UP = slice(None, None, -1)  # sublayers from the last to the first

Pair = tuple[FloatArray, FloatArray]  # of all sublayers: (variance, covariance), or (ln variance, correlation)


class Overlaps(NamedTuple):
    """The similarity of token kernels, sum_ij A_ij B_ij / (tr A tr B): of skip and branch, of a branch with itself.

    Arrays (sublayers, 2). Position averages (v, c) over T tokens give (v v' + (T - 1) c c') / (T v v').
    """

    forward: FloatArray | None
    backward: FloatArray | None


class Point(NamedTuple):
    """Every sublayer at one forward signal, (sublayers,)."""

    branch: Pair  # ln variance and correlation
    total: Pair  # of the sum, before a norm after it
    share: FloatArray  # of the branch in the sum's variance
    skip2: FloatArray  # factor on a gradient along the skip, norms included
    maps: BranchBackward

    def sent(self, r: FloatArray) -> Pair:
        """(variance, covariance) of what the branch sends back of a gradient of variance 1 and correlation r."""
        return self.maps.vv + self.maps.vc * r, self.maps.cv + self.maps.cc * r

    def back(self, r: FloatArray) -> Pair:
        """(ln variance, correlation) of what such a gradient becomes."""
        v, c = self.sent(r)
        return np.log(self.skip2 + v), (self.skip2 * r + c) / (self.skip2 + v)


class Noise(NamedTuple):
    """Covariances of what the draws of weights add.

    Attributes:
        start, top: of (ln variance, correlation) of what enters, and of the gradient at the top, (2, 2).
        sums, branches, gradients: of (variance, covariance) over the variance, (sublayers, 2, 2); of gradients at the
            stream that is read.
    """

    start: FloatArray
    sums: FloatArray
    branches: FloatArray
    top: FloatArray
    gradients: FloatArray


class Spread(NamedTuple):
    """Covariances of (ln variance, correlation) over networks, (sublayers, 2, 2).

    Attributes:
        forward: by point. gradient: at what every sublayer reads and after the last, (sublayers + 1, 2, 2).
        by_signals: the part of it that the stream's scatter makes, without the last.
    """

    forward: dict[str, FloatArray]
    gradient: FloatArray
    by_signals: FloatArray


class Response:
    """Of one network and its profile, to the draws of its weights.

    Attributes:
        r, r_g: correlation of the stream that is read, and of the gradient that arrives at a sublayer (of a profile
            without gradients nothing depends on it). here: all sublayers at the forward signal of the profile.
        by_stream, by_sum: derivatives of branch and sum by the stream that is read, in (ln variance, correlation);
            passed: of what leaves the sublayer, after a norm on the sum.
        sum_of: (variance, covariance) of skip and branch, over the variance of their sum.
    """

    def __init__(self, p: Parametrization, profile: Profile, overlaps: Overlaps | None = None) -> None:
        self.p, self.profile, self.overlaps = p, profile, overlaps
        a = p.architecture
        self.d, self.tokens = a.d_model, float(a.seq_len)
        self.sized = 0.0 if a.embedding_norm else 1.0  # whether what enters has a size that scatters
        self.before, self.after = (np.broadcast_to(placed(p, of), p.n_sublayers) for of in (NORM_BEFORE, NORM_AFTER))
        # random maps in a branch, in units of one to d_model features: values and output; down
        self.maps_in_a_row = 1.0 + rows_where(p, lambda kind: kind.attends) * self.d / (a.n_kv_heads * a.d_head)
        self.branches = branches_of(p)
        self.r = profile.forward["stream_in"].token_correlation
        self.r_g = (profile.gradient or profile.forward)["stream_out"].token_correlation
        self.turn = np.where(self.r > 0.5, -_STEP, _STEP)
        self.here, self.by_v, self.by_r = self.at(0.0, 0.0), self.at(_STEP, 0.0), self.at(0.0, self.turn)
        self.by_stream = self.derivative(lambda point: point.branch)
        self.by_sum = self.derivative(lambda point: point.total)
        self.passed = np.where(self.after[:, None, None] & np.array([[True], [False]]), 0.0, self.by_sum)
        share = self.here.share
        self.sum_of = (1 - share, (1 - share) * self.r), (share, share * self.here.branch[1])

    def at(self, log_v: float, r: FloatArray | float) -> Point:
        """Every sublayer, its input's ln variance and correlation moved by so much."""
        p, stream = self.p, self.profile.forward["stream_in"]
        moved = np.clip(self.r + r, -1.0, 1.0)
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

    def derivative(self, of: Callable[[Point], Pair]) -> FloatArray:
        """Of (ln variance, correlation) of something by those of the stream that is read, (sublayers, 2, 2)."""
        base, by_v, by_r = (np.array(of(point)) for point in (self.here, self.by_v, self.by_r))
        return np.moveaxis(np.array([(by_v - base) / _STEP, (by_r - base) / self.turn]), (0, 1), (2, 1))

    @cached_property
    def returned(self) -> tuple[Pair, Pair]:
        """(variance, covariance) of what skip and branch send back, over the variance of their sum."""
        v, sent, skip = np.exp(self.here.back(self.r_g)[0]), self.here.sent(self.r_g), self.here.skip2
        return (skip / v, skip / v * self.r_g), (sent[0] / v, sent[1] / v)

    @cached_property
    def through(self) -> FloatArray:
        """Derivative of (ln variance, correlation) of the gradient by those of what arrives, (sublayers, 2, 2)."""
        log_v, r = self.here.back(self.r_g)
        out, v = np.zeros((len(r), 2, 2)), np.exp(log_v)
        out[:, 0, 0], out[:, 0, 1] = 1.0, self.here.maps.vc / v
        out[:, 1, 1] = (self.here.skip2 + self.here.maps.cc - r * self.here.maps.vc) / v
        return out

    @cached_property
    def by_signal(self) -> FloatArray:
        """Derivative of the gradient by the stream that is read."""
        return self.derivative(lambda point: point.back(self.r_g))

    # --- noise ---

    def modes(self, v: FloatArray | float, c: FloatArray | float) -> tuple[FloatArray, FloatArray]:
        """Variance of what all tokens share, times T, and of what differs between tokens."""
        return np.asarray(v + (self.tokens - 1) * c), np.asarray(v - c)

    def of_modes(self, shared: FloatArray, specific: FloatArray) -> FloatArray:
        """Covariance of (variance, covariance) from the variances of the sizes of modes, (..., 2, 2)."""
        t = self.tokens
        one, other = np.array([1.0, 1.0]) / t, np.array([t - 1, -1.0]) / t
        by_specific = np.multiply.outer(specific / max(t - 1, 1.0), np.outer(other, other))
        return np.asarray(np.multiply.outer(shared, np.outer(one, one)) + by_specific)

    def noise(self, skipped: Pair, added: Pair) -> FloatArray:
        """Covariance of (variance, covariance) of the sum of skip and branch, of variance 1, by the draws of the
        branch, (sublayers, 2, 2)."""
        modes = zip(self.modes(*skipped), self.modes(*added), strict=True)
        return self.of_modes(*(self._of_sum(skip * branch, branch**2) for skip, branch in modes))

    def beyond_averages(self, skipped: Pair, added: Pair, known: FloatArray | None) -> FloatArray:
        """What kernels know of that beyond position averages: noise in the size of the sum alone."""
        if known is None:
            return np.zeros((len(self.r), 2, 2))
        (v, c), (w, d), t = skipped, added, self.tokens
        cross = np.maximum(known[:, 0] * v * w - (v * w + (t - 1) * c * d) / t, 0.0)
        specific = np.maximum(known[:, 1] * w * w - (w * w + (t - 1) * d * d) / t, 0.0)
        total = np.stack([v + w, c + d], -1)
        return np.asarray(self._of_sum(cross, specific)[:, None, None] * total[:, :, None] * total[:, None, :])

    def _of_sum(self, cross: FloatArray, specific: FloatArray) -> FloatArray:
        """Variance of the size of a sum, by the products of skip and branch, and of the branch with itself."""
        return np.asarray((4 * cross + 2 * self.maps_in_a_row * specific) / self.d)

    def gaussian(self, v: float, c: float) -> FloatArray:
        """Covariance of (variance, covariance) of Gaussian tokens of variance v and covariance c, (2, 2)."""
        return self.of_modes(*(2 / self.d * mode**2 for mode in self.modes(v, c)))

    @cached_property
    def drawn(self) -> Noise:
        """Of all sublayers."""
        none, known = 0 * self.r, self.overlaps or Overlaps(None, None)
        return Noise(
            congruent(to_state(self.r[0], self.sized), self.gaussian(1.0, self.r[0])),
            self.noise(*self.sum_of) + self.beyond_averages(*self.sum_of, known.forward),
            self.noise((none, none), (none + 1, self.here.branch[1])),
            congruent(to_state(self.r_g[-1], 0.0), self.gaussian(1.0, self.r_g[-1])),
            self.noise(*self.returned) + self.beyond_averages(*self.returned, known.backward),
        )

    # --- propagation ---

    def spread(self) -> Spread:
        """What comes of noise in all sublayers."""
        noise = self.drawn
        to_sum = to_state(self.here.total[1], ~self.after)
        out = covariances(self.passed, congruent(to_sum, noise.sums), noise.start)
        read = np.concatenate([noise.start[None], out[:-1]])
        branch = congruent(self.by_stream, read) + congruent(to_state(self.here.branch[1]), noise.branches)
        forward = {"stream_in": read, "branch": branch, "stream_out": out}
        none, up = np.zeros((2, 2)), self.through[_UP]
        by_read = chain(up, self.passed[_UP], self.by_signal[_UP], none)[_UP]
        by_noise = self.through @ np.concatenate([by_read[1:], none[None]]) @ to_sum
        by_noise[:, 0, 0] -= self.after  # the norm after a sum divides gradients by its size
        by_signals = congruent(by_read, read) + covariances(up, congruent(by_noise, noise.sums)[_UP], none)[_UP]
        by_maps = congruent(to_state(self.here.back(self.r_g)[1]), noise.gradients)
        gradient = by_signals + covariances(up, by_maps[_UP], noise.top)[_UP]
        return Spread(forward, np.concatenate([gradient, noise.top[None]]), by_signals)

    def means(self) -> dict[str, FloatArray]:
        """Means of (ln variance, correlation) over what is predicted, to second order, by point; (sublayers, 2)."""
        noise = self.drawn
        at_sum = bend_of_ratio(self.here.total[1], noise.sums)
        at_sum[self.after, 0] = 0.0
        start = bend_of_ratio(self.r[0], self.gaussian(1.0, self.r[0]))
        start[0] *= self.sized
        out = means(self.passed, at_sum, start)
        read = np.concatenate([start[None], out[:-1]])
        branch = np.einsum("nij,nj->ni", self.by_stream, read) + bend_of_ratio(self.here.branch[1], noise.branches)
        return {"stream_in": read, "branch": branch, "stream_out": out}

    def mean_of_gradient(self, spread: Spread, mean: FloatArray) -> FloatArray:
        """ln of the gradient's mean over the prediction, where `Spread.gradient` stands, (sublayers + 1,).

        Args:
            mean: (ln of the mean variance, mean correlation) over the prediction, of the stream that is read.
        """
        read, sent = spread.forward["stream_in"], self.returned[1][0]
        size = congruent(self.by_sum, read)[:, 0, 0] + self.drawn.sums[:, 0, 0]
        bend = np.where(self.before, sent * (2 - sent), 0.0) * read[:, 0, 0] / 2
        bend = np.where(self.after, self.by_sizes_of_tokens() - size / 2, bend)
        lifted = means(self.through[_UP], np.einsum("nij,nj->ni", self.by_signal, mean)[_UP], np.zeros(2))[_UP, 0]
        return np.append(np.cumsum(bend[_UP])[_UP] + spread.by_signals[:, 0, 0] / 2 + lifted, 0.0)

    def by_sizes_of_tokens(self) -> FloatArray:
        """ln of the mean factor of a post-norm's token sizes on a gradient, less what a branch does not see."""
        share, sent = self.here.share, self.returned[1][0]
        sizes = self._of_sum(share * (1 - share), share**2)
        if self.sized:
            sizes[0] += 2 * (1 - share[0]) ** 2 / self.d  # rows of the embedding are Gaussian
        unseen = sent * self._of_sum(1 - share, share) / 2  # the norm's gradient is orthogonal to the sum
        return np.asarray(sizes - unseen)


def congruent(by: FloatArray, covariance: FloatArray) -> FloatArray:
    """A C A^T."""
    return np.asarray(by @ covariance @ np.swapaxes(by, -1, -2))


def to_state(r: FloatArray | float, sized: FloatArray | float = 1.0) -> FloatArray:
    """From (variance, covariance), of variance 1, to (ln variance, correlation); 0 in the first where it is normed."""
    out = np.zeros((*np.shape(r), 2, 2))
    out[..., 0, 0] = sized
    out[..., 1, 0], out[..., 1, 1] = -np.asarray(r), 1.0
    return out


def bend_of_ratio(r: FloatArray, noise: FloatArray) -> FloatArray:
    """Mean of (ln variance, correlation) over what they are without noise in (variance, covariance), whose covariance
    is `noise`, (..., 2, 2); to second order, of variance 1."""
    return np.stack([-noise[..., 0, 0] / 2, r * noise[..., 0, 0] - noise[..., 0, 1]], -1)


def chain(left: FloatArray, right: FloatArray, added: FloatArray, start: FloatArray) -> FloatArray:
    """X_(l+1) = A_l X_l B_l + C_l for all l, (n, j, k)."""
    found, x = [], start
    for a, b, c in zip(left, right, added, strict=True):
        x = a @ x @ b + c
        found.append(x)
    return np.stack(found)


def covariances(by: FloatArray, noise: FloatArray, start: FloatArray) -> FloatArray:
    """Covariances C_(l+1) = A_l C_l A_l^T + noise_l for all l, (n, 2, 2)."""
    return chain(by, np.swapaxes(by, 1, 2), noise, start)


def means(by: FloatArray, added: FloatArray, start: FloatArray) -> FloatArray:
    """Means x_(l+1) = A_l x_l + added_l for all l, (n, 2)."""
    return chain(by, np.ones((len(by), 1, 1)), added[..., None], start[:, None])[..., 0]
