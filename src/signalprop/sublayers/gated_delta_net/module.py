"""A gated DeltaNet as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import WithMaps
from signalprop.network.parametrization import Parametrization
from signalprop.streams.replay import split_features
from signalprop.sublayers.gated_delta_net.roles import Settings


class GatedDeltaNetModule(WithMaps):
    """out(norm(delta rule(silu(filter(query, key, value)), decay, write)) silu(gate)).

    Attributes:
        A_log, dt_bias: of every head; set as the settings say, not drawn. norm: gains of the norm, that heads share.
    """

    filter = "delta_filter"

    def __init__(
        self, p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any = None
    ) -> None:
        super().__init__(p, index, biases, dtype)
        self.given = s = Settings.of(p.architecture)
        self.A_log = nn.Parameter(torch.tensor(s.rate(), dtype=dtype).log())
        self.dt_bias = nn.Parameter(torch.full((s.n_heads,), s.step_bias, dtype=dtype))
        self.norm = nn.Parameter(torch.ones(s.d_value, dtype=dtype))

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        s, length = self.given, stream.shape[1]
        inner = torch.cat([self.delta_query(stream), self.delta_key(stream), self.delta_value(stream)], -1)
        filtered = F.silu(self.delta_filter(inner.mT)[..., :length]).mT
        query, key, value = torch.split(filtered, [s.shared, s.shared, s.inner], -1)
        query, key = (self._unit(x).repeat_interleave(s.n_heads // s.n_groups, 2) for x in (query, key))
        log_decay = -self.A_log.float().exp() * F.softplus(self.delta_decay(stream).float() + self.dt_bias)
        write = self.delta_write(stream).sigmoid()
        out = self._ruled(split_features(value, s.n_heads), key, query * s.d_key**-0.5, log_decay, write)
        gate = F.silu(split_features(self.delta_gate(stream), s.n_heads))
        normed = F.rms_norm(out, (s.d_value,), self.norm, eps=s.eps) * gate
        done: Tensor = self.delta_out(normed.flatten(-2))
        return done

    def _unit(self, x: Tensor) -> Tensor:
        heads = split_features(x, self.given.n_groups)
        return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + self.given.eps)

    def _ruled(self, value: Tensor, key: Tensor, query: Tensor, log_decay: Tensor, write: Tensor) -> Tensor:
        """(batch, tokens, heads, features), token by token."""
        state = value.new_zeros(value.shape[0], value.shape[2], value.shape[3], key.shape[3])
        out, decays = [], log_decay.exp().to(value.dtype)
        for v, k, q, decay, beta in zip(*(x.unbind(1) for x in (value, key, query, decays, write)), strict=True):
            state = state * decay[..., None, None]
            new = (v - torch.einsum("bhpn,bhn->bhp", state, k)) * beta[..., None]
            state = state + torch.einsum("bhp,bhn->bhpn", new, k)
            out.append(torch.einsum("bhpn,bhn->bhp", state, q))
        return torch.stack(out, 1)


make = GatedDeltaNetModule
