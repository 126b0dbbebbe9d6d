"""Token kernels on a grid of positions: for causal stacks whose positions differ by where they stand alone.

Without real ids a kernel is smooth in the positions, with kinks and a step where both are equal. It is stored at a few
positions, the first ones all and later ones by ever larger steps, as linear in ln n in between; sums over keys and
queries become exact integrals of that. Derivation and measured errors: `docs/theory/kernels.md`.

A kernel on a grid of m positions has 2 m rows: two tokens at every position, so that the diagonal (a token with itself)
and its limit (two tokens at one place) stand in one matrix, and whatever acts entry by entry need not know of the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.softmax_rows import turns
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import Kind, kinds_in
from signalprop.network.layout import PLACEMENTS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.products import pairs, product, transposed
from signalprop.theory.signals import Signal, linear

_DENSE = 7  # first positions that are all nodes
_STEP = 0.09  # between later ones in ln n, at most
_COARSE = 21  # later ones for rankings
_SHORT = 200  # tokens up to which every position is followed


class Grid:
    """Positions of a sequence, hat functions phi of ln n between them (n = position + 1), and exact sums of these.

    Attributes:
        tokens: T. positions: of the m nodes, from 0 to T - 1. n: keys that they see.
        visible: W, the sum of phi_b over positions up to node a; its last row weighs an average over all positions.
    """

    def __init__(self, tokens: int, positions: NDArray[np.int64]) -> None:
        self.tokens, self.positions = tokens, positions
        self.n: FloatArray = np.asarray(positions + 1.0, dtype=np.float64)
        i = np.arange(1, tokens + 1, dtype=np.float64)
        self._upper = np.clip(np.searchsorted(positions, np.arange(tokens)), 1, max(len(positions) - 1, 1))
        self._share = np.ones(1)
        if len(positions) > 1:
            low, high = self.n[self._upper - 1], self.n[self._upper]
            self._share = np.log(i / low) / np.log(high / low)  # phi of the upper node
        self.visible: FloatArray = np.cumsum(self._steps(np.ones(tokens)), axis=0)
        self.by_power = [self._later(i**-power) for power in (1.0, 2.0, 3.0)]
        self.by_pairs = self._later(np.divide(1.0, i * (i - 1), out=np.zeros(tokens), where=i > 1))

    @cached_property
    def weights(self) -> FloatArray:
        """How many positions every node stands for."""
        return np.asarray(self.visible[-1])

    @cached_property
    def sees(self) -> NDArray[np.bool_]:
        """Which nodes (columns) a node sees."""
        return np.tri(len(self.n), dtype=bool)

    @cached_property
    def shorter(self) -> NDArray[np.intp]:
        """The first one of every two nodes, (m, m)."""
        nodes = np.arange(len(self.n))
        return np.minimum.outer(nodes, nodes)

    @cached_property
    def longer(self) -> NDArray[np.intp]:
        """The last one of every two nodes, (m, m)."""
        return np.maximum.outer(np.arange(len(self.n)), np.arange(len(self.n)))

    @cached_property
    def lengths(self) -> FloatArray:
        """Products of the numbers of keys that two nodes see."""
        return np.multiply.outer(self.n, self.n)

    @cached_property
    def mean_overlap(self) -> FloatArray:
        """Shared keys of two nodes over those products."""
        return 1 / np.maximum.outer(self.n, self.n)

    def _halves(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Sums of values times phi over the positions after one node, up to the next: of the lower, the upper phi."""
        starts = self.positions[:-1] + 1
        low, high = values * (1 - self._share), values * self._share
        if len(starts) == 0:
            return values[:0], values[:0]
        return np.add.reduceat(low, starts), np.add.reduceat(high, starts)

    def _steps(self, values: FloatArray) -> FloatArray:
        """Row a: sums of values times phi_b over the positions after node a - 1, up to node a; (m, m)."""
        m = len(self.n)
        out = np.zeros((m, m))
        low, high = self._halves(values)
        later = np.arange(1, m)
        out[later, later - 1], out[later, later] = low, high
        out[0, 0] = values[0]
        return out

    def _later(self, values: FloatArray) -> FloatArray:
        """U: sums of values times phi_b over positions from node a on."""
        out = np.diag(values[self.positions])
        out[:-1] += np.flip(np.cumsum(np.flip(self._steps(values)[1:], 0), 0), 0)
        return out

    def _weighted(self, values: FloatArray) -> FloatArray:
        """Sums of values times phi over all positions, (m,)."""
        low, high = self._halves(values)
        out = np.zeros(len(self.n))
        out[:-1] += low
        out[1:] += high
        out[0] += values[0]
        return out

    @lru_cache(maxsize=8)  # noqa: B019
    def rotated(self, d_head: int, base: float, fraction: float) -> FloatArray:
        """Mean cosine of rotary angles between two different positions, over those that two nodes stand for, (m, m)."""
        turned = turns(self.tokens, d_head, base, fraction)
        waves = np.array([self._weighted(part) for turn in turned for part in (turn.real, turn.imag)])
        total = product(waves.T, waves) * (2 / len(waves)) if len(waves) else np.zeros_like(self.visible)
        share = len(waves) / d_head
        per_token = self._equal
        pairs = np.multiply.outer(self.weights, self.weights) - per_token
        mean = np.divide(total - per_token, pairs, out=np.ones_like(total), where=pairs > 1e-6)
        return np.asarray(1 - share + share * mean)

    @lru_cache(maxsize=64)  # noqa: B019
    def moved(self, by: int) -> FloatArray:
        """The matrix from values at the nodes to those so many positions later, or earlier (below 0), (m, m).

        There is nothing before the first position; after the last it is as at the last.
        """
        at, rows = self.positions + by, np.arange(len(self.n))
        there = np.clip(at, 0, self.tokens - 1)
        out = np.zeros((len(rows), len(rows)))
        out[rows, self._upper[there] - 1] = 1 - self._share[there]
        out[rows, self._upper[there]] = self._share[there]
        out[at < 0] = 0.0
        return out

    @cached_property
    def _equal(self) -> FloatArray:
        """sum over i of phi_a(i) phi_b(i)."""
        m = len(self.n)
        out = np.zeros((m, m))
        lower, crossed = self._halves(1 - self._share)
        _, upper = self._halves(self._share)
        later = np.arange(1, m)
        out[later - 1, later - 1] += lower
        out[later, later] += upper
        out[later, later - 1] = out[later - 1, later] = crossed
        out[0, 0] += 1.0
        return out

    def split(self, kernel: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(what two tokens share, with its limit on the diagonal; what a token is by itself), (m, m) and (m,)."""
        m = len(self.n)
        return kernel[..., :m, m:], kernel.diagonal(0, -2, -1)[..., :m]

    def joined(self, off: FloatArray, per_token: FloatArray) -> FloatArray:
        """The kernel of both, (2 m, 2 m)."""
        *lead, m = per_token.shape
        out = np.empty((*lead, 2 * m, 2 * m))
        out.reshape(*lead, 2, m, 2, m)[:] = off[..., None, :, None, :]
        out.reshape(*lead, -1)[..., :: 2 * m + 1].reshape(*lead, 2, m)[:] = per_token[..., None, :]
        return out

    def sums(self, kernel: FloatArray) -> tuple[Any, Any]:
        """(trace, sum over pairs of different positions) of the kernel of all positions."""
        (off, per_token), w = self.split(kernel), self.weights
        return per_token @ w, off @ w @ w - off.diagonal(0, -2, -1) @ w

    def total(self, off: FloatArray, per_token: FloatArray) -> float:
        """Sum over all pairs of positions, each with itself included, of a kernel as `split` gives it."""
        w = self.weights
        return float(w @ off @ w - w @ off.diagonal() + w @ per_token)


class EqualTokens(Grid):
    """So many tokens of which none is set apart, as an encoder reads averages: one node stands for all of them.

    Every token sees every other. What a causal stack sums by the matrices of a grid, with these sums over all tokens.
    """

    def __init__(self, tokens: int) -> None:
        one, n = np.ones((1, 1)), float(tokens)
        self.tokens, self.positions, self.n = tokens, np.zeros(1, np.int64), np.full(1, n)
        self.visible = n * one
        self.by_power = [one, one / n, one / n**2]
        self.by_pairs = one / (n - 1) if tokens > 1 else 0 * one


class Averages(EqualTokens):
    """One node that stands for all tokens of any stack, by the formulas of pairs, as fidelity `moments` has them."""


@lru_cache(maxsize=4)
def grid_of(tokens: int, later: int | None = None) -> Grid:
    """The grid of a sequence: the first _DENSE positions, and by equal ratios so many `later`, or as many as keep them
    within _STEP."""
    dense = min(_DENSE, tokens)
    steps = math.ceil(math.log(tokens / dense) / _STEP) if later is None else later
    spaced = np.round(np.geomspace(dense, tokens, steps + 1)) - 1
    return Grid(tokens, np.array(sorted({*range(dense), *spaced.tolist()}), np.int64))


def grid_for(p: Parametrization, inputs: InputStatistics, coarse: bool = False) -> Grid | None:
    """The grid on which a prediction is right to 0.5 %; None where every position has to be followed.

    That is where sequences are short, real ids or patches enter position by position, attention is shaped, a branch
    has no norm, or a kind of sublayer is drawn or has a window. Of an encoder-decoder it is the decoder's; the
    encoder's tokens are `EqualTokens`.

    Args:
        coarse: of 28 nodes, for sequences from 56 tokens on, also without norms. At 128 tokens (gpt2 of 48 layers,
            every scheme) gradients below 1e6 were within .9 %, streams within .06 % of all positions.
    """
    a = p.architecture
    usual = p.shaping.kind == "none" and a.positions != "alibi" and not (p.value_skip != 0).any()
    normed = not (p.placement == PLACEMENTS.index("none")).any()
    tokens, known = a.seq_len, _is_known(inputs, a.seq_len)
    if a.kind == "encoder-decoder":
        tokens = a.target_len or a.seq_len
        known = known or a.positions == "rotary" or _is_known(inputs.of_decoder, tokens)
    shortest = 2 * (_DENSE + _COARSE) if coarse else _SHORT
    covered = a.kind != "encoder" and usual and (normed or coarse) and not known and max(tokens, a.seq_len) > shortest
    followed = covered and all(kind.closed and _is_smooth(kind, p) for kind in kinds_in(p))
    return (grid_of(tokens, _COARSE) if coarse else grid_of(tokens)) if followed else None


def _is_known(inputs: InputStatistics, tokens: int) -> bool:
    """Whether what is read enters position by position."""
    if inputs.kind == "patches":
        return True
    return inputs.tokens is not None and inputs.tokens.shape[1] == tokens


def _is_smooth(kind: Kind, p: Parametrization) -> bool:
    """Whether a kind of sublayer can be followed on a grid: no window ends between positions."""
    return not getattr(kind.part("roles"), "has_window", lambda _: False)(p.architecture)


@dataclass(frozen=True)
class GridAttention(TokenAttention):
    """`TokenAttention`, causal and without value skips, on a grid: `kernel` is what two different tokens share.

    Attributes:
        grid: where they stand. per_token, value_per_token: diagonals of kernel and values. turn: mean cosines of
            `Grid.rotated`, in the place of rho.
    """

    grid: Grid = field(kw_only=True)
    per_token: FloatArray = field(kw_only=True)
    value_per_token: FloatArray | None = None
    turn: FloatArray | None = None

    def output(self) -> Signal:
        shared, per_token = self._averaged()
        return linear((per_token, shared), self.gain**2)

    def sent(self, g: Signal) -> Signal:
        return self._held(self._returned(g))

    def sent_apart(self, g: Signal) -> tuple[Signal, Signal]:
        return self._held(self._returned(g, scores=0)), self._returned(g, value=0)

    def _returned(self, g: Signal, value: int = 1, scores: int = 1) -> Signal:
        shared, per_token = self._sent_back(np.asarray(g.shared), np.asarray(g.per_token), value, scores)
        return linear((per_token, shared), self.gain**2)

    def _held(self, x: Signal) -> Signal:
        """As `softmax_rows.held`."""
        if np.min(x.per_token) >= 0:
            return x
        root = np.sqrt(np.maximum(x.per_token, 0.0))
        most = pairs(root, root)
        return Signal(root**2, np.clip(x.shared, -most, most))

    @property
    def _per_token(self) -> FloatArray:
        return self.per_token

    def _value_per_token(self, values: FloatArray) -> FloatArray:
        assert self.value_per_token is not None  # given with the values
        return self.value_per_token

    @property
    def _turn(self) -> FloatArray | None:
        return self.turn

    @property
    def _row_length(self) -> FloatArray:
        return self.grid.n

    @property
    def _visible(self) -> NDArray[np.bool_]:
        return self.grid.sees

    @property
    def _mean_overlap(self) -> FloatArray:
        return self.grid.mean_overlap

    def _of_pair(self, by_row: FloatArray) -> FloatArray:
        if by_row.ndim == self.kernel.ndim:
            return np.where(self._visible, transposed(by_row), by_row)
        return by_row.take(self.grid.shorter, -1)

    def _sum_over_visible(self, values: FloatArray) -> FloatArray:
        return np.asarray(np.einsum("ab,...ab->...a", self.grid.visible, values))

    def _mean_over_keys(self, values: FloatArray) -> FloatArray:
        return np.asarray(values @ self.grid.visible.T / self.grid.n)

    def _over_both(self, values: FloatArray) -> FloatArray:
        return self._of_longer(values @ self.grid.by_pairs.T)

    def _sent_to_keys(self, values: FloatArray) -> FloatArray:
        shares = self.grid.by_power[0] * transposed(self._shared_out(self._rows.favour[1]))
        return np.asarray((shares @ values[..., None])[..., 0])

    def _sums(self, shared: FloatArray, per_token: FloatArray) -> tuple[FloatArray, FloatArray]:
        visible, n, e = self.grid.visible, self.grid.n, per_token - shared.diagonal(0, -2, -1)
        averaged = product(visible, shared)
        single = e @ visible.T
        double = product(averaged, visible.T) + self._of_pair(single)
        return (averaged + e[..., None, :]) / n[:, None], double / self.grid.lengths

    def _sums_of_rows(self, shared: FloatArray, per_token: FloatArray) -> tuple[FloatArray, FloatArray]:
        mean = product(self.grid.visible, shared) + (per_token - shared.diagonal(0, -2, -1))[..., None, :]
        mean /= self.grid.n[:, None]
        return mean, self._sum_over_visible(mean) / self.grid.n

    def _different_queries(self, gradient: FloatArray, value: int, scores: int) -> tuple[FloatArray, FloatArray]:
        one, two, three = self.grid.by_power
        kernel, per_token, (mean, double_mean) = self.kernel, self.per_token, self._means
        if not value:
            kernel, mean, double_mean, per_token, *_ = self._of_values
        e = per_token - kernel.diagonal(0, -2, -1)
        apart = mean - e[..., None, :] / self.grid.n[:, None]  # M S of keys that a row does not see
        popular, keys = self._bracket_weights
        h = gradient * (value * popular + scores * keys)

        def both(over_second: FloatArray, per_row: FloatArray) -> FloatArray:
            """Sums over i from k, i' from k' on, of values / (n n'), where i is not i'; of the values' sums over i' and
            of their diagonal."""
            return product(one, over_second) - self._of_longer(per_row @ two.T)

        over_second, overlap = product(h, one.T), h.diagonal(0, -2, -1)
        core = both(over_second, overlap)
        step = product(two, e[..., None, :] * over_second - apart * overlap[..., None]) - pairs(overlap @ three.T, e)
        mixed = product(one, apart * over_second) + np.where(
            self._visible, step, step.diagonal(0, -2, -1)[..., None, :]
        )
        means = h * double_mean + gradient if value else h * double_mean
        rest = both(product(means, one.T), means.diagonal(0, -2, -1)) - mixed - transposed(mixed)
        return kernel * core + rest, per_token * core.diagonal(0, -2, -1) + rest.diagonal(0, -2, -1)

    def _of_longer(self, per_row: FloatArray) -> FloatArray:
        return per_row.take(self.grid.longer, -1)


class AlikeAttention(GridAttention):
    """Attention without a mask to tokens of which none is set apart, on `EqualTokens`: they have no structure."""

    @property
    def _structural_slope(self) -> FloatArray:
        return np.zeros(1)
