"""Token kernels through attention whose keys are its values, within a window and to averages of what came before.

Keys and values are what the attention sees of a token: its own normed map, and normed averages of runs of other maps.
What a run's tokens weigh in it is an attention, too, of one query for all runs (docs/theory/attention.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from signalprop.kernels.grouped import GroupedAttention
from signalprop.kernels.latest import Latest
from signalprop.kernels.masked import MaskedAttention, View
from signalprop.kernels.stack import BranchKernel
from signalprop.kernels.state import inverse_roots, normalised
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.shared_kv_attention.moments import of as moments_of
from signalprop.sublayers.shared_kv_attention.moments import output_gain
from signalprop.sublayers.shared_kv_attention.roles import NAME, SPARSE, compressed, settings_of
from signalprop.theory.elements import inner_correlation, through_inner_norm

_WIDE = 10**9  # queries and keys of one size: their scores scatter by what `normed` and `chance` say
_SLOW, _NODES = 8.0, 5  # angle over all positions below which rotations are merged, and into how many


class _At(NamedTuple):
    """What one sublayer makes of a kernel.

    Attributes:
        attention: of queries to tokens, and to averages. runs: the attention that averages; None: no averages.
        divided: by what their norm divides averages, (R,).
    """

    attention: GroupedAttention
    runs: MaskedAttention | None
    divided: FloatArray


class SharedKernel(BranchKernel):
    """The attention sublayers of one stack that are of one of the three kinds."""

    def __init__(self, p: Parametrization, stack: int, name: str) -> None:
        moments_of(p, stack, name)  # refuses what is not derived
        self.p, self.a, self.s = p, p.architecture, settings_of(p.architecture, name)
        self.more = compressed(self.a, name)
        self.halves = 1 + (name == SPARSE)
        self.output = output_gain(p)
        self.views: dict[int, tuple[View, View, View] | tuple[View]] = {}  # by tokens
        self.at = Latest(self._made)

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        return self.at(i, kernel).attention.forward() * float(self.output[i])

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        a, at, n = self.a, self.at(i, kernel), len(kernel)
        to_queries, to_keys = at.attention.backward(gradient)
        out = (to_queries + to_keys[0]) * through_inner_norm(normalised(kernel), a.d_model, a.d_head)
        out *= _pairs(inverse_roots(np.diagonal(kernel) + self._epsilon("key_value", i)))
        if at.runs is not None:
            alike = normalised(at.runs.forward())
            sent = to_keys[1] * through_inner_norm(alike, a.d_model, a.d_head) * _pairs(inverse_roots(at.divided))
            to_runs = at.runs.backward_to_both(sent)[1]
            for k in range(self.halves):
                out += to_runs[k * n : (k + 1) * n, k * n : (k + 1) * n]
        return np.asarray(out * float(self.output[i]))

    def _epsilon(self, role: str, i: int) -> float:
        """Of a norm on what a map makes, in units of what it reads."""
        gain = self.a.d_model * float(self.p.weights[role][i]) ** 2
        return self.a.norm_eps / gain if gain > 0 else 1e150

    def _made(self, i: int, kernel: FloatArray) -> _At:
        a, s, r = self.a, self.s, normalised(kernel)
        own = np.diagonal(kernel)
        size = np.sqrt(own / (own + self._epsilon("key_value", i)))
        asks = r * inner_correlation(r, s.query_rank)
        asks, keys = asks * inner_correlation(asks, a.d_head), [r * inner_correlation(r, a.d_head) * _pairs(size)]
        views, runs, divided, empty = self._views(len(kernel)), None, np.ones(0), [np.zeros(len(kernel), bool)]
        if len(views) == 3:
            runs = MaskedAttention(
                kernel=kernel if self.halves == 1 else _beside(kernel, kernel), view=views[2], chance=1 / a.d_model,
                asks=np.ones((len(views[2].mask), len(views[2].mask))), d_model=a.d_model,
                qk=a.d_model * float(self.p.weights["run_weight"][i]) ** 2,
            )  # fmt: skip
            made = runs.forward()
            divided = np.diagonal(made) + self._epsilon("run_value", i)
            keys.append(made * _pairs(inverse_roots(divided)))
            assert self.more is not None
            empty.append(np.arange(len(kernel)) + 1 < self.more.rate)
        groups = [
            MaskedAttention(
                kernel=of_group, asks=asks, view=view, qk=a.d_head * float(self.p.score_scale[i]) ** 2,
                d_model=_WIDE, chance=1 / a.d_model + 1 / a.d_head, normed=a.d_head, dropout=a.attention_dropout or 0.0,
            ) for of_group, view in zip(keys, views[:2], strict=True)
        ]  # fmt: skip
        return _At(GroupedAttention(groups, np.stack(empty), s.sink), runs, divided)

    def _views(self, n: int) -> tuple[View, View, View] | tuple[View]:
        """What so many tokens see of tokens; and of averages, and these of tokens, if there are any."""
        if n not in self.views:
            self.views[n] = self._view(n)
        return self.views[n]

    def _view(self, n: int) -> tuple[View, View, View] | tuple[View]:
        at, turned = np.arange(float(n)), self._rotations(n)
        near = View((at[:, None] >= at) & (at[:, None] - at < self.s.window), at, at, *turned)
        if self.more is None or n < self.more.rate:
            return (near,)
        rate = self.more.rate
        run, of_token = np.arange(n // rate), np.arange(n) // rate
        own = of_token == run[:, None]
        made = own if self.halves == 1 else np.concatenate([own, of_token == run[:, None] - 1], 1)
        seen = run < ((at + 1) // rate)[:, None]
        seen[: rate - 1, 0] = True  # `empty` says that it is not
        places = run.astype(float)
        return near, View(seen, at, places * rate, *turned), View(made, places, np.tile(at, self.halves))

    def _rotations(self, n: int) -> tuple[FloatArray, FloatArray]:
        """Frequencies, and the shares of features that turn so."""
        if self.a.positions != "rotary":
            return np.zeros(0), np.zeros(0)
        rotated = self.s.d_rotary // 2 * 2
        frequencies = (self.s.rotary_base or self.a.rotary_base) ** (-np.arange(0, rotated, 2) / rotated)
        slow = frequencies * n < _SLOW
        nodes, counts = _merged(frequencies[slow]) if slow.sum() > _NODES else (frequencies[slow], np.ones(slow.sum()))
        counts = np.concatenate([np.ones((~slow).sum()), counts])
        return np.concatenate([frequencies[~slow], nodes]), counts * (2 / self.a.d_head)


def _merged(frequencies: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Few frequencies, and how many each counts for, with the same mean cosine at small angles.

    The Gauss quadrature of the squared frequencies: a cosine is a power series in them, and its first 2 * _NODES terms
    agree. At angles up to _SLOW, of 64 rotated features of base 10,000 to 160,000, the mean is right to 1e-9.
    """
    square = frequencies**2 / frequencies.max() ** 2
    basis, _ = np.linalg.qr(np.vander(square, _NODES, increasing=True))
    nodes, vectors = np.linalg.eigh(basis.T @ (square[:, None] * basis))
    return np.sqrt(np.maximum(nodes, 0.0)) * frequencies.max(), vectors[0] ** 2 * len(frequencies)


def _beside(one: FloatArray, other: FloatArray) -> FloatArray:
    """Two kernels of what is independent."""
    n, m = len(one), len(other)
    out = np.zeros((n + m, n + m))
    out[:n, :n], out[n:, n:] = one, other
    return out


def _pairs(per_row: FloatArray) -> FloatArray:
    return np.outer(per_row, per_row)


def of(p: Parametrization, stack: int, shapes: Sequence[Any], name: str = NAME) -> SharedKernel:
    """The attention of a table of one of the three kinds; nothing shapes it."""
    return SharedKernel(p, stack, name)
