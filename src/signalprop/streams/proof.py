"""A second pass that proves what the first one found, by plain hooks and float64."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from signalprop.hooks import Hooks, Site, first_tensor, loss_and_logits, whole
from signalprop.streams.between import ambiguous, noise_in_branches, places_between, with_between
from signalprop.streams.calls import Enough, call_until_enough, can_end
from signalprop.streams.parts import Branch, Layer, Multiplier, Place, Stack

ROUNDINGS = 8  # of the tensors' type, that the two sides of an equation may differ by, in units of its largest entry


@dataclass(frozen=True)
class Norm:
    """What a norm computes: output = normed * (offset + weight) + bias.

    Attributes:
        path: of the norm; of one that is a `function`, of the module that reads what it gives.
        kind: `layernorm`, `rmsnorm`; `unknown` where neither fits. offset: None where it has no weight.
        error: largest difference over the largest entry of its output, in float64; None where it did not run.
        eps: under its root, as far as numbers show.
    """

    path: str
    kind: Literal["layernorm", "rmsnorm", "unknown"]
    offset: float | None
    error: float | None
    function: bool = False
    eps: float | None = None


def prove(
    model: nn.Module, arguments: Dictionary[str, Any], stacks: tuple[Stack, ...]
) -> tuple[tuple[Stack, ...], tuple[Norm, ...]]:
    """The same stacks with every equation's error, and what their norms compute; one pass of a model that evaluates."""
    wanted: set[Place] = set()
    norms: dict[str, None] = {}
    for stack in stacks:
        for branch in stack.branches:
            wanted |= {s for s in (branch.stream_in, branch.output, branch.total) if s is not None}
            norms |= dict.fromkeys(n for n in (branch.norm, branch.post_norm) if n is not None)
            wanted |= {Place(branch.reads, "input")} if branch.normed and branch.reads is not None else set()
        outer = (*(layer.entry_norm for layer in stack.layers), stack.final_norm)
        norms |= dict.fromkeys(n for n in outer if n is not None)
        wanted |= places_between(stack) | ({Place(stack.final_reads, "input")} if stack.final_reads else set())
    both: tuple[Literal["input", "output"], ...] = ("input", "output")
    wanted |= {Place(path, side) for path in norms for side in both}
    tensors, _ = tensors_of_pass(model, arguments, wanted, whole_pass=False)
    parameters = dict(model.named_parameters())
    proved = tuple(replace(s, layers=tuple(_layer(one, tensors, parameters) for one in s.layers)) for s in stacks)
    proved = tuple(_with_between(model, arguments, stack, tensors) for stack in proved)
    functions = (norm for stack in proved for norm in _functions(stack, tensors, parameters))
    return proved, (*(norm_of(model, path, tensors) for path in norms), *functions)


def _with_between(
    model: nn.Module, arguments: Dictionary[str, Any], stack: Stack, tensors: Dictionary[Place, Tensor]
) -> Stack:
    if ambiguous(stack, tensors):
        with noise_in_branches(model, stack, tensors):
            tensors, _ = tensors_of_pass(model, arguments, places_between(stack), whole_pass=False)
    return with_between(stack, tensors)


def tensors_of_pass(
    model: nn.Module,
    arguments: Dictionary[str, Any],
    wanted: set[Place],
    *,
    last: bool = False,
    whole_pass: bool = True,
) -> tuple[dict[Place, Tensor], Tensor | None]:
    """Copies of the wanted tensors of a pass, and its first output.

    None for a tensor that the pass does not reach; of a module that runs more often than said, the first (or
    the `last`). Without the `whole_pass` it may end when all were seen, and gives no output.
    """
    ends = not (last or whole_pass) and can_end(model)
    points = sorted({(place.path, place.side, place.call) for place in wanted})
    calls: dict[tuple[str, str], int] = {}
    for place in wanted:  # those of a norm are not counted
        calls[place.path, place.side] = max(place.calls, calls.get((place.path, place.side), 1))
    found: dict[tuple[str, str, int], Tensor] = {}

    def keep(index: int, tensor: Tensor | None) -> None:
        if tensor is not None and (last or points[index] not in found):
            found[points[index]] = tensor.detach().clone()
        if ends and len(found) == len(points):
            raise Enough

    hooks = Hooks()
    hooks.sites([Site(model.get_submodule(path), side, call, calls[path, side]) for path, side, call in points], keep)
    with hooks, torch.no_grad():
        given = call_until_enough(model, arguments)
    _, logits = loss_and_logits(given)
    output = first_tensor(given if logits is None else logits)
    return {place: found[p] for place in wanted if (p := (place.path, place.side, place.call)) in found}, output


