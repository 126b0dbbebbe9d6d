"""Norms on the stream between layers, as the norms on the sums before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from signalprop.streams.parts import Layer, Place


def post_norms(layers: Sequence[Layer], final: str | None) -> tuple[tuple[Layer, ...], str | None]:
    """Layers whose entry norms are put on the sums before, where those have none (MiniMax): then it is a post-norm.

    Returns:
        The layers, and the norm after the last one; None where that is on the last sum.
    """
    after = [*(layer.entry_norm for layer in layers[1:]), final]
    bare = [layer.branches[-1].placement == "none" if layer.branches else False for layer in layers]
    if not all(bare) or None in after[:-1] or len(layers) < 2:
        return tuple(layers), final
    out = []
    for i, (layer, norm) in enumerate(zip(layers, after, strict=True)):
        last = layer.branches[-1]
        if norm is not None:
            place = layers[i + 1].branches[0].stream_in if i + 1 < len(layers) else Place(norm, "output")
            last = replace(last, placement="post", norm=norm, stream_out=place)
        out.append(
            replace(layer, branches=(*layer.branches[:-1], last), entry_norm=layer.entry_norm if i == 0 else None)
        )
    return tuple(out), None
