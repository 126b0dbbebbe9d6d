"""Statistics of a stored tensor of any size, in one pass over its numbers in pieces of constant size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from signalprop.files.tensor_files import StoredTensor

# Bits of the mantissa, exponent of the smallest normal number, largest number (Micikevicius et al. 2022, table 1).
_FLOAT8 = {"float8_e4m3fn": (3, -6, 448.0), "float8_e5m2": (2, -14, 57344.0)}
Seen = Callable[[int], None]


@dataclass(frozen=True)
class Statistics:
    """What one pass finds. Moments are of the finite numbers; NaN if there are none.

    Attributes:
        n, zeros, nan, infinite: how many.
        mean, std, rms; least, most: the smallest and the largest number.
        first_bad: index of the first number that is NaN or infinite, () if there is none.
        digest: of all bytes: equal tensors have equal ones.
    """

    n: int
    zeros: int
    nan: int
    infinite: int
    mean: float
    std: float
    rms: float
    least: float
    most: float
    first_bad: tuple[int, ...] = ()
    digest: str = ""


def values_of(words: NDArray[np.generic], dtype: str) -> NDArray[np.floating]:
    """The numbers of pieces of a stored tensor: float32, or float64 where they are stored so."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    if dtype in _EIGHT_BITS:
        table: NDArray[np.floating] = _EIGHT_BITS[dtype][words]
        return table
    wide: NDArray[np.floating] = words.astype(np.float64 if dtype == "F64" else np.float32, copy=False)
    return wide


def _eight_bits(name: str) -> NDArray[np.float32]:
    """All 256 numbers of a float8 format."""
    mantissa, least, top = _FLOAT8[name]
    code = np.arange(128)
    exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    half = np.where(exponent > 0, np.ldexp(1 + fraction, exponent - 1 + least), np.ldexp(fraction, least))
    half = np.where(half > top, np.nan, half)
    if name == "float8_e5m2":
        half[124] = np.inf
    return np.concatenate([half, -half]).astype(np.float32)


_EIGHT_BITS = {"F8_E4M3": _eight_bits("float8_e4m3fn"), "F8_E5M2": _eight_bits("float8_e5m2")}


def statistics(tensor: StoredTensor, seen: Seen | None = None) -> Statistics:
    """One pass over a stored tensor.

    Args:
        seen: called with the number of bytes after every piece.
    """
    n = zeros = nan = infinite = done = 0
    first: int | None = None
    digest = hashlib.blake2b(digest_size=16)
    least, most, shift, sums, square = math.inf, -math.inf, None, np.zeros(2), 0.0
    with np.errstate(all="ignore"):
        for words in tensor.pieces():
            if seen is not None:
                seen(words.nbytes)
            digest.update(words.tobytes())
            x = values_of(words, tensor.dtype).astype(np.float64)
            finite, before, done = np.isfinite(x), done, done + len(words)
            if not finite.all():
                first = before + int(np.argmin(finite)) if first is None else first
                nan += int(np.isnan(x).sum())
                infinite += int(np.isinf(x).sum())
                x = x[finite]
            if not len(x):
                continue
            n += len(x)
            zeros += len(x) - int(np.count_nonzero(x))
            least, most = min(least, float(x.min())), max(most, float(x.max()))
            square += float(x @ x)
            shift = float(x.mean()) if shift is None else shift
            x -= shift
            sums += (x.sum(), x @ x)
        s1, s2 = (float(s) / n if n else math.nan for s in sums)
    return Statistics(
        n=tensor.n,
        zeros=zeros,
        nan=nan,
        infinite=infinite,
        mean=(shift or 0.0) + s1,
        std=math.sqrt(max(s2 - s1 * s1, 0.0)) if n else math.nan,
        rms=math.sqrt(square / n) if n else math.nan,
        least=least if n else math.nan,
        most=most if n else math.nan,
        first_bad=() if first is None else tuple(int(i) for i in np.unravel_index(first, tensor.shape)),
        digest=digest.hexdigest(),
    )
