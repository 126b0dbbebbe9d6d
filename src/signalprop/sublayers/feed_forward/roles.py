"""The feed-forward sublayer, gated or not: what it is."""

from __future__ import annotations

from signalprop.network.kinds import Kind, Role

KIND = Kind(
    name="feed_forward",
    roles=(
        Role("gate", lambda a: (a.d_model, a.d_ff), exists=lambda a: a.gated, reads=True),
        Role("up", lambda a: (a.d_model, a.d_ff), reads=True),
        Role("down", lambda a: (a.d_ff, a.d_model), writes=True),
    ),
    words="feed-forward",
    short="ffn",
    activates=True,
)
