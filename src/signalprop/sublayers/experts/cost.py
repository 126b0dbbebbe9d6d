"""What a mixture of experts costs: all parameters, and the operations of the experts that a token has."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.layout import entries
from signalprop.network.operations import ACTIVATION, ADD, DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.experts.roles import settings, width


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    s, total = settings(a), 0
    for role in kind_named("experts").roles:
        if role.exists(a):
            outputs = role.fan(a)[1] * (s.n_experts if role.copies else 1)
            total += entries(a, role.name) + outputs * role.biased(a)
    return total


def idle_parameters(a: Architecture) -> int:
    """Those of one sublayer that one token does not meet: experts that it has not chosen."""
    s, maps = settings(a), 3 if a.gated else 2
    one = maps * a.d_model * width(a) + ((maps - 1) * width(a) + a.d_model) * a.bias
    return (s.n_experts - s.top_k) * one


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence; arguments as of `attention.cost.flops`."""
    s, d, maps = settings(a), a.d_model, 3 if a.gated else 2
    count = 2 * d * s.n_experts + SOFTMAX * s.n_experts + s.top_k * 2 * d  # logits, scores, the weighted sum
    for hidden, times in ((width(a), s.top_k), (s.shared_width, 1 if s.shared_width else 0)):
        count += times * (maps * 2 * d * hidden + (ACTIVATION + a.gated) * hidden)
        count += times * ((maps - 1) * hidden + d) * a.bias
    count += (2 * d + d) * s.shared_gated + d * (s.shared_width > 0)
    return float(queries * (count + ADD * d + NORM * d * n_norms + DROPOUT * d * (a.dropout > 0)))
