"""Attentions computed again from their maps, in float64: which map is the query's, the key's; and what a replay says.

A role is a claim until the branch, replayed from it, gives what the model gave.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Rows = slice | Sequence[int] | None
BY_FUNCTION = ("", "")
# The words of names, in the order in which maps are tried; only the replay decides.
_WORDS = {
    "query": r"(^|[._])(q|query|wq|q_proj|to_q|q_lin)\b|query",
    "key": r"(^|[._])(k|key|wk|k_proj|to_k|k_lin)\b|key",
    "value": r"(^|[._])(v|value|wv|v_proj|to_v|v_lin)\b|value",
    "gate": r"gate|w1\b|wi_0",
    "up": r"up|w3\b|wi_1|fc|in",
}


@dataclass(frozen=True)
class Map:
    """A map of a branch: its path, what it reads and outputs, (tokens, features), float64."""

    path: str
    read: Tensor
    gave: Tensor


@dataclass(frozen=True)
class Rotation:
    """Queries and keys are turned, a pair of features by frequency * position.

    Attributes:
        halves: feature i is turned with i + n / 2, not with i + 1.
    """

    frequencies: tuple[float, ...]
    halves: bool
    gain: float = 1.0

    def turn(self, x: Tensor) -> Tensor:
        """(heads, tokens, features) -> the same, turned."""
        n = 2 * len(self.frequencies)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor(self.frequencies, dtype=x.dtype)
        cos, sin = self.gain * angle.cos(), self.gain * angle.sin()
        pairs = (slice(0, n // 2), slice(n // 2, n)) if self.halves else (slice(0, n, 2), slice(1, n, 2))
        out = x.clone()
        one, two = x[..., pairs[0]], x[..., pairs[1]]
        out[..., pairs[0]], out[..., pairs[1]] = one * cos - two * sin, two * cos + one * sin
        return out


@dataclass(frozen=True)
class AttentionShape:
    """What an attention does with its queries, keys and values, beside the maps.

    Attributes:
        order: of a fused map: its rows are query, key and value (`blocks`), or so for every key's head (`groups`);
            '' of separate maps. slopes: keys further away count less by ALiBi's slopes.
        table: path of the table whose rows are added to the scores, by distance. window: a query reads keys that are
            less than so many tokens away; 0: all.
    """

    heads: int
    kv_heads: int
    scale: float
    causal: bool
    order: str = ""
    rotation: Rotation | None = None
    slopes: bool = False
    table: str = ""
    window: int = 0


@dataclass(frozen=True)
class Routing:
    """How experts are chosen, beside the maps.

    Attributes:
        width: features inside an expert. scores: of the logits, `softmax` or `sigmoid`. normalised: the weights of the
            chosen are divided by their sum. scale: factor on what all of them give.
        n_groups, top_groups: only experts of the best groups can be chosen. router_biased: the router has a bias.
        corrected: a vector is added to the scores for the choice alone.
    """

    n_experts: int
    top_k: int
    width: int
    scores: str
    normalised: bool
    scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    router_biased: bool = False
    corrected: bool = False


@dataclass(frozen=True)
class Replayed:
    """A branch whose roles are proved.

    Attributes:
        weights: role -> (path of its map, output features there; None: all). error: largest difference of what the last
            map reads from the replay, over its largest entry. shape: of an attention.
        activation: of a feed-forward. across: keys and values read another stack's stream. norms: paths of those of
            queries and keys, BY_FUNCTION of root mean squares without modules. per_head: these are of one head.
    """

    weights: dict[str, tuple[str, Rows]]
    error: float
    shape: AttentionShape | None = None
    routing: Routing | None = None
    activation: str = ""
    norms: tuple[str, ...] = ()
    per_head: bool = True
    across: bool = False

    @property
    def words(self) -> str:
        """What the branch is."""
        if self.routing is not None:
            r = self.routing
            shared = ", shared ones" * ("shared_up" in self.weights)
            return f"{r.n_experts} experts, {r.top_k} a token by {r.scores}{shared}"
        if self.shape is not None:
            return "cross-" * self.across + "attention" + " with an output gate" * ("attention_gate" in self.weights)
        return "gated convolution" if "conv_filter" in self.weights else "feed-forward"

    @property
    def gated(self) -> bool:
        """Whether a feed-forward multiplies two maps."""
        return "gate" in self.weights or "expert_gate" in self.weights


@dataclass(frozen=True)
class Hints:
    """Numbers to try, that a configuration or the modules hold: heads, factors on scores, windows, rotations."""

    heads: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    rotations: tuple[Rotation, ...] = ()
    norms: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)  # (heads, tokens, tokens)


def named_so(path: str, role: str) -> bool:
    """Whether a map's name is usual for that role."""
    return re.search(_WORDS[role], path.rpartition(".")[2]) is not None


