"""Parameters of a feed-forward sublayer, and its operations by ELECTRA's accounting (`signalprop.results.cost`)."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import ACTIVATION, ADD, DROPOUT, NORM
from signalprop.network.parametrization import Parametrization


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    maps_in = 2 if a.gated else 1
    return (maps_in + 1) * a.d_model * a.d_ff + (maps_in * a.d_ff + a.d_model) * a.bias


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence; arguments as of `attention.cost.flops`."""
    d, hidden, maps_in = a.d_model, a.d_ff, 2 if a.gated else 1
    count = maps_in * (2 * d * hidden + hidden * a.bias) + ACTIVATION * hidden + hidden * a.gated
    count += 2 * hidden * d + d * a.bias + ADD * d + NORM * d * n_norms
    return float(queries * (count + DROPOUT * d * (a.dropout > 0)))
