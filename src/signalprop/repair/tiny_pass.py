"""One forward pass on a tiny batch, with the tensors that chosen modules read and output."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.data.batches import Batch, default_statistics, shortened
from signalprop.errors import InputError, first_line
from signalprop.hooks import Hooks, Site
from signalprop.models.synthetic import synthetic_batch
from signalprop.network.architecture import Architecture
from signalprop.streams.arguments import tiny_arguments
from signalprop.streams.calls import call
from signalprop.streams.live_model import evaluating, placed
from signalprop.streams.proof import gain_and_bias

TOKENS = 6
ROUNDINGS = 1.0  # allowed error over eps and the summed sizes of the terms; one rounding costs 0.3 of its result


@dataclass
class TinyPass:
    """What modules read and output in one forward pass, cloned (some models add in place), by the module's id.

    Attributes:
        replace: by id of a module: a function of its output that gives what the model goes on with instead.
        inputs, outputs: first tensors, in the order of the calls.
    """

    replace: dict[int, Any] = field(default_factory=dict)
    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    error: Exception | None = None

    def run(self, model: nn.Module, arguments: dict[str, Any], watched: Iterable[tuple[nn.Module, str]]) -> None:
        """One forward pass in evaluation mode, without gradients, with a look at modules, each with the side that is
        looked at. An error is for `failure`.

        A head may ask for what a tiny batch does not have (an end token); the streams are then complete all the same.
        """
        hooks, sites = Hooks(), list(dict.fromkeys(Site(*one) for one in watched))
        hooks.sites(sites, lambda index, tensor: self._see(sites[index].module, sites[index].side, tensor))
        try:
            with hooks, evaluating(model), torch.no_grad():
                call(model, arguments)
        except Exception as error:
            self.error = error

    def seen(self, site: Site) -> Tensor | None:
        """What the pass showed there, if anything."""
        tensors = (self.inputs if site.side == "input" else self.outputs).get(id(site.module), [])
        return tensors[site.call] if len(tensors) > site.call else None

    def failure(self, what: str) -> InputError:
        """The InputError for something that was not seen."""
        if self.error is None:
            return InputError(f"{what}; fix the mapping")
        if isinstance(self.error, InputError):
            return self.error
        reason = first_line(self.error)
        return InputError(
            f"the model does not run on a tiny batch ({type(self.error).__name__}: {reason}); give the "
            "keyword arguments of its forward"
        )

    def _see(self, module: nn.Module, side: str, tensor: Tensor | None) -> Tensor | None:
        replace = self.replace.get(id(module)) if side == "output" else None
        new = None if replace is None or tensor is None else replace(tensor)
        seen = tensor if new is None else new
        if seen is not None and seen.is_floating_point():
            tensors = self.inputs if side == "input" else self.outputs
            tensors.setdefault(id(module), []).append(seen.detach().clone())
        return new


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter is on the meta device."""
    return any(p.is_meta for p in model.parameters())


def tiny_batch(architecture: Architecture) -> Batch:
    """One sequence of a few drawn tokens, or of white patches or frames (as many as the model reads)."""
    a = shortened(architecture, TOKENS)
    a = a if a.target_len is None else a.replace(target_len=min(a.target_len, TOKENS))
    return synthetic_batch(a, default_statistics(a), 1, 0)


def arguments_for(attached: Anatomy, given: Dictionary[str, Any] | None) -> dict[str, Any]:
    """The given arguments, or those of a tiny batch, on the model's device."""
    if given is None:
        mapping = attached.mapping
        if mapping.arguments is None:  # a model that was found
            return tiny_arguments(attached.model)
        given = mapping.arguments(tiny_batch(mapping.architecture))
    return placed(attached.model, given)


def rms(tensor: Tensor) -> float:
    """Root mean square; 0 of an empty tensor."""
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """In the other's shape: some models fold batch and tokens together."""
    if tensor.shape == other.shape or tensor.shape[-1:] != other.shape[-1:] or tensor.numel() != other.numel():
        return tensor
    return tensor.reshape(other.shape)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to rounding, whatever the shape."""
    if one.numel() != other.numel() or one.shape[-1] != other.shape[-1]:
        return False
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (one, other))
    difference = rms(one.double() - like(other, one).double())
    return difference <= ROUNDINGS * eps * (rms(one) + rms(other))


def norm_before(attached: Anatomy, head: nn.Module, arguments: Dictionary[str, Any]) -> nn.Module | None:
    """The norm whose output, times a constant, is all that the head reads, and that nothing else reads."""
    seen = TinyPass()
    known = {id(norm) for norm in attached.norm_modules}
    watched = {id(m): m for m in attached.model.modules() if id(m) in known or next(m.children(), None) is None}
    readers = [m for m in watched.values() if m is not head and next(m.parameters(), None) is not None]
    norms = [m for key, m in watched.items() if key in known or "norm" in type(m).__name__.lower()]
    sites = [(head, "input"), *((m, "input") for m in readers), *((m, "output") for m in norms)]
    seen.run(attached.outer, dict(arguments), sites)
    entries = seen.inputs.get(id(head), [])
    if len(entries) != 1:
        raise seen.failure(f"the head was reached {len(entries)} times in a forward pass; expected once")

    def in_head(tensors: list[Tensor]) -> bool:
        return any(_multiple(entries[0], tensor) for tensor in tensors)

    norm = next((watched[key] for key, tensors in reversed(seen.outputs.items()) if in_head(tensors)), None)
    shared = any(in_head(seen.inputs.get(id(m), [])) for m in readers if m is not norm)
    return None if norm is None or shared or not isinstance(gain_and_bias(norm)[0], Tensor) else norm


def _multiple(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor is a number times another, to rounding."""
    if tensor.numel() != other.numel() or tensor.shape[-1] != other.shape[-1]:
        return False
    x, y = tensor.double().flatten(), like(other, tensor).double().flatten()
    norm = float(y @ y)
    if norm == 0:
        return False
    rest = x - (x @ y) / norm * y
    eps = max(torch.finfo(t.dtype).eps for t in (tensor, other))
    return bool(rest.norm() <= 8 * eps * x.norm()) and bool(x.norm() > 0)