def _layer(layer: Layer, tensors: Dictionary[Place, Tensor], parameters: Dictionary[str, Tensor]) -> Layer:
    """The layer with the error of every sum."""
    groups: list[list[Branch]] = []
    for branch in layer.branches:
        if groups and (branch.parallel or _unseen(groups[-1][-1], branch)):
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return replace(layer, branches=tuple(b for group in groups for b in _sum(group, tensors, parameters)))


def _unseen(before: Branch, branch: Branch) -> bool:
    """Whether no module sees the stream between two branches, so that one equation has to do for both."""
    return before.total is None and branch.stream_in is None and before.placement != "post"


def _terms(group: list[Branch], parameters: Dictionary[str, Tensor]) -> list[Any]:
    """The factors in total = f0 * stream_in + f1 * output1 + ..., of branches added at once or one after the other."""
    factors: list[Any] = [_number(group[0].skip, parameters)]
    for branch in group:
        if branch is not group[0] and not branch.parallel:
            skip = _number(branch.skip, parameters)
            factors = [factor * skip for factor in factors]
        factors.append(_number(branch.multiplier, parameters))
    return factors


def _sum(group: list[Branch], tensors: Dictionary[Place, Tensor], parameters: Dictionary[str, Tensor]) -> list[Branch]:
    """Branches of one sum, with its error."""
    first = group[0]
    places = [first.stream_in, group[-1].total, *(branch.output for branch in group)]
    caveat = next((branch.caveat for branch in group if branch.caveat), "")
    if not caveat and any(place is None for place in places):
        caveat = "no module sees the stream " + ("before it" if first.stream_in is None else "after it")
    if caveat:
        return [replace(branch, caveat=branch.caveat or caveat) for branch in group]
    missing = [place for place in places if place not in tensors]
    if missing:
        return [replace(branch, caveat="a second pass did not find it again") for branch in group]
    values = [tensors[place] for place in places if place is not None]
    total = values[1].double()
    if any(v.numel() != total.numel() for v in values):
        return [replace(branch, caveat="its shape is not the stream's") for branch in group]
    factors = _terms(group, parameters)
    products = [f * v.double() for f, v in zip(factors, [values[0], *values[2:]], strict=True)]
    if any(product.numel() != total.numel() for product in products):
        return [replace(branch, caveat="its multiplier's shape is not the stream's") for branch in group]
    terms = [product.reshape(total.shape) for product in products]
    size = max(float(term.abs().max()) for term in [total, *terms]) or 1.0
    error = float((total - sum(terms)).abs().max()) / size
    eps = max(torch.finfo(v.dtype).eps for v in values if v.is_floating_point())
    return [replace(branch, error=error, rounding=ROUNDINGS * eps) for branch in group]


def _number(factor: Multiplier, parameters: Dictionary[str, Tensor]) -> Any:
    if factor.tensor is not None:  # in the shape in which the model multiplies with it
        return whole(factor.tensor)
    return whole(parameters[factor.parameter]).detach().double() if factor.parameter else factor.value


def _functions(stack: Stack, tensors: Dictionary[Place, Tensor], parameters: Dictionary[str, Tensor]) -> Iterator[Norm]:
    """What the norms of a stack compute that are functions: of a stream that no module sees, of the sum that it is."""
    for layer in stack.layers:
        stream: Tensor | None = None
        group: list[Branch] = []
        for branch in layer.branches:
            if branch.stream_in is not None and branch.stream_in in tensors:
                stream, group = tensors[branch.stream_in].double(), []
            if branch.normed and branch.reads is not None:
                read = _total(stream, group, tensors, parameters) if group else stream
                yield _function(branch.reads, read, tensors)
            group = [*group, branch]
    if stack.final_reads is not None:
        end = stack.branches[-1].stream_out
        yield _function(stack.final_reads, tensors.get(end) if end is not None else None, tensors)


