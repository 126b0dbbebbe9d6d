"""What self-attention does to a signal: caps, sinks, norms on values and gates around heads (`docs/theory/network.md`).

Of one node the heads are `theory.attention`, the closed forms of TGS (v1 B.8) and what they leave out; of n nodes
`on_nodes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Heads, Row, mixes, settings, table_of
from signalprop.sublayers.attention.roles import Settings, Sight, Sights, has_gate, sights
from signalprop.theory import attention, attention_scores
from signalprop.theory.attention_rows import Band, over_rows
from signalprop.theory.attention_variants import capped, share_beside_sink
from signalprop.theory.log_arithmetic import plain
from signalprop.theory.signals import Rows, Rowset, Sent, Signal, activated, activated_back, linear


class GateRow(NamedTuple):
    """Products of widths and variances of an output gate."""

    weight: Array  # d_model sigma_g^2
    bias: Array
    back: Array  # d_model sigma_o^2 d_inner sigma_g^2; a gate of a head sums over its features


class Averages(Protocol):
    """The outputs of the heads of one sublayer, and what they send back."""

    def forward(self, gain: Array, bias: Array) -> Signal:
        """What the heads give; gain: d_model sigma_v^2, bias: variance of a value's bias."""

    def backward(self, g: Signal) -> Signal:
        """Gradient at what they read, in units of d_model sigma_o^2 d_v sigma_v^2."""

    def beside_sink(self, sink: float) -> Signal | None:
        """Mean square of the share of its weights that a token keeps beside a sink, and of two; None: no sinks."""


class OneNode(NamedTuple):
    """`Averages` of equivalent tokens.

    Attributes:
        read: of second moment 1. second: what it is. mixed: value_skip and attention_gain; None: heads only average.
    """

    read: attention.Attention
    second: Array
    mixed: tuple[Array, Array] | None

    def forward(self, gain: Array, bias: Array) -> Signal:
        averaged = attention.forward(self.read)
        if self.mixed:  # rows of attention weights sum to 1, so a value bias passes
            averaged, bias = self._with_values(averaged, self.read.r_key), bias * sum(self.mixed) ** 2
        return linear(averaged, gain * self.second, bias)

    def backward(self, g: Signal) -> Signal:
        r_g = g.shared / np.maximum(g.per_token, 1e-300)  # of a sum over tokens that differ it may be beyond 1
        sent = attention.backward(self.read._replace(r_g=r_g))
        if self.mixed:
            sent = self._with_values(sent, r_g)
        return Signal(sent[0] * g.per_token, sent[1] * g.per_token)

    def _with_values(self, averaged: tuple[Array, Array], r: Array) -> tuple[Array, Array]:
        assert self.mixed is not None
        sizes = self.read.sizes
        return attention.mixture(*averaged, r, *self.mixed, sizes.n_keys, causal=sizes.causal)

    def beside_sink(self, sink: float) -> Signal:
        """Over the lengths of rows, of which a short one weighs as much more in the mean square as its output is larger
        under uniform weights."""
        x, sizes = self.read, self.read.sizes
        per_token = np.asarray(np.maximum(1 - x.r_key * sizes.omega_rows, 0.0) * x.s0)
        lengths = over_rows(int(sizes.n_keys), sizes.causal)
        shares = [share_beside_sink(np.asarray(float(n)), per_token, x.s0 - per_token, sink) for n, _ in lengths]
        size = [weight * (x.r_key + (1 - x.r_key) / n) for n, weight in lengths]
        zero = np.zeros_like(per_token)
        one = sum((y * share**2 for y, share in zip(size, shares, strict=True)), zero) / sum(size)
        mean = sum((weight * share for (_, weight), share in zip(lengths, shares, strict=True)), zero)
        return Signal(plain(one), plain(mean**2))


