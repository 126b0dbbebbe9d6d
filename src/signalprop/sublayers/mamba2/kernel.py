"""Token kernels through Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.mamba2.moments import Mamba2
from signalprop.sublayers.mamba2.moments import of as moments_of
from signalprop.sublayers.mamba2.roles import settings
from signalprop.sublayers.mamba2.scan import Scan, scan

LONGEST = 256  # tokens: memory and time grow with the square and the cube


class Mamba2Kernel:
    """The Mamba-2 sublayers of one stack."""

    def __init__(self, made: Mamba2) -> None:
        self.made = made

    def silent(self, i: int) -> bool:
        """Always worked out."""
        return False

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        """As `BranchKernel.forward`."""
        return np.asarray(self.made.gains(i).out * self._scan(i, kernel).normed + self.made.biases(i).out)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        """As `BranchKernel.backward`."""
        gains = self.made.gains(i, back=True)
        return self._scan(i, kernel).back(gains.out * gradient, gains)

    def _scan(self, i: int, kernel: FloatArray) -> Scan:
        if len(kernel) > LONGEST:
            raise InputError(
                f"token kernels through Mamba-2 are worked out up to {LONGEST} tokens, these are {len(kernel)}; "
                "give a smaller seq_len, or predict moments"
            )
        made = self.made
        return scan(settings(made.p.architecture), kernel, made.gains(i), made.biases(i), uniform=made.uniform, layer=i)


def of(p: Parametrization, stack: int, shapes: Sequence[Any]) -> Mamba2Kernel:
    """The Mamba-2 sublayers of a table."""
    return Mamba2Kernel(moments_of(p, stack))
