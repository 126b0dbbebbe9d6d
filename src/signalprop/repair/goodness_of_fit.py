"""Whether numbers can be draws of a distribution: sample statistics, and how far they may deviate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from signalprop.network.embedding_and_head import Distribution
from signalprop.repair.check_result import TOO_LARGE, TOO_SMALL

SMALLEST = 1e-3  # relative difference that is never called off
CHUNK = 32_000  # numbers that are made float64 at a time: in the cache, and too few for PyTorch to start a thread
PIECE = 1 << 17  # the same on one thread: Python takes as long for a piece of any size

# Of a normal cut at +-2: E x^2 = 1 - 4 c and E x^4 = 3 - 28 c with c = pdf(2) / (2 cdf(2) - 1).
_CUT = math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2))
# Fourth central moment over the variance squared. Orthogonal: of large matrices, whose mean square does not scatter.
KURTOSIS: dict[str, float] = {
    "normal": 3.0,
    "uniform": 1.8,
    "truncated_normal": (3 - 28 * _CUT) / (1 - 4 * _CUT) ** 2,
    "orthogonal": 3.0,
}


class Sample(NamedTuple):
    """n numbers: their mean, standard deviation about it (n - 1 in the denominator), and kurtosis if they differ.

    The standard deviation of a single number is its absolute value.
    """

    n: int
    mean: float
    std: float
    kurtosis: float | None


def sample(tensor: Tensor) -> Sample:
    """Statistics of all entries in float64: one pass of power sums about the mean of the first piece, on one thread."""
    flat = tensor.detach().reshape(-1)
    n = flat.numel()
    if n <= 1:
        value = float(flat) if n else 0.0
        return Sample(n, value, abs(value), None)
    start = float(flat[:PIECE].double().mean())
    first = second = third = fourth = 0.0
    with one_thread():
        for piece in torch.split(flat, PIECE):
            x = piece.double() - start
            square = x * x
            first, second = first + float(x.sum()), second + float(x.dot(x))
            third, fourth = third + float(square.dot(x)), fourth + float(square.dot(square))
    off = first / n  # from there to the mean of all
    about = second - n * off**2
    kurtosis = n * (fourth - 4 * off * third + 6 * off**2 * second - 3 * n * off**4) / about**2 if about > 0 else None
    return Sample(n, start + off, math.sqrt(max(about, 0.0) / (n - 1)), kurtosis)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch starts no threads inside: on busy cores they wait for each other longer than one takes alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def standard_error(seen: Sample, shape: Distribution) -> float:
    """Standard error of a sample's standard deviation s: s sqrt((kurtosis - 1) / 4n), kurtosis of the distribution."""
    kurtosis = KURTOSIS.get(shape, seen.kurtosis or 3.0)
    return seen.std * math.sqrt(max(kurtosis - 1, 0.0) / (4 * max(seen.n, 1)))


def std_bounds(n: int, kurtosis: float, deviations: float) -> tuple[float, float]:
    """Between what a sample standard deviation lies, over the true one, but for normal tails beyond `deviations`.

    A mean square of n numbers scatters like chi-squared with 2 (n - 1) / (kurtosis - 1) degrees of freedom (exactly so
    for normal ones), and downwards no less than with n - 1, since every density is flat at 0. Quantiles are Wilson and
    Hilferty's (1931), which from 3 deviations on lie further out than the true ones, the more so the fewer degrees of
    freedom there are (at 4.7 deviations and n = 30 the upper one by 0.7 %, the lower one by 4 %, of the variance).
    """
    if n <= 1:
        return 0.0, math.inf
    freedom = 2 * (n - 1) / max(kurtosis - 1, 1e-6)

    def root(nu: float, z: float) -> float:
        return math.pow(max(0.0, 1 - 2 / (9 * nu) + z * math.sqrt(2 / (9 * nu))), 1.5)

    return root(min(freedom, n - 1), -deviations), root(freedom, deviations)


def fault(seen: Sample, wanted: float, shape: Distribution, deviations: float) -> str:
    """Why numbers cannot be draws of mean 0 and standard deviation `wanted`; empty where they can.

    Differences below 0.1 % of the standard deviation are ignored.
    """
    if wanted == 0:
        return "" if seen.std == 0 and seen.mean == 0 else "expected zeros"
    ratio = seen.std / wanted
    low, high = std_bounds(seen.n, KURTOSIS.get(shape, seen.kurtosis or 3.0), deviations)
    if not (low <= ratio <= high or abs(ratio - 1) <= SMALLEST):
        if ratio == 0:  # all equal
            return f"all are {seen.mean:.4g}" if seen.mean else "zeros"
        return f"{ratio:.4g} {TOO_LARGE}" if ratio > 1 else f"{1 / ratio:.4g} {TOO_SMALL}"
    if abs(seen.mean) > max(deviations / math.sqrt(max(seen.n, 1)), SMALLEST) * wanted:
        return "the mean is not 0"
    return ""
