"""What layers read of earlier streams: sums of several, with factors (x0 of nanochat, the skips of a U-Net)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from signalprop.network.moments import FloatArray

INPUT = -1  # the model's input, where what enters the first layer is a multiple of it
MOST = 16  # streams at once: what pairs of them share is their square

LayerInputs = Sequence[Mapping[int, float]]


def matrices(inputs: LayerInputs) -> FloatArray:
    """What happens to the stream and to those that are stored before every layer, (layers, n, n).

    Streams are columns: first the one that is written to, then earlier ones until their last reader has read them.
    """
    # the last layer that reads each source beside what left the layer before it
    last = {source: layer for layer, row in enumerate(inputs) for source in row if source != layer}
    stored = {INPUT: 1} if INPUT in last else {}  # where a source is
    rows: list[dict[tuple[int, int], float]] = []
    n = 1 + len(stored)
    for layer, row in enumerate(inputs):
        one = {(0, 0 if source == layer else stored[source]): factor for source, factor in row.items()}
        stored = {source: place for source, place in stored.items() if last[source] > layer}
        if last.get(layer, 0) > layer:
            stored[layer] = next(place for place in range(1, len(inputs) + 1) if place not in stored.values())
            one[stored[layer], 0] = 1.0
        one |= {(place, place): 1.0 for source, place in stored.items() if source != layer}
        n = max(n, 1 + max(stored.values(), default=0))
        rows.append(one)
    out = np.zeros((len(rows), n, n))
    for layer, one in enumerate(rows):
        for place, factor in one.items():
            out[layer][place] = factor
    return out


def changed(inputs: LayerInputs) -> dict[int, Mapping[int, float]]:
    """Those of layers that enter with more, or with less, than what left the layer before."""
    return {layer: row for layer, row in enumerate(inputs) if dict(row) != {layer: 1.0}}


def check(inputs: LayerInputs, n_layers: int) -> None:
    """Raise ValueError where these are not the inputs of so many layers."""
    if len(inputs) != n_layers:
        raise ValueError(f"layer_inputs names {len(inputs)} layers, the model has {n_layers}")
    if dict(inputs[0]) != {0: 1.0} and inputs[0].keys() != {INPUT}:
        raise ValueError(f"layer_inputs of layer 0: {dict(inputs[0])}; expected {{0: 1.0}}, or {{{INPUT}: factor}}")
    first = next(iter(inputs[0]))  # by which of the two names later layers read the first stream
    for layer, row in enumerate(inputs[1:], 1):
        if not row or not row.keys() <= {first, *range(1, layer + 1)}:
            raise ValueError(
                f"layer_inputs of layer {layer}: {dict(row)}; expected factors by sources {first}, as in layer 0, and "
                f"1 to {layer} (what left the layer before)"
            )
    n = matrices(inputs).shape[-1]
    if n > MOST:
        raise ValueError(f"layer_inputs needs {n} streams at once; at most {MOST} can be followed")
