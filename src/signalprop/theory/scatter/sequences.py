"""What two sequences that one network reads have in common, forward and back.

Sequences draw their tokens from one distribution, so that two tokens of different sequences enter with the correlation
of two of one. Attention then raises the correlation of tokens of one sequence and leaves those of different ones as
they are: the means that it gives to two sequences have the covariance of the sequences' tokens, so a covariance passes
it times what a covariance of 1 would keep. Feed-forwards act on every pair of tokens. docs/theory/network.md, "Several
sequences".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from signalprop.network.moments import FloatArray
from signalprop.theory.scatter.response import Noise, Pair, Point, Response

_NODES = (0.0, 0.5, 1.0)  # correlations through which a feed-forward's output correlation is a parabola


def between_sequences(x: Response) -> Noise:
    """The covariance, between two sequences, of what the draws add to the moments of each.

    Of S sequences the variance lies between that of one and this one, 1/S of the way from here.
    """
    points, share = [x.at(0.0, r - x.r) for r in _NODES], x.here.share
    stream, branch = _ahead(x, points)
    skip, arrives, sent = _back(x, points, stream)

    def same(c: FloatArray) -> Pair:
        return c, c

    sums, returned = (same((1 - share) * stream), same(share * branch)), (same(skip * arrives), same(sent))
    return x.noise_of(same(stream), sums, same(branch), same(arrives), returned)


def _ahead(x: Response, points: list[Point]) -> Pair:
    """Correlations of two sequences' tokens, of the streams that are read and of branches, (sublayers,).

    Args:
        points: at streams of the correlations `_NODES`.
    """
    # variance of a branch that reads one token all over, over that which it has
    of_mean = np.exp(points[-1].branch[0] - x.here.branch[0])
    columns = np.stack([x.attends, x.here.share, of_mean, *(point.branch[1] for point in points)])
    stream, branch, r = [], [], float(x.r[0])
    for attends, share, factor, *at_nodes in columns.T.tolist():
        stream.append(r)
        branch.append(min(max(factor * r if attends else parabola(r, *at_nodes), -1.0), 1.0))
        r = (1 - share) * r + share * branch[-1]
    return np.array(stream), np.array(branch)


def _back(x: Response, points: list[Point], stream: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Of gradients, over the variance at the stream that is read, (sublayers,).

    Returns:
        The skip's factor; the covariance of two sequences' gradients that arrives at a sublayer's output; and what its
        branch sends of it.
    """
    skip2, v = x.here.skip2, np.exp(x.here.back(x.r_g)[0])
    by = [np.divide(skip2, point.skip2, out=np.ones(len(v)), where=point.skip2 > 0) for point in points]
    cc = parabola(stream, *(scale * point.maps.cc for scale, point in zip(by, points, strict=True)))
    of_mean = by[-1] * (points[-1].maps.cc + points[-1].maps.cv)
    columns = np.stack([skip2, np.where(x.attends, of_mean, cc)]) / v
    arrives, sent, c = [], [], float(x.r_g[-1])
    for skip, factor in columns.T[::-1].tolist():
        arrives.append(c)
        sent.append(factor * c)
        c = min(max(skip * c + sent[-1], -1.0), 1.0)
    return columns[0], np.array(arrives[::-1]), np.array(sent[::-1])


def parabola(r: Any, zero: Any, half: Any, one: Any) -> Any:
    """Through values at the correlations `_NODES`."""
    return (1 - r) * (1 - 2 * r) * zero + 4 * r * (1 - r) * half + r * (2 * r - 1) * one
