"""Feed-forwards computed again from their maps, in float64: which map is the gate's, which leads up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from signalprop.network.activations import ACTIVATIONS
from signalprop.streams.replay import Map, Replayed, Rows, named_so

CLAMPED = "clamped swish"
Bend = Callable[[Tensor | None, Tensor], Tensor]  # of what the gate (None: there is none) and the way up give


def bends(numbers: Dictionary[str, float]) -> dict[str, Bend]:
    """What may stand between a feed-forward's maps, by name: every activation; GPT-OSS's clamped Swish.

    Args:
        numbers: that the configuration and the modules hold, by name.
    """
    found: dict[str, Bend] = {f.name: partial(_bent, f.function) for f in ACTIVATIONS.values()}
    slope, most = (next((v for n, v in numbers.items() if n.endswith(word)), None) for word in ("alpha", "limit"))
    return found if slope is None or most is None else {**found, CLAMPED: partial(_clamped, slope, most)}


def _bent(function: Callable[[Any], Any], gate: Tensor | None, up: Tensor) -> Tensor:
    y = torch.from_numpy(function((up if gate is None else gate).numpy()))
    return y if gate is None else y * up


def _clamped(slope: float, most: float, gate: Tensor | None, up: Tensor) -> Tensor:
    if gate is None:
        return torch.zeros_like(up)
    below = gate.clamp(max=most)
    return (up.clamp(-most, most) + 1) * below * (slope * below).sigmoid()


def feed_forward(
    maps: Sequence[Map], last: Map, limit: float, between: Dictionary[str, Bend], like: Replayed | None = None
) -> Replayed | float:
    """The roles of maps that read one tensor, where `last` reads activation(up) or activation(gate) * up.

    Args:
        between: as `bends` gives it. like: a branch that was proved, whose activation is tried first.

    Returns:
        The smallest error where none fits.
    """
    target = last.read
    size = float(target.abs().max()) or 1.0
    best: tuple[float, Replayed | None] = (math.inf, None)
    for names in (between,) if like is None else ((like.activation,), between):
        for (gate, up), name in product(_pairs(maps, target.shape[-1]), names):
            bent = between[name](None if gate is None else gate[1], up[1])
            error = float((bent - target).abs().max()) / size
            if error < best[0]:
                roles = {"up": up[0]} if gate is None else {"gate": gate[0], "up": up[0]}
                best = error, Replayed({**roles, "down": (last.path, None)}, error, activation=name)
        if best[1] is not None and best[0] <= limit and bool(target.any()):
            return best[1]
    return best[0]


_Part = tuple[tuple[str, Rows], Tensor]


def _pairs(maps: Sequence[Map], width: int) -> Iterator[tuple[_Part | None, _Part]]:
    """(gate or None, up) in the order in which they are tried."""
    whole: list[_Part] = [((m.path, None), m.gave) for m in maps if m.gave.shape[-1] == width]
    for one in whole:
        yield None, one
    for gate, up in sorted(product(whole, whole), key=lambda pair: -named_so(pair[0][0][0], "gate")):
        if gate is not up:
            yield gate, up
    for m in maps:
        if m.gave.shape[-1] == 2 * width:
            for halves in ((slice(0, width), slice(width, None)), (slice(0, None, 2), slice(1, None, 2))):
                first, second = (((m.path, rows), m.gave[:, rows]) for rows in halves)
                yield first, second
                yield second, first
