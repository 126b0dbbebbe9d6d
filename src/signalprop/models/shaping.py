"""Shaped attention in PyTorch: D softmax(scores + B) V around one `scaled_dot_product_attention`.

B = log A and D = A 1 are tables of `signalprop.kernels.causal_shaping`, computed in float64 stored in every type and
every device that asks for them. They are not buffers: nothing enters a state dict, nothing is lost on the meta device.
B has the type of the scores, D at least float32: an error of D repeats in every layer. He et al. 2023 (SPA), section 3;
numerics: `docs/papers/without-shortcuts.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from signalprop.kernels.causal_shaping import AttentionShape

# Stands for log 0. A finite number: with -inf a row that sees nothing would be NaN.
LOW = -1e30
# Queries at a time, on a CPU: beside a bias PyTorch's kernel also works through the keys that a causal row hides. Of
# blocks of 256 the fastest at 512 and 2,048 tokens; on a GPU they could leave it idle.
_BLOCK = 256
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Positions:
    """Where the tokens of padded sequences stand.

    Attributes:
        place: of every token among the real ones of its sequence, (b, n). seen: True where a query may look,
            (b, 1, n, n).
    """

    place: Tensor
    seen: Tensor

    @staticmethod
    def of(keep: Tensor) -> Positions:
        """Of sequences with padding anywhere: `keep` is True at real tokens, (b, n). A padding token sees itself."""
        seen = keep[:, None, None, :] | torch.eye(keep.shape[1], dtype=torch.bool, device=keep.device)
        place = (keep.cumsum(1) - 1).clamp_(min=0)
        return Positions(place, seen.tril())


class TorchShape:
    """One sublayer's attention matrices at zero scores, as tables of B and D.

    Args:
        shapes: one for all heads, or one per head.
        length: tokens of the tables so far; longer sequences extend them when they come.
    """

    def __init__(self, shapes: Sequence[AttentionShape], length: int) -> None:
        self.shapes = tuple(shapes)
        self.length = length
        self._made: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        self._make(length, torch.float32)

    def tables(self, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """B, (heads or 1, n, n), up to a constant per row and `LOW` for log 0; D, (n,). Perhaps of more tokens, whose
        first rows and columns these are."""
        if n > self.length:
            self.length = max(n, self.length + self.length // 4)
        n = self.length
        if (n, dtype, device) not in self._made:
            if (n, dtype, _CPU) not in self._made:
                # NumPy stays out of graphs. As a decorator `disable` imports the compiler, 1 s, for everybody.
                disable: Any = torch.compiler.disable
                (disable(self._make) if torch.compiler.is_compiling() else self._make)(n, dtype)
            bias, rows = self._made[n, dtype, _CPU]
            self._made[n, dtype, device] = bias.to(device), rows.to(device)
        return self._made[n, dtype, device]

    def _make(self, n: int, dtype: torch.dtype) -> None:
        bias = np.stack([np.maximum(shape.log_weights(n), LOW) for shape in self.shapes])
        rows = np.array(self.shapes[0].rescale(n))
        self._made[n, dtype, _CPU] = torch.from_numpy(bias).to(dtype), torch.from_numpy(rows).to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": {key: made for key, made in self._made.items() if key[2] == _CPU}}

    def at(self, n: int, positions: Positions | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """B, (b or 1, heads or 1, n, n), and D, (b or 1, 1, n, 1), where `like` is; float64 as it is, else float32."""
        dtype, device = torch.float64 if like.dtype == torch.float64 else torch.float32, like.device
        bias, rows = self.tables(n, dtype, device)
        if positions is None:
            return bias[None, :, :n, :n], rows[None, None, :n, None]
        place = positions.place
        at = bias[:, place[..., None], place[:, None]].transpose(0, 1)
        return torch.where(positions.seen, at, LOW), rows[place][:, None, :, None]


def torch_shape(shapes: Sequence[AttentionShape], length: int) -> TorchShape | None:
    """What a network needs of a sublayer's attention matrices (`signalprop.kernels.stack.attention_shapes`).

    Args:
        shapes: none: ordinary attention. length: as for `TorchShape`.
    """
    return TorchShape(shapes, length) if shapes else None


def shaped_attention(
    shape: TorchShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions | None = None,
    *,
    added: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """D softmax(scale Q K^T + B + added) V, (b, heads, n, d_head), of the type of `v`.

    Args:
        q, k, v: (b, heads, n, d_head). positions: of padded sequences; None: whole ones. added: another bias on the
            scores, broadcastable to (b, heads, n, n). dropout: on attention weights, where it is active.
    """
    n = q.shape[2]
    bias, rows = shape.at(n, positions, v)  # under autocast a normed query can still be float32
    if added is not None:
        bias = torch.where(bias <= LOW, LOW, bias + added)
    if v.dtype == torch.float16:
        bias = bias.clamp(min=torch.finfo(v.dtype).min)  # which LOW is beyond
    bias = bias.to(v.dtype)
    blocks = [(0, n, n)]
    if n > _BLOCK and positions is None and v.device == _CPU and not torch.compiler.is_compiling():
        blocks = [(i, end := min(i + _BLOCK, n), end) for i in range(0, n, _BLOCK)]
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, i:j], k[:, :, :m], v[:, :, :m], attn_mask=bias[..., i:j, :m], dropout_p=dropout, scale=scale
        )
        for i, j, m in blocks
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return (out * rows).to(out.dtype)
