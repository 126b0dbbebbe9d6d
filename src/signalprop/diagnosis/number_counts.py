"""Statistics of a tensor of any size, from one pass over its numbers in pieces of constant size.

A 16-bit number is one of 65,536: how often each occurs gives every statistic exactly, without holding the tensor.
Of float32 and float64 moments, zeros and the largest number are summed up exactly; quantiles and the errors of casts
come from counts of the upper 16 bits, which fix a number to 2^-7 of itself. Where at most `KEPT` numbers share those
bits, as the largest do, the numbers themselves are kept, so that a heavy tail counts as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.files.tensor_files import StoredTensor
from signalprop.network.moments import FloatArray

QUANTILES = (0.5, 0.99, 0.9999)
# Bits of the mantissa, exponent of the smallest normal number, largest number (Micikevicius et al. 2022, table 1).
_FLOATS = {
    "float8_e4m3fn": (3, -6, 448.0), "float8_e5m2": (2, -14, 57344.0), "bfloat16": (7, -126, 2.0**128 - 2.0**120)
}  # fmt: skip
CASTS = tuple((name, scaled) for name in (*_FLOATS, "int8") for scaled in (False, True) if (name, scaled) != (
    "bfloat16", True))  # fmt: skip
KEPT = 8
_AT_ONCE = 1 << 15  # counted at once: index and counts stay in the processor's cache
_SUBCELLS = (np.arange(16) + 0.5) / 16  # where numbers are taken to lie between two whose upper 16 bits are neighbours
_SHORTEST_ROW = 64  # of which it is told that they are all zeros
Seen = Callable[[int], None]


@dataclass(frozen=True)
class Statistics:
    """What one pass finds. Moments and quantiles are of the finite numbers; NaN where there are none.

    Attributes:
        n, zeros, nan, infinite: how many.
        mean, std, rms, kurtosis: the last is the fourth central moment over the squared variance (normal: 3).
        least, most: the smallest and the largest number. quantiles: of absolute values, at `QUANTILES`: the least one
            that at least so many do not exceed. casts: 10 log10 of signal over noise, by `CASTS`; a scale is the
            largest absolute value over the largest of the format. NaN where nothing is lost, or all is zero.
        exact: quantiles and casts are exact, too. dead_rows: rows (of the first axis) that are all zeros.
    """

    n: int
    zeros: int
    nan: int
    infinite: int
    mean: float
    std: float
    rms: float
    kurtosis: float
    least: float
    most: float
    quantiles: tuple[float, ...]
    casts: tuple[float, ...]
    exact: bool
    dead_rows: int


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
    mantissa, least, top = _FLOATS[name]
    code = np.arange(128)
    exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    half = np.where(exponent > 0, np.ldexp(1 + fraction, exponent - 1 + least), np.ldexp(fraction, least))
    half = np.where(half > top, np.nan, half)
    if name == "float8_e5m2":
        half[124] = np.inf
    return np.concatenate([half, -half]).astype(np.float32)


_EIGHT_BITS = {"F8_E4M3": _eight_bits("float8_e4m3fn"), "F8_E5M2": _eight_bits("float8_e5m2")}


def statistics(tensor: StoredTensor, seen: Seen | None = None) -> Statistics:
    """One pass over a stored tensor; a second one where so many are zero that rows may be.

    Args:
        seen: called with the number of bytes after every piece of the first pass.
    """
    with np.errstate(all="ignore"):
        found = _wide(tensor, seen) if tensor.dtype in ("F32", "F64") else _counted(tensor, seen)
    width = tensor.n // tensor.shape[0] if len(tensor.shape) > 1 else 0
    if width < _SHORTEST_ROW or found.zeros < width:
        return found
    return Statistics(**{**vars(found), "dead_rows": _dead_rows(tensor, width)})


def _counted(tensor: StoredTensor, seen: Seen | None) -> Statistics:
    bits = 8 if tensor.dtype in _EIGHT_BITS else 16
    counts, index = np.zeros(1 << bits, np.int64), np.empty(min(_AT_ONCE, tensor.n), np.intp)
    for piece in tensor.pieces():
        for start in range(0, len(piece), _AT_ONCE):
            words = piece[start : start + _AT_ONCE]
            np.copyto(index[: len(words)], words)
            np.add.at(counts, index[: len(words)], 1)  # faster than bincount, which makes an index every time
        if seen is not None:
            seen(piece.nbytes)
    words = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    values = values_of(words, tensor.dtype).astype(np.float64)
    used = np.flatnonzero(counts)
    good = used[np.isfinite(values[used])]
    x, c = values[good], counts[good].astype(np.float64)
    n = c.sum()
    mean = float(c @ x / n)
    second, fourth = (float(c @ (x - mean) ** power / n) for power in (2, 4))
    return Statistics(
        n=tensor.n,
        zeros=int(counts[values == 0].sum()),
        nan=int(counts[np.isnan(values)].sum()),
        infinite=int(counts[np.isinf(values)].sum()),
        mean=mean,
        std=math.sqrt(second),
        rms=math.sqrt(float(c @ x**2 / n)),
        kurtosis=fourth / second**2 if second else math.nan,
        least=float(x.min(initial=math.inf)) if len(x) else math.nan,
        most=float(x.max(initial=-math.inf)) if len(x) else math.nan,
        quantiles=_quantiles(x, c),
        casts=_casts(x, c, float(np.abs(x).max(initial=0.0))),
        exact=True,
        dead_rows=0,
    )


def _wide(tensor: StoredTensor, seen: Seen | None) -> Statistics:
    counts, kept_numbers = np.zeros(1 << 16, np.int64), np.zeros((1 << 16, KEPT))
    n = zeros = nan = infinite = 0
    least, most, shift, sums, square = math.inf, -math.inf, None, np.zeros(4), 0.0
    for piece in tensor.pieces():
        if seen is not None:
            seen(piece.nbytes)
        kept = np.isfinite(piece)
        if not kept.all():
            nan += int(np.isnan(piece).sum())
            infinite += int(np.isinf(piece).sum())
            piece = piece[kept]
        if not len(piece):
            continue
        cells = piece.astype("<f4", copy=False).view("<u4") >> 16
        _keep(kept_numbers, counts, cells, piece)
        counts += np.bincount(cells, minlength=1 << 16)
        n += len(piece)
        zeros += len(piece) - int(np.count_nonzero(piece))
        least, most = min(least, float(piece.min())), max(most, float(piece.max()))
        x = piece.astype(np.float64)
        square += float(x @ x)
        shift = float(x.mean()) if shift is None else shift
        x -= shift
        y = x * x
        sums += (x.sum(), y.sum(), x @ y, y @ y)
    s1, s2, s3, s4 = (float(s) / n if n else math.nan for s in sums)
    second = max(s2 - s1 * s1, 0.0) if n else math.nan
    fourth = s4 - 4 * s1 * s3 + 6 * s1**2 * s2 - 3 * s1**4
    x, c = _cells(counts, kept_numbers)
    largest = max(abs(least), abs(most)) if n else 0.0
    return Statistics(
        n=tensor.n,
        zeros=zeros,
        nan=nan,
        infinite=infinite,
        mean=(shift or 0.0) + s1,
        std=math.sqrt(second),
        rms=math.sqrt(square / n) if n else math.nan,
        kurtosis=fourth / second**2 if second else math.nan,
        least=least if n else math.nan,
        most=most if n else math.nan,
        quantiles=tuple(min(q, largest) for q in _quantiles(x, c)),
        casts=_casts(x, c, largest),
        exact=False,
        dead_rows=0,
    )


def _keep(kept: FloatArray, counts: NDArray[np.int64], cells: NDArray[Any], numbers: NDArray[Any]) -> None:
    """Write numbers into cells that hold fewer than `KEPT` so far (`counts`), in order, as many as there is room."""
    rare = np.flatnonzero(counts[cells] < KEPT)
    rare = rare[np.argsort(cells[rare], kind="stable")]
    cell = cells[rare]
    first = np.flatnonzero(np.diff(cell, prepend=-1))
    slot = counts[cell] + np.arange(len(cell)) - np.repeat(first, np.diff(first, append=len(cell)))
    room = slot < KEPT
    kept[cell[room], slot[room]] = numbers[rare[room]]


def _cells(counts: NDArray[np.int64], kept: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Numbers and how often they occur, for counts of the upper 16 bits: those kept, or spread evenly over a cell."""
    few = (counts > 0) & (counts <= KEPT)
    alone = kept[few][np.arange(KEPT) < counts[few][:, None]]
    used = np.flatnonzero(counts > KEPT).astype(np.uint32)
    lower = (used << 16).view(np.float32).astype(np.float64)
    upper = ((used << 16) | 0xFFFF).view(np.float32).astype(np.float64)
    split = np.where((used & 0x7FFF) == 0, 0.0, 1.0)  # a zero is a zero
    x = lower[:, None] + (upper - lower)[:, None] * _SUBCELLS * split[:, None]
    c = np.repeat(counts[used] / len(_SUBCELLS), len(_SUBCELLS))
    good = np.isfinite(x.ravel())
    return np.concatenate([alone, x.ravel()[good]]), np.concatenate([np.ones(len(alone)), c[good]])


