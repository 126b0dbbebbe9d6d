"""A mixture of experts computed again from its maps, in float64: which map routes, which are the experts'.

Experts are stored as one tensor of three axes per map: (experts, outputs, inputs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, replace
from itertools import permutations, product

import torch
from torch import Tensor

from signalprop.streams.feed_forwards import CLAMPED, Bend, bends, feed_forward
from signalprop.streams.replay import Map, Replayed, Routing, Rows
from signalprop.streams.routing import choose

_FEW = 3  # tokens that are tried first
SPARSE = "sparse mixer"


@dataclass(frozen=True)
class _Reading:
    """One way to read the tensors: paths with the output features of gate (None: ungated) and up, and the way down."""

    gate: tuple[str, Rows] | None
    up: tuple[str, Rows]
    down: str
    activation: str = ""


def experts(
    x: Tensor,
    target: Tensor,
    tensors: Dictionary[str, Tensor],
    maps: Sequence[Map],
    numbers: Dictionary[str, float],
    limit: float,
    like: Replayed | None = None,
) -> Replayed | float:
    """The roles of a branch's tensors, where it outputs weighted sums of the experts' outputs for each token.

    Args:
        x, target: what enters the branch and what leaves it, (tokens, features), float64.
        tensors: of the branch, parameters and buffers by path. maps: its linear maps that ran.
        numbers: by the names that the configuration and the modules have for them. like: a branch that was proved.

    Returns:
        The smallest error where none fits.
    """
    size, best, between = float(target.abs().max()) or 1.0, math.inf, bends(numbers)
    readings = list(_readings(tensors, x.shape[-1]))
    for shared, added in _shared(x, maps, between, limit):
        rest = target - added
        for router, routing, chosen in _routings(x, tensors, numbers):
            for reading in _with_activations(readings, between, like):
                few = _mixed(x[:_FEW], chosen[:_FEW], reading, tensors, between)
                scale = float((few * rest[:_FEW]).sum() / (few * few).sum().clamp_min(1e-300))
                error = float((scale * few - rest[:_FEW]).abs().max()) / size
                best = min(best, error)
                if error > limit or not bool(target.any()):
                    continue
                whole = _mixed(x, chosen, reading, tensors, between)
                scale = float((whole * rest).sum() / (whole * whole).sum())
                error = float((scale * whole - rest).abs().max()) / size
                blind = _mixed(x[:_FEW], chosen[:_FEW].roll(1, 1), reading, tensors, between)
                change = float((scale * blind - rest[:_FEW]).abs().max()) / size
                if error <= limit and change > 64 * error:  # else any routing would fit
                    return _found(tensors, numbers, router, routing, reading, shared, scale, error)
    return best


def _found(
    tensors: Dictionary[str, Tensor],
    numbers: Dictionary[str, float],
    router: str,
    routing: Routing,
    reading: _Reading,
    shared: Dictionary[str, tuple[str, Rows]],
    scale: float,
    error: float,
) -> Replayed:
    weights: dict[str, tuple[str, Rows]] = {"router": (_owner(router), None)}
    weights |= {} if reading.gate is None else {"expert_gate": (_owner(reading.gate[0]), reading.gate[1])}
    weights |= {"expert_up": (_owner(reading.up[0]), reading.up[1]), "expert_down": (_owner(reading.down), None)}
    routing = replace(
        routing,
        width=int(tensors[reading.down].shape[2]),
        scale=next((v for v in (1.0, *numbers.values()) if abs(scale / (v or 1) - 1) < 1e-5), scale),
    )
    return Replayed({**weights, **shared}, error, activation=reading.activation, routing=routing)


def _owner(path: str) -> str:
    """The module of a weight; the parameter itself where it has another name."""
    return path.removesuffix(".weight")


def _readings(tensors: Dictionary[str, Tensor], width: int) -> Iterator[_Reading]:
    """Which tensor of three axes is the way up, which the way down."""
    three = {path: t for path, t in tensors.items() if t.ndim == 3}
    for down in (path for path, t in three.items() if t.shape[1] == width):
        inner = three[down].shape[2]
        first = {p: t.shape[1] for p, t in three.items() if p != down and t.shape[2] == width}
        for up in (p for p in first if first[p] == 2 * inner):
            for one, other in ((slice(0, inner), slice(inner, None)), (slice(0, None, 2), slice(1, None, 2))):
                yield _Reading((up, one), (up, other), down)
                yield _Reading((up, other), (up, one), down)
        same = [p for p in first if first[p] == inner]
        for gate, up in sorted(permutations(same, 2), key=lambda pair: "gate" not in pair[0]):
            yield _Reading((gate, None), (up, None), down)
        for up in same:
            yield _Reading(None, (up, None), down)


def _with_activations(
    readings: Sequence[_Reading], between: Dictionary[str, Bend], like: Replayed | None
) -> Iterator[_Reading]:
    first = ("silu", "gelu", CLAMPED) if like is None else (like.activation,)
    names = sorted(between, key=lambda name: name not in first)
    return (replace(reading, activation=name) for name, reading in product(names, readings))


def _mixed(
    x: Tensor, chosen: Tensor, reading: _Reading, tensors: Dictionary[str, Tensor], between: Dictionary[str, Bend]
) -> Tensor:
    """Sums over experts of weight * expert(token), (tokens, features). chosen: weights, (tokens, experts)."""
    out = torch.zeros_like(x)
    for e in chosen.any(0).nonzero().flatten().tolist():
        tokens = chosen[:, e].nonzero().flatten()
        up, gate = (
            None if place is None else _through(x[tokens], tensors, *place, e) for place in (reading.up, reading.gate)
        )
        assert up is not None
        y = between[reading.activation](gate, up)
        out[tokens] += chosen[tokens, e, None] * _through(y, tensors, reading.down, None, e)
    return out


def _through(x: Tensor, tensors: Dictionary[str, Tensor], path: str, rows: Rows, e: int) -> Tensor:
    y = x @ tensors[path][e].detach().double().cpu().mT
    return y if rows is None else y[:, rows]


def _shared(
    x: Tensor, maps: Sequence[Map], between: Dictionary[str, Bend], limit: float
) -> Iterator[tuple[dict[str, tuple[str, Rows]], Tensor]]:
    """Nothing; or the roles of a feed-forward that every token has beside its experts, and what it adds."""
    reading = [m for m in maps if m.read.shape == x.shape and torch.equal(m.read, x)]
    for last in maps:
        if last.gave.shape != x.shape or last in reading:
            continue
        found = feed_forward([m for m in reading if m.gave.shape[-1] > 1], last, limit, between)
        if isinstance(found, Replayed):
            roles = {f"shared_{role}": place for role, place in found.weights.items()}
            yield roles, last.gave
            for gate in (m for m in reading if m.gave.shape[-1] == 1):
                yield {**roles, "shared_router": (gate.path, None)}, gate.gave.sigmoid() * last.gave
    yield {}, torch.zeros_like(x)


def _routings(
    x: Tensor, tensors: Dictionary[str, Tensor], numbers: Dictionary[str, float]
) -> Iterator[tuple[str, Routing, Tensor]]:
    """(path of the router's weight, the rule, weights (tokens, experts)), each set of weights once."""
    n = next((len(t) for t in tensors.values() if t.ndim == 3), 0)
    counts = {int(v) for name, v in numbers.items() if _counts(name) and 1 <= v <= n and v == int(v)}
    groups = {int(v) for name, v in numbers.items() if "group" in name and 1 < v < n and n % v == 0}
    tops = {int(v) for name, v in numbers.items() if "group" in name and "top" in name and 1 <= v < n}
    pairs = [*((g, t) for g in sorted(groups) for t in sorted(tops) if t < g), (1, 1)]  # of equal ones, the first
    vectors = [None, *(t for t in tensors.values() if t.shape == (n,))]
    done: list[Tensor] = []
    routers = [(p, t) for p, t in tensors.items() if t.shape == (n, x.shape[-1])]
    for (path, weight), k in product(routers, sorted(counts or range(1, min(n, 8) + 1))):
        router_bias = tensors.get(f"{_owner(path)}.bias")
        logits = x @ weight.detach().double().cpu().mT
        logits = logits if router_bias is None else logits + router_bias.detach().double().cpu()
        for rules, weights, index in _rules(logits, k, vectors, pairs, router_bias, numbers):
            chosen = torch.zeros_like(logits).scatter(1, index, weights)
            if not any(torch.equal(chosen, other) for other in done):
                done.append(chosen)
                yield path, rules, chosen


def _rules(
    logits: Tensor,
    k: int,
    vectors: Sequence[Tensor | None],
    pairs: Sequence[tuple[int, int]],
    router_bias: Tensor | None,
    numbers: Dictionary[str, float],
) -> Iterator[tuple[Routing, Tensor, Tensor]]:
    """(the rule, weights and indices of the chosen) by every rule that is known."""
    n = logits.shape[-1]
    for rule, (g, top), vector in product(("softmax", "sigmoid"), pairs, vectors):
        if g > 1 and (k > n // g * top or n < 2 * g):
            continue
        correction = None if vector is None or vector is router_bias else vector.detach().double().cpu().flatten()
        for normalised in (True, False):
            rules = Routing(n, k, 0, rule, normalised, 1.0, g, top, router_bias is not None, vector is not None)
            yield rules, *choose(logits, rules, correction)
    for noise in (v for name, v in numbers.items() if "jitter" in name and v > 0):
        yield Routing(n, k, 0, SPARSE, False, router_biased=router_bias is not None), *_sparse(logits, k, noise)


def _sparse(logits: Tensor, k: int, noise: float) -> tuple[Tensor, Tensor]:
    """Weights and indices by SparseMixer (Liu et al. 2023): each by a softmax over those near the best that is left."""
    left, weights, index = logits, [], []
    for _ in range(k):
        best = left.max(-1, keepdim=True)
        far = (best.values - logits) / logits.abs().clamp(min=best.values) > 2 * noise
        weights.append(left.masked_fill(far, -math.inf).softmax(-1).gather(-1, best.indices))
        index.append(best.indices)
        left = left.scatter(-1, best.indices, -math.inf)
    return torch.cat(weights, -1), torch.cat(index, -1)


def _counts(name: str) -> bool:
    return "top" in name or "per_tok" in name or "selected" in name or name.endswith("_k")