def attention(
    maps: Sequence[Map], memory: Sequence[Map], last: Map, hints: Hints, limit: float, like: Replayed | None = None
) -> Replayed | float:
    """The roles of maps, where `last` reads the output of an attention with them.

    Args:
        maps: that read what enters the branch. memory: those that read another stack's stream, which then make the keys
            and values. like: a branch that was proved, whose shape is tried first.

    Returns:
        The smallest error where none fits.
    """
    target, best = last.read, math.inf
    size = float(target.abs().max()) or 1.0
    for weights, tensors in _triples(maps, memory, target.shape[-1], hints, like):
        q, k, v, order, heads, kv_heads = tensors
        gates = list(_gates(maps, weights, target.shape[-1], heads))
        for (query, key, norms, per_head), shape in product(
            _normed(q, k, heads, kv_heads, hints), _shapes(q, heads, kv_heads, order, hints, like, bool(memory))
        ):
            if shape.scale == 0:
                continue
            if norms == BY_FUNCTION and (shape.window or shape.table or shape.slopes):
                continue
            bias = hints.tables.get(shape.table)
            if shape.table and (bias is None or len(bias) != heads):
                continue
            found = attended(query, key, _split(v, kv_heads), shape, bias)
            for gate, factor in gates:
                error = float((factor * found - target).abs().max()) / size
                best = min(best, error)
                if error > limit or not bool(target.any()):
                    continue
                blind = factor * attended(0 * query, key, _split(v, kv_heads), shape, bias)
                if float((blind - target).abs().max()) / size > 64 * error:  # else any queries and keys would fit
                    return Replayed(
                        {**weights, **gate, "output": (last.path, None)},
                        error,
                        shape,
                        norms=norms,
                        per_head=per_head,
                        across=bool(memory),
                    )
    return best