def _quantiles(x: FloatArray, c: FloatArray) -> tuple[float, ...]:
    if not len(x):
        return (math.nan,) * len(QUANTILES)
    size = np.abs(x)
    order = np.argsort(size)
    up_to = np.cumsum(c[order])
    return tuple(float(size[order[np.searchsorted(up_to, q * up_to[-1])]]) for q in QUANTILES)


def _casts(x: FloatArray, c: FloatArray, largest: float) -> tuple[float, ...]:
    signal = float(c @ x**2)
    out = []
    for name, scaled in CASTS:
        noise = float(c @ (rounded(x, name, largest if scaled else None) - x) ** 2)
        good = noise > 0 and signal > 0 and math.isfinite(signal + noise)
        out.append(10 * math.log10(signal / noise) if good else math.nan)
    return tuple(out)


def rounded(x: FloatArray, name: str, largest: float | None = None) -> FloatArray:
    """Numbers as a format of `CASTS` holds them, to the nearest, ties to even; beyond its range, its ends.

    Args:
        largest: the number that a scale takes to the largest of the format; None: no scale.
    """
    top = 127.0 if name == "int8" else _FLOATS[name][2]
    scale = largest / top if largest else 1.0
    held = np.clip(x / scale, -top, top)
    if name == "int8":
        return np.round(held) * scale
    mantissa, least, _ = _FLOATS[name]
    step = np.ldexp(1.0, np.maximum(np.frexp(held)[1] - 1, least) - mantissa)
    return np.asarray(np.clip(np.round(held / step) * step, -top, top) * scale)


def _dead_rows(tensor: StoredTensor, width: int) -> int:
    """How many rows hold nothing but zeros."""
    dead = done = 0
    alive = False  # of the row that the piece before ended in
    magnitude = {"F16": 0x7FFF, "BF16": 0x7FFF, "F8_E4M3": 0x7F, "F8_E5M2": 0x7F}.get(tensor.dtype)
    for piece in tensor.pieces():
        live = piece != 0 if magnitude is None else (piece & magnitude) != 0
        first = -(-done // width) * width - done  # where the next row begins
        if first > 0:
            alive = alive or bool(live[:first].any())
        starts = np.arange(first, len(piece), width)
        if done and len(starts):
            dead += not alive
        if len(starts):
            rows = np.logical_or.reduceat(live, starts)
            dead += len(rows) - 1 - int(np.count_nonzero(rows[:-1]))
            alive = bool(rows[-1])
        done += len(piece)
    return dead + (not alive)
