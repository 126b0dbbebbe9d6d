"""Multi-head attention as a PyTorch module, of a stream to itself or to an encoder's output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.models.multipliers import is_fixed, times, trainable
from signalprop.models.shaping import TorchShape, shaped_attention
from signalprop.models.surroundings import Surroundings, rotate, rotation_table
from signalprop.models.weights import Linear
from signalprop.network.parametrization import Parametrization, Trainable, fan
from signalprop.sublayers.attention.roles import ROLES, Settings, Sight, sights


class Attention(nn.Module):
    """Multi-head attention over the stream itself, or over the encoder's output (`cross`).

    Attributes:
        value_skip, attention_gain: the heads output value_skip * V + attention_gain * A V; plain numbers, or
            parameters of shape (1,). With a fixed gain of 0 queries and keys are not computed.
        shape: the matrix that A is at zero scores; None: a softmax of the scores alone.
        sight: which keys, and which rotations.
        keys_are_values: without a map of values.
        prefix: before the names of its maps.

    Raises:
        InputError: a cross-attention with a value skip.
    """

    prefix = ""

    def __init__(
        self,
        p: Parametrization,
        index: int,
        biases: dict[str, bool],
        dtype: torch.dtype,
        shape: TorchShape | None,
        *,
        cross: bool = False,
        keys_are_values: bool = False,
    ) -> None:
        super().__init__()
        a = p.architecture
        value_skip, gain = float(p.value_skip[index]), float(p.attention_gain[index])
        if cross and value_skip != 0:
            raise InputError(
                f"value_skip of sublayer {index} is {value_skip}; expected 0 in cross-attention, where a query has no "
                "value"
            )
        learned: Trainable = "scalar" if p.attention_trainable else "fixed"
        self.architecture, self.shape, self.cross, self.keys_are_values = a, shape, cross, keys_are_values
        self.score_scale = float(p.score_scale[index])
        self.sight = Sight() if cross else sights(a, p.layer).at(index)
        self.value_skip = trainable(value_skip, "fixed" if cross else learned, 1, dtype)
        self.attention_gain = trainable(gain, learned, 1, dtype)
        self._values_alone = is_fixed(self.attention_gain, 0.0) and not cross
        self._skips_values = not is_fixed(self.value_skip, 0.0)
        self.given = Settings() if cross else Settings.of(a)
        sink = self.given.sink
        self.sink = None if sink is None else nn.Parameter(torch.full((a.n_heads,), sink, dtype=dtype))
        self.attention_gate = None
        if self.given.gate != "none":
            self.attention_gate = Linear(*fan(a, "attention_gate"), bias=biases["attention_gate"], dtype=dtype)
        for role in (role.name for role in ROLES):
            if not (keys_are_values and role == "value"):
                linear = Linear(*fan(a, role), bias=biases[self.prefix + role], dtype=dtype)
                setattr(self, self.prefix + role, linear)

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        a = self.architecture
        source = stream
        if self.cross:
            assert around.memory is not None, "cross-attention needs the encoder's output"
            source = around.memory

        def heads(x: Tensor, n: int) -> Tensor:
            return x.view(*x.shape[:-1], n, a.d_head).transpose(1, 2)

        key = self._map("key")(source) if self.keys_are_values else None
        value = self._map("value")(source) if key is None else key
        v = heads(value, a.n_kv_heads)
        if self.given.value_norm:
            v = F.rms_norm(v, (a.d_head,), eps=a.norm_eps)
        if a.n_kv_heads != a.n_heads:
            v = v.repeat_interleave(a.n_heads // a.n_kv_heads, 1)
        if self._values_alone:
            mixed = times(self.value_skip, v)
        else:
            key = self._map("key")(source) if key is None else key
            q, k = heads(self._map("query")(stream), a.n_heads), heads(key, a.n_kv_heads)
            mixed = times(self.attention_gain, self._attended(q, k, v, around))
            if self._skips_values:
                mixed = mixed + times(self.value_skip, v)
        mixed = mixed.transpose(1, 2)
        if self.attention_gate is not None:
            opened = self.attention_gate(stream).sigmoid()
            mixed = mixed * opened.view(*mixed.shape[:2], a.n_heads, -1)
        out: Tensor = self._map("output")(mixed.flatten(-2))
        return out

    def _map(self, role: str) -> nn.Module:
        found: nn.Module = getattr(self, self.prefix + role)
        return found

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, around: Surroundings) -> Tensor:
        """A V, (batch, heads, queries, d_head)."""
        a = self.architecture
        if a.qk_norm == "whole":
            q, k = (x * torch.rsqrt(x.square().mean((1, 3), keepdim=True) + a.norm_eps) for x in (q, k))
        elif a.qk_norm:
            q, k = F.rms_norm(q, (a.d_head,), eps=a.norm_eps), F.rms_norm(k, (a.d_head,), eps=a.norm_eps)
        if self.sight.base and not self.cross:
            table = self._rotation(q, around)
            q, k = rotate(q, table), rotate(k, table)
        if a.n_kv_heads != a.n_heads:
            k = k.repeat_interleave(a.n_heads // a.n_kv_heads, 1)
        mask = around.memory_mask if self.cross else self._windowed(around, q.shape[2], q.device)
        dropout = (a.attention_dropout or 0.0) if self.training else 0.0
        if self.shape is not None:
            added = mask if mask is not None and mask.is_floating_point() else None
            return shaped_attention(
                self.shape, q, k, v, around.positions, added=added, dropout=dropout, scale=self.score_scale
            )
        if self.sink is not None or self.given.score_cap is not None:
            return self._by_hand(q, k, v, mask, causal=around.causal, dropout=dropout)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=around.causal and not self.cross and mask is None,
            scale=self.score_scale,
        )

    def _rotation(self, q: Tensor, around: Surroundings) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (tokens, rotated features)."""
        a = self.architecture
        if around.rotation is not None and self.sight.base == a.rotary_base:
            return around.rotation
        return rotation_table(a, q.shape[2], device=q.device, dtype=q.dtype, base=self.sight.base)

    def _by_hand(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, dropout: float) -> Tensor:
        """With a cap on the scores, and a sink among them."""
        scores = q @ k.transpose(-1, -2) * self.score_scale
        cap = self.given.score_cap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if mask is None and causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        if self.sink is not None:
            scores = torch.cat([scores, self.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = F.dropout(scores.softmax(-1), dropout)
        return weights[..., : k.shape[2]] @ v

    def _windowed(self, around: Surroundings, length: int, device: torch.device) -> Tensor | None:
        """The mask of the surroundings within the window; the causal part is in it."""
        reach = self.sight.window - 1 if around.causal else self.sight.window // 2
        if not self.sight.window or reach >= length - 1:
            return around.mask
        at = torch.arange(length, device=device)
        ahead = at[:, None] - at
        near = (ahead <= reach) & (ahead >= (0 if around.causal else -reach))
        if around.mask is None:
            return near
        if around.mask.is_floating_point():
            return around.mask.masked_fill(~near, float("-inf"))
        return around.mask & near


make = Attention