def _gates(
    maps: Sequence[Map], used: dict[str, tuple[str, Rows]], width: int, heads: int
) -> Iterator[tuple[dict[str, tuple[str, Rows]], Tensor]]:
    """No gate on what heads output; or one of features that are nothing else yet, one per feature or per head."""
    yield {}, torch.ones(())
    taken = [path for path, rows in used.values() if rows is None]
    for m in maps:
        held = {row for path, rows in used.values() if path == m.path and isinstance(rows, list) for row in rows}
        left = [row for row in range(m.gave.shape[-1]) if row not in held]
        if m.path not in taken and len(left) in (width, heads):
            for bent in (m.gave[:, left].sigmoid(), F.softplus(m.gave[:, left])):
                factor = bent.repeat_interleave(width // len(left), -1)
                yield {"attention_gate": (m.path, left if held else None)}, factor


def attended(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, bias: Tensor | None = None) -> Tensor:
    """What heads output, (tokens, heads * features), of queries, keys and values (heads, tokens, features)."""
    if shape.rotation is not None:
        q, k = shape.rotation.turn(q), shape.rotation.turn(k)
    groups = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = shape.scale * (q @ k.mT)
    apart = torch.arange(scores.shape[2])[None] - torch.arange(scores.shape[1])[:, None]
    if bias is not None and bias.shape == scores.shape:
        scores = scores + bias
    if shape.slopes:
        scores = scores + slopes(shape.heads)[:, None, None] * apart
    if shape.window:
        scores = scores.masked_fill(apart.abs() >= shape.window, -math.inf)
    if shape.causal:
        scores = scores.masked_fill(apart > 0, -math.inf)
    out = scores.softmax(-1) @ v
    return out.transpose(0, 1).flatten(1)


def slopes(heads: int) -> Tensor:
    """ALiBi's slope of each head (Press et al. 2022), float64."""
    whole = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    more = [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return torch.tensor(first + more, dtype=torch.float64)


def fused_rows(heads: int, kv_heads: int, d_head: int, order: str) -> dict[str, list[int]]:
    """Output features that are query, key and value in a fused map: `blocks`, or by turns in `groups`."""
    q, kv = heads * d_head, kv_heads * d_head
    rows = np.arange(q + 2 * kv)
    if order == "blocks":
        parts: list[Any] = np.split(rows, [q, q + kv])
    else:
        turns = rows.reshape(kv_heads, -1, d_head)
        parts = [turns[:, :-2], turns[:, -2], turns[:, -1]]
    return {role: part.ravel().tolist() for role, part in zip(("query", "key", "value"), parts, strict=True)}


_Tensors = tuple[Tensor, Tensor, Tensor, str, int, int]


def _triples(
    maps: Sequence[Map], memory: Sequence[Map], width: int, hints: Hints, like: Replayed | None
) -> Iterator[tuple[dict[str, tuple[str, Rows]], _Tensors]]:
    """Maps for query, key and value, with counts of heads, in the order in which they are tried."""
    known = () if like is None or like.shape is None else (like.shape.heads,)
    heads = [h for h in dict.fromkeys((*known, *hints.heads)) if h > 0 and width % h == 0]
    others = memory or maps
    every = sorted(
        ((q, k, v) for q in maps for k in others for v in others if len({id(m) for m in (q, k, v)}) == 3),
        key=lambda three: (
            -sum(named_so(m.path, role) for m, role in zip(three, ("query", "key", "value"), strict=True))
        ),
    )
    for (q, k, v), h in product(every[:24], heads):
        d, kv = width // h, k.gave.shape[-1]
        if v.gave.shape[-1] == kv and kv % d == 0 and h % (kv // d) == 0:
            others_of_head: dict[str, tuple[str, Rows]] = {"key": (k.path, None), "value": (v.path, None)}
            for part in _query_rows(q.gave.shape[-1], width, h):
                query = q.gave if part is None else q.gave[:, part]
                yield {"query": (q.path, part), **others_of_head}, (query, k.gave, v.gave, "", h, kv // d)
    for m, h, order in product(maps, heads, ("blocks", "groups")):
        rest, d = m.gave.shape[-1] - width, width // h
        if rest > 0 and rest % (2 * d) == 0 and h % (rest // (2 * d)) == 0:
            rows = fused_rows(h, rest // (2 * d), d, order)
            q_, k_, v_ = (m.gave[:, rows[role]] for role in ("query", "key", "value"))
            yield {role: (m.path, rows[role]) for role in rows}, (q_, k_, v_, order, h, rest // (2 * d))


def _query_rows(features: int, width: int, heads: int) -> Iterator[list[int] | None]:
    """All of a map's features; or half of them, of every head or as a block, beside a gate."""
    if features == width:
        yield None
    if features == 2 * width:
        rows = torch.arange(features)
        yield rows.reshape(heads, 2, -1)[:, 0].flatten().tolist()
        yield rows[:width].tolist()


def _shapes(
    q: Tensor, heads: int, kv_heads: int, order: str, hints: Hints, like: Replayed | None, across: bool
) -> Iterator[AttentionShape]:
    """What to try with those heads; first what another branch was proved to do."""
    if like is not None and like.shape is not None and (like.shape.heads, like.shape.kv_heads) == (heads, kv_heads):
        yield like.shape
    d = q.shape[-1] // heads
    turns = [one for one in hints.rotations if 2 * len(one.frequencies) <= d]
    rotations: list[Rotation | None] = [None] if across else [None, *turns]
    scales = tuple(dict.fromkeys((d**-0.5, 1.0, *hints.scales)))
    windows = (0,) if across else (0, *hints.windows)
    masks = (False,) if across else (True, False)
    for window, scale, turn, causal in product(windows, scales, rotations, masks):
        yield AttentionShape(heads, kv_heads, scale, causal, order, turn, window=window)
    if not across:
        yield AttentionShape(heads, kv_heads, d**-0.5, True, order, None, slopes=True)
    for scale, table, causal in product(scales, hints.tables, (True, False)):
        yield AttentionShape(heads, kv_heads, scale, causal, order, None, table=table)


def rows_of(tensor: Tensor) -> Tensor:
    """(tokens, features), float64, on the CPU."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).double().cpu()


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and the same entries."""
    return one.shape == other.shape and torch.equal(one, other)


def split_features(x: Tensor, parts: int) -> Tensor:
    """(..., parts * features) -> (..., parts, features)."""
    return x.reshape(*x.shape[:-1], parts, -1)


def _split(x: Tensor, heads: int) -> Tensor:
    """(tokens, heads * features) -> (heads, tokens, features)."""
    return x.reshape(x.shape[0], heads, -1).transpose(0, 1)


def _normed(
    q: Tensor, k: Tensor, heads: int, kv_heads: int, hints: Hints
) -> Iterator[tuple[Tensor, Tensor, tuple[str, ...], bool]]:
    """Queries and keys as they are; and after norms that read them, over a head or over all."""
    yield _split(q, heads), _split(k, kv_heads), (), True
    found = [[_after(x, n, *norm) for norm in hints.norms.items()] for x, n in ((q, heads), (k, kv_heads))]
    for one, other in product(*([hit for hit in side if hit is not None] for side in found)):
        if one[1] != other[1] or q.shape != k.shape or not torch.equal(q, k):
            yield one[0], other[0], (one[1], other[1]), one[2]
    if not hints.norms:
        for eps in (torch.finfo(torch.float32).eps, 1e-6):
            yield _over_rms(_split(q, heads), eps), _over_rms(_split(k, kv_heads), eps), BY_FUNCTION, True


def _over_rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _after(x: Tensor, heads: int, path: str, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, str, bool] | None:
    """(heads after the norm, its path, whether it is of one head), where it reads these features."""
    read, gave = tensors
    if read.numel() != x.numel():
        return None
    if read.shape[-1] == x.shape[-1]:
        same = torch.allclose(read.reshape(x.shape), x, rtol=1e-6, atol=0)
        return (_split(gave.reshape(x.shape), heads), path, heads == 1) if same else None
    split = _split(x, heads)
    if read.shape[-1] != split.shape[-1]:
        return None
    for turned in (False, True):  # (heads, tokens, features), or (tokens, heads, features)
        wanted = split.transpose(0, 1) if turned else split
        if torch.allclose(read.reshape(wanted.shape), wanted, rtol=1e-6, atol=0):
            out = gave.reshape(wanted.shape)
            return (out.transpose(0, 1) if turned else out), path, True
    return None
