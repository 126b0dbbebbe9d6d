"""The residual sublayers of the reference transformer: norm, branch, multipliers.

A sublayer adds `multiplier * branch(...)` to `skip * stream`. The output of its child `branch` is the probe point
`branch` (after output dropout, and after a norm on the branch: a sandwich's second, a res-post's only one); its own
input and output are `stream_in` and `stream_out`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.kernels.stack import attention_shapes
from signalprop.models.activations import torch_activation
from signalprop.models.shaping import Positions, TorchShape, shaped_attention, torch_shape
from signalprop.models.weights import Linear, draw
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import (
    ATTENTION_ROLES,
    FEED_FORWARD_ROLES,
    PLACEMENTS,
    Distribution,
    Parametrization,
    Trainable,
    fan,
)

Multiplier = float | nn.Parameter


@dataclass(frozen=True)
class Surroundings:
    """What the sublayers of a stack read besides the stream.

    Attributes:
        causal: self-attention sees no later token.
        mask: True where self-attention may look, broadcastable to (batch, heads, queries, keys), or a float bias
            that is added to the scores; the causal part is in it. None: everywhere (that `causal` allows).
        rotation: cosines and sines of rotary positions, each (tokens, rotated features); None: no rotation.
        memory: the encoder's output, (batch, source tokens, features), that cross-attention reads.
        memory_mask: True at the memory's real tokens, (batch, 1, 1, source tokens); None: all.
        positions: where the tokens stand; shaped attention reads them, and of `mask` only what is added to scores.
    """

    causal: bool = False
    mask: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    positions: Positions | None = None


def make_norm(architecture: Architecture, gain: float, dtype: torch.dtype) -> nn.Module:
    """A LayerNorm or RMSNorm over the features with every gain at `gain` and zero bias."""
    a = architecture
    norm: nn.LayerNorm | nn.RMSNorm
    if a.norm == "rmsnorm":
        norm = nn.RMSNorm(a.d_model, eps=a.norm_eps, dtype=dtype)
    else:
        norm = nn.LayerNorm(a.d_model, eps=a.norm_eps, bias=a.norm_bias, dtype=dtype)
    nn.init.constant_(norm.weight, gain)
    return norm


def rotation_table(
    architecture: Architecture, length: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions 0..length-1, each (length, rotated features).

    Su et al. 2021, section 3.4.2, in the half-split order of Llama and GPT-NeoX: feature i turns with feature
    i + rotated / 2.
    """
    a = architecture
    rotated = int(a.d_head * a.rotary_fraction) // 2 * 2
    exponent = torch.arange(0, rotated, 2, device=device, dtype=torch.float32) / max(rotated, 1)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * a.rotary_base**-exponent
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first features of every head, x of shape (batch, heads, tokens, d_head)."""
    cos, sin = rotation
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def trainable(value: float, kind: Trainable, d_model: int, dtype: torch.dtype) -> Multiplier:
    """The number itself, or a parameter that starts at it: of shape (1,) or, per channel, (d_model,)."""
    if kind == "fixed":
        return value
    return nn.Parameter(torch.full((1 if kind == "scalar" else d_model,), value, dtype=dtype))


def is_fixed(multiplier: Multiplier, value: float) -> bool:
    """Whether a multiplier is, and stays, this number."""
    return not isinstance(multiplier, Tensor) and multiplier == value


def times(multiplier: Multiplier, x: Tensor) -> Tensor:
    """multiplier * x, and x itself where the multiplier is a fixed 1."""
    return x if is_fixed(multiplier, 1.0) else multiplier * x


class Attention(nn.Module):
    """Multi-head attention over the stream itself, or over the encoder's output (`cross`).

    Attributes:
        value_skip, attention_gain: the heads give out value_skip * V + attention_gain * A V; plain numbers, or
            parameters of shape (1,). With a fixed gain of 0 queries and keys are not computed.
        shape: the matrix that A is at zero scores; None: a softmax of the scores alone.
    """

    def __init__(
        self,
        architecture: Architecture,
        score_scale: float,
        biases: dict[str, bool],
        *,
        cross: bool,
        dtype: torch.dtype,
        value_skip: Multiplier = 0.0,
        attention_gain: Multiplier = 1.0,
        shape: TorchShape | None = None,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.shape = shape
        self.score_scale = score_scale
        self.cross = cross
        self.value_skip = value_skip
        self.attention_gain = attention_gain
        self.query, self.key, self.value, self.output = (
            Linear(*fan(architecture, role), bias=biases[role], dtype=dtype) for role in ATTENTION_ROLES
        )

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        a = self.architecture
        source = stream
        if self.cross:
            assert around.memory is not None, "cross-attention needs the encoder's output"
            source = around.memory

        def heads(x: Tensor, n: int) -> Tensor:
            return x.view(*x.shape[:-1], n, a.d_head).transpose(1, 2)

        v = heads(self.value(source), a.n_kv_heads)
        if a.n_kv_heads != a.n_heads:
            v = v.repeat_interleave(a.n_heads // a.n_kv_heads, 1)
        if is_fixed(self.attention_gain, 0.0) and not self.cross:
            mixed = times(self.value_skip, v)
        else:
            q, k = heads(self.query(stream), a.n_heads), heads(self.key(source), a.n_kv_heads)
            mixed = times(self.attention_gain, self._attended(q, k, v, around))
            if not is_fixed(self.value_skip, 0.0):
                mixed = mixed + times(self.value_skip, v)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return out

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, around: Surroundings) -> Tensor:
        """A V, (batch, heads, queries, d_head)."""
        a = self.architecture
        if a.qk_norm == "whole":
            q, k = (x * torch.rsqrt(x.square().mean((1, 3), keepdim=True) + a.norm_eps) for x in (q, k))
        elif a.qk_norm:
            q, k = F.rms_norm(q, (a.d_head,), eps=a.norm_eps), F.rms_norm(k, (a.d_head,), eps=a.norm_eps)
        if around.rotation is not None and not self.cross:
            q, k = rotate(q, around.rotation), rotate(k, around.rotation)
        if a.n_kv_heads != a.n_heads:
            k = k.repeat_interleave(a.n_heads // a.n_kv_heads, 1)
        mask = around.memory_mask if self.cross else around.mask
        dropout = (a.attention_dropout or 0.0) if self.training else 0.0
        if self.shape is not None:
            at = around.positions or Positions.of_length(q.shape[2], q.device)
            added = mask if mask is not None and mask.is_floating_point() else None
            return shaped_attention(self.shape, q, k, v, at, added=added, dropout=dropout, scale=self.score_scale)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=around.causal and not self.cross and mask is None,
            scale=self.score_scale,
        )


class FeedForward(nn.Module):
    """down(f(up x)), or gated: down(f(gate x) * up x)."""

    def __init__(self, architecture: Architecture, biases: dict[str, bool], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = torch_activation(architecture.activation)
        self.gate = Linear(*fan(architecture, "gate"), bias=biases["gate"], dtype=dtype) if architecture.gated else None
        self.up, self.down = (
            Linear(*fan(architecture, role), bias=biases[role], dtype=dtype) for role in ("up", "down")
        )

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape; the tokens do not meet."""
        hidden = self.up(stream)
        hidden = self.activation(hidden) if self.gate is None else self.activation(self.gate(stream)) * hidden
        out: Tensor = self.down(hidden)
        return out


