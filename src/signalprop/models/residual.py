"""The residual sublayers of the reference transformer: norm, branch, multipliers.

A sublayer adds `multiplier * branch(...)` to `skip * stream`. The output of its child `branch` is the probe point
`branch` (after output dropout, and after a norm on the branch: a sandwich's second, a res-post's only one); its
input and output are `stream_in` and `stream_out`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from signalprop.models.activations import TORCH_FUNCTIONS
from signalprop.models.multipliers import Multiplier, times
from signalprop.models.surroundings import Surroundings
from signalprop.network.architecture import Architecture
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE


class Squash(nn.Module):
    """DyT and Derf: weight * f(alpha x) + bias, f tanh or erf.

    Attributes:
        weight, bias: (features,). alpha: (1,), trainable too.
    """

    def __init__(self, a: Architecture, slope: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = TORCH_FUNCTIONS[a.squash]
        self.alpha = nn.Parameter(torch.full((1,), slope, dtype=dtype))
        self.weight = nn.Parameter(torch.ones(a.d_model, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(a.d_model, dtype=dtype)) if a.norm_bias else None

    def forward(self, stream: Tensor) -> Tensor:
        """(..., features) -> the same shape."""
        out = self.weight * self.function(self.alpha * stream)
        return out if self.bias is None else out + self.bias


def make_norm(architecture: Architecture, gain: float, dtype: torch.dtype, slope: float = 0.5) -> nn.Module:
    """A LayerNorm or RMSNorm over the features, or what stands in for one, with every gain at `gain` and zero bias."""
    a = architecture
    norm: nn.LayerNorm | nn.RMSNorm | Squash
    if a.squash:
        norm = Squash(a, slope, dtype)
    elif a.norm == "rmsnorm":
        norm = nn.RMSNorm(a.d_model, eps=a.norm_eps, dtype=dtype)
    else:
        norm = nn.LayerNorm(a.d_model, eps=a.norm_eps, bias=a.norm_bias, dtype=dtype)
    nn.init.constant_(norm.weight, gain)
    return norm


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
        branch = self.branch_of(stream, around)
        total = (times(self.skip, stream) if onto is None else onto) + times(self.multiplier, branch)
        return branch, self._normed(total) if self.placement in NORM_AFTER else total

    def branch_of(self, read: Tensor, around: Surroundings) -> Tensor:
        """The branch's output, (batch, tokens, features), of what it reads, after the norm before it."""
        read = self._normed(read) if self.placement in NORM_BEFORE else read
        out: Tensor = self.branch(read, around, self.norm_scale if self.placement == "res-post" else 1.0)
        return out

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else times(self.norm_scale, self.norm(x))

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
