"""Moments through gated DeltaNets: those of the rule at equally correlated tokens, `docs/theory/components.md`."""

from __future__ import annotations

from signalprop.sublayers.gated_delta_net.roles import Settings
from signalprop.sublayers.gated_delta_net.rule import Gains, rule
from signalprop.sublayers.recurrent import RecurrentKind

KIND = RecurrentKind("gated DeltaNets", Settings, Gains, rule, lambda _: 256, draws=(8, 4))
of = KIND.moments
