"""Self-attention: what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from signalprop.network.kinds import Kind, Role

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture


def _heads(a: Architecture) -> tuple[int, int]:
    return a.d_model, a.n_heads * a.d_head


def _shared_heads(a: Architecture) -> tuple[int, int]:
    return a.d_model, a.n_kv_heads * a.d_head


def _merged(a: Architecture) -> tuple[int, int]:
    return a.n_heads * a.d_head, a.d_model


def _biased(a: Architecture) -> bool:
    return bool(a.qkv_bias)


ROLES = (
    Role("query", _heads, biased=_biased),
    Role("key", _shared_heads, biased=_biased),
    Role("value", _shared_heads, biased=_biased),
    Role("output", _merged, writes=True),
)
KIND = Kind(
    name="attention",
    package=__name__.rpartition(".")[0],
    roles=ROLES,
    words="attention",
    short="attention",
    attends=True,
)
