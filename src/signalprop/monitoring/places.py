"""Where in a model a number is from, in words: `layer 3, attention`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from signalprop.network.kinds import kind_of
from signalprop.network.layout import Layout, layer_starts
from signalprop.results import text

# Weights of a layer that belong to none of its sublayers.
OTHER = "other weights"


class Place(NamedTuple):
    """A sublayer.

    Attributes:
        layer: from 0, the encoder's first. sublayer: what it is, with a number where the layer has several of that
            kind; empty: the whole layer.
    """

    layer: int
    sublayer: str = ""

    def __str__(self) -> str:
        return f"layer {self.layer}" + (f", {self.sublayer}" if self.sublayer else "")


def sublayers_of(rows: Layout) -> tuple[Place, ...]:
    """The place of every sublayer."""
    starts = {int(i) for i in layer_starts(rows)}
    layer, out = -1, []
    for i in range(len(rows.kind)):
        layer += i in starts
        out.append((layer, kind_of(rows, i).words))
    several, seen = Counter(out), Counter[tuple[int, str]]()
    for i, key in enumerate(out):
        seen[key] += 1
        if several[key] > 1:
            out[i] = (key[0], f"{key[1]} {seen[key]}")
    return tuple(Place(*one) for one in out)


def named(found: Sequence[Place], everywhere: Sequence[Place]) -> str:
    """`layer 1, feed-forward; layers 2-5`: some places in the order of the signal; whole layers by their number alone.

    Args:
        everywhere: all places that there are, of which a layer that is named alone has several.
    """
    there: dict[int, set[str]] = {}
    for place in everywhere:
        there.setdefault(place.layer, set()).add(place.sublayer)
    parts: dict[int, list[str]] = {}
    for place in sorted(found, key=everywhere.index):
        parts.setdefault(place.layer, []).append(place.sublayer)
    by_name: dict[str, list[int]] = {}
    for layer, names in parts.items():
        whole = len(names) > 1 and set(names) == there[layer]
        by_name.setdefault("" if whole else " and ".join(names), []).append(layer)
    return "; ".join(text.named(layers) + (f", {name}" if name else "") for name, layers in by_name.items())
