"""Latent attention (DeepSeek) computed again from its maps: keys and values come from one narrow map and its norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from signalprop.streams.replay import (
    AttentionShape,
    Hints,
    Map,
    Replayed,
    Rows,
    attended,
    rows_of,
    same,
    scales_of,
    split_features,
)  # fmt: skip


def latent_attention(
    x: Tensor, maps: Sequence[Map], last: Map, hints: Hints, limit: float, like: Replayed | None = None
) -> Replayed | float:
    """The roles of maps, where `last` reads what an attention makes of queries, and of keys and values from one latent.

    Args:
        x: what enters the branch, (tokens, features). maps: that ran in the branch. like: a branch that was proved.

    Returns:
        The smallest error where none fits.
    """
    target, best = last.read, math.inf
    size = float(target.abs().max()) or 1.0
    for down, up, norm in _narrow(x, maps, hints):
        rank, turned = up.read.shape[-1], down.gave.shape[-1] - up.read.shape[-1]
        for (query, roles, norms), heads in product(_queries(x, maps, hints), hints.heads):
            d_value = target.shape[-1] // heads
            d_plain = up.gave.shape[-1] // heads - d_value
            d_query = query.gave.shape[-1] // heads
            if (
                d_plain <= 0
                or d_query != d_plain + turned
                or any(m % heads for m in (target.shape[-1], up.gave.shape[-1], query.gave.shape[-1]))
            ):
                continue
            both = split_features(up.gave, heads).transpose(0, 1)
            q = split_features(query.gave, heads).transpose(0, 1)
            shared = down.gave[:, rank:].expand(heads, -1, -1)
            for shape in _shapes(heads, d_query, turned, hints, like):
                plain = AttentionShape(heads, heads, shape.scale, shape.causal, window=shape.window)
                parts = [(q[..., :d_plain], q[..., d_plain:]), (both[..., :d_plain], shared)]
                if shape.rotation is not None:
                    parts = [(one, shape.rotation.turn(other)) for one, other in parts]
                queries, keys = (torch.cat(pair, -1) for pair in parts)
                error = float((attended(queries, keys, both[..., d_plain:], plain) - target).abs().max()) / size
                best = min(best, error)
                if error > limit or not bool(target.any()):
                    continue
                blind = attended(0 * queries, keys, both[..., d_plain:], plain)
                if float((blind - target).abs().max()) / size > 64 * error:  # else any queries and keys would fit
                    weights: dict[str, tuple[str, Rows]] = {**roles, "latent_down": (down.path, None)}
                    weights |= {"latent_up": (up.path, None), "output": (last.path, None)}
                    return Replayed(
                        weights, error, shape, norms=(*norms, norm), latent=(rank, turned, d_plain, d_value)
                    )
    return best


def _narrow(x: Tensor, maps: Sequence[Map], hints: Hints) -> Iterator[tuple[Map, Map, str]]:
    """(the map down to the latent, the map up from it, the norm between them or '')."""
    for down, up in product(maps, maps):
        rank = up.read.shape[-1]
        if not same(down.read, x) or up is down or rank > down.gave.shape[-1] or same(up.read, x):
            continue
        inside = down.gave[:, :rank]
        if same(inside, up.read):
            yield down, up, ""
        for path, (read, gave) in hints.norms.items():
            if same(rows_of(gave), up.read) and same(rows_of(read), inside):
                yield down, up, path


def _queries(
    x: Tensor, maps: Sequence[Map], hints: Hints
) -> Iterator[tuple[Map, dict[str, tuple[str, Rows]], list[str]]]:
    """(the map to queries, its roles, its norms): of the stream, or from a narrow map and its norm."""
    for one in (m for m in maps if same(m.read, x)):
        yield one, {"query": (one.path, None)}, []
    for down, up, norm in _narrow(x, maps, hints):
        if down.gave.shape[-1] == up.read.shape[-1]:
            yield up, {"query_down": (down.path, None), "query_up": (up.path, None)}, [norm]


def _shapes(heads: int, d_query: int, turned: int, hints: Hints, like: Replayed | None) -> Iterator[AttentionShape]:
    turns = [one for one in hints.rotations if 2 * len(one.frequencies) == turned]
    if (
        like is not None
        and like.shape is not None
        and like.shape.heads == heads
        and like.shape.rotation in [*turns, None]
    ):
        yield like.shape
    for window, scale, rotation, causal in product(
        (0, *hints.windows), scales_of(d_query, hints), [*turns, None], (True, False)
    ):
        yield AttentionShape(heads, heads, scale, causal, rotation=rotation, window=window)
