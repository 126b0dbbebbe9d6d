"""Moments through global attention: those of attention, with its own heads."""

from __future__ import annotations

from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention import moments
from signalprop.sublayers.attention.heads import SelfAttention
from signalprop.sublayers.global_attention.roles import as_usual


def of(p: Parametrization, stack: int) -> SelfAttention | moments.Layers:
    """The global attention of a table in one stack (index into STACKS)."""
    return moments.of(as_usual(p), stack)
