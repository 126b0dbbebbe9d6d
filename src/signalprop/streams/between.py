"""What a model does to the stream between two layers: the stream that enters one is held against those that were there.

A network of a table's kind hands on what left the layer before. Others multiply it (modded-nanogpt), or add the stream
of an earlier layer (U-Net) or the first one (nanochat's x0).
"""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from signalprop.errors import InputError
from signalprop.streams.parts import Layer, Seen, Stack

_ROUNDINGS = 64  # of the tensors' type, relative to the largest entry; a coefficient is only worth a word above them


def places_between(stack: Stack) -> set[Seen]:
    """Where the stream is looked at."""
    found = (place for layer in stack.layers for place in _ends(layer))
    return {place for place in found if place is not None}


def with_between(stack: Stack, tensors: Dictionary[Seen, Tensor]) -> Stack:
    """The stack whose layers say what was done to the stream before them."""
    layers = list(stack.layers)
    earlier: list[tuple[str, Tensor]] = []
    for i, (before, after) in enumerate(pairwise(stack.layers), 1):
        (began, left), (enters, _) = _ends(before), _ends(after)
        if i == 1 and began in tensors and began is not None:
            earlier.append((f"what entered {before.path}", tensors[began]))
        if left is None or enters is None or left not in tensors or enters not in tensors:
            continue
        earlier.append((f"what left {before.path}", tensors[left]))
        if after.entry_norm is None and tensors[left].shape == tensors[enters].shape:
            said, scale = _told(tensors[enters], earlier)
            if not said and not after.linked:
                said = f"what enters comes from what left {before.path} by more than sums and factors"
            layers[i] = replace(after, between=said, scale=scale)
    return replace(stack, layers=tuple(layers))


def _ends(layer: Layer) -> tuple[Seen | None, Seen | None]:
    if not layer.branches:
        return None, None
    return layer.branches[0].stream_in, layer.branches[-1].stream_out


def _told(entering: Tensor, earlier: list[tuple[str, Tensor]]) -> tuple[str, float]:
    """(what the stream is of those that were there, or '' where it is the last one; the factor on that if it is all).

    Sums of two are tried before sums of all.
    """
    name, last = earlier[-1]
    eps = max(torch.finfo(t.dtype).eps for t in (entering, last) if t.is_floating_point())
    y = entering.double().flatten()
    if not all(bool(t.isfinite().all()) for t in (entering, *(x for _, x in earlier))):
        raise InputError("a stream of the model is not finite, so that its parts cannot be proved")
    size = float(y.abs().max()) or 1.0
    if float((y - last.double().flatten()).abs().max()) <= _ROUNDINGS * eps * size:
        return "", 1.0
    streams = [(said, x.double().flatten()) for said, x in earlier if x.shape == entering.shape]
    tries = [[streams[-1]], *([one, streams[-1]] for one in streams[:-1]), streams]
    for some in tries:
        columns = torch.stack([x for _, x in some], 1)
        found = torch.linalg.lstsq(columns, y[:, None], driver="gelsd").solution[:, 0]
        if float((columns @ found - y).abs().max()) <= _ROUNDINGS * eps * size:
            terms = [(float(c), said) for c, (said, _) in zip(found, some, strict=True) if abs(float(c)) > 1e-5]
            words = " + ".join(f"{c:.4g} x {said}" for c, said in reversed(terms))
            alone = len(terms) == 1 and terms[0][1] == name
            return f"what enters is {words}", terms[0][0] if alone else 1.0
    return f"what enters is neither {name} nor a sum of earlier streams", 1.0