def _total(
    stream: Tensor | None, group: list[Branch], tensors: Dictionary[Place, Tensor], parameters: Dictionary[str, Tensor]
) -> Tensor | None:
    """The stream after branches that are added to it; None where an output was not seen."""
    places = [branch.output for branch in group if branch.output is not None and branch.output in tensors]
    outputs = [tensors[place].double() for place in places]
    if stream is None or len(places) < len(group) or any(x.numel() != stream.numel() for x in outputs):
        return None
    first, *factors = _terms(group, parameters)
    total: Tensor = first * stream
    for factor, output in zip(factors, outputs, strict=True):
        total = total + factor * output.reshape(stream.shape)
    return total


def _function(reads: str, stream: Tensor | None, tensors: Dictionary[Place, Tensor]) -> Norm:
    given = tensors.get(Place(reads, "input"))
    if stream is None or given is None or given.numel() != stream.numel():
        return Norm(reads, "unknown", None, None, function=True)
    return replace(fitted_norm(reads, stream, given.reshape(stream.shape)), function=True)


def norm_of(model: nn.Module, path: str, tensors: Dictionary[Place, Tensor]) -> Norm:
    """Which norm it is, by its numbers: of all kinds and offsets the one that comes nearest."""
    x, y = tensors.get(Place(path, "input")), tensors.get(Place(path, "output"))
    if x is None or y is None or x.shape != y.shape:
        return Norm(path, "unknown", None, None)
    module = model.get_submodule(path)
    weight, bias = map(whole, gain_and_bias(module))
    if any(isinstance(held, Tensor) and held.is_meta for held in (weight, bias)):
        return Norm(path, "unknown", None, None)  # fetched only while it runs
    if any(isinstance(held, Tensor) and held.shape != x.shape[-held.ndim :] for held in (weight, bias)):
        return Norm(path, "unknown", None, None)  # over channels that are not last
    return fitted_norm(path, x, y, weight, bias, epsilon(module), centred=isinstance(module, nn.LayerNorm))


def fitted_norm(
    path: str, x: Tensor, y: Tensor, weight: Any = None, bias: Any = None, stated: float | None = None, *,
    centred: bool = False,
) -> Norm:  # fmt: skip
    """The norm that comes nearest; `centred`: a LayerNorm in any case, as of a stream without a mean both kinds fit."""
    wide, given = x.double(), y.double()
    shift = bias.detach().double() if isinstance(bias, Tensor) else 0.0
    middle = wide - wide.mean(-1, keepdim=True)
    tries = []
    kinds = (("layernorm", middle), ("rmsnorm", wide))[: 1 if centred else 2]
    for (kind, base), eps in product(kinds, _USUAL if stated is None else (stated,)):
        normed = base / (base.square().mean(-1, keepdim=True) + eps).sqrt()
        gains: list[tuple[float | None, Any]] = [(None, 1.0)]
        if isinstance(weight, Tensor):
            gains = [(offset, offset + weight.detach().double()) for offset in (0.0, 1.0)]
        for offset, gain in gains:
            error = float((normed * gain + shift - given).abs().max() / given.abs().max().clamp_min(1e-30))
            tries.append((error, kind, offset, eps))
    limit = 64 * max(torch.finfo(one).eps for one in (y.dtype, torch.float32))  # which many compute in, whatever x is
    error, kind, offset, eps = min(tries, key=lambda one: one[0])
    if not error <= limit:
        return Norm(path, "unknown", None, error)
    return Norm(path, kind, offset, error, eps=eps)  # type: ignore[arg-type]


def affine(module: nn.Module) -> tuple[str, str]:
    """The names of a module's gain and bias: `weight` and `bias`, or what norms that have no `weight` call them."""
    if getattr(module, "weight", None) is not None:
        return "weight", "bias"
    gain, bias = (
        next((name for name in names if isinstance(getattr(module, name, None), nn.Parameter)), names[0])
        for names in _AFFINE
    )
    return gain, bias


def gain_and_bias(norm: nn.Module | None) -> tuple[Any, Any]:
    """What a norm holds under these names; None without."""
    gain, bias = (None, None) if norm is None else (getattr(norm, name, None) for name in affine(norm))
    return gain, bias


def epsilon(norm: nn.Module) -> float | None:
    """What a norm adds under its root, where it says so."""
    stated = [float(value) for name in _EPSILONS if isinstance(value := getattr(norm, name, None), float)]
    return stated[0] if stated else None


_AFFINE = (("weight", "g", "gamma", "scale", "gain"), ("bias", "b", "beta", "shift"))
_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")
_USUAL = (1e-5, 1e-6, 1e-12, 0.0, 1e-8, torch.finfo(torch.float32).eps)  # of norms that do not say theirs
