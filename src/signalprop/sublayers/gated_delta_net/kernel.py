"""Token kernels through gated DeltaNets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_delta_net.moments import GatedDeltaNet
from signalprop.sublayers.gated_delta_net.moments import of as moments_of
from signalprop.sublayers.gated_delta_net.roles import settings
from signalprop.sublayers.gated_delta_net.rule import Rule, rule

LONGEST = 256  # tokens: memory and time grow with the square and the cube


class GatedDeltaNetKernel:
    """The gated DeltaNets of one stack."""

    def __init__(self, made: GatedDeltaNet) -> None:
        self.made = made

    def silent(self, i: int) -> bool:
        """Always worked out."""
        return False

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        """As `BranchKernel.forward`."""
        return np.asarray(self.made.gains(i).out * self._rule(i, kernel).out + self.made.biases(i).out)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        """As `BranchKernel.backward`."""
        gains = self.made.gains(i, back=True)
        return self._rule(i, kernel).back(gains.out * gradient, gains)

    def _rule(self, i: int, kernel: FloatArray) -> Rule:
        if len(kernel) > LONGEST:
            raise InputError(
                f"token kernels through gated DeltaNets are worked out up to {LONGEST} tokens, these are "
                f"{len(kernel)}; give a smaller seq_len, or predict moments"
            )
        made = self.made
        return rule(settings(made.p.architecture), kernel, made.gains(i), made.biases(i), uniform=made.uniform, layer=i)


def of(p: Parametrization, stack: int, shapes: Sequence[Any]) -> GatedDeltaNetKernel:
    """The gated DeltaNets of a table."""
    return GatedDeltaNetKernel(moments_of(p, stack))
