"""Attention to strong compressions of earlier tokens: what it is."""

from __future__ import annotations

from signalprop.network.kinds import Kind
from signalprop.sublayers.shared_kv_attention.roles import BEYOND, HEAVY, ROLES, RUN, Compressed

KIND = Kind(
    name=HEAVY,
    package=__name__.rpartition(".")[0],
    roles=(*ROLES, *RUN),
    words="attention to strong compressions",
    short="heavy",
    counted="attention",
    attends=True,
    settings=Compressed,
    longest=512,
    beyond=BEYOND,
)
