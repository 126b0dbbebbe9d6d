"""Attention of a decoder to the encoder's output: what it is."""

from __future__ import annotations

from signalprop.network.kinds import Kind
from signalprop.sublayers.attention.roles import ROLES

KIND = Kind(
    name="cross_attention",
    roles=ROLES,
    words="cross-attention",
    short="cross",
    counted="attention",
    attends=True,
    reads_memory=True,
)
