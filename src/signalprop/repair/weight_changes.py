"""A factor along one axis of a parameter: what `fold` and `fit` do to weights, biases and gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import Held
from signalprop.errors import InputError
from signalprop.repair.splices import Splice
from signalprop.streams.proof import gain_and_bias

Factor = float | Tensor  # one number, or one per output feature


@dataclass(frozen=True)
class Change:
    """A parameter, and the factor along one of its axes: new = (old + offset) * factor - offset."""

    tensor: Tensor
    factor: Factor
    axis: int
    offset: float

    def value(self) -> Tensor:
        """The new entries, computed in float64."""
        factor = self.factor
        if isinstance(factor, Tensor):
            shape = [-1 if i == self.axis else 1 for i in range(self.tensor.ndim)]
            factor = factor.reshape(shape).to(self.tensor.device)
        return (self.tensor.detach().double() + self.offset) * factor - self.offset

    def problem(self) -> str:
        """Why the parameter cannot take the factor; empty where it can."""
        tensor = self.tensor
        if not tensor.is_floating_point() or not isinstance(tensor, torch.nn.Parameter):
            return f"its weight is {'quantized' if not tensor.is_floating_point() else 'computed'}"
        if isinstance(self.factor, Tensor) and self.factor.numel() not in (1, tensor.shape[self.axis]):
            return f"its {tensor.shape[self.axis]} features do not fit {self.factor.numel()} multipliers"
        largest = float(self.value().abs().max()) if tensor.numel() else 0.0
        if not largest <= torch.finfo(tensor.dtype).max:
            return f"its weight would reach {largest:.3g}, too much for {tensor.dtype}"
        return ""


def product(one: Factor, other: Factor) -> Factor:
    """Both factors together; of two vectors on the device of the second."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.to(other.device) * other
    return one * other


def equal(one: Factor, other: Factor) -> bool:
    """Whether two factors are the same numbers."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool((torch.as_tensor(one).cpu() == torch.as_tensor(other).cpu()).all())
    return one == other


class Factors:
    """Factors on the parameters of a model, collected before anything is changed.

    Args:
        refusal: message with two gaps, for a place and a reason. verb: what is done, in messages.
        every_holder: modules that share a parameter need one factor each, the same; else a parameter is scaled from one
            place alone, and whatever else holds it sees the factor.
    """

    def __init__(self, attached: Anatomy, refusal: str, verb: str, *, every_holder: bool) -> None:
        self._attached, self._refusal, self._verb, self._every = attached, refusal, verb, every_holder
        self._norms = {id(norm) for norm in attached.norm_modules}
        self._found: dict[tuple[int, int], tuple[Change, str]] = {}  # by parameter and what holds it
        self._holders: dict[int, list[nn.Module]] = {}
        for module in attached.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append(module)

    def _refused(self, where: str, why: str) -> InputError:
        return InputError(self._refusal.format(where, why))

    def holders(self, tensor: object) -> list[nn.Module]:
        """The modules that hold a parameter."""
        return self._holders.get(id(tensor), [])

    def of(self, tensor: Tensor, holder: object) -> Factor:
        """The factor on a parameter so far, as it is held there."""
        found = self._found.get(self._key(tensor, holder))
        return 1.0 if found is None else found[0].factor

    def scale(self, held: Held, weight: Factor, bias: Factor, where: str) -> None:
        """Factors on a role's outputs of a weight and its bias, or on a norm's gain and bias, beside earlier ones."""
        holder, mapping = held.holder, self._attached.mapping
        if hasattr(holder, "base_layer"):
            raise InputError(f"{where}: a map with a multiplier has an adapter; {self._verb} before adapters are added")
        own, beside = (holder, held.beside) if isinstance(holder, Tensor) else gain_and_bias(holder)
        if not isinstance(own, Tensor):
            kind = type(holder)._vanilla if isinstance(holder, Splice) else type(holder)
            raise self._refused(where, f"{kind.__name__} has no `weight` that its multiplier could go into")
        gain = id(holder) in self._norms
        if gain and mapping.gains_differ and not equal(weight, 1.0):
            raise self._refused(where, "some of the model's norms have the gain weight, and some 1 + weight")
        for tensor, factor, axis, offset in (
            (own, weight, held.axis, mapping.gain_offset * gain),
            (beside, bias, int(held.copies), 0.0),
        ):
            if isinstance(tensor, Tensor) and not equal(factor, 1.0):
                self._put(tensor, holder, Change(tensor, _of_rows(factor, held, tensor, axis), axis, offset), where)

    def _put(self, tensor: Tensor, holder: object, change: Change, where: str) -> None:
        key = self._key(tensor, holder)
        before, place = self._found.get(key, (None, where))
        if not self._every and place != where:
            raise InputError(f"{where} shares a weight with {place}; {self._verb} needs real weights")
        factor = change.factor if before is None else product(before.factor, change.factor)
        self._found[key] = Change(tensor, factor, change.axis, change.offset), place

    def as_of(self, tensor: Tensor, holder: object, other: object) -> None:
        """Give a parameter the factor that it has where something else holds it."""
        key, found = self._key(tensor, holder), self._found.get(self._key(tensor, other))
        self._found.pop(key, None)
        if found is not None:
            self._found[key] = found

    def changes(self) -> list[Change]:
        """Every parameter that changes, once."""
        out: dict[int, Change] = {}
        for (tensor, holder), (change, where) in self._found.items():
            others = self.holders(change.tensor) if self._every and holder != tensor else []
            if any(not equal(change.factor, self.of(change.tensor, other)) for other in others):
                raise self._refused(where, "it shares a weight with another module, which has another multiplier")
            if not equal(change.factor, 1.0):
                if problem := change.problem():
                    raise self._refused(where, problem)
                out[tensor] = change
        return list(out.values())

    def _key(self, tensor: Tensor, holder: object) -> tuple[int, int]:
        return id(tensor), id(holder) if self._every else 0


def _of_rows(factor: Factor, held: Held, tensor: Tensor, axis: int) -> Factor:
    """A factor on some output features, as one per output feature; the factor itself, where it is on all of them."""
    if held.rows is None:
        return factor
    every = torch.ones(tensor.shape[axis], dtype=torch.float64)
    every[held.rows] = factor
    return every
