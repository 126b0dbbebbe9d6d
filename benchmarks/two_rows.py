"""The overlap of two softmaxes by quadrature, and the table of it that predictions read.

python -m benchmarks.two_rows    # src/signalprop/theory/row_overlaps.json anew, 15 s
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from signalprop.files.storage import write_json
from signalprop.network.moments import Array, FloatArray
from signalprop.theory.row_overlaps import FILE, NODES, hermite, hermite_data
from signalprop.theory.softmax import softmax_moments

LENGTHS = (2, 3, 4, 6, 8, 12, 20, 40, 80, 160, 320, 1000, 3200, 10_000, 100_000, 1_000_000)
LARGEST = 1000.0  # score variance: beyond it the table is continued
INSIDE = np.linspace(0, 1, 13)[1:-1]

_STEP = 0.4
_Y = np.arange(-70, 11) * _STEP
_EXP_Y = np.exp(_Y)
_GUMBEL = _STEP * np.exp(_Y - _EXP_Y)
_ERFC = np.frompyfunc(math.erfc, 1, 1)


class Overlap(NamedTuple):
    """Of two rows of so many weights, each (lengths,): length E sum A B, and length E tr J_A J_B."""

    value: FloatArray
    jacobian: FloatArray


def _one_row(u: FloatArray, std: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """1 - E exp(-e^y), E e^y exp(-e^y) and E e^2y exp(-e^y) of y = u + std z."""
    if std <= 1.0:
        z = np.arange(-12, 13) * 0.7
        weight = np.exp(-0.5 * z * z)
        weight /= weight.sum()
        ey = np.exp(u[:, None] + std * z)
        decay = np.exp(-ey) * ey
        return -np.expm1(-ey) @ weight, decay @ weight, (decay * ey) @ weight
    z = (_Y - u[:, None]) / std
    density = np.exp(-0.5 * z * z) / (std * math.sqrt(2 * math.pi))
    tail = 0.5 * _ERFC(z * math.sqrt(0.5)).astype(np.float64)
    return tail @ _GUMBEL, density @ _GUMBEL, density @ (_GUMBEL * _EXP_Y)


def exact_overlap(s: float, c: float, lengths: tuple[int, ...]) -> Overlap:
    """Two softmaxes of logits of variance s, of which each pair of like places has the covariance c (-s to s).

    Logits are sqrt(|c|) z_k + sqrt(s - |c|) x_k with a common z_k; given all z the two sums are independent. With
    1/S = int e^(u - e^u S) du for both, every factor is a table over u and z, and what is left a sum over two u
    (docs/theory/attention.md, "Overlap of two rows"). Relative error about 1e-6.
    """
    full, tau, std = math.sqrt(s), math.sqrt(abs(c)), math.sqrt(s - abs(c))
    low = math.floor((-8.5 * full - math.log(max(lengths)) - 14) / _STEP)
    high = math.ceil((8.5 * full + 5) / _STEP)
    u = np.arange(low, high + 1) * _STEP
    if tau > 1:  # z on the grid of u, so that few sums of both are different
        k = math.ceil(8.5 * tau / _STEP)
        weight = np.exp(-0.5 * (np.arange(-k, k + 1) * _STEP / tau) ** 2)
        index = np.arange(2 * k + 1)[:, None] + np.arange(len(u))
        table = [x[index] for x in _one_row(np.arange(low - k, high + k + 1) * _STEP, std)]
    else:
        z = np.arange(-12, 13) * 0.7
        weight = np.exp(-0.5 * z * z)
        at = tau * z[:, None] + u
        table = [x.reshape(at.shape) for x in _one_row(at.ravel(), std)]
    weight /= weight.sum()
    miss, psi1, psi2 = table
    like = slice(None) if c >= 0 else slice(None, None, -1)

    def both(x: FloatArray, y: FloatArray) -> FloatArray:
        return np.asarray((x.T * weight) @ y[like])

    alone = weight @ miss
    log_phi = np.log1p(-np.minimum(alone[:, None] + alone - both(miss, miss), 1 - 1e-16))
    psi11, psi12, psi22 = both(psi1, psi1), both(psi1, psi2), both(psi2, psi2)
    value, jacobian = [], []
    for n in lengths:
        single = n * np.exp((n - 1) * log_phi)
        pair = n * (n - 1.0) * np.exp((n - 2) * log_phi)
        first, second = (_STEP**2 * float((single * psi).sum()) for psi in (psi11, psi12))
        third = _STEP**2 * float((single * psi22 + pair * psi11**2).sum())
        value.append(n * first)
        jacobian.append(n * (first - 2 * second + third))
    return Overlap(np.array(value), np.array(jacobian))


def share(s: Array, x: Array) -> Array:
    """c/s, of x: the inverse of `position`."""
    root = (s + 4.0) ** 0.5
    return x * (2.0 * root - x * (root - 2.0)) / (root + 2.0)


def bends(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """What is added to the cubic of ln Λ_V: nothing at the ends, and no slope there."""
    even = (x * (1 - x)) ** 2
    return even, even * x


def fitted(s: float) -> FloatArray:
    """What `bends` has to add at a score variance, (lengths, 2): least squares of ln of the overlap."""
    c = s * share(s, INSIDE)
    exact = np.log(np.stack([exact_overlap(s, float(at), LENGTHS).value for at in c]))
    rest = []
    for k, n in enumerate(LENGTHS):
        m = softmax_moments(np.array([s]), n)
        smooth = hermite(*hermite_data(np.array([s]), m.second, m.jacobian, n))[:, 0]
        missing = exact[:, k] - s * np.polynomial.polynomial.polyval(INSIDE, smooth)
        rest.append(np.linalg.lstsq(np.stack(bends(INSIDE), axis=1), missing, rcond=None)[0])
    return np.array(rest)


def main() -> None:
    """Write the table."""
    table = np.zeros((len(NODES), len(LENGTHS), 2))
    known = np.flatnonzero((NODES > 0) & (NODES < LARGEST))
    for k in known:
        table[k] = fitted(float(NODES[k]))
    for k in range(known[-1] + 1, len(NODES)):
        table[k] = 2 * table[k - 1] - table[k - 2]
    even, odd = np.round(table, 4).transpose(2, 0, 1).tolist()
    write_json(FILE, {"lengths": LENGTHS, "even": even, "odd": odd})


if __name__ == "__main__":
    main()
