"""Token kernels through latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from signalprop.kernels.attention import TokenAttention
from signalprop.kernels.grid import Grid
from signalprop.kernels.rows import rotation
from signalprop.kernels.shaping import Shapes
from signalprop.kernels.state import normalised
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.kernel import AttentionKernel, size_of
from signalprop.sublayers.latent_attention.moments import LatentAttention
from signalprop.sublayers.latent_attention.moments import of as moments_of
from signalprop.sublayers.latent_attention.roles import Settings


class LatentKernel(AttentionKernel):
    """The latent attention of one stack: scores of one size, of which a share rotates."""

    made: LatentAttention

    def __init__(self, p: Parametrization, stack: int, shapes: Sequence[Shapes], grid: Grid | None = None) -> None:
        self.made, self.a, self.shapes, self.grid = moments_of(p, stack), p.architecture, shapes, grid
        self.kept, self.has_gate = {}, False

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        return super().forward(i, kernel * self.made.aligned(normalised(kernel)))

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        r = normalised(kernel)
        return super().backward(i, kernel * self.made.aligned(r), gradient) * self.made.sent_back(r)

    def _by_scores(self, i: int, kernel: FloatArray) -> tuple[TokenAttention, float]:
        a, size = self.a, size_of(kernel) or 1.0
        s0, share = (float(x) for x in self.made.of_scores(i, size))
        fields: dict[str, Any] = {
            "qk": s0, "d_model": self.made.d_model, "dropout": a.attention_dropout or 0.0,
            "d_head": a.d_head,
        }  # fmt: skip
        rho = omega = turn = None
        if a.positions == "rotary":
            rotated = Settings.of(a).d_rotary
            turned = rotation(a.seq_len, rotated, a.rotary_base, 1.0, a.causal)
            rho, omega = (1 - share * (1 - x) for x in turned)
            if self.grid is not None:
                turn = 1 - share * (1 - self.grid.rotated(rotated, a.rotary_base, 1.0))
        return self._placed(kernel / size, rho, omega, turn, fields), size


of = on_grid = LatentKernel
