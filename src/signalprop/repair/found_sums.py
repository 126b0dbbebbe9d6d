"""Which tensors of a forward pass are sums of others: residual streams, found by numbers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from signalprop.repair.tape import ROUNDINGS, Tape, like, rms

_WINDOW = 96  # so many tensors of one shape are looked back for a base and one part
_PAIRED = 32  # and so many, about two layers', for a base and two parts
_PROJECTIONS = 4


@dataclass
class Value:
    """A tensor of the forward pass, wherever it came by: events are (time, module path, module)."""

    tensor: Tensor
    projection: NDArray[np.float64]
    size: float
    time: int
    made: list[tuple[int, str, nn.Module]] = field(default_factory=list)
    read: list[tuple[int, str, nn.Module]] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """A module without children gave it out before anyone read it."""
        return bool(self.made) and self.made[0][0] == self.time and not has_children(self.made[0][2])


def values_of(tape: Tape, names: dict[int, str]) -> list[Value]:
    """Every distinct tensor once, in the order of its first appearance."""
    found: dict[tuple[Any, ...], Value] = {}
    directions: dict[int, NDArray[np.float64]] = {}
    for time, (module, side, tensor) in enumerate(tape.events):
        if tensor.ndim < 2 or tensor.numel() == 0:
            continue
        flat = tensor.reshape(-1).contiguous().cpu()
        key = (flat.dtype, tensor.shape[-1], flat.view(torch.uint8).numpy().tobytes())
        value = found.get(key)
        if value is None:
            n = flat.numel()
            if n not in directions:
                directions[n] = np.random.default_rng(n).standard_normal((_PROJECTIONS, n)) / n**0.5
            projection = directions[n] @ flat.double().numpy()
            value = found[key] = Value(tensor, projection, rms(tensor), time)
        (value.read if side == "input" else value.made).append((time, names[id(module)], module))
    return list(found.values())


@dataclass(frozen=True)
class Sum:
    """total = base + factor * (sum of the parts)."""

    total: Value
    base: Value
    parts: tuple[Value, ...]
    factor: float = 1.0


def _explain(value: Value, earlier: list[Value], streams: set[int]) -> Sum | None:
    """The value as a sum: of an earlier one and a part; else of two parts; else of a multiple of a part.

    The latest base comes first. Random projections are compared before whole tensors are.
    """
    parts = [v for v in earlier if v.made and v.made[0][0] == v.time and id(v) not in streams and v.size > 0]
    near = [part for part in parts if part.time >= earlier[-_PAIRED:][0].time] if earlier else []
    singles = [(part,) for part in parts]
    pairs = [(one, other) for i, one in enumerate(near) for other in near[i + 1 :]]
    for candidates, free, window in ((singles, False, _WINDOW), (pairs, False, _PAIRED), (singles, True, _WINDOW)):
        bases = [v for v in reversed(earlier[-window:]) if v.read]
        if not candidates:
            continue
        p = np.array([np.sum([part.projection for part in chosen], 0) for chosen in candidates])
        for base in bases:
            rest = value.projection - base.projection
            factors = p @ rest / (p * p).sum(-1) if free else np.ones(len(p))
            gap = np.abs(factors[:, None] * p - rest).max(-1)
            loose = 8 * ROUNDINGS * torch.finfo(value.tensor.dtype).eps * (value.size + base.size)
            for k in np.flatnonzero(gap <= loose):
                found = Sum(value, base, tuple(candidates[k]), float(factors[k]))
                if _depends(base, found.parts) and _adds_up(found):
                    return found
    return None


def _depends(base: Value, parts: tuple[Value, ...]) -> bool:
    """Whether some module read the base before each part was made; tables that are added up are not branches."""
    return all(any(base.time <= time < part.time for time, _, _ in base.read) for part in parts)


def _adds_up(found: Sum) -> bool:
    """To the rounding of the dtype, and to a hundredth of each part."""
    total, base = found.total.tensor, like(found.base.tensor, found.total.tensor).double()
    parts = [found.factor * like(part.tensor, total).double() for part in found.parts]
    error = rms(total.double() - base - torch.stack(parts).sum(0))
    sizes = [rms(part) for part in parts]
    rounding = ROUNDINGS * torch.finfo(total.dtype).eps * (found.total.size + found.base.size + sum(sizes))
    return error <= rounding and error <= 0.01 * min(sizes)


def has_children(module: nn.Module) -> bool:
    """Whether a module is made of others."""
    return next(module.children(), None) is not None


def explained(values: list[Value]) -> list[Sum]:
    """All values that are an earlier one plus module outputs, in the order in which their (first) part was made."""
    sums: list[Sum] = []
    for shape in sorted({(v.tensor.numel(), v.tensor.shape[-1]) for v in values}):
        group = [v for v in values if (v.tensor.numel(), v.tensor.shape[-1]) == shape]
        streams: set[int] = set()
        for i, value in enumerate(group):
            if value.computed:
                continue
            found = _explain(value, group[max(0, i - _WINDOW) : i], streams)
            if found is not None:
                streams.add(id(value))
                sums.append(found)
    sums.sort(key=lambda found: found.parts[0].time)
    return sums
