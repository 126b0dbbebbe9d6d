"""Are two networks one, in other units? The canonical form of a table, and the gauge between two of them.

A norm does not see the size of what it reads, so multipliers on the stream can be moved into units of the stream, and
from there into weights (docs/theory/gauge.md). What no change of units moves is compared: `docs/schemes.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from signalprop.errors import InputError
from signalprop.files.documents import Document, fields_of
from signalprop.files.validation import Value, typed
from signalprop.network.activations import activation
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import ROLE, kind_of, kinds_in
from signalprop.network.layout import PLACEMENTS, STACKS, stacks_of
from signalprop.network.parametrization import LEARNING_RATES, Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE, NORM_ON_BRANCH
from signalprop.schemes.base import parametrized

SCHEMA = "signalprop/equivalence/1"
_TOLERANCE = 1e-9  # relative: of numbers that are worked out in another order
_IN_THE_TABLE = {
    "norm_placement",
    "final_norm",
    "norm_eps",
    "attention_scale",
    "embedding_scale",
    "family",
    "init_scale",
    "branch_scale",
    "head_scale",
    "role_scale",
}
_ATTENTION: dict[str, tuple[str, ...]] = {
    "scores (query x key)": ("query", "key"),
    "value x output": ("value", "output"),
}
_TRAINED = ("branch_trainable", "skip_trainable", "attention_trainable")


class Difference(Value):
    """The first thing that no change of units takes away.

    Attributes:
        where: `architecture`, `embedding`, a sublayer in words, or `head`. what: in words. one, other: its values.
    """

    where: str
    what: str
    one: Any
    other: Any


class Equivalence(Value, Document):
    """Whether two networks are one function of their weights up to a gauge; see `equivalent`.

    Attributes:
        same: the answer. difference: what differs first; None where they are the same.
        stream: unit of the one network's stream over the other's, at the start and after every sublayer.
        weights: by role, standard deviation of the one network's weights over the other's, of every sublayer, 1 where
            it has no such weight; roles that are equal everywhere are left out.
        notes: what is the same but for details: epsilon, learning rates, what is trained.
    """

    same: bool
    difference: Difference | None = None
    stream: tuple[float, ...] = ()
    weights: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"schema": SCHEMA} | self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Any) -> Equivalence:
        """Read what `to_json` wrote (`data`).

        Raises:
            InputError: another schema version, or a missing or unknown field.
        """
        found = {k: v for k, v in fields_of(data, SCHEMA, "an equivalence").items() if k != "schema"}
        for name in ("stream", "notes"):
            found[name] = tuple(found.get(name, ()))
        found["weights"] = {role: tuple(factors) for role, factors in dict(found.get("weights", {})).items()}
        if found.get("difference"):
            found["difference"] = Difference(**found["difference"])
        return cls(**found)

    def summary(self) -> str:
        """The answer in one line."""
        if self.difference is not None:
            d = self.difference
            return f"different networks: {d.where}: {d.what} {_words(d.one)} against {_words(d.other)}"
        if all(math.isclose(x, 1, rel_tol=_TOLERANCE) for x in self.stream):
            units = "in the same units"
        else:
            units = f"in units of the stream from {min(self.stream):.4g} to {max(self.stream):.4g} times the other's"
        return f"the same network, {units}; weights {'multiplied' if self.weights else 'unchanged'}"


@typed
def equivalent(one: str | Architecture | Parametrization, other: str | Architecture | Parametrization) -> Equivalence:
    """Whether two networks are one function of their weights, up to units of the stream and of what is inside a branch.

    Both are brought to a form without multipliers: the stream in units of the token table, every fixed factor in the
    weights that it can be moved to, no size where a norm takes it away. What is left is compared sublayer by sublayer:
    the ratio of branch and skip, products of matrices with nothing but linear maps between them, biases in units of
    their maps. Sizes are standard deviations, so weights are the same where their distributions are. Inside a branch
    the freedom of attention and feed-forward is known; of other kinds every matrix is compared by itself, and a freedom
    there is not found. Several residual streams are one where their connections keep equal streams equal.

    Args:
        one, other: a preset's name or an Architecture, with the scheme that `predict` takes for it; or a
            Parametrization.

    Raises:
        InputError: an unknown preset, or a sweep.
    """
    mine, theirs = parametrized(one), parametrized(other)
    for p in (mine, theirs):
        if p.skip.ndim != 1:
            raise InputError(f"this parametrization is a sweep of shape {p.skip.shape[:-1]}; give one of its members")
    several = [p.architecture.streams is not None for p in (mine, theirs)]
    mine, theirs = _of_one_stream(mine), _of_one_stream(theirs)
    merged = any(many and p.architecture.streams is None for many, p in zip(several, (mine, theirs), strict=True))
    difference = _of_architectures(mine, theirs)
    if difference is not None:
        return Equivalence(same=False, difference=difference)
    forms = [_Canonical(p) for p in (mine, theirs)]
    for (where, a), (_, b) in zip(forms[0].parts, forms[1].parts, strict=True):
        for what in a:
            if not _alike(a[what], b[what]):
                return Equivalence(
                    same=False, difference=Difference(where=where, what=what, one=a[what], other=b[what])
                )
    stream = tuple(x / y for x, y in zip(forms[0].units, forms[1].units, strict=True))
    if mine.architecture.layer_inputs is not None and not all(_alike(x, stream[0]) for x in stream):
        return Equivalence(same=False, difference=Difference(where="stream", what="size", one=max(stream), other=1.0))
    weights = _factors(mine, theirs)
    return Equivalence(same=True, stream=stream, weights=weights, notes=_notes(mine, theirs, stream) + _EQUAL * merged)


def _of_architectures(one: Parametrization, other: Parametrization) -> Difference | None:
    """The first field that differs, what the table says itself left out."""
    a, b = one.architecture, other.architecture
    mine, theirs = a.model_dump(exclude=_IN_THE_TABLE), b.model_dump(exclude=_IN_THE_TABLE)
    fields = [(name, mine[name], theirs[name]) for name in mine]
    fields.append(("final_norm", a.has_final_norm, b.has_final_norm))
    fields.append(("shaping", one.shaping, other.shaping))
    return next((Difference(where="architecture", what=n, one=x, other=y) for n, x, y in fields if x != y), None)


_EQUAL = ("residual streams that start equal stay so with these connections; training parts them",)


def _of_one_stream(p: Parametrization) -> Parametrization:
    """The same function of one stream, where the connections keep equal streams equal; else the table itself.

    Gates that see nothing read a multiple of the stream, which the norm before the branch takes out.
    """
    s = p.architecture.streams
    if s is None or (s.mixing != "hyper" and not (s.gated and s.logit_std(p.architecture.d_model) == 0)):
        return p
    written = s.write_gain / (1 + math.exp(-s.write_bias)) if s.gated else 1.0
    return replace(p, architecture=p.architecture.replace(streams=None)).with_columns(branch=written * p.branch)


class _Canonical:
    """A table without what a change of units can take away.

    Attributes:
        parts: (place, invariant numbers by name) of embedding, sublayers, head. units: of the stream at the embeddings
            and after every sublayer.
    """

    def __init__(self, p: Parametrization) -> None:
        self.p, self.a = p, p.architecture
        self.units: list[float] = []
        self.parts: list[tuple[str, dict[str, Any]]] = []
        self.distributed = {
            role: p.distribution[role] for kind in kinds_in(p) for role in kind.role_names(p.architecture)
        }
        start = self._embedding()
        memory = 1.0
        for _, rows in stacks_of(p):
            unit = layer_in = start
            for i in rows:
                if not p.parallel[i]:
                    layer_in = unit
                unit = self._row(i, layer_in, unit, memory)
            memory = p.head.final_norm_gain if self.a.has_final_norm else unit
        h = p.head
        if self.a.squash and self.a.has_final_norm:
            self.parts.append(("final norm", {"slope by the size that it reads": h.final_norm_slope * unit}))
        head = {"weights": h.distribution, "dense layer": h.transform * memory, "matrix": h.weight * h.scale * memory}
        if h.transform:  # a norm stands between the two
            head["matrix"] = h.weight * h.scale
        self.parts.append(("head", head))

    def _embedding(self) -> float:
        """The unit of the stream at the start: what the token table, or the last map of the input, gives."""
        e = self.p.embedding
        token = (e.convolutions[-1] if e.convolutions else e.token) or 1.0
        found: dict[str, Any] = {"weights": e.distribution}
        for name in ("position", "decoder_position", "segment", "patch_bias"):
            found[name.replace("_", " ")] = (getattr(e, name) or 0.0) / token
        found["convolutions"] = (*e.convolutions[:-1], *(bias / token for bias in e.convolution_biases))
        self.parts.append(("embedding", found))
        unit = e.norm_gain if self.a.embedding_norm else token * e.scale
        self.units.append(unit)
        return unit

    def _row(self, i: int, layer_in: float, before: float, memory: float) -> float:
        """Note the invariants of a sublayer; the unit of the stream after it."""
        p, place = self.p, PLACEMENTS[self.p.placement[i]]
        kind = kind_of(p, i)
        skip = 1.0 if p.parallel[i] else abs(float(p.skip[i]))
        branch, norm = abs(float(p.branch[i])), float(p.norm_output[i])
        read = norm if place in NORM_BEFORE else layer_in
        kept = skip * before if skip > 0 else branch or 1.0  # without a skip the branch alone says what the unit is
        found: dict[str, Any] = {"norm": place, "skip": skip > 0}
        sizes, biases = {}, {}
        for role in kind.role_names(self.a):
            size = float(p.weights[role][i])
            if ROLE[role].reads:
                size *= memory if kind.reads_memory and role != "query" else read
            sizes[role], biases[role] = size, float(p.biases[role][i])
        last = next((role for role in sizes if ROLE[role].writes), "")
        hidden = place in NORM_ON_BRANCH or (place in NORM_AFTER and skip == 0)  # a norm sees the branch alone
        share = branch / kept
        if hidden:
            gain = float(p.post_norm_gain[i]) if place == "sandwich" else norm if place in NORM_ON_BRANCH else 1.0
            found["branch over skip"] = share * gain
        elif last:
            sizes[last], biases[last] = sizes[last] * share, biases[last] * share
        else:
            found["branch over skip"] = share
        if self.a.squash and place in NORM_BEFORE:
            found["slope by the size that it reads"] = float(p.norm_slope[i]) * layer_in
        found |= self._inside(i, sizes, biases, last if hidden else "")
        where = f"layer {int(p.layer[i])} {kind.words}"
        self.parts.append((f"{STACKS[p.stack[i]]} {where}" if self.a.n_decoder_layers else where, found))
        after = norm if place in NORM_AFTER else kept
        self.units.append(after)
        return after

    def _inside(self, i: int, sizes: dict[str, float], biases: dict[str, float], hidden: str) -> dict[str, Any]:
        """Invariants of a branch: products of linear maps, single maps, biases in units of their map.

        `hidden`: the last map, where a norm takes its size away.
        """
        p, a = self.p, self.a
        kind = kind_of(p, i)
        groups = _groups(a, kind.name, kind.attends)
        found: dict[str, Any] = {}
        free = {hidden} | {role for roles in groups.values() for role in roles}
        for name, roles in groups.items():
            product = math.prod(sizes[role] for role in roles)
            if roles[0] == "query":
                product = (1.0 if a.qk_norm else product) * abs(float(p.score_scale[i]))
            if roles[0] == "value":
                own, mean = float(p.value_skip[i]), float(p.attention_gain[i])
                found["a token's value over the average"] = own / mean if mean else math.inf
                product *= abs(mean or own)
            if hidden not in roles:
                found[name] = product
        for role, size in sizes.items():
            if role not in free:
                found[role] = size
            bias = biases[role]
            found[f"{role} bias"] = bias / size if role in free and size > 0 else bias
            found[f"{role} distribution"] = self.distributed[role] if size > 0 else ""
        if kind.attends and not groups:
            found["scale of scores"] = abs(float(p.score_scale[i]))
            found["values"] = (float(p.value_skip[i]), float(p.attention_gain[i]))
        return found


def _groups(a: Architecture, kind: str, attends: bool) -> dict[str, tuple[str, ...]]:
    """Roles with nothing but linear maps between them, whose product alone shows; none where settings change that."""
    own = a.settings.get(kind)
    if own is not None and own != type(own)():
        return {}
    if attends:
        return _ATTENTION
    if kind == "feed_forward" and (a.gated or activation(a.activation).name in ("relu", "identity")):
        return {"up x down": ("up", "down")}
    return {}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(_alike(x, y) for x, y in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return bool(one == other)


def _factors(one: Parametrization, other: Parametrization) -> dict[str, tuple[float, ...]]:
    """By role, size of the weights over the other's; roles that are equal everywhere are left out."""
    out = {}
    for role, theirs in other.weights.items():
        ratio = np.divide(one.weights[role], theirs, out=np.ones(len(theirs)), where=theirs != 0)
        if not np.allclose(ratio, 1, rtol=_TOLERANCE, atol=0):
            out[role] = tuple(ratio.tolist())
    return out


def _notes(one: Parametrization, other: Parametrization, stream: tuple[float, ...]) -> tuple[str, ...]:
    """What the same function does not say."""
    a, b = one.architecture, other.architecture
    notes = []
    moved = any(not math.isclose(x, 1, rel_tol=_TOLERANCE) for x in stream)
    if a.norm_eps != b.norm_eps or (moved and a.norm_eps > 0):
        notes.append(
            f"exact but for the epsilon of norms ({a.norm_eps:g} and {b.norm_eps:g}), which counts in units of what "
            "the norm reads"
        )
    rates: Mapping[str, Any] = one.learning_rates
    ends = [(p.embedding.learning_rate, p.head.learning_rate, p.head.transform_learning_rate) for p in (one, other)]
    if ends[0] != ends[1] or any(not np.array_equal(rates[n], other.learning_rates[n]) for n in LEARNING_RATES):
        notes.append("learning rates differ: the same function, trained in another way")
    if any(getattr(one, name) != getattr(other, name) for name in _TRAINED):
        notes.append("different multipliers are trained: the functions are equal at the start only")
    return tuple(notes)


def _words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
