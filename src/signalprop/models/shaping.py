"""Shaped attention in PyTorch: D softmax(scores + B) V around one `scaled_dot_product_attention`.

`torch_shape` turns the matrices of `signalprop.kernels.causal_shaping` into what a network needs of them, `Positions`
says where the tokens of a batch stand, `shaped_attention` puts the two together. B and D come from closed forms or from
tables that are made in float64, and neither is a buffer: nothing enters a state dict, nothing is lost on the meta
device. B has the type of the scores, D at least float32: an error of D repeats in every layer. He et al. 2023 (SPA),
section 3; numerics: `docs/papers/without-shortcuts.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from signalprop.kernels.bidirectional_shaping import ALiBi, BidirectionalUSPA
from signalprop.kernels.causal_shaping import ESPA, USPA, AttentionShape
from signalprop.models.shape_tables import CPU, NestedTables, Tables
from signalprop.models.token_positions import Positions
from signalprop.network.moments import FloatArray

# Stands for log 0. A finite number: with -inf a row that sees nothing would be NaN.
LOW = -1e30
# Queries at a time, on a CPU: beside a bias PyTorch's kernel also works through the keys that a causal row hides. Of
# blocks of 256 the fastest at 512 and 2,048 tokens; on a GPU they could leave it idle.
_BLOCK = 256


class TorchShape:
    """One sublayer's attention matrix at zero scores, as B and D for any positions. Holds plain numbers and tables.

    Attributes:
        causal: later keys are left out, also where `Positions.seen` is None.
    """

    causal: bool

    def bias(self, at: Positions, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
        """B, (b, 1 or heads, q, k) in `dtype`, up to a constant per row; a large negative number where nothing is seen.

        Args:
            added: another bias on the scores, broadcastable to (b, heads, q, k).
        """
        out = self._log_weights(at, _working(dtype))
        if added is not None:
            out = out + added
        if at.seen is not None:
            out = torch.where(at.seen, out, LOW)
        elif added is not None and self.causal:
            out = torch.where(_lag(at)[:, None] >= 0, out, LOW)
        return _as(out, dtype)

    def rescale(self, at: Positions, dtype: torch.dtype) -> Tensor | None:
        """D, (b, 1, q, 1) in float32 or, for float64, in that; None where it is 1."""
        return self._row_sums(at, _working(dtype))[:, None, :, None]

    def _log_weights(self, at: Positions, dtype: torch.dtype) -> Tensor:
        """log A, (b, 1 or heads, q, k), LOW for log 0; without `at.seen` also at later keys, where A is causal."""
        raise NotImplementedError

    def _row_sums(self, at: Positions, dtype: torch.dtype) -> Tensor:
        """D, (b, q)."""
        raise NotImplementedError


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast; LOW is beyond float16."""
    return (values.clamp(min=torch.finfo(dtype).min) if dtype == torch.float16 else values).to(dtype)


def _lag(at: Positions) -> Tensor:
    """Position of the query less that of the key, (b, q, k)."""
    return at.query[..., None] - at.key


def _log(value: float) -> float:
    """log, LOW for 0: torch.compile would make a graph of its own for an infinite number."""
    return math.log(value) if value > 0 else LOW


