"""The heads of latent attention on n nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from signalprop.kernels.nodes import Nodes
from signalprop.kernels.rows import rotation
from signalprop.sublayers.attention.on_nodes import Softmax, placed
from signalprop.sublayers.attention.signal import size_of
from signalprop.theory.elements import Signal, linear

if TYPE_CHECKING:
    from signalprop.sublayers.latent_attention.signal import LatentAttention


def heads_of(made: LatentAttention, i: int, x: Signal) -> Softmax:
    """Those of sublayer i, which reads x."""
    nodes, (rotated, base) = made.nodes, made.rotation
    assert isinstance(nodes, Nodes)
    size = float(size_of(x)) or 1.0
    s0, share = (float(y) for y in made.of_scores(i, size))
    fields: dict[str, Any] = {
        "qk": s0, "d_model": made.d_model, "dropout": made.attention_dropout, "d_head": made.d_head,
    }  # fmt: skip
    rho = omega = turn = None
    if base:
        rho, omega = (1 - share * (1 - y) for y in rotation(made.n_keys, rotated, base, 1.0, bool(made.causal)))
        turn = None if nodes.grid is None else 1 - share * (1 - nodes.grid.rotated(rotated, base, 1.0))
    attention = placed(made, nodes, nodes.matrix(linear(x, 1 / size)), (rho, omega, turn), fields)
    return Softmax(attention, nodes, size, 1.0)
