"""Attention whose keys are its values, within a window and to averages of what came before, as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from signalprop.models.surroundings import Surroundings, rotate, rotation_table
from signalprop.models.weights import WithMaps
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.shared_kv_attention.roles import NAME, SPARSE, compressed, settings_of


class SharedAttention(WithMaps):
    """Queries through a latent vector and a norm of every head; one head of keys, which are the values."""

    def __init__(self, p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, name: str) -> None:
        super().__init__(p, index, biases, dtype)
        self.a = a = p.architecture
        self.s, self.more, self.score_scale = settings_of(a, name), compressed(a, name), float(p.score_scale[index])
        self.overlaps = name == SPARSE
        self.query_norm = nn.RMSNorm(self.s.query_rank, eps=a.norm_eps, dtype=dtype)
        self.norm = nn.RMSNorm(a.d_head, eps=a.norm_eps, dtype=dtype)
        sink = self.s.sink
        self.sink = None if sink is None else nn.Parameter(torch.full((a.n_heads,), sink, dtype=dtype))
        self.run_norm: nn.RMSNorm | None = None
        self.run_bias: nn.Parameter | None = None
        if self.more is not None:
            self.run_norm = nn.RMSNorm(a.d_head, eps=a.norm_eps, dtype=dtype)
            maps = 1 + self.overlaps
            self.run_bias = nn.Parameter(torch.zeros(maps, self.more.rate, a.d_head, dtype=dtype))

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        a, s, (batch, length, _) = self.a, self.s, stream.shape
        q = self.kv_query(self.query_norm(self.kv_query_down(stream))).view(batch, length, a.n_heads, a.d_head)
        q = nn.functional.rms_norm(q, (a.d_head,), eps=a.norm_eps).transpose(1, 2)
        kv = self.norm(self.key_value(stream))[:, None]
        at = torch.arange(length, device=stream.device)
        ahead = at[:, None] - at
        visible, places = (ahead >= 0) & (ahead < s.window), at
        if self.more is not None and length >= self.more.rate:
            runs = self._runs(stream, length // self.more.rate)
            run = torch.arange(runs.shape[1], device=stream.device)
            kv, places = torch.cat([kv, runs[:, None]], 2), torch.cat([at, run * self.more.rate])
            visible = torch.cat([visible, run < ((at + 1) // self.more.rate)[:, None]], 1)
        table = None
        if around.rotation is not None:
            table = rotation_table(
                a, length, device=stream.device, dtype=stream.dtype, base=s.rotary_base, features=s.d_rotary
            )
            q, kv = rotate(q, table), rotate(kv, (table[0][places], table[1][places]))
        scores = (q @ kv.transpose(-1, -2) * self.score_scale).masked_fill(
            ~self._masked(visible, around), float("-inf")
        )
        if self.sink is not None:
            scores = torch.cat([scores, self.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        dropout = (a.attention_dropout or 0.0) if self.training else 0.0
        out = nn.functional.dropout(scores.softmax(-1), dropout)[..., : kv.shape[2]] @ kv
        if table is not None:
            out = rotate(out, (table[0], -table[1]))
        grouped = out.transpose(1, 2).reshape(batch, length, s.groups, -1)
        weight = self.grouped_output.weight.unflatten(0, (s.groups, s.group_rank))
        merged: Tensor = self.kv_output(torch.einsum("blgi,goi->blgo", grouped, weight).flatten(2))
        return merged

    def _masked(self, visible: Tensor, around: Surroundings) -> Tensor:
        """What may be looked at, padding apart; averages hold padding like anything else."""
        if around.mask is None:
            return visible
        allowed = around.mask if around.mask.dtype == torch.bool else around.mask > float("-inf")
        extra = visible.shape[1] - allowed.shape[-1]
        return visible & nn.functional.pad(allowed, (0, extra), value=True)

    def _runs(self, stream: Tensor, n: int) -> Tensor:
        """Normed averages of n runs, (batch, n, features)."""
        assert self.more is not None and self.run_bias is not None and self.run_norm is not None
        rate = self.more.rate
        used = stream[:, : n * rate]
        values = self.run_value(used).unflatten(1, (n, rate))
        weights = self.run_weight(used).unflatten(1, (n, rate)) + self.run_bias[0]
        if self.overlaps:  # each with the run before it, by separate maps; the first has none
            before = self.before_value(used).unflatten(1, (n, rate))
            logits = self.before_weight(used).unflatten(1, (n, rate)) + self.run_bias[1]
            none = torch.full_like(logits[:, :1], float("-inf"))
            values = torch.cat([torch.cat([0 * before[:, :1], before[:, :-1]], 1), values], 2)
            weights = torch.cat([torch.cat([none, logits[:, :-1]], 1), weights], 2)
        out: Tensor = self.run_norm((values * weights.softmax(2)).sum(2))
        return out


def make(
    p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any, name: str = NAME
) -> nn.Module:
    return SharedAttention(p, index, biases, dtype, name)
