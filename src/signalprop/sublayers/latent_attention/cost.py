"""What latent attention costs beside its maps."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.latent_attention.roles import Settings


def beside(a: Architecture) -> int:
    """Gains of the norms on latents."""
    s = Settings.of(a)
    return s.rank + s.query_rank


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    s = Settings.of(a)
    per_token = NORM * (s.rank + s.query_rank) + 3 * s.d_rotary * (a.n_heads + 1) * (a.positions == "rotary")
    dropped = DROPOUT * ((a.attention_dropout or 0) > 0)
    per_score = a.n_heads * (2 * a.d_head + 2 * s.d_value + 1 + SOFTMAX + dropped)
    return float(queries * per_token + queries * queries * per_score)
