"""What a model does to the stream between two layers: the stream that enters one is compared with those before it.

A network of a table's kind hands on what left the layer before. Others multiply it (modded-nanogpt), or add the stream
of an earlier layer (U-Net) or the first one (nanochat's x0). Streams that are multiples of each other (of branches that
begin at 0) do not show which was read: then a pass is looked at in which noise is added to every branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.streams.parts import Layer, Place, Stack

_SAME_DIRECTION = 1 - 1e-6  # cosine of two streams beyond which a sum does not distinguish them
_ROUNDINGS = 64  # of the tensors' type, relative to the largest entry; a coefficient is only worth a word above them


def places_between(stack: Stack) -> set[Place]:
    """Where the stream is looked at."""
    found = (place for layer in stack.layers for place in _entry_and_exit(layer))
    return {place for place in (*found, _last(stack)) if place is not None}


def _last(stack: Stack) -> Place | None:
    return None if stack.final_norm is None else Place(stack.final_norm, "input")


def with_between(stack: Stack, tensors: Dictionary[Place, Tensor]) -> Stack:
    """The stack whose layers say what was done to the stream before them."""
    layers = list(stack.layers)
    earlier: list[tuple[int, str, Tensor]] = []
    for i, (before, after) in enumerate(pairwise(stack.layers), 1):
        (began, left), (enters, _) = _entry_and_exit(before), _entry_and_exit(after)
        if i == 1 and began in tensors and began is not None:
            earlier.append((0, f"what entered {before.path}", tensors[began]))
        if left is None or enters is None or left not in tensors or enters not in tensors:
            continue
        earlier.append((i, f"what left {before.path}", tensors[left]))
        if after.entry_norm is None and tensors[left].shape == tensors[enters].shape:
            said, sources = _told(tensors[enters], earlier)
            if not said and not after.linked:
                said = f"what enters comes from what left {before.path} by more than sums and factors"
            scale = sources[i] if sources.keys() == {i} else 1.0
            layers[i] = replace(after, between=said, scale=scale, sources=sources)
    (_, left), end, sum_after = _entry_and_exit(stack.layers[-1]), _last(stack), ""
    if left in tensors and end in tensors and left is not None and end is not None:
        earlier.append((len(layers), f"what left {stack.layers[-1].path}", tensors[left]))
        if tensors[left].shape == tensors[end].shape:
            said, sources = _told(tensors[end], earlier)
            sum_after = said.replace("what enters", "what it reads") if said and sources.keys() != {len(layers)} else ""
    return replace(stack, layers=tuple(layers), after=sum_after)


def _entry_and_exit(layer: Layer) -> tuple[Place | None, Place | None]:
    if not layer.branches:
        return None, None
    return layer.branches[0].stream_in, layer.branches[-1].stream_out


def ambiguous(stack: Stack, tensors: Dictionary[Place, Tensor]) -> bool:
    """Whether two streams are multiples of each other, so that sums of them do not show which was read."""
    places = [_entry_and_exit(stack.layers[0])[0], *(_entry_and_exit(layer)[1] for layer in stack.layers[:-1])]
    vectors = [tensors[place].double().flatten() for place in places if place is not None and place in tensors]
    vectors = [x for x in vectors if x.shape == vectors[0].shape and bool(x.any())]
    if len(vectors) < 2:
        return False
    rows = torch.nn.functional.normalize(torch.stack(vectors))
    return bool(((rows @ rows.T).abs() - torch.eye(len(rows), device=rows.device) > _SAME_DIRECTION).any())


@contextmanager
def noise_in_branches(model: nn.Module, stack: Stack, tensors: Dictionary[Place, Tensor]) -> Iterator[None]:
    """Inside, what branches give has normal noise added, of the size of the stream that enters the stack."""
    began = _entry_and_exit(stack.layers[0])[0]
    size = float(tensors[began].double().square().mean().sqrt()) if began in tensors and began is not None else 1.0

    def noisy(module: nn.Module, args: object, output: object) -> object:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return output
        first = first + size * torch.randn_like(first)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    with ExitStack() as hooks:
        for path in {branch.output.path for branch in stack.branches if branch.output is not None}:
            hooks.callback(model.get_submodule(path).register_forward_hook(noisy).remove)
        yield


def _told(entering: Tensor, earlier: list[tuple[int, str, Tensor]]) -> tuple[str, dict[int, float]]:
    """(what the stream is of those that were there, or '' where it is the last one; factors by their numbers).

    Sums of two are tried before sums of all.
    """
    _, name, last = earlier[-1]
    eps = max(torch.finfo(t.dtype).eps for t in (entering, last) if t.is_floating_point())
    y = entering.double().flatten()
    if not all(bool(t.isfinite().all()) for t in (entering, *(x for *_, x in earlier))):
        raise InputError("a stream of the model is not finite, so that its parts cannot be proved")
    size = float(y.abs().max()) or 1.0
    if float((y - last.double().flatten()).abs().max()) <= _ROUNDINGS * eps * size:
        return "", {}
    streams = [(n, said, x.double().flatten()) for n, said, x in earlier if x.shape == entering.shape]
    tries = [[streams[-1]], *([one, streams[-1]] for one in streams[:-1]), streams]
    for some in tries:
        columns = torch.stack([x for *_, x in some], 1)
        found = torch.linalg.lstsq(columns, y[:, None], driver="gelsd").solution[:, 0]
        if float((columns @ found - y).abs().max()) <= _ROUNDINGS * eps * size:
            terms = [(float(c), n, said) for c, (n, said, _) in zip(found, some, strict=True) if abs(float(c)) > 1e-5]
            words = " + ".join(f"{c:.4g} x {said}" for c, _, said in reversed(terms))
            return f"what enters is {words}", {n: float(f"{c:.6g}") for c, n, _ in terms}
    return f"what enters is neither {name} nor a sum of earlier streams", {}
