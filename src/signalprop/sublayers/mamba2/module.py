"""Mamba-2 as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import WithMaps
from signalprop.network.parametrization import Parametrization
from signalprop.streams.replay import split_features
from signalprop.sublayers.mamba2.roles import Settings

_CHUNK = 64  # tokens whose products are formed at a time


class Mamba2Module(WithMaps):
    """out(norm(scan(silu(filter(value, key, query)), step) silu(gate))).

    Attributes:
        A_log, dt_bias, D: of every head; set as the settings say, not drawn.
        norm: gains of the gated norm, if there is one.
    """

    filter = "scan_filter"

    def __init__(
        self, p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any = None
    ) -> None:
        super().__init__(p, index, biases, dtype)
        self.given = s = Settings.of(p.architecture)
        self.A_log = nn.Parameter(torch.tensor(s.rate(), dtype=dtype).log())
        self.dt_bias = nn.Parameter(torch.tensor(s.step_bias(index * 2**0.5), dtype=dtype))
        self.D = nn.Parameter(torch.full((s.n_heads,), s.skip, dtype=dtype))
        self.norm = nn.Parameter(torch.ones(s.inner, dtype=dtype)) if s.normed else None

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        s, length = self.given, stream.shape[1]
        inner = torch.cat([self.scan_value(stream), self.scan_key(stream), self.scan_query(stream)], -1)
        filtered = F.silu(self.scan_filter(inner.mT)[..., :length]).mT
        value, key, query = torch.split(filtered, [s.inner, s.shared, s.shared], -1)
        step = F.softplus(self.scan_step(stream) + self.dt_bias)
        heads = split_features(value, s.n_heads)
        y = self._scanned(heads * step[..., None], key, query, -self.A_log.float().exp() * step.float())
        y = (y + self.D[:, None] * heads).flatten(2) * F.silu(self.scan_gate(stream))
        if self.norm is not None:
            groups = F.rms_norm(split_features(y, s.n_groups), (s.inner // s.n_groups,), eps=s.eps)
            y = groups.flatten(2) * self.norm
        out: Tensor = self.scan_out(y)
        return out

    def _scanned(self, value: Tensor, key: Tensor, query: Tensor, log_decay: Tensor) -> Tensor:
        """(batch, tokens, heads, features), chunk by chunk: the state comes from the chunks before."""
        s, out = self.given, []
        key, query = (split_features(x, s.n_groups).repeat_interleave(s.n_heads // s.n_groups, 2) for x in (key, query))
        state = value.new_zeros(value.shape[0], s.n_heads, s.d_head, s.d_state)
        for v, k, q, a in zip(*(torch.split(x, _CHUNK, 1) for x in (value, key, query, log_decay)), strict=True):
            total = a.cumsum(1)  # (batch, tokens, heads)
            between = (total[:, :, None] - total[:, None]).clamp(max=0.0).exp().to(v.dtype)
            visible = torch.ones(v.shape[1], v.shape[1], device=v.device, dtype=v.dtype).tril()[:, :, None]
            inside = torch.einsum("bthn,bshn->btsh", q, k) * between * visible
            before = torch.einsum("bthn,bhpn->bthp", q, state) * total.exp().to(v.dtype)[..., None]
            out.append(torch.einsum("btsh,bshp->bthp", inside, v) + before)
            left = (total[:, -1:] - total).exp().to(v.dtype)
            state = state * total[:, -1].exp().to(v.dtype)[..., None, None]
            state = state + torch.einsum("bshp,bshn,bsh->bhpn", v, k, left)
        return torch.cat(out, 1)


make = Mamba2Module
