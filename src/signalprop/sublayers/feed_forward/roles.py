"""The feed-forward sublayer, gated or not: what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from signalprop.network.kinds import Kind, Role

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture


def _inner(a: Architecture) -> tuple[int, int]:
    return a.d_model, a.d_ff


def _outer(a: Architecture) -> tuple[int, int]:
    return a.d_ff, a.d_model


def _gated(a: Architecture) -> bool:
    return a.gated


KIND = Kind(
    name="feed_forward",
    package=__name__.rpartition(".")[0],
    roles=(Role("gate", _inner, exists=_gated), Role("up", _inner), Role("down", _outer, writes=True)),
    words="feed-forward",
    short="ffn",
    line="--",
    activates=True,
)
