"""Statistics of a stored tensor of any size, in one pass over its numbers in pieces of constant size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from signalprop.diagnosis.result import number
from signalprop.diagnosis.stored_values import TensorWeights
from signalprop.diagnosis.weight_names import place_of
from signalprop.files.tensor_files import StoredTensor

# Bits of the mantissa, exponent of the smallest normal number, largest number (Micikevicius et al. 2022, table 1).
_FLOAT8 = {"float8_e4m3fn": (3, -6, 448.0), "float8_e5m2": (2, -14, 57344.0)}
Seen = Callable[[int], None]


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


def statistics(tensor: StoredTensor, seen: Seen | None = None) -> tuple[TensorWeights, str]:
    """One pass over a stored tensor: its numbers, and a digest of all its bytes, which equal tensors share.

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
        row = TensorWeights(
            **place_of(tensor.name)._asdict(),
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            n=tensor.n,
            zeros=zeros,
            nan=nan,
            infinite=infinite,
            first_bad=() if first is None else tuple(int(i) for i in np.unravel_index(first, tensor.shape)),
        )
    if not n:
        return row, digest.hexdigest()
    s1, s2 = (float(s) / n for s in sums)
    numbers = {
        "mean": (shift or 0.0) + s1,
        "std": math.sqrt(max(s2 - s1 * s1, 0.0)),
        "rms": math.sqrt(square / n),
        "least": least,
        "most": most,
    }
    return row.model_copy(update={name: number(value) for name, value in numbers.items()}), digest.hexdigest()
