"""Moments through attention whose keys are its values, within a window and to averages of what came before.

docs/theory/attention.md, "Shared keys and values".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial import chebyshev

from signalprop.errors import InputError
from signalprop.kernels.rows import rows_of
from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import mixes, settings
from signalprop.sublayers.shared_kv_attention.averages import Attended, Group, Seen, Weighed, pairs_of
from signalprop.sublayers.shared_kv_attention.roles import NAME, SPARSE, compressed, settings_of
from signalprop.theory.elements import (
    Branch,
    BranchBackward,
    BranchMoments,
    Pair,
    Rowset,
    Sent,
    dropped,
    inner_correlation,
    through_inner_norm,
)

_NODES = 9  # correlations between which sublayers are interpolated
_PER_E = 1024  # mean squares of what is read are rounded to e^(1 / _PER_E); gradients are not


class Gains(NamedTuple):
    """Of one sublayer: score variance of unit keys, what maps to the stream make of a head; d_model sigma^2 of maps."""

    qk: float
    output: float
    key_value: float
    run_value: float
    run_weight: float


class Average(NamedTuple):
    """One average of a run, before its norm, of tokens of mean square 1.

    Attributes:
        size: mean square. linear: of it, what weights tilt alike in all runs. second: what a gradient sends to its
            tokens, summed over them; within: and to pairs of different ones through one map. across: what two averages'
            gradients send to pairs of tokens of the two runs.
    """

    size: float
    linear: float
    second: float
    within: float
    across: float


def average(r: float, rate: int, halves: int, logits: float, d_model: int) -> Average:
    """Of `rate` tokens of correlation r through one map, or of twice as many through one map for each half.

    Args:
        logits: score variance of tokens that share nothing. d_model: by which it scatters.
    """
    n = halves * rate
    mean = (1 + (rate - 1) * r) / n  # of all products of two keys
    spread = 0.0 if n == 1 else n / (n - 1) * (1 - mean)
    rows = rows_of(np.array([logits * spread]), np.array([float(n)]), 4 / d_model)
    second, weighted, jacobian = (float(x[0]) for x in (rows.second, rows.weighted, rows.jacobian))
    # keys of one half are alike on purpose: what its weights have in common moves the average as a whole
    alike = ((rate - 1) * (r - mean) ** 2 + (n - rate) * mean**2 - (1 - mean) ** 2 / max(n - 1, 1)) / n
    linear = logits * (max(alike, 0.0) + spread**2 / d_model * (1 - second) ** 2) * (1 - second) ** 2
    keys = weighted * logits * spread
    size = mean + (second - 1 / n) * spread + linear
    moved = 0.0 if n == 1 else (n * second - 1) / (1 - 1 / n) + n * jacobian * logits * spread / (1 - 1 / n)
    across = 1 / halves + (0.0 if halves == 1 or spread == 0 else moved / spread * r / 4)
    within = (1 - second - keys) * (1.0 if halves == 1 else (rate - 1) / (n - 1))
    return Average(size, linear, second + keys, within, across)


@dataclass(frozen=True)
class SharedMoments(BranchMoments):
    """The attention of one stack to tokens in a window, and to averages beside it: token kernels at equal correlations.

    Attributes:
        p: the table. name: of the kind. length: tokens.
    """

    p: Parametrization
    name: str
    length: int

    @cached_property
    def _seen(self) -> list[Seen]:
        """The tokens, and the averages, that every token sees."""
        a = self.p.architecture
        s, more = settings_of(a, self.name), compressed(a, self.name)
        at, base = np.arange(self.length), s.rotary_base or a.rotary_base
        turned = s.d_rotary // 2 * 2 if a.positions == "rotary" else 0
        turns = Turns(base ** (-np.arange(0, turned, 2) / max(turned, 1)), turned / a.d_head, 1)
        window = min(s.window, self.length)
        near = seen_by(np.minimum(at + 1, window), np.maximum(at - window + 1, 0), at, turns, window)
        if more is None or self.length < more.rate:
            return [near]
        first = np.arange(1, self.length // more.rate + 1) * more.rate - 1
        far = seen_by((at + 1) // more.rate, 0 * at, first, turns._replace(step=more.rate), self.length)
        return [near, far]

    @cached_property
    def _tables(self) -> dict[tuple[float, ...], FloatArray]:
        """Chebyshev coefficients in 1 - 2 r of `One.moments`, (nodes, 6), by gains and mean square."""
        return {}

    def _through(self, gains: Gains, second: float, r: float) -> FloatArray:
        """`One.moments` by interpolation: sublayers that read a normed stream have one table."""
        second = max(second, 1e-300)
        near = math.exp(round(_PER_E * math.log(second)) / _PER_E)
        key = (*gains, near)
        if key not in self._tables:
            nodes = chebyshev.chebpts2(_NODES)
            values = [One(self, gains, near, (1 - x) / 2).moments() for x in nodes.tolist()]
            self._tables[key] = np.asarray(
                np.linalg.solve(chebyshev.chebvander(nodes, _NODES - 1), np.array(values)), np.float64
            )
        found = np.array(chebyshev.chebval(1 - 2 * min(max(r, 0.0), 1.0), self._tables[key]), np.float64)
        found[2:] *= near / second
        return found

    def _of_each(self, i: int | Rowset, read: Pair) -> FloatArray:
        """`_through` of every sublayer, (6, ...)."""
        shape = np.broadcast(i, read[0]).shape
        columns = [np.broadcast_to(x, shape).ravel().tolist() for x in (*self._gains[..., i], *read)]
        found = [self._through(Gains(*of), second, r) for *of, second, r in zip(*columns, strict=True)]
        return np.array(found).T.reshape(6, *shape)

    @cached_property
    def _gains(self) -> FloatArray:
        """The fields of Gains of every sublayer."""
        a, w = self.p.architecture, self.p.weights
        maps = [a.d_model * w[role] ** 2 for role in ("key_value", "run_value", "run_weight")]
        return np.stack([a.d_head * self.p.score_scale**2, output_gain(self.p), *maps])

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        out = dropped(tuple(self._of_each(i, read)[:2]), self.p.architecture.dropout)
        return Branch(*(float(x) if np.ndim(x) == 0 else x for x in out))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        vv, vc, cv, cc = self._of_each(i, read)[2:]
        kept = 1 / (1 - self.p.architecture.dropout)
        return Sent(BranchBackward(kept * vv, vc, kept * cv, cc))


class One:
    """One sublayer on tokens of one mean square and correlation."""

    def __init__(self, of: SharedMoments, gains: Gains, second: float, r: float) -> None:
        self.a, self.gains, self.second, self.r = of.p.architecture, gains, second, r
        self.s, self.more = settings_of(self.a, of.name), compressed(self.a, of.name)
        self.length = of.length
        self.halves = 1 + (of.name == SPARSE)
        key = r * inner_correlation(r, self.a.d_head)
        latent = r * inner_correlation(r, self.s.query_rank)
        asks = float(latent * inner_correlation(latent, self.a.d_head))
        self.divided = 1 + self._epsilon(gains.key_value)
        size, ones = 1 / self.divided, np.ones(of.length)
        known: dict[str, Any] = {
            "qk": gains.qk, "asks": asks, "d_head": self.a.d_head,
            "chance": 1 / self.a.d_model + 1 / self.a.d_head, "dropout": self.a.attention_dropout or 0.0,
        }  # fmt: skip
        near = of._seen[0]
        groups = [Group(near, size, size**0.5 * key**0.5 * ones, size * (1 - key) * ones, **known)]
        if len(of._seen) == 2:
            far, one, rest = of._seen[1], self._first, self._rest
            # a direction that all averages share, of which the first, which has no run before it, has another part
            later = self._alike(rest, rest) ** 0.5
            first = self._alike(one, rest) / later if later > 0 else 0.0
            n = np.maximum(far.n, 1.0)
            common = (first + (n - 1) * later) / n
            sizes = [x.size / (x.size + self._added) for x in (one, rest)]
            apart = ((sizes[0] - first**2) + (n - 1) * (sizes[1] - later**2)) / n
            groups.append(Group(far, sizes[1], common, apart, **known))
        self.attended = Attended(groups, self.s.sink)

    def _epsilon(self, gain: float) -> float:
        """Of a norm on what a map makes, in units of what it reads."""
        return self.a.norm_eps / (gain * self.second) if gain > 0 else 1e150

    @cached_property
    def _added(self) -> float:
        return self._epsilon(self.gains.run_value)

    @cached_property
    def _rest(self) -> Average:
        assert self.more is not None
        return average(self.r, self.more.rate, self.halves, self.gains.run_weight * self.second, self.a.d_model)

    @cached_property
    def _first(self) -> Average:
        """Of the first run."""
        assert self.more is not None
        return average(self.r, self.more.rate, 1, self.gains.run_weight * self.second, self.a.d_model)

    def _alike(self, one: Average, other: Average) -> float:
        """Correlation of two normed averages."""
        sizes = (one.size + self._added) * (other.size + self._added)
        return float((self.r / self.halves + (one.linear * other.linear) ** 0.5) / sizes**0.5)

    def moments(self) -> FloatArray:
        """(variance, covariance, vv, vc, cv, cc)."""
        return np.concatenate([self.forward(), self.backward().ravel()])

    def forward(self) -> tuple[float, float]:
        """Variance and covariance."""
        own, pairs = self.attended.forward()
        gain, n = self.gains.output, self.length
        return gain * own / n, gain * pairs / max(n * (n - 1), 1)

    def backward(self) -> FloatArray:
        """((vv, vc), (cv, cc))."""
        queries, keys = self.attended.backward()
        one, two = (through_inner_norm(r, self.a.d_model, self.a.d_head) / self.divided for r in (1.0, self.r))
        own = [one * (queries.own[k].sum() + keys[0].own[k].sum()) for k in (0, 1)]
        pairs = [two * (queries.pairs[k] + keys[0].pairs[k]) for k in (0, 1)]
        if len(keys) == 2:
            for k in (0, 1):
                to_tokens, to_pairs = self._through_runs(keys[1], k)
                own[k], pairs[k] = own[k] + to_tokens, pairs[k] + to_pairs
        n, gain = self.length, self.gains.output / self.second
        return gain * np.array([np.array(own) / n, np.array(pairs) / max(n * (n - 1), 1)])

    def _through_runs(self, keys: Weighed, k: int) -> tuple[float, float]:
        """Sums over tokens, and over pairs of them, of what gradients at averages send; k: of independent ones, all."""
        one, rest, widths = self._first, self._rest, (self.a.d_model, self.a.d_head)
        size, later = one.size + self._added, rest.size + self._added
        norm = through_inner_norm(1.0, *widths)
        at_first, at_rest = keys.own[k][0] * norm / size, float(keys.own[k][1:].sum()) * norm / later
        tokens = at_first * one.second + at_rest * rest.second
        pairs = at_first * one.within + at_rest * rest.within
        if len(keys.own[0]) > 1:
            # what averages share goes to two of them as gradients go to each
            arrived = keys.own[k] if keys.own[k][1:].any() else keys.own[0]
            root = np.sqrt(np.maximum(arrived, 0.0))
            others = pairs_of(root[1:]) / max(pairs_of(root), 1e-300)
            among = through_inner_norm(self._alike(rest, rest), *widths) * rest.across / later
            mixed = through_inner_norm(self._alike(one, rest), *widths) / self.halves / (size * later) ** 0.5
            pairs += keys.pairs[k] * (others * among + (1 - others) * mixed)
        return float(tokens), float(pairs)


class Turns(NamedTuple):
    """Rotations: their frequencies, the share of features that turn, and how many positions keys stand apart."""

    frequencies: FloatArray
    share: float
    step: int

    def between(self, lag: IntArray) -> FloatArray:
        """Mean cosine of all features between rows so far apart."""
        if self.share == 0:
            return np.ones(len(lag))
        return np.asarray(1 - self.share + self.share * np.cos(np.outer(lag, self.frequencies)).mean(1))

    def along(self, n: FloatArray) -> FloatArray:
        """What is left of the square of a vector that so many keys in a row share."""
        if self.share == 0:
            return np.ones(len(n))
        half = self.frequencies * self.step / 2
        phasor = np.sin(np.outer(n, half)) / (n[:, None] * np.sin(half))
        return np.asarray(1 - self.share + self.share * (phasor**2).mean(1))


def seen_by(n: IntArray, low: IntArray, first: IntArray, turns: Turns, reach: int) -> Seen:
    """What every row sees of a group whose keys are seen by `reach` rows from `first` on; n, low as in `Seen`."""
    length, least = len(n), np.maximum(n, 1.0)
    lag = np.arange(1, length)
    cosine, coherence = turns.between(lag), turns.along(least)
    if reach >= length:  # a row sees all that rows before it see
        turned = np.append(np.cumsum(cosine)[::-1] / lag[::-1], 1.0)
        bracket, again = 1 - 1 / least, np.ones(length)
    else:
        weight, turned, bracket, again = np.zeros((4, length))
        for k in lag[: reach - 1].tolist():
            early, late = least[:-k], least[k:]
            both = np.minimum(early, reach - k)
            at = both / late
            weight[:-k] += at
            turned[:-k] += at * cosine[k - 1]
            bracket[:-k] += at * (1 - 1 / early - 1 / late + both / (early * late))
            again[:-k] += at * both / early
        turned, bracket, again = (x / np.where(weight > 0, weight, 1.0) for x in (turned, bracket, again))
    last = np.minimum(first + (reach - 1), length - 1)
    return Seen(n.astype(np.float64), low, first, last, coherence, turned, bracket, again)


def of(p: Parametrization, stack: int, name: str = NAME) -> SharedMoments:
    """The attention of a table of one of the three kinds."""
    a = p.architecture
    if p.shaping.kind != "none" or a.positions == "alibi" or mixes(p):
        raise InputError("attention with shared keys and values is not shaped, and has no value_skip; leave them out")
    return SharedMoments(p, name, settings(a, stack)["n_queries"])


def output_gain(p: Parametrization) -> FloatArray:
    """What the maps to the stream make of a head's variance, of every sublayer."""
    a, s = p.architecture, settings_of(p.architecture)
    inner = a.n_heads * a.d_head * p.weights["grouped_output"] ** 2
    return np.asarray(inner * (s.group_rank * p.weights["kv_output"] ** 2))
