"""Token kernels through Mamba-2."""

from __future__ import annotations

from signalprop.sublayers.mamba2.moments import KIND

of = KIND.kernels