class Branch(nn.Module):
    """What a sublayer adds, before its multiplier: a function, output dropout, and a norm on the branch.

    Attributes:
        norm: the second norm of a sandwich, the only norm of a res-post sublayer, else None.
    """

    def __init__(self, function: nn.Module, dropout: float, norm: nn.Module | None) -> None:
        super().__init__()
        self.function = function
        self.dropout = nn.Dropout(dropout)
        self.norm = norm

    def forward(self, stream: Tensor, around: Surroundings, norm_scale: float = 1.0) -> Tensor:
        """(batch, tokens, features) -> the same shape; `norm_scale` multiplies the norm's output."""
        out: Tensor = self.dropout(self.function(stream, around))
        return out if self.norm is None else times(norm_scale, self.norm(out))


class Sublayer(nn.Module):
    """One residual sublayer.

    Attributes:
        norm: reads the stream (pre, sandwich), makes it (post), or None (none, and res-post: `branch.norm`).
        norm_scale: fixed factor on the output of the norm that the placement names.
        branch: the function; see `Branch`.
        skip, multiplier: lambda and beta; plain numbers, or, where trainable, parameters of shape (1,) or (d_model,).
        parallel: adds onto the output of the sublayer before it, while reading that sublayer's input.
    """

    def __init__(
        self,
        branch: Branch,
        norm: nn.Module | None,
        *,
        placement: str,
        skip: Multiplier,
        multiplier: Multiplier,
        parallel: bool,
        norm_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.norm_scale = norm_scale
        self.branch = branch
        self.placement = placement
        self.skip = skip
        self.multiplier = multiplier
        self.parallel = parallel

    def parts(self, stream: Tensor, around: Surroundings, onto: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(branch, stream_out), each (batch, tokens, features); arguments as in `forward`."""
        reads = stream
        if self.norm is not None and self.placement != "post":
            reads = times(self.norm_scale, self.norm(stream))
        branch = self.branch(reads, around, self.norm_scale if self.placement == "res-post" else 1.0)
        if onto is None:
            onto = times(self.skip, stream)
        out = onto + times(self.multiplier, branch)
        if self.norm is not None and self.placement == "post":
            out = times(self.norm_scale, self.norm(out))
        return branch, out

    def forward(self, stream: Tensor, around: Surroundings, onto: Tensor | None = None) -> Tensor:
        """One step of the residual stream.

        Args:
            stream: what the branch reads, (batch, tokens, features).
            onto: what a parallel sublayer adds to (with the skip already in it); default: skip * stream.
        """
        return self.parts(stream, around, onto)[1]

    def extra_repr(self) -> str:
        skip, multiplier = (
            "trainable" if isinstance(value, nn.Parameter) else f"{value:.6g}" for value in (self.skip, self.multiplier)
        )
        scale = "" if self.norm_scale == 1 else f", norm_scale={self.norm_scale:.6g}"
        return f"{self.placement}, skip={skip}, multiplier={multiplier}, parallel={self.parallel}{scale}"


def torch_shapes(parametrization: Parametrization) -> list[TorchShape | None]:
    """How every sublayer's attention is shaped; None where a softmax of the scores does.

    Raises:
        InputError: as `signalprop.kernels.stack.attention_shapes`.
    """
    a = parametrization.architecture
    length = max(a.seq_len, a.target_len or 0)
    return [torch_shape(shapes, length) for shapes in attention_shapes(parametrization, length)]


def make_sublayer(
    parametrization: Parametrization,
    index: int,
    seed: int,
    dtype: torch.dtype,
    shape: TorchShape | None,
) -> Sublayer:
    """Sublayer `index` of the network that a parametrization and a seed describe, by itself.

    Args:
        shape: of `torch_shapes`, which makes those of all sublayers at once: calibration passes through the stack.
    """
    p, a = parametrization, parametrization.architecture
    kind = p.kind_name(index)
    attention = kind != "feed_forward"
    roles = ATTENTION_ROLES if attention else FEED_FORWARD_ROLES
    has_bias = {
        role: bool((a.qkv_bias if role in ("query", "key", "value") else a.bias) or p.biases[role][index] > 0)
        for role in roles
    }
    function: nn.Module
    if attention:
        cross = kind == "cross_attention"
        value_skip, gain = float(p.value_skip[index]), float(p.attention_gain[index])
        if cross and value_skip != 0:
            raise InputError(
                f"value_skip of sublayer {index} is {value_skip}; expected 0 in cross-attention, where a query has no "
                "value of its own"
            )
        learned: Trainable = "scalar" if p.attention_trainable else "fixed"
        function = Attention(
            a,
            float(p.score_scale[index]),
            has_bias,
            cross=cross,
            dtype=dtype,
            value_skip=trainable(value_skip, "fixed" if cross else learned, 1, dtype),
            attention_gain=trainable(gain, learned, 1, dtype),
            shape=shape,
        )
    else:
        function = FeedForward(a, has_bias, dtype=dtype)
    for role in roles:
        linear = getattr(function, role)
        if linear is None:
            continue
        made: tuple[Distribution, int, str] = (p.distribution[role], seed, str(index))
        draw(linear.weight, float(p.weights[role][index]), *made, role)
        if linear.bias is not None:
            draw(linear.bias, float(p.biases[role][index]), *made, f"{role} bias")
    placement = PLACEMENTS[p.placement[index]]
    first = None if placement == "none" else make_norm(a, float(p.norm_gain[index]), dtype)
    second = make_norm(a, float(p.post_norm_gain[index]), dtype) if placement == "sandwich" else None
    if placement == "res-post":
        first, second = None, first
    parallel = bool(p.parallel[index])
    return Sublayer(
        Branch(function, a.dropout, second),
        first,
        placement=placement,
        # a parallel sublayer's skip is that of the one before it; a parameter would never be read
        skip=trainable(float(p.skip[index]), "fixed" if parallel else p.skip_trainable, a.d_model, dtype),
        multiplier=trainable(float(p.branch[index]), p.branch_trainable, a.d_model, dtype),
        parallel=parallel,
        norm_scale=float(p.norm_scale[index]),
    )