@dataclass(frozen=True)
class SelfAttention(Heads):
    """Q, K, V -> scaled dot-product attention -> W_O, of a stream that attends to itself.

    Attributes:
        sights: what its layers see. sizes: what the formulas of one node take of heads that see so much.
        given: score_cap, sink, value_norm. gates: the fields of GateRow, (3, ..., sublayers); None: no gates.
        rotary_fraction: of a head's features, that rotates.
    """

    sights: Sights = field(kw_only=True)
    sizes: Mapping[Sight, attention.Sizes] = field(kw_only=True)
    given: Settings = field(default_factory=Settings)
    gates: FloatArray | None = None
    rotary_fraction: float = 1.0

    def scores(self, row: Row, second_query: Array, second_key: Array) -> tuple[Array, Array]:
        """As `Heads.scores`, capped."""
        s0, bias = super().scores(row, second_query, second_key)
        return capped(s0, self.given.score_cap), bias

    def forward(self, i: Rows, x: Signal, memory: Signal | None = None) -> Signal:
        if several := self._by_sight(i):
            return _together([(at, self.forward(rows, _of(x, at))) for at, rows in several])
        row, averages = self.at(i), self.averages(i, x)
        values = self._values(row, x, averages)
        if self.gates is not None:
            values = values.times(activated(self._before_gate(i, x), "sigmoid"))
        return linear(values, row.output, row.output_bias)

    def backward(self, i: Rows, x: Signal, g: Signal, memory: Signal | None = None) -> Sent:
        """Over all three paths; what a sink's share changes with the scores is left out."""
        if several := self._by_sight(i):
            return Sent(_together([(at, self.backward(rows, _of(x, at), _of(g, at)).stream) for at, rows in several]))
        row, averages = self.at(i), self.averages(i, x)
        if isinstance(i, int):
            self.attentions.pop(i, None)
        arrived, back = g, row.back * self._normed(row, x)
        if self.given.sink is not None and (share := averages.beside_sink(self.given.sink)) is not None:
            arrived = arrived.times(share)
        if self.gates is None:
            return Sent(linear(averages.backward(arrived), back))
        gate = self._before_gate(i, x)
        through = averages.backward(arrived.times(activated(gate, "sigmoid")))
        slope = activated_back(g.times(self._values(row, x, averages)), gate, "sigmoid")
        return Sent(linear(through, back).plus(linear(slope, self._gate(i).back)))

    def averages(self, i: Rows, x: Signal) -> Averages:
        """What heads do; for n nodes stored on the way forward, where that is asked for, and found on the way back."""
        if self.nodes is None:
            return self._on_one_node(i, self.at(i), x)
        assert isinstance(i, int)
        stored = None if self.nodes.caches else self.attentions.get(i)
        found: Averages = stored or self._on_nodes(i, self.at(i), x)
        if self.nodes.caches:
            self.attentions[i] = found
        return found

    def _on_one_node(self, i: Rows, row: Row, x: Signal) -> Averages:
        s0, bias = self.scores(row, x.per_token, x.per_token)
        read = self.sizes[self._sees(i)].on_itself(x.cosine(), s0, query_bias=bias)
        return OneNode(read, x.per_token, (row.value_skip, row.attention_gain) if self.mixes else None)

    def _on_nodes(self, i: int, row: Row, x: Signal) -> Averages:
        from signalprop.sublayers.attention.on_nodes import (
            Normed,
            Shaped,
            Softmax,
            normed,
            of_tokens,
            score_variance,
        )

        skip, gain = (float(row.value_skip), float(row.attention_gain)) if self.mixes else (0.0, 1.0)
        if self.nodes.shapes[i]:
            fields = {"shapes": self.nodes.shapes[i], "dropout": self.attention_dropout, "value_skip": skip}
            return Shaped(x, self.nodes, fields | {"gain": gain})
        read = normed(row, x, self.norm_eps) if self.qk_norm else Normed(1.0, x, x, None)
        fields = {
            "qk": score_variance(row, read.read.per_token, self.given.score_cap),
            "d_model": self.d_model,
            "dropout": self.attention_dropout,
            "query_bias": of_tokens(row.query_bias) / read.size,
            "value_skip": skip,
            "gain": gain,
        }
        if read.norms is not None and self.nodes.grid is None:
            fields["values"] = read.values.matrix()
        elif read.norms is not None:
            fields |= {"values": read.values.shared, "value_per_token": read.values.per_token}
        return Softmax(self._seeing(i, read.read, fields), read.size, skip + gain, read.norms)

    def _seeing(self, i: int, read: Signal, fields: dict[str, Any]) -> Any:
        """The attention of sublayer i: through its window, or of all tokens."""
        from signalprop.kernels.sliding_window import windowed
        from signalprop.kernels.softmax_rows import rotation
        from signalprop.sublayers.attention.on_nodes import placed

        (window, base), share, causal = self.sights.at(i), self.rotary_fraction, bool(self.causal)
        rho = omega = turn = None
        if base:
            rho, omega = rotation(self.n_keys, self.d_head, base, share, causal or window > 0)
        if window:
            return windowed(read.matrix(), window, rho, omega, causal=causal, **fields)
        if base and self.nodes.grid:
            turn = self.nodes.grid.rotated(self.d_head, base, share)
        return placed(self.nodes, read, (rho, omega, turn), fields, causal=causal)

    def _sees(self, i: Rows) -> Sight:
        """What a row sees, or rows that all see the same."""
        return self.sights.at(i if isinstance(i, int) else int(np.ravel(i)[0]))

    def _values(self, row: Row, x: Signal, averages: Averages) -> Signal:
        """What the heads give, before a gate."""
        normed = self._normed(row, x)
        values = averages.forward(row.value * normed, row.value_bias * normed)
        if self.given.sink is not None and (share := averages.beside_sink(self.given.sink)) is not None:
            values = values.times(share)
        return values

    def _normed(self, row: Row, x: Signal) -> Array:
        """What a norm multiplies the variance of values by; 1 without one."""
        if not self.given.value_norm:
            return 1.0
        return ratio(1.0, size_of(x) * row.value + row.value_bias + self.norm_eps)

    def _gate(self, i: Rows) -> GateRow:
        """The products of the gate of sublayer i, or of several."""
        assert self.gates is not None
        return GateRow(*(plain(column) for column in self.gates[..., i]))

    def _before_gate(self, i: Rows, x: Signal) -> Signal:
        gate = self._gate(i)
        return linear(x, gate.weight, gate.bias)

    def _by_sight(self, i: Rows) -> list[tuple[Rowset, Rowset]]:
        """Of rows that do not all see the same: where those stand that do, and which they are."""
        if isinstance(i, int) or len(self.sights.run) == 1:
            return []
        sight = self.sights.layer[i] % len(self.sights.run)
        found = [np.flatnonzero(sight == k) for k in np.unique(sight)]
        return [(at, i[at]) for at in found] if len(found) > 1 else []


