"""Attention to compressions of earlier tokens: what it is."""

from __future__ import annotations

from signalprop.network.kinds import Kind
from signalprop.sublayers.shared_kv_attention.roles import BEFORE, BEYOND, ROLES, RUN, SPARSE, Sparse

KIND = Kind(
    name=SPARSE,
    package=__name__.rpartition(".")[0],
    roles=(*ROLES, *RUN, *BEFORE),
    words="attention to compressions",
    short="sparse",
    counted="attention",
    attends=True,
    settings=Sparse,
    longest=512,
    beyond=BEYOND,
)
