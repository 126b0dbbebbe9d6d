"""Mean, variance and token correlation of a tensor in two passes: O(batch * tokens * features) work, no T x T matrix.

With S_b the sum over tokens of sequence b (a vector of features), the sum over pairs of different tokens is
|S_b|^2 minus the sum of squares, so two sums over the tensor give all three moments. `exact` subtracts a pivot
and sums in float64. On the CPU `moments` first tries float32, and falls back to `exact` where that would lose
digits (mean^2 above 4 times the variance) or range (squares near the ends of float32). Measured on random
tensors up to 8 x 2048 x 1024, float32 is within 2e-7 of the variance (relative) and 1e-7 of the correlation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from signalprop.moments import FloatArray

_CHUNK = 1 << 24  # entries that `exact` converts at a time
_SMALLEST, _LARGEST = 1e-24, 1e30  # mean squares between which float32 sums keep their range

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Padding:
    """Which tokens count: `keep` (batch, tokens), how many per sequence, where the first is; and the sums of the
    counts and of their squares."""

    keep: Tensor
    counts: Tensor
    first: int
    count: float
    count2: float

    @staticmethod
    def of(mask: Tensor) -> Padding | None:
        """The padding that a mask describes (nonzero: a real token), or None where every token is real."""
        keep = mask != 0
        if bool(keep.all()):
            return None
        counts = keep.sum(1)
        numbers = counts.double().cpu().numpy() if mask.device.type != "mps" else counts.cpu().numpy()
        first = int(keep.flatten().to(torch.uint8).argmax())
        return Padding(keep, counts, first, float(numbers.sum()), float((numbers * numbers).sum()))

    def to(self, device: torch.device) -> Padding:
        """The same on another device."""
        return Padding(self.keep.to(device), self.counts.to(device), self.first, self.count, self.count2)


@dataclass(frozen=True)
class Sums:
    """Sums that are still on their device, with what it takes to make moments of them.

    Attributes:
        values: pivot, sum of squares, sum over sequences of |S_b|^2, sum of all, sum over sequences of n_b times
            its sum; all of entries minus the pivot.
        count, count2: sum over sequences of the number n_b of real tokens, and of its square. features: width.
    """

    values: Tensor
    count: float
    count2: float
    features: int


def moments(x: Tensor, padding: Padding | None = None) -> Triple | Sums:
    """The moments of a tensor (batch, tokens, features), real tokens only, or the sums that `collect` makes them of.

    (mean, variance, token correlation) on the CPU; elsewhere Sums, which stay on the device so that nothing waits.
    The correlation averages over all pairs of different real tokens of one sequence, and is 0 where there is no
    pair or no variance, as in `signalprop.inputs.tensor_moments`. Not finite where an entry is not.
    """
    if x.device.type != "cpu":
        return exact(x, padding)
    found = None if x.dtype == torch.float64 else _single(x, padding)
    if found is not None:
        return found
    mean, variance, correlation = collect([exact(x, padding)])[0].tolist()
    return mean, variance, correlation


def collect(results: Sequence[Triple | Sums]) -> FloatArray:
    """(n, 3): mean, variance and token correlation of every result. Sums move to the host together."""
    out = np.empty((len(results), 3))
    pending = [(i, item) for i, item in enumerate(results) if isinstance(item, Sums)]
    if pending:
        device = pending[0][1].values.device
        values = torch.stack([item.values.to(device) for _, item in pending]).cpu().double().numpy()
        for (i, sums), row in zip(pending, values, strict=True):
            out[i] = _finish(row.tolist(), sums.count, sums.count2, sums.features)
    for i, result in enumerate(results):
        if not isinstance(result, Sums):
            out[i] = result
    return out


def _finish(values: Sequence[float], count: float, count2: float, features: int) -> Triple:
    pivot, squares, norms, total, weighted = values
    entries, pairs = count * features, (count2 - count) * features
    shift = total / entries
    mean, variance = pivot + shift, squares / entries - shift * shift
    if variance <= 0:  # by rounding; NaN passes
        return mean, 0.0, 0.0
    if pairs == 0:
        return mean, variance, 0.0
    together = norms - 2 * shift * weighted + shift * shift * count2 * features
    correlation = (together - variance * entries) / pairs / variance
    return mean, variance, min(1.0, max(-1.0, correlation))


def _single(x: Tensor, padding: Padding | None) -> Triple | None:
    """The moments in float32, or None where that would lose digits or range."""
    batch, tokens, features = x.shape
    if x.dtype != torch.float32:
        x = x.float()
    if padding is not None:
        x = torch.where(padding.keep[:, :, None], x, 0.0)
    # a norm per token: one float32 sum over all entries would drift (4e-4 at 16 million)
    lengths = torch.linalg.vector_norm(x, dim=-1).double().reshape(-1)
    squares = torch.dot(lengths, lengths).item()
    sums = x.sum(1).double()
    flat_sums = sums.reshape(-1)
    if padding is None:
        total = flat_sums.sum().item()
        weighted, count, count2 = tokens * total, float(batch * tokens), float(batch * tokens * tokens)
    else:
        per_sequence = sums.sum(1)
        total, weighted = per_sequence.sum().item(), torch.dot(per_sequence, padding.counts.double()).item()
        count, count2 = padding.count, padding.count2
    second, mean = squares / (count * features), total / (count * features)
    if not (_SMALLEST < second < _LARGEST and second > 1.25 * mean * mean):
        return None
    norms = torch.dot(flat_sums, flat_sums).item()
    return _finish((0.0, squares, norms, total, weighted), count, count2, features)


def exact(x: Tensor, padding: Padding | None = None) -> Sums:
    """The sums in float64 (float32 on a device that has no other), shifted by the first real entry."""
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    batch, tokens, features = x.shape
    sequence, token = divmod(0 if padding is None else padding.first, tokens)
    pivot = x[sequence, token, 0].to(dtype)  # an entry, so that a constant has variance exactly 0
    counts = None if padding is None else padding.counts.to(dtype)
    rows = max(1, _CHUNK // max(1, tokens * features))
    parts = []
    for start in range(0, batch, rows):
        part = x[start : start + rows].to(dtype) - pivot
        if padding is not None:
            part = torch.where(padding.keep[start : start + rows, :, None], part, 0.0)
        flat, sums = part.reshape(-1), part.sum(1)
        flat_sums = sums.reshape(-1)
        per_sequence = sums.sum(1)
        total = per_sequence.sum()
        weighted = tokens * total if counts is None else torch.dot(per_sequence, counts[start : start + rows])
        parts.append(torch.stack([torch.dot(flat, flat), torch.dot(flat_sums, flat_sums), total, weighted]))
    values = torch.cat([pivot[None], parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)])
    count = float(batch * tokens) if padding is None else padding.count
    count2 = float(batch * tokens * tokens) if padding is None else padding.count2
    return Sums(values, count, count2, features)
