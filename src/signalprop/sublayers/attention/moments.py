"""Moments through self-attention whose layers see different things, with caps, sinks, norms on values and gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Row, SelfAttention, mixes, settings, table_of
from signalprop.sublayers.attention.roles import (
    Settings,
    Sight,
    Sights,
    first_values,
    has_gate,
    sights,
)
from signalprop.theory import attention_scores
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
    dropped,
    linear,
)
from signalprop.theory.logs import plain


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
class Varied(SelfAttention):
    """Self-attention with what `Settings` put around scores and values.

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
        row, values = self.at(i), self._values(i, read, memory)
        if self.gates is not None:
            opened = activated(self._before_gate(i, read), "sigmoid")
            values = (values[0] * opened[0], values[1] * opened[1])
        return Branch(*dropped(linear(values, row.output, row.output_bias), self.dropout))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """What a sink's share changes with the scores is left out."""
        row = self.at(i)
        one, both = self._kept(row, read)
        without = super().backward(i, read, memory)
        vv, vc, cv, cc = (x / self.value_size(row, read[0]) for x in without.stream)
        out = _times(BranchBackward(vv, vc, cv, cc), (one, both))
        first = without.memory and _times(without.memory, (one, both))
        if self.gates is None:
            return Sent(out, first)
        gate = self._before_gate(i, read)
        opened, values = activated(gate, "sigmoid"), self._values(i, read, memory)
        through = first and _times(first, opened)
        unit = np.ones_like(np.asarray(read[0], float))
        slope = activated_back((unit * values[0], unit * values[1]), gate, "sigmoid")
        back = self.gate(i).back
        return Sent(
            BranchBackward(
                out.vv * opened[0] + slope[0] * back / (1 - self.dropout), out.vc * opened[1],
                out.cv * opened[0], out.cc * opened[1] + slope[1] * back,
            ),
            through,
        )  # fmt: skip

    def gate(self, i: Any) -> GateRow:
        """The products of the gate of sublayer i, or of several."""
        assert self.gates is not None
        return GateRow(*self.gates[..., i])

    def value_size(self, row: Row, second: Array) -> Array:
        """What a norm divides the variance of values by, of an input of that second moment; 1 without."""
        return second * row.value + row.value_bias + self.norm_eps if self.given.value_norm else 1.0

    def _before_gate(self, i: Any, read: Pair) -> Pair:
        gate = self.gate(i)
        return linear((read[0], read[0] * read[1]), gate.weight, gate.bias)

    def _values(self, i: Any, read: Pair, memory: Pair | None) -> Pair:
        """What the heads give, before a gate."""
        row, without = self.at(i), super().forward(i, read, memory)
        out = (1 - self.dropout) * without.variance - row.output_bias, without.covariance - row.output_bias
        size, (one, both) = self.value_size(row, read[0]) * row.output, self._kept(row, read)
        return ratio(out[0] * one, size), ratio(out[1] * both, size)

    def _kept(self, row: Row, read: Pair) -> Pair:
        """Mean square of the share of weight that a sink leaves, and of two rows; over the lengths of rows, of which a
        short one weighs as much more in the former as its output is larger under uniform weights."""
        if self.given.sink is None:
            return 1.0, 1.0
        s0, _ = self.scores(row, read[0], read[0])
        own = np.asarray(np.maximum(1 - read[1] * self.rotary_rows, 0.0) * s0)
        lengths = over_rows(self.n_keys, self.causal)
        shares = [(weight, kept(np.asarray(float(n)), own, s0 - own, self.given.sink)) for n, weight in lengths]
        sizes = [weight * (read[1] + (1 - read[1]) / n) for n, weight in lengths]
        one = sum((size * share**2 for size, (_, share) in zip(sizes, shares, strict=True)), np.zeros_like(own))
        one = one / sum(sizes)
        mean = sum((weight * share for weight, share in shares), np.zeros_like(own))
        return plain(one), plain(mean**2)


def _times(maps: BranchBackward, by: Pair) -> BranchBackward:
    """Maps of a gradient whose variance and covariance are multiplied beforehand."""
    vv, vc, cv, cc = maps
    return BranchBackward(vv * by[0], vc * by[1], cv * by[0], cc * by[1])


def around(p: Parametrization) -> dict[str, Any]:
    """The fields of Varied beyond those of Heads; none where everything is usual."""
    a = p.architecture
    given = Settings.of(a)
    usual = given.score_cap is None and given.sink is None and not given.value_norm and given.gate == "none"
    if usual:
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
    more = around(p)
    return (Varied if more else SelfAttention)(table_of(p), mixes(p), **fields, **more)


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
