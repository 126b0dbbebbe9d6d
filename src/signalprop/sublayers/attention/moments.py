"""Moments through self-attention whose layers see different things, with caps, sinks, norms on values and gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Heads, Row, mixes, settings, table_of
from signalprop.sublayers.attention.roles import (
    Settings,
    Sight,
    Sights,
    first_values,
    has_gate,
    sights,
)
from signalprop.theory import attention, attention_scores
from signalprop.theory.attention_rows import Band, over_rows
from signalprop.theory.attention_variants import capped, kept
from signalprop.theory.elements import (
    Branch,
    BranchBackward,
    BranchMoments,
    Pair,
    Rowset,
    Sent,
    activated,
    activated_back,
    linear,
)
from signalprop.theory.logs import correlation, plain

Ends = tuple[Pair, Pair]  # what goes back where two tokens' gradients share nothing, and all


class Summed(NamedTuple):
    """Values and those of the first attention: their variance without biases, its correlation, and the bias's."""

    size: Array
    r: Array
    bias: Array


class GateRow(NamedTuple):
    """Products of widths and variances of an output gate."""

    weight: Array  # d_model sigma_g^2
    bias: Array
    back: Array  # d_model sigma_o^2 d_inner sigma_g^2; a gate of a head sums over its features


@dataclass(frozen=True)
class Layers(BranchMoments):
    """Self-attention whose layers see different things: a SelfAttention for every Sight."""

    seeing: dict[Sight, SelfAttention]
    sights: Sights

    @property
    def first(self) -> int | None:
        """As of each."""
        return next(iter(self.seeing.values())).first

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        """Of one row, or of rows that see the same."""
        return self.seeing[self.sights.at(int(i if isinstance(i, int) else i[0]))].forward(i, read, memory)

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        out: list[FloatArray] = []  # to the stream, and to what the first values were made of
        second, r = (np.asarray(x) for x in read)
        for seen, made in self.seeing.items():
            where = [k for k, row in enumerate(i.tolist()) if self.sights.at(row) == seen]
            if where:
                met = None if memory is None else (np.asarray(memory[0])[..., where], np.asarray(memory[1])[..., where])
                sent = made.backward(i[where], (second[..., where], r[..., where]), met)
                parts = [np.stack(maps) for maps in sent if maps is not None]
                out = out or [np.empty((*part.shape[:-1], len(i))) for part in parts]
                for whole, part in zip(out, parts, strict=True):
                    whole[..., where] = part
        return Sent(*(BranchBackward(*whole) for whole in out))


