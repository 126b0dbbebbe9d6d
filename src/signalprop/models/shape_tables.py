"""Numbers of shaped attention that are made in NumPy, kept in every type and on every device that asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signalprop.network.moments import FloatArray

CPU = torch.device("cpu")


class Tables:
    """Numbers that are made in NumPy in float64, kept in every type and on every device that asks for them.

    A shape's plain numbers are kept like this too: with floats, torch.compile would make a graph for every layer.

    Attributes:
        make: the arrays for so many tokens.
    """

    def __init__(self, make: Callable[[int], tuple[FloatArray, ...]], length: int, dtype: torch.dtype) -> None:
        self.make = make
        self._made: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, ...]] = {}
        self._add(length, dtype)

    def of(self, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The arrays for n tokens."""
        if (n, dtype, device) not in self._made:
            if (n, dtype, CPU) not in self._made:
                self._add(n, dtype)
            self._made[n, dtype, device] = tuple(x.to(device) for x in self._made[n, dtype, CPU])
        return self._made[n, dtype, device]

    # NumPy stays out of graphs; what a model needs is made before its first pass
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _add(self, n: int, dtype: torch.dtype) -> None:
        arrays = (torch.from_numpy(np.array(array, np.float64)) for array in self.make(n))
        self._made[n, dtype, CPU] = tuple(x.to(dtype) for x in arrays)

    def __getstate__(self) -> dict[str, Any]:
        return {"make": self.make, "_made": {k: v for k, v in self._made.items() if k[2] == CPU}}


class NestedTables:
    """Tables whose first rows and columns do not depend on how many there are; made for `length` tokens, and for more
    when a longer sequence comes."""

    def __init__(self, make: Callable[[int], tuple[FloatArray, ...]], length: int, dtype: torch.dtype) -> None:
        self.length = length
        self.tables = Tables(make, length, dtype)

    def of(self, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The arrays for at least n tokens."""
        if n > self.length:
            self.length = max(n, self.length + self.length // 4)  # a cache that grows token by token
        return self.tables.of(self.length, dtype, device)