def _of(x: Signal, at: Any) -> Signal:
    """Of some of several sublayers."""
    return Signal(np.asarray(x.per_token)[..., at], np.asarray(x.shared)[..., at])


def _together(parts: Sequence[tuple[Rowset, Signal]]) -> Signal:
    """Signals of some sublayers each as those of all."""
    order = np.argsort(np.concatenate([at for at, _ in parts]))
    per_token, shared = (np.concatenate([np.asarray(x) for x in side], axis=-1)[..., order]
                   for side in zip(*(part for _, part in parts), strict=True))  # fmt: skip
    return Signal(per_token, shared)


def size_of(x: Signal) -> Array:
    """Mean square of an entry, over all nodes."""
    return float(np.mean(x.per_token)) if x.has_nodes else x.per_token


def around(p: Parametrization) -> dict[str, Any]:
    """The fields of SelfAttention beyond heads."""
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


def of(p: Parametrization, stack: int, nodes: Any = None) -> SelfAttention:
    """The self-attention sublayers of a table in one stack (index into STACKS)."""
    a = p.architecture
    fields = settings(a, stack)
    sight = sights(a, p.layer, fields["n_queries"])
    if any(one.window for one in sight.run) and (p.shaping.kind != "none" or a.positions == "alibi"):
        shape = "ALiBi" if p.shaping.kind == "none" else p.shaping.kind
        raise InputError(f"attention.window with {shape}: shaped attention has no window; leave one of them out")
    sizes = {one: sizes_of(a, fields, one) for one in dict.fromkeys(sight.run)}
    return SelfAttention(
        table_of(p), mixes(p), **fields, nodes=nodes, sights=sight, sizes=sizes, rotary_fraction=a.rotary_fraction,
        **around(p),
    )  # fmt: skip


def sizes_of(a: Architecture, fields: Mapping[str, Any], sight: Sight) -> attention.Sizes:
    """What the formulas of one node take of heads that see so much; fields: of `settings`."""
    n, causal, mask = fields["n_queries"], fields["causal"], fields["causal"]
    length, turns = n, {}
    if sight.window:
        mask = band = Band(sight.window, causal)
        length, causal = min(n, band.widest), False  # what rotations leave is that of a row away from the ends
    if sight.base:
        turned = (length, a.d_head, sight.base, a.rotary_fraction)
        turns["omega"] = attention_scores.rotary_coherence(*turned, causal="pairs" if causal else None)
        if causal:
            turns["omega_rows"] = attention_scores.rotary_coherence(*turned, causal="rows")
    return attention.Sizes(n, n, a.d_model, fields["attention_dropout"], causal=mask, **turns)