@dataclass(frozen=True)
class SelfAttention(Heads):
    """Q, K, V -> scaled dot-product attention -> W_O -> dropout, of a stream that attends to itself.

    Attributes:
        given: score_cap, sink, value_norm. gates: the fields of GateRow, (3, ..., sublayers); None: no gates.
    """

    given: Settings = field(default_factory=Settings)
    gates: FloatArray | None = None

    def scores(self, row: Row, second_query: Array, second_key: Array) -> tuple[Array, Array]:
        """As `Heads.scores`, capped."""
        s0, bias = super().scores(row, second_query, second_key)
        return capped(s0, self.given.score_cap), bias

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        row = self.at(i)
        values = self._values(i, row, read, memory)
        if self.gates is not None:
            opened = activated(self._before_gate(i, read), "sigmoid")
            values = (values[0] * opened[0], values[1] * opened[1])
        return self.output(row, values)

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """Over all three paths; what a sink's share changes with the scores is left out."""
        row = self.at(i)
        out, first = self._sent(i, row, read, memory)
        size, kept = self.value_size(row, read[0]), self._kept(row, read)
        if size is not None:
            out = BranchBackward(*(x / size for x in out))
        if kept is not None:
            out, first = _times(out, kept), first and _times(first, kept)
        if self.gates is None:
            return Sent(out, first)
        gate = self._before_gate(i, read)
        opened, values = activated(gate, "sigmoid"), self._values(i, row, read, memory)
        unit = np.ones_like(np.asarray(read[0], float))
        slope = activated_back((unit * values[0], unit * values[1]), gate, "sigmoid")
        back, out = self.gate(i).back, _times(out, opened)
        vv, cc = out.vv + slope[0] * back / (1 - self.dropout), out.cc + slope[1] * back
        return Sent(out._replace(vv=vv, cc=cc), first and _times(first, opened))

    def gate(self, i: Any) -> GateRow:
        """The products of the gate of sublayer i, or of several."""
        assert self.gates is not None
        return GateRow(*self.gates[..., i])

    def value_size(self, row: Row, second: Array) -> Array | None:
        """What a norm divides the variance of values by, of an input of that second moment; None without one."""
        return second * row.value + row.value_bias + self.norm_eps if self.given.value_norm else None

    def _before_gate(self, i: Any, read: Pair) -> Pair:
        gate = self.gate(i)
        return linear((read[0], read[0] * read[1]), gate.weight, gate.bias)

    def _values(self, i: Any, row: Row, read: Pair, memory: Pair | None) -> Pair:
        """What the heads give, before a gate."""
        if self.values is not None:
            added = self.summed(i, row, read, memory)
            out = linear(attention.forward(self._read(row, read, added)), added.size, added.bias)
        else:
            averaged = attention.forward(self._read(row, read, None))
            if self.mixes:
                averaged = self._mixed(row, averaged, read[1])
            out = self.averages(row, read[0], averaged)
        size, kept = self.value_size(row, read[0]), self._kept(row, read)
        if size is not None:
            out = ratio(out[0], size), ratio(out[1], size)
        return out if kept is None else (out[0] * kept[0], out[1] * kept[1])

    def _kept(self, row: Row, read: Pair) -> Pair | None:
        """Mean square of the share of weight that a sink leaves, and of two rows; over the lengths of rows, of which a
        short one weighs as much more in the former as its output is larger under uniform weights."""
        if self.given.sink is None:
            return None
        s0, _ = self.scores(row, read[0], read[0])
        own = np.asarray(np.maximum(1 - read[1] * self.rotary_rows, 0.0) * s0)
        lengths = over_rows(self.n_keys, self.causal)
        shares = [(weight, kept(np.asarray(float(n)), own, s0 - own, self.given.sink)) for n, weight in lengths]
        sizes = [weight * (read[1] + (1 - read[1]) / n) for n, weight in lengths]
        one = sum((size * share**2 for size, (_, share) in zip(sizes, shares, strict=True)), np.zeros_like(own))
        one = one / sum(sizes)
        mean = sum((weight * share for weight, share in shares), np.zeros_like(own))
        return plain(one), plain(mean**2)

    def _sent(self, i: Rowset, row: Row, read: Pair, memory: Pair | None) -> Sent:
        """What goes back through the heads alone."""
        if self.values is not None:
            added = self.summed(i, row, read, memory)
            ends = attention.backward_ends(self._read(row, read, added))
            by_value = attention.value_ends(self._read(row, read, None))
            return self._sent_apart(i, row, read[0], added.size, ends, by_value)
        low, high = attention.backward_ends(self._read(row, read, None))
        if self.mixes:
            low, high = self._mixed(row, low, 0.0), self._mixed(row, high, 1.0)
        return Sent(self.from_ends(row, low, high))

    def _mixed(self, row: Row, averaged: Pair, r: Array) -> Pair:
        return attention.mixture(*averaged, r, row.value_skip, row.attention_gain, self.n_queries, causal=self.causal)

    @cached_property
    def sizes(self) -> attention.Sizes:
        """What the formulas of one set of heads take of them."""
        return attention.Sizes(
            self.n_queries, self.n_queries, self.d_model, self.d_head, self.attention_dropout, causal=self.causal,
            omega=self.rotary, omega_rows=self.rotary_rows, one_length=self.one_length, norms=self.norms,
        )  # fmt: skip

    def _read(self, row: Row, read: Pair, added: Summed | None) -> attention.Attention:
        """What the formulas of one set of heads take."""
        s0, bias = self.scores(row, read[0], read[0])
        return self.sizes.on_itself(read[1], s0, query_bias=bias, r_value=None if added is None else added.r)

    def summed(self, i: Any, row: Row, read: Pair, memory: Pair | None) -> Summed:
        """What the values of sublayer i are with those of the first one, `memory`: independent maps of two inputs."""
        assert self.values is not None
        own, later = self.values.own[i] ** 2, self.values.first[i] ** 2
        second, r = memory or (0.0, 0.0)
        begun = self._begun(i)
        kept, added = own * row.value * read[0], later * begun.value * second
        shared = correlation(kept * read[1] + added * r, kept + added)
        return Summed(kept + added, shared, own * row.value_bias + later * begun.value_bias)

    def _begun(self, i: Any) -> Row:
        """The products of the first attention, with an axis of rows where i has one."""
        assert self.values is not None
        return self.at(np.array([self.values.row]) if np.ndim(i) else self.values.row)

    def _sent_apart(self, i: Rowset, row: Row, second: Array, size: Array, ends: Ends, by_value: Ends) -> Sent:
        """What goes to the stream, and through the first values to what they were made of.

        The paths through queries and keys are as large as the sum is, those through values as their factors.
        """
        assert self.values is not None
        ratio_of_sizes = ratio(size, row.value * second)
        own = self.values.own[i] ** 2 - ratio_of_sizes
        low, high = (
            (own * np.asarray(v) + ratio_of_sizes * both_v, own * np.asarray(c) + ratio_of_sizes * both_c)
            for (v, c), (both_v, both_c) in zip(by_value, ends, strict=True)
        )
        back = row.output * self._begun(i).value * self.values.first[i] ** 2
        return Sent(self.from_ends(row, low, high), self.from_ends(row._replace(back=back), *by_value))


