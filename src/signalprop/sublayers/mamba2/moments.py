"""Moments through Mamba-2: those of its scan at equally correlated tokens, `docs/theory/components.md`."""

from __future__ import annotations

from signalprop.sublayers.mamba2.roles import Settings
from signalprop.sublayers.mamba2.scan import Gains, scan
from signalprop.sublayers.recurrent import RecurrentKind

# finer where no norm follows
KIND = RecurrentKind("Mamba-2", Settings, Gains, scan, lambda s: 64 if s.normed else 1024)
of = KIND.moments
