"""Token kernels through gated DeltaNets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_delta_net.moments import of as moments_of
from signalprop.sublayers.recurrent import RecurrentKernel


def of(p: Parametrization, stack: int, shapes: Sequence[Any]) -> RecurrentKernel:
    """Those of a table."""
    return RecurrentKernel(moments_of(p, stack))
