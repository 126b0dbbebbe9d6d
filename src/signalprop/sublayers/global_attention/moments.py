"""Moments through global attention: those of attention, with its own heads."""

from __future__ import annotations

from signalprop.errors import InputError
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention import moments
from signalprop.sublayers.attention.heads import mixes
from signalprop.sublayers.global_attention.roles import as_usual


def of(p: Parametrization, stack: int) -> moments.SelfAttention | moments.Layers:
    """The global attention of a table in one stack (index into STACKS)."""
    if p.shaping.kind != "none" or mixes(p):
        raise InputError("global attention is not shaped, and has no value_skip or attention_gain; leave them out")
    return moments.of(as_usual(p), stack)
