"""What gates between streams do on average: functions of the correlation of two tokens, by Gaussian sampling.

A gate gives z = s g, g standard normal over networks and tokens; two tokens whose normed streams have correlation rho
have gates of that correlation. Streams of one distribution, with gates of equal biases, keep one distribution, so that
a mean stream and the deviations from it are all there is. Derivation: `docs/theory/network.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from signalprop.network.activations import activation
from signalprop.network.moments import FloatArray
from signalprop.network.residual_streams import Streams

_NETWORKS = 1024
_NODES = 1 - np.linspace(1, 0, 11) ** 2  # closer where tokens are correlated: there functions of a correlation bend


@dataclass(frozen=True)
class Gates:
    """Averages at correlations `at` of two tokens' gates, (nodes,) each; of one token with itself at the end.

    Attributes:
        read: E sum_i da_i da'_i of read weights over their sum; d: less their mean. read_slope: E of two derivatives
            by z, over sums too.
        write: as read, of write weights themselves. write_sum: E of two sums of them. write_slope: of derivatives.
        mix: E sum_ij (M - 1/n)_ij (M' - 1/n)_ij / (n - 1): what is left of deviations. mix_slope: E of the scalar
            product of both tokens' derivatives of M in one random direction of z.
    """

    at: FloatArray
    read: FloatArray
    read_slope: FloatArray
    write: FloatArray
    write_sum: FloatArray
    write_slope: FloatArray
    mix: FloatArray
    mix_slope: FloatArray

    def of(self, name: str, rho: FloatArray) -> FloatArray:
        """A function at correlations; those below 0 count as 0."""
        return np.asarray(np.interp(rho, self.at, getattr(self, name)))


def doubly_stochastic(z: FloatArray, passes: int) -> FloatArray:
    """Softmax over the last axis of (..., n, n), then columns and rows in turn brought to sum 1, columns last."""
    m = np.exp(z - z.max(-1, keepdims=True))
    for _ in range(passes):
        m /= m.sum(-1, keepdims=True)
        m /= m.sum(-2, keepdims=True)
    return np.asarray(m)


@lru_cache(maxsize=16)
def gates_of(streams: Streams, d_model: int) -> Gates:
    """The averages of an architecture's gates."""
    s, n, rng = streams.logit_std(d_model), streams.n, np.random.default_rng(0)
    rows: dict[str, list[float]] = {name: [] for name in Gates.__dataclass_fields__ if name != "at"}
    vector, vector_too = rng.standard_normal((2, _NETWORKS * 4, n))
    matrix, matrix_too, direction = rng.standard_normal((3, _NETWORKS, n, n))
    same, first, second = _weights(streams, s * vector), *_mixed(streams, s * matrix, direction)
    for rho in _NODES:
        rest = np.sqrt(1 - rho**2)
        read, read_slope, write, write_slope = _weights(streams, s * (rho * vector + rest * vector_too))
        mix, mix_slope = _mixed(streams, s * (rho * matrix + rest * matrix_too), direction)
        rows["read"].append(_mean_product(_centred(same[0]), _centred(read)))
        rows["read_slope"].append(float((same[1] * read_slope).mean()))
        rows["write"].append(_mean_product(_centred(same[2]), _centred(write)))
        rows["write_sum"].append(float((same[2].sum(1) * write.sum(1)).mean()))
        rows["write_slope"].append(float((same[3] * write_slope).mean()))
        rows["mix"].append(_mean_product(first - 1 / n, mix - 1 / n) / (n - 1))
        rows["mix_slope"].append(_mean_product(second, mix_slope))
    return Gates(_NODES, **{name: np.array(values) for name, values in rows.items()})


def _weights(streams: Streams, z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Read weights over their sum, their derivatives over it; write weights, and theirs."""
    sigmoid = activation("sigmoid").function
    read, write = sigmoid(z + streams.read_bias), sigmoid(z + streams.write_bias)
    total = read.sum(1, keepdims=True)
    gain = streams.write_gain
    return read / total, read * (1 - read) / total, gain * write, gain * write * (1 - write)


def _mixed(streams: Streams, z: FloatArray, direction: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mixing matrices, and their derivatives in a direction."""
    if streams.mixing != "mhc":
        return np.broadcast_to(np.eye(streams.n), z.shape), np.zeros_like(z)
    step, bias = 1e-4, streams.mix_bias * np.eye(streams.n)
    up, down = (doubly_stochastic(z + bias + sign * step * direction, streams.sinkhorn) for sign in (1, -1))
    return (up + down) / 2, (up - down) / (2 * step)


def _centred(weights: FloatArray) -> FloatArray:
    return np.asarray(weights - weights.mean(1, keepdims=True))


def _mean_product(one: FloatArray, other: FloatArray) -> float:
    """Mean over networks of the scalar product."""
    return float((one * other).sum() / len(one))
