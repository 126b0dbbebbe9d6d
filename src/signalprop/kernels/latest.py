"""What was last made of a kernel, which is asked for several times in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from signalprop.network.moments import FloatArray

T = TypeVar("T")


class Latest(Generic[T]):
    """Makes something of (a sublayer, the kernel that it reads), once while both stay."""

    def __init__(self, make: Callable[[int, FloatArray], T]) -> None:
        self.make = make
        self.last: tuple[int, FloatArray, T] | None = None

    def __call__(self, i: int, kernel: FloatArray) -> T:
        if self.last is None or self.last[0] != i or not np.array_equal(self.last[1], kernel):
            self.last = (i, kernel, self.make(i, kernel))
        return self.last[2]
