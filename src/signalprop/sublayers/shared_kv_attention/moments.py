"""Moments through attention whose keys are its values, within a window and to averages of what came before.

docs/theory/attention.md, "Shared keys and values".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Row, mixes, settings
from signalprop.sublayers.attention.moments import SelfAttention
from signalprop.sublayers.attention.roles import Settings as Around
from signalprop.sublayers.shared_kv_attention.roles import NAME, SPARSE, compressed, settings_of
from signalprop.theory import attention_scores
from signalprop.theory.attention_rows import Band
from signalprop.theory.elements import (
    Branch,
    BranchBackward,
    Pair,
    Rowset,
    Sent,
    inner_correlation,
    through_inner_norm,
)
from signalprop.theory.softmax import softmax_moments


class Runs(NamedTuple):
    """The averages that a token sees beside its window.

    Attributes:
        rate: tokens of one. n: how many there are on average. weight: variance of the logits of a token's weights in
            its run, of every sublayer. share: of what a token sees, mean square over tokens. halves: of how many
            independent averages one is made.
    """

    rate: int
    n: int
    weight: FloatArray
    share: float
    halves: int


@dataclass(frozen=True)
class SharedMoments(SelfAttention):
    """The attention of one stack to tokens in a window, and to averages as another attention beside it.

    Averages of how alike tokens are, over a window and over runs: `kernel` is exact position by position.

    Attributes:
        widths: of the stream and of a head. own: share of a token's window in what it sees, mean square over tokens.
        runs: None where it sees only the window.
    """

    widths: tuple[int, int] = (1, 1)
    own: float = 1.0
    runs: Runs | None = None

    def value_size(self, row: Row, second: Array) -> Array:
        """As `SelfAttention.value_size`: keys and values are normed."""
        return second + row.key

    def scores(self, row: Row, second_query: Array, second_key: Array) -> tuple[Array, Array]:
        """As `Heads.scores`, of normed queries and keys."""
        return row.qk * ratio(second_key, second_key + row.key), 0.0

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        near = SelfAttention.forward(self, i, self._aligned(read))
        if self.runs is None:
            return near
        far = SelfAttention.forward(self._to_runs, i, self._aligned((read[0], self._of_runs(i, read)[1])))
        return Branch(*(self.own * x + self.runs.share * y for x, y in zip(near, far, strict=True)))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """Queries count to the attention that they ask."""
        near = SelfAttention.backward(self, i, self._aligned(read)).stream
        own, both = (through_inner_norm(r, *self.widths) for r in (np.ones_like(near.vv), read[1]))
        out = BranchBackward(near.vv * own, near.vc * own, near.cv * both, near.cc * both)
        if self.runs is None:
            return Sent(out)
        size, r, second = self._of_runs(i, read)
        far = SelfAttention.backward(self._to_runs, i, self._aligned((read[0], r))).stream
        rate, tokens = self.runs.rate, self.n_keys
        # to the tokens of a run: by the squares of their weights; of two tokens, by whether one run holds both
        one = (rate - 1) / max(tokens - 1, 1)
        vv, vc = (x * second / size for x in (far.vv, far.vc))
        cv, cc = ((one * x + y) / rate**2 / size for x, y in ((far.vv, far.cv), (far.vc, far.cc)))
        parts = zip(out, (vv, vc, cv, cc), strict=True)
        return Sent(BranchBackward(*(np.asarray(self.own * x + self.runs.share * y) for x, y in parts)))

    def _aligned(self, read: Pair) -> Pair:
        return read[0], read[1] * inner_correlation(read[1], self.widths[1])

    def _of_runs(self, i: int | Rowset, read: Pair) -> tuple[Array, Array, Array]:
        """Mean square of an average over that of a token, correlation of two of them, mean square of a weight."""
        assert self.runs is not None
        r, rate = np.clip(np.asarray(read[1], float), 0.0, 1.0), self.runs.rate
        logits = np.asarray(self.runs.weight[..., i] * read[0] * (1 - r), float)
        second = np.asarray(softmax_moments(logits, rate).second)
        size = r + (1 - r) * second
        found = (size, ratio(r, size), second / rate)
        return tuple(float(x) if np.ndim(x) == 0 else x for x in found)  # type: ignore[return-value]

    @cached_property
    def _to_runs(self) -> SharedMoments:
        """The attention to averages alone, all of which a token sees."""
        assert self.runs is not None
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields |= {"n_keys": self.runs.n, "causal": False, "runs": None, "rotary_rows": self.rotary}
        return SharedMoments(**fields)


def of(p: Parametrization, stack: int, name: str = NAME) -> SharedMoments:
    """The attention of a table of one of the three kinds."""
    a, s = p.architecture, settings_of(p.architecture, name)
    if p.shaping.kind != "none" or a.positions == "alibi" or mixes(p):
        raise InputError("attention with shared keys and values is not shaped, and has no value_skip; leave them out")
    zero = np.zeros_like(p.score_scale)
    value = a.d_model * p.weights["key_value"] ** 2
    added = np.divide(a.norm_eps, value, out=zero.copy(), where=value > 0)
    output = output_gain(p)
    rows = Row(
        a.d_head * p.score_scale**2, zero, zero + 1.0, zero, output, zero, output, zero, zero + 1.0, zero, added,
    )  # fmt: skip
    fields = settings(a, stack) | {"d_model": 1 / (1 / a.d_model + 1 / a.d_head), "qk_norm": False, "causal": True}
    length = fields["n_queries"]
    near = np.minimum(np.arange(length) + 1, s.window)
    more = compressed(a, name)
    n_runs = np.zeros(length) if more is None else (np.arange(length) + 1) // more.rate
    share = near / (near + n_runs)
    runs = None
    if more is not None and n_runs[-1] > 0:
        weight = a.d_model * p.weights["run_weight"] ** 2
        halves = 1 + (name == SPARSE)
        runs = Runs(more.rate, max(round(float(n_runs.mean())), 1), weight, float(((1 - share) ** 2).mean()), halves)
    if s.window < length:
        fields["causal"] = Band(s.window, True)
    if a.positions == "rotary":
        turned = (min(length, s.window), s.d_rotary, s.rotary_base or a.rotary_base, 1.0)
        kept = s.d_rotary / a.d_head
        for field, rows_of in (("rotary", "pairs"), ("rotary_rows", "rows")):
            coherence = attention_scores.rotary_coherence(*turned, causal=rows_of)
            fields[field] = 1 - kept * (1 - coherence)
    return SharedMoments(
        np.stack(rows), False, **fields, given=Around(sink=s.sink), widths=(a.d_model, a.d_head),
        own=float((share**2).mean()), runs=runs,
    )  # fmt: skip


def output_gain(p: Parametrization) -> FloatArray:
    """What the maps to the stream make of a head's variance, of every sublayer."""
    a, s = p.architecture, settings_of(p.architecture)
    inner = a.n_heads * a.d_head * p.weights["grouped_output"] ** 2
    return np.asarray(inner * (s.group_rank * p.weights["kv_output"] ** 2))
