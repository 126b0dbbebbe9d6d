"""Matrices that are used again: a fresh one costs more than an old one, by the pages that the system has to clear.

Of 512 tokens that is as much as all arithmetic of a feed-forward's step. A matrix is handed out again when nothing but
the store of its thread refers to it, which CPython's counts of references say; without these every one is fresh.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from signalprop.network.moments import FloatArray

_MOST = 6  # of one size: a stream, what a branch reads of it and gives, the next stream; and what is seen of them


class _Store(threading.local):
    kept: dict[tuple[int, int], list[FloatArray]] | None = None


_STORE = _Store()
_count = getattr(sys, "getrefcount", None)


@contextmanager
def reused() -> Iterator[None]:
    """Within this, `empty` hands out matrices again; afterwards those that are left are freed."""
    if _STORE.kept is not None:  # of whoever asked first
        yield
        return
    _STORE.kept = {}
    try:
        yield
    finally:
        _STORE.kept = None


def _references(matrices: list[FloatArray]) -> list[int]:
    """How many there are to each matrix of a list, this function's own included."""
    return [] if _count is None else [_count(matrix) for matrix in matrices]


_UNUSED = next(iter(_references([np.empty(0)])), 0)  # of a matrix that stands in a list and nowhere else


def empty(n: int, columns: int | None = None) -> FloatArray:
    """A matrix (n, columns), by default (n, n), of whatever was in its memory."""
    shape = n, n if columns is None else columns
    if _STORE.kept is None:
        return np.empty(shape)
    kept = _STORE.kept.setdefault(shape, [])
    for i, references in enumerate(_references(kept)):
        if references == _UNUSED:
            return kept[i]
    del kept[: max(0, len(kept) - _MOST + 1)]  # those that others hold on to
    kept.append(np.empty(shape))
    return kept[-1]
