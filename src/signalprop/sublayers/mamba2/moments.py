"""Moments through Mamba-2: those of its scan at equally correlated tokens, `docs/theory/components.md`."""

from __future__ import annotations

from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.mamba2.roles import Settings
from signalprop.sublayers.mamba2.scan import Gains, scan
from signalprop.sublayers.recurrent import RecurrentKind, RecurrentMoments

# finer where no norm follows
_KIND = RecurrentKind("Mamba-2", Settings, Gains, scan, lambda s: 64 if s.normed else 1024)


def of(p: Parametrization, stack: int) -> RecurrentMoments:
    """The Mamba-2 sublayers of a table."""
    return RecurrentMoments(p, _KIND)
