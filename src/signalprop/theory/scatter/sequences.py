"""The similarity of tokens of different sequences, forward and back: what several sequences of one network share.

Sequences draw their tokens from one distribution, so that two tokens of different sequences enter as alike as two of
one. Attention then makes tokens of one sequence alike and leaves those of different ones as they are: the means that
it gives to two sequences have the covariance of the sequences' tokens, so a covariance passes it times what a
covariance of 1 would keep. Feed-forwards act on every pair of tokens. docs/theory/network.md, "Several sequences".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.network.moments import FloatArray
from signalprop.results.profile import Profile
from signalprop.theory.scatter.error_chains import banded_of_many, congruent
from signalprop.theory.scatter.response import Response

NODES = (0.0, 0.5, 1.0)  # correlations through which a feed-forward's output correlation is a parabola


class Between(NamedTuple):
    """Correlations of tokens of different sequences at every sublayer, (n,), in units of the variances of one.

    Attributes:
        stream: that is read; last: after all. branch: of what the branch gives.
    """

    stream: FloatArray
    branch: FloatArray
    last: float


def ahead(
    start: float, share: FloatArray, branch_r: Sequence[FloatArray], passed: FloatArray, attends: NDArray[np.bool_]
) -> Between:
    """Of streams.

    Args:
        start: of what enters. share: of the branch in the sum. branch_r: correlation of the branch at streams of the
            correlations `NODES`. passed: variance of a branch that reads one token all over, over that which it has.
    """
    stream, branch, r = np.zeros(len(share)), np.zeros(len(share)), start
    for i, attention in enumerate(attends.tolist()):
        stream[i] = r
        made = passed[i] * r if attention else float(parabola(r, *(x[i] for x in branch_r)))
        branch[i] = min(max(made, -1.0), 1.0)
        r = float((1 - share[i]) * r + share[i] * branch[i])
    return Between(stream, branch, r)


def back(top: float, kept: FloatArray, made: FloatArray, added: FloatArray) -> Between:
    """Of gradients, over the variance of the one at the stream that the sublayer reads: what arrives at a sublayer's
    output (`stream`), and what its branch sends (`branch`).

    Args:
        top: of what arrives at the last sublayer. kept: of a gradient's covariance by the skip. made, added: by the
            branch, which sends made times that, and `added`.
    """
    arrives, sent, r = np.zeros(len(kept)), np.zeros(len(kept)), top
    for i in range(len(kept) - 1, -1, -1):
        arrives[i], sent[i] = r, made[i] * r + added[i]
        r = float(np.clip(kept[i] * r + sent[i], -1.0, 1.0))
    return Between(arrives, sent, r)


def parabola(r: FloatArray | float, zero: FloatArray, half: FloatArray, one: FloatArray) -> FloatArray:
    """Through values at the correlations `NODES`."""
    return (1 - r) * (1 - 2 * r) * zero + 4 * r * (1 - r) * half + r * (2 * r - 1) * one


def with_several(x: Response, profile: Profile) -> Profile:
    """The profile with the standard deviations of one network that reads many sequences.

    They are the root of what two sequences have in common of ln variance and of correlation: of S sequences the square
    lies between that of one and this one, 1/S of the way from here.
    """
    start, t = profile.forward["stream_in"], x.tokens
    points = [x.at(0.0, r - start.token_correlation) for r in NODES]
    share, one, first = x.here.share, points[-1], float(start.token_correlation[0])
    between = ahead(
        first, share, [point.branch[1] for point in points], np.exp(one.branch[0] - x.here.branch[0]), x.attends
    )
    none = 0 * share

    def sums(kept: FloatArray, added: FloatArray) -> FloatArray:
        return x.noise((t * kept, none), (t * added, none))

    raw = sums((1 - share) * between.stream, share * between.branch) + x.beyond
    turned = x.derivative(lambda point: point.branch)
    size = 0.0 if x.p.architecture.embedding_norm else 1.0
    spread = x.spread_ahead(turned, _start_between(first, size, x.d), raw, sums(none, between.branch))
    forward = {name: banded_of_many(profile.forward[name], spread[name]) for name in spread}
    g = profile.gradient
    if g is None:
        return replace(profile, forward=forward)
    way, r = x.way, between.stream
    scale = [np.divide(x.here.skip2, point.skip2, out=np.ones(x.n), where=point.skip2 > 0) for point in points]
    cc, cv = (
        parabola(r, *(by * getattr(point.maps, name) for by, point in zip(scale, points, strict=True)))
        for name in ("cc", "cv")
    )
    passed = scale[-1] * (one.maps.cc + one.maps.cv)
    kept, made, added = (
        x.here.skip2 / way.v,
        np.where(x.attends, passed, cc) / way.v,
        np.where(x.attends, 0, cv) / way.v,
    )
    top = float(g["stream_out"].token_correlation[-1])
    arrives, sent, _ = back(top, kept, made, added)
    at_top = _start_between(top, 0.0, x.d)
    noise = sums(kept * arrives, sent) + way.beyond
    found = np.sum(x.sources(way, spread["stream_in"], raw, noise, at_top), axis=0)
    gradient = {
        **g,
        "stream_in": banded_of_many(g["stream_in"], found),
        "stream_out": banded_of_many(g["stream_out"], np.concatenate([found[1:], at_top[None]])),
    }
    return replace(profile, forward=forward, gradient=gradient)


def _start_between(r: float, size: float, d: int) -> FloatArray:
    """As `Response._start`, between two sequences; r: correlation of their tokens, which is that of one's."""
    return congruent(np.array([[size, 0.0], [-r, 1.0]]), np.full((2, 2), 2 / d * r**2))