def _times(maps: BranchBackward, by: Pair) -> BranchBackward:
    """Maps of a gradient whose variance and covariance are multiplied beforehand."""
    vv, vc, cv, cc = maps
    return BranchBackward(vv * by[0], vc * by[1], cv * by[0], cc * by[1])


def around(p: Parametrization) -> dict[str, Any]:
    """The fields of SelfAttention beyond those of Heads."""
    a = p.architecture
    given = Settings.of(a)
    if given.score_cap is None and given.sink is None and not given.value_norm and given.gate == "none":
        return {}
    if p.shaping.kind != "none" or a.positions == "alibi":
        raise InputError(
            "shaped attention has no cap, sink, norm on values or gate; leave these attention settings out"
        )
    if given.sink is not None and mixes(p):
        raise InputError("attention.sink with value_skip or attention_gain: expected one of them")
    if not has_gate(a):
        return {"given": given}
    inner, w = a.n_heads * a.d_head, p.weights["attention_gate"] ** 2
    back = a.d_model * p.weights["output"] ** 2 * (inner * w)
    return {"given": given, "gates": np.stack([a.d_model * w, p.biases["attention_gate"] ** 2, back])}


def seeing(p: Parametrization, stack: int, seen: Sight) -> SelfAttention:
    """The self-attention sublayers of a table in one stack, as if all of them saw the same."""
    a = p.architecture
    fields = settings(a, stack)
    causal, n = fields["causal"], fields["n_queries"]
    if seen.window:
        fields["causal"] = band = Band(seen.window, causal)
        n, causal = min(n, band.widest), False  # what rotations leave is that of a row away from the ends
    if seen.base:
        turned = (n, a.d_head, seen.base, a.rotary_fraction)
        fields["rotary"] = attention_scores.rotary_coherence(*turned, causal="pairs" if causal else None)
        fields["rotary_rows"] = (
            attention_scores.rotary_coherence(*turned, causal="rows") if causal else fields["rotary"]
        )
    fields["values"] = first_values(p)
    return SelfAttention(table_of(p), mixes(p), **fields, **around(p))


def of(p: Parametrization, stack: int) -> SelfAttention | Layers:
    """The self-attention sublayers of a table in one stack (index into STACKS)."""
    found = sights_of(p, stack)
    made = {seen: seeing(p, stack, seen) for seen in dict.fromkeys(found.run)}
    return next(iter(made.values())) if len(made) == 1 else Layers(made, found)


def sights_of(p: Parametrization, stack: int) -> Sights:
    """What the layers of a stack see."""
    a = p.architecture
    found = sights(a, p.layer, settings(a, stack)["n_queries"])
    if any(seen.window for seen in found.run) and (p.shaping.kind != "none" or a.positions == "alibi"):
        shape = "ALiBi" if p.shaping.kind == "none" else p.shaping.kind
        raise InputError(f"attention.window with {shape}: shaped attention has no window; leave one of them out")
    return found