class TorchESPA(TorchShape):
    """`ESPA` from the distance of two tokens; repeats take one table, of D."""

    causal = True

    def __init__(self, shape: ESPA, length: int) -> None:
        self.numbers = Tables(partial(_exponential_numbers, shape), 1, torch.float32)
        self.repeating = shape.repeats > 0
        self.sums = NestedTables(partial(_row_sums, shape), length, torch.float32) if self.repeating else None

    def _numbers(self, at: Positions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.numbers.of(1, dtype, at.key.device)[0].unbind()

    def _log_weights(self, at: Positions, dtype: torch.dtype) -> Tensor:
        *numbers, repeats, log_zero, kappa = self._numbers(at, dtype)
        out = (_exponential_of_whole if at.whole else _exponential)(at, *numbers)
        if self.repeating:
            total = kappa - (kappa - 1) * torch.exp(log_zero * at.key)
            out = out + 0.5 * torch.log(1 + repeats * (total * total - 1))[:, None]
        return out

    def _row_sums(self, at: Positions, dtype: torch.dtype) -> Tensor:
        if self.sums is not None:
            return self.sums.of(at.n_keys, dtype, at.key.device)[0][at.query]
        top, log_pole, *_ = self._numbers(at, dtype)
        return top + (1 - top) * torch.exp(at.query * log_pole)


def _exponential_numbers(shape: ESPA, _: int) -> tuple[FloatArray, ...]:
    """(D of a token far from the first, ln pole, ln A on the diagonal, ln A one below it: first column, others; then
    of repeats: r, ln zero, kappa of `repeated_diagonal`)."""
    top = shape.diagonal * (1 - shape.zero) / (1 - shape.pole)
    first, later = (max(offset, LOW) for offset in shape.offsets)
    kappa = math.sqrt((1 + shape.zero) / (1 - shape.zero))
    return (
        np.array(
            [
                top,
                _log(shape.pole),
                math.log(shape.diagonal),
                first,
                later,
                shape.repeats,
                _log(shape.zero),
                kappa,
            ]
        ),
    )


def _exponential(at: Positions, _: Tensor, log_pole: Tensor, own: Tensor, first: Tensor, later: Tensor) -> Tensor:
    """log A of E-SPA without repeats."""
    start = at.key == 0
    before = (_lag(at) - 1).to(own.dtype)
    below = before * log_pole + torch.where(start, first, later)
    out = torch.where(before >= 0, below, torch.where(start, torch.zeros_like(own), own))
    return torch.where(before >= -1, out, LOW)[:, None]


def _exponential_of_whole(
    at: Positions, _: Tensor, log_pole: Tensor, own: Tensor, first: Tensor, later: Tensor
) -> Tensor:
    """The same for one sequence in order: row i holds what belongs to the distances from i down, but for column 0."""
    n, rows = at.n_keys, at.query.shape[1]
    lag = torch.arange(n - 1, -rows, -1, device=own.device, dtype=own.dtype)
    falling = (lag - 1) * log_pole
    by_lag = torch.where(lag > 0, later + falling, torch.where(lag == 0, own, LOW))
    out = by_lag.unfold(0, n, 1).flip(0)
    out[:, 0] = torch.where(lag > 0, first + falling, 0.0)[:rows].flip(0)
    return out[None, None]


def _row_sums(shape: AttentionShape, n: int) -> tuple[FloatArray, ...]:
    return (shape.rescale(n),)


class TorchUSPA(TorchShape):
    """`USPA` from its two vectors: their difference is taken in float64, its logarithm in the working type."""

    causal = True

    def __init__(self, shape: USPA, length: int) -> None:
        self.tables = NestedTables(partial(_uniform_terms, shape), length, torch.float64)

    def _log_weights(self, at: Positions, dtype: torch.dtype) -> Tensor:
        diagonal, u, w, _ = self.tables.of(at.n_keys, torch.float64, at.key.device)
        out = (u[at.key] - w[at.query][..., None]).to(dtype).clamp_(min=0).log_().clamp_(min=LOW)
        own = diagonal[at.query].log().to(dtype)
        if at.start is None:
            lag = _lag(at)
            return torch.where(lag > 0, out, torch.where(lag == 0, own[..., None], LOW))[:, None]
        out.diagonal(at.start, 1, 2).copy_(own)
        return out.masked_fill_(torch.ones_like(out[0], dtype=torch.bool).triu(at.start + 1), LOW)[:, None]

    def _row_sums(self, at: Positions, dtype: torch.dtype) -> Tensor:
        return self.tables.of(at.n_keys, torch.float64, at.key.device)[3][at.query].to(dtype)


def _uniform_terms(shape: USPA, n: int) -> tuple[FloatArray, ...]:
    return (*shape.terms(n), shape.rescale(n))


class TorchBidirectionalUSPA(TorchShape):
    """`BidirectionalUSPA`: two numbers of every row, from the number of tokens in its sequence."""

    causal = False

    def __init__(self, shape: BidirectionalUSPA) -> None:
        self.numbers = Tables(partial(_uniform_numbers, shape), 1, torch.float32)

    def _log_weights(self, at: Positions, dtype: torch.dtype) -> Tensor:
        single, _, _ = self._numbers(at, dtype)
        other = (self._row_sums(at, dtype) - single).clamp(min=0) / at.count
        own = (single + other).log()[..., None]
        return torch.where(_lag(at) == 0, own, other.log().clamp(min=LOW)[..., None])[:, None]

    def _row_sums(self, at: Positions, dtype: torch.dtype) -> Tensor:
        _, rho, rho_out = self._numbers(at, dtype)
        others = at.count - 1
        return torch.sqrt((1 + others * rho_out) / (1 + others * rho)).expand_as(at.query)

    def _numbers(self, at: Positions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.numbers.of(1, dtype, at.key.device)[0].unbind()


def _uniform_numbers(shape: BidirectionalUSPA, _: int) -> tuple[FloatArray, ...]:
    """(what A does to differences of tokens, rho, rho_out)."""
    single = math.sqrt((1 - shape.rho_out) / (1 - shape.rho))
    return (np.array([single, shape.rho, shape.rho_out]),)


class TorchBidirectionalTable(TorchShape):
    """Any shape that depends on the number of tokens: a matrix for every number that is met.

    Padded batches read the numbers off the mask, which waits for the device and breaks a compiled graph.
    """

    causal = False

    def __init__(self, shape: AttentionShape, length: int) -> None:
        self.tables = Tables(partial(_weights_and_sums, shape), length, torch.float32)

    def _log_weights(self, at: Positions, dtype: torch.dtype) -> Tensor:
        if at.whole:
            return self.tables.of(at.n_keys, dtype, at.key.device)[0][None, None]
        lengths, which = at.lengths
        made = [self.tables.of(n, dtype, at.key.device)[0] for n in lengths]
        n = len(made[-1])
        weights = torch.stack([F.pad(w, (0, n - len(w), 0, n - len(w)), value=LOW) for w in made])
        return weights[which[..., None], at.query[..., None], at.key][:, None]

    def _row_sums(self, at: Positions, dtype: torch.dtype) -> Tensor:
        if at.whole:
            return self.tables.of(at.n_keys, dtype, at.key.device)[1][None]
        lengths, which = at.lengths
        made = [self.tables.of(n, dtype, at.key.device)[1] for n in lengths]
        sums = torch.stack([F.pad(s, (0, len(made[-1]) - len(s))) for s in made])
        return sums[which, at.query]


def _weights_and_sums(shape: AttentionShape, n: int) -> tuple[FloatArray, ...]:
    return (np.maximum(shape.log_weights(n), LOW), shape.rescale(n))


class TorchALiBi(TorchShape):
    """`ALiBi` of all heads: a softmax, so D is 1."""

    causal = True

    def __init__(self, shapes: Sequence[ALiBi]) -> None:
        self.slopes = [-math.log(shape.decay) for shape in shapes]

    def _log_weights(self, at: Positions, dtype: torch.dtype) -> Tensor:
        lag = _lag(at).to(dtype)[:, None]
        slopes = torch.tensor(self.slopes, dtype=dtype, device=at.key.device)
        return torch.where(lag >= 0, -slopes[:, None, None] * lag, LOW)

    def rescale(self, at: Positions, dtype: torch.dtype) -> None:
        """A softmax has row sums of 1."""


def torch_shape(shapes: Sequence[AttentionShape], length: int) -> TorchShape | None:
    """What a network needs of a sublayer's attention matrices (`signalprop.kernels.stack.attention_shapes`).

    Args:
        shapes: none: ordinary attention; one for all heads; or ALiBi, one per head.
        length: tokens that tables are made for now; longer sequences make longer ones when they come.
    """
    if not shapes:
        return None
    if isinstance(shapes[0], ALiBi):
        return TorchALiBi([shape for shape in shapes if isinstance(shape, ALiBi)])
    (shape,) = shapes
    if isinstance(shape, ESPA):
        return TorchESPA(shape, length)
    if isinstance(shape, USPA):
        return TorchUSPA(shape, length)
    if isinstance(shape, BidirectionalUSPA):
        return TorchBidirectionalUSPA(shape)
    return TorchBidirectionalTable(shape, length)


def shaped_attention(
    shape: TorchShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Positions,
    *,
    added: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """D softmax(scale Q K^T + B + added) V, (b, heads, queries, d_head), of the type of `v`.

    Args:
        q: (b, heads, queries, d_head). k, v: (b, heads, keys, d_head). added: another bias on the scores.
        dropout: on attention weights, where it is active.
    """
    n = q.shape[2]
    in_blocks = n > _BLOCK and at.whole and shape.causal and added is None and q.device == CPU
    if in_blocks and not torch.compiler.is_compiling():
        return torch.cat(
            [
                _attended(shape, q[:, :, i:j], k[:, :, :j], v[:, :, :j], at.rows(i, j), None, dropout, scale)
                for i, j in ((i, min(i + _BLOCK, n)) for i in range(0, n, _BLOCK))
            ],
            2,
        )
    return _attended(shape, q, k, v, at, added, dropout, scale)


def _attended(
    shape: TorchShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Positions,
    added: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    bias = shape.bias(at, v.dtype, added)  # under autocast a normed query can still be float32
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    rows = shape.rescale(at, v.dtype)
    return out if rows is None else (out * rows).to(out.dtype)
