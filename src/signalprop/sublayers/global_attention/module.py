"""Global attention as a PyTorch module."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from signalprop.models.shaping import TorchShape
from signalprop.models.surroundings import Surroundings
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.module import Attention
from signalprop.sublayers.global_attention.roles import PREFIX, Settings, as_usual


class GlobalAttention(Attention):
    """Attention whose maps have other names, and whose rotations may be proportional."""

    prefix = PREFIX

    def __init__(
        self,
        p: Parametrization,
        index: int,
        biases: dict[str, bool],
        dtype: torch.dtype,
        shape: TorchShape | None,
    ) -> None:
        s = Settings.of(p.architecture)
        super().__init__(as_usual(p), index, biases, dtype, shape, keys_are_values=s.shared)
        self.proportional = s.proportional

    def _rotation(self, q: Tensor, around: Surroundings) -> tuple[Tensor, Tensor]:
        cos, sin = super()._rotation(q, Surroundings())
        rest = q.shape[-1] // 2 - cos.shape[-1] // 2
        if not self.proportional or rest == 0:
            return cos, sin
        (cos, _), (sin, _) = cos.chunk(2, -1), sin.chunk(2, -1)
        cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


make = GlobalAttention
