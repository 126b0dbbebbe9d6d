"""Token kernels through gated DeltaNets."""

from __future__ import annotations

from signalprop.sublayers.gated_delta_net.moments import KIND

of = KIND.kernels
