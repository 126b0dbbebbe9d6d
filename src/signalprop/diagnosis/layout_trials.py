"""Trials of how weights are laid out: rotary pairs, heads, thirds of fused maps, layers, matrices, gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import AttachedRow, Held
from signalprop.diagnosis.removal import lists_of
from signalprop.diagnosis.temporary_changes import (
    Copies,
    Trial,
    changed,
    other_attributes,
    part_of,
    part_of_bias,
    plain,
)
from signalprop.errors import InputError

_SQUARE = ("query", "key", "value", "output")
_PROJECTED = ("query", "key", "value")


def layout_trials(attached: Anatomy) -> Iterator[Trial]:
    """All that fit a model."""
    yield from _rotary_pairs(attached)
    yield from _grouping(attached)
    yield from _projections(attached)
    yield from _fused(attached)
    yield from _order(attached)
    yield from _matrices(attached)
    yield from _gates(attached)
    yield from _experts(attached)


def _with(attached: Anatomy, *roles: str) -> list[AttachedRow]:
    """Self-attention rows that have all of these weights as plain matrices."""
    return [
        row for row in attached.rows
        if row.kind.attends_itself and all(plain(row.weights.get(role)) for role in roles)
    ]  # fmt: skip


def _rotary_pairs(attached: Anatomy) -> Iterator[Trial]:
    """Rotary pairs are (i, i + d/2) in transformers, (2i, 2i + 1) in Meta's and GPT-J's code."""
    a = attached.mapping.architecture
    rows = _with(attached, "query", "key")
    turned = int(a.d_head * a.rotary_fraction)
    if a.positions != "rotary" or turned < 4 or not rows:
        return

    def reordered(copies: Copies, *, to_halves: bool) -> None:
        for row in rows:
            for role in ("query", "key"):
                held = row.weights[role]

                def pairs(x: Tensor) -> Tensor:
                    heads = x.reshape(-1, a.d_head, *x.shape[1:])
                    shape = (turned // 2, 2) if to_halves else (2, turned // 2)
                    first = heads[:, :turned]
                    heads[:, :turned] = first.reshape(-1, *shape, *x.shape[1:]).transpose(1, 2).reshape(first.shape)
                    return heads.reshape(x.shape)

                copies.weights(held, pairs)

    for to_halves, stored in ((True, "interleaved pairs"), (False, "two halves")):
        yield Trial(
            "rotary pairs",
            f"queries and keys are stored for rotary positions by {stored}, which this model does not read",
            f"query and key rows reordered to {'two halves' if to_halves else 'interleaved pairs'}",
            changed(lambda copies, to_halves=to_halves: reordered(copies, to_halves=to_halves)),  # type: ignore[misc]
        )


def _grouping(attached: Anatomy) -> Iterator[Trial]:
    """Query head h reads key head h // group in transformers; others number them the other way round."""
    a = attached.mapping.architecture
    kv = a.n_kv_heads
    rows = _with(attached, "query", "output")
    if kv in (1, a.n_heads) or a.n_heads % kv or not rows:
        return
    order = torch.arange(a.n_heads).view(kv, a.n_heads // kv).t().reshape(-1)
    every = {"h % key heads": order, "h // group": order.argsort()}
    if torch.equal(order, order.argsort()):
        del every["h // group"]
    for word, chosen in every.items():

        def regrouped(copies: Copies, chosen: Tensor = chosen) -> None:
            for row in rows:

                def heads(x: Tensor) -> Tensor:
                    return x.reshape(a.n_heads, -1, *x.shape[1:])[chosen.to(x.device)].reshape(x.shape)

                copies.weights(row.weights["query"], heads)
                copies.inputs(row.weights["output"], heads)

        yield Trial(
            "grouping", "query heads are stored in another order than the key heads that they read",
            f"query heads (and the output map's inputs) reordered, as if head h read key head {word}",
            changed(regrouped),
        )  # fmt: skip


def _projections(attached: Anatomy) -> Iterator[Trial]:
    """Queries, keys and values of one shape can change places, in a fused map or in three."""
    rows = _with(attached, *_PROJECTED)
    for order in permutations(_PROJECTED):  # what the maps read as query, key, value hold
        moved = [(to, source) for source, to in zip(_PROJECTED, order, strict=True) if to != source]
        shapes = [{part_of(row.weights[role]).shape for role, _ in moved} for row in rows]
        if not moved or not rows or any(len(found) > 1 for found in shapes):
            continue

        def reordered(copies: Copies, moved: list[tuple[str, str]] = moved) -> None:
            for row in rows:
                parts = {role: [x.clone() for x in _numbers(row.weights[role])] for role, _ in moved}
                for to, source in moved:
                    numbers = iter(parts[source])
                    copies.weights(row.weights[to], lambda _, numbers=numbers: next(numbers))  # type: ignore[misc]

        yield Trial(
            "projections", f"the maps that are read as query, key, value hold {', '.join(order)}",
            f"these maps taken as {', '.join(order)}", changed(reordered),
        )  # fmt: skip


def _numbers(held: Held) -> list[Tensor]:
    """A role's part of a weight and, if there is one, of a bias."""
    return [x for x in (part_of(held), part_of_bias(held)) if x is not None]


def _fused(attached: Anatomy) -> Iterator[Trial]:
    """A fused map holds thirds, (3, heads, d_head), or every head's three, (heads, 3, d_head)."""
    a = attached.mapping.architecture
    size = 3 * a.n_heads * a.d_head
    rows = [
        row for row in _with(attached, *_PROJECTED)
        if len({id(row.weights[role].weight) for role in _PROJECTED}) == 1
        and row.weights["query"].weight.shape[row.weights["query"].axis] == size
    ]  # fmt: skip
    if not rows or a.n_heads == 1:
        return
    read = rows[0].weights["query"].of(torch.arange(size), 0)
    thirds = int(read[-1] - read[0]) + 1 == len(read)
    order = torch.arange(size).view(*((a.n_heads, 3) if thirds else (3, a.n_heads)), a.d_head)
    order = order.transpose(0, 1).reshape(-1)

    def laid(copies: Copies) -> None:
        for row in rows:
            held = Held(row.weights["query"].found, turned=row.weights["query"].turned)
            copies.weights(held, lambda x: x[order.to(x.device)])

    stored = "head by head (heads, 3, d_head)" if thirds else "in thirds (3, heads, d_head)"
    yield Trial(
        "fused map", f"fused maps of queries, keys and values are stored {stored}, which this model does not read",
        "the fused map reordered to " + ("thirds" if thirds else "one head after the other"), changed(laid),
    )  # fmt: skip


def _order(attached: Anatomy) -> Iterator[Trial]:
    """Layers numbered in the order of their names as text (0, 1, 10, 11, ..., 2), or from the top down."""
    try:
        stacks = [(owner, name, getattr(owner, name)) for owner, name, _ in lists_of(attached)]
    except InputError:
        return

    def ordered(order: Callable[[int], list[int]]) -> Callable[[], Any]:
        """Layer i goes where it came from: to place order[i]."""
        changes = []
        for owner, name, held in stacks:
            at = order(len(held))
            changes.append((owner, name, nn.ModuleList(held[at.index(i)] for i in range(len(held)))))
        return lambda: other_attributes(changes)

    longest = max(len(held) for *_, held in stacks)
    if longest > 10:
        yield Trial(
            "layer order", "layers are stored in the order of their names as text (0, 1, 10, 11, ..., 2)",
            "layers reordered by number", ordered(lambda n: sorted(range(n), key=str)),
        )  # fmt: skip
    if longest > 1:
        yield Trial(
            "layer order", "layers are stored from the last to the first", "layers in the opposite order",
            ordered(lambda n: list(range(n))[::-1]),
        )  # fmt: skip
    for places in (1, -1) if longest > 2 else ():
        yield Trial(
            "layer order", f"layers are stored one place {'before' if places < 0 else 'behind'} where they are read",
            f"layers moved by {-places:+d}, the one at the end to the other end",
            ordered(lambda n, places=places: [(i - places) % n for i in range(n)]),  # type: ignore[misc]
        )  # fmt: skip


def _matrices(attached: Anatomy) -> Iterator[Trial]:
    """Square maps fit either way round."""
    rows = attached.rows

    def square(row: AttachedRow, role: str) -> bool:
        held = row.weights.get(role)
        if held is None or not plain(held):
            return False
        return bool(part_of(held).shape[0] == held.weight.shape[1 - held.axis])

    found = {role: [row.weights[role] for row in rows if square(row, role)] for role in _SQUARE}
    groups = [tuple(role for role in _SQUARE if found[role])]
    groups += [(role,) for role in groups[0]] if len(groups[0]) > 1 else []
    for roles in groups:
        if not roles:
            continue

        def turned(copies: Copies, roles: tuple[str, ...] = roles) -> None:
            for held in (held for role in roles for held in found[role]):
                copies.change(held.weight, held.rows, int(held.transposed), lambda x: x.t())

        yield Trial(
            "transposed", f"square {', '.join(roles)} maps are stored the other way round",
            f"{', '.join(roles)} transposed", changed(turned),
        )  # fmt: skip


def _gates(attached: Anatomy) -> Iterator[Trial]:
    """Gate and up projections of one shape can change places, experts' too."""
    pairs = [
        (row.weights[gate], row.weights[up])
        for gate, up in (("gate", "up"), ("expert_gate", "expert_up")) for row in attached.rows
        if plain(row.weights.get(gate), copies=True) and plain(row.weights.get(up), copies=True)
    ]  # fmt: skip

    def swapped(copies: Copies) -> None:
        for gate, up in pairs:
            for held, other in ((gate, part_of(up).clone()), (up, part_of(gate).clone())):
                copies.change(held.weight, held.rows, held.axis, lambda _, other=other: other)  # type: ignore[misc]

    if pairs:
        yield Trial(
            "gate and up", "gate and up projections have changed places", "gate and up projections swapped",
            changed(swapped),
        )  # fmt: skip


def _experts(attached: Anatomy) -> Iterator[Trial]:
    """Experts one place off their rows of the router."""
    routers = [row.weights["router"] for row in attached.rows if plain(row.weights.get("router"))]
    for places in (1, -1) if routers else ():

        def moved(copies: Copies, places: int = places) -> None:
            for held in routers:
                copies.weights(held, lambda x: x.roll(places, 0))

        yield Trial(
            "experts", f"experts stand one place {'behind' if places > 0 else 'before'} their rows of the router",
            f"rows of the router moved by {places:+d}", changed(moved),
        )  # fmt: skip
