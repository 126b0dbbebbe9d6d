"""Latent attention as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.models.surroundings import Surroundings, rotate, rotation_table
from signalprop.models.weights import WithMaps
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.latent_attention.roles import Settings


class LatentAttentionModule(WithMaps):
    """Queries and keys of d_head features, of which the last d_rotary are turned; keys and values from one latent."""

    def __init__(
        self, p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any = None
    ) -> None:
        super().__init__(p, index, biases, dtype)
        a = p.architecture
        self.architecture, self.settings, self.score_scale = a, Settings.of(a), float(p.score_scale[index])
        rank, query_rank = self.settings.rank, self.settings.query_rank
        eps = self.settings.eps_in(a)
        self.norm = nn.RMSNorm(rank, eps=eps, dtype=dtype)
        self.query_norm = nn.RMSNorm(query_rank, eps=eps, dtype=dtype) if query_rank else None

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        a, s = self.architecture, self.settings
        batch, length, _ = stream.shape
        asked = stream
        if self.query_norm is not None:
            asked = self.query_norm(self.latent_query_down(stream))

        def heads(x: Tensor, n: int = a.n_heads) -> Tensor:
            return x.view(batch, length, n, -1).transpose(1, 2)

        q = heads(self.latent_query(asked))
        latent, shared = torch.split(self.latent_down(stream), [s.rank, s.d_rotary], -1)
        d_unrotated = a.d_head - s.d_rotary
        k, v = torch.split(heads(self.latent_up(self.norm(latent))), [d_unrotated, s.d_value], -1)
        q, turned, shared = q[..., :d_unrotated], q[..., d_unrotated:], heads(shared, 1)
        if around.rotation is not None:
            table = rotation_table(a, length, device=stream.device, dtype=stream.dtype, features=s.d_rotary)
            turned, shared = rotate(turned, table), rotate(shared, table)
        q, k = torch.cat([q, turned], -1), torch.cat([k, shared.expand(-1, a.n_heads, -1, -1)], -1)
        dropout = (a.attention_dropout or 0.0) if self.training else 0.0
        causal = around.causal and around.mask is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=around.mask, dropout_p=dropout, is_causal=causal, scale=self.score_scale
        )
        merged: Tensor = self.latent_output(out.transpose(1, 2).flatten(-2))
        return merged


make = LatentAttentionModule
