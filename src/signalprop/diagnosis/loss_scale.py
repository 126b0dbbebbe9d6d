"""Gradients in float16 at a loss scale: which entries become 0, lose digits or overflow.

Source: Micikevicius et al. 2018 (Mixed precision training), section 3.2.

They are computed in the model's precision and counted by their exponents, so one backward pass serves any scale:
those of the stream after every layer and of matrices. Gains and biases are left out: the gradient of a key's bias is
rounding noise. A backward pass in float16 rounds in between as well: what it loses on the way is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from signalprop.attachment.anatomy import Anatomy
from signalprop.diagnosis.layers import groups
from signalprop.diagnosis.result import ScaledGradient, ScaledGradients
from signalprop.errors import InputError
from signalprop.hooks import Hooks

# Up to the first, numbers round to 0; below the second, they are subnormal; from the third on, infinite.
_ZERO, _NORMAL, _INFINITE = 2.0**-25, 2.0**-14, 65520.0
_HEADROOM = 4.0  # between the largest entry that was seen and the end of the format: other texts have larger ones
_LEAST, _MOST = -160, 140  # exponents of float32, subnormal ones included


def check_scale(scale: float, name: str = "loss_scale") -> None:
    """Raise InputError for what no loss can be multiplied with."""
    if not 0 < scale < math.inf:
        raise InputError(f"{name} is {scale:g}; expected a number above 0, such as 65536")


class GradientExponents:
    """How many entries of every gradient have which exponent, of all backward passes in `watching`.

    Args:
        scale: what the loss is to be multiplied with.
    """

    def __init__(self, attached: Anatomy, scale: float) -> None:
        check_scale(scale)
        self._attached, self._scale = attached, scale
        self._layers = _layers_of(attached)
        self._exponents: dict[str, Tensor] = {}  # (exponents,): entries without the scale that are not 0
        self._shares: dict[str, Tensor] = {}  # (3,): those that become 0, subnormal, infinite with it
        self._largest: dict[str, float] = {}
        self._layer: dict[str, int | None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts in a block in which parameters take part in the backward pass."""
        hooks, plan = Hooks(), self._attached.plan
        ends = {plan.stream_out[rows[-1]]: k for k, rows in enumerate(groups(self._attached.layout))}
        for k in ends.values():
            self._layer.setdefault(f"stream after layer {k}", k)

        def passes(index: int, x: Tensor | None) -> None:
            if index in ends and x is not None and x.requires_grad:
                x.register_hook(partial(self._see, f"stream after layer {ends[index]}"))  # type: ignore[no-untyped-call]

        hooks.sites(plan.sites, passes)
        handles = []
        for name, p in self._attached.model.named_parameters():
            if p.requires_grad and p.ndim > 1:
                self._layer[name] = self._layers.get(id(p))
                handles.append(p.register_hook(partial(self._see, name)))  # type: ignore[no-untyped-call]
        try:
            with hooks:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, name: str, gradient: Tensor) -> None:
        x = gradient.detach().float().abs().flatten()
        x = x[x != 0].nan_to_num(torch.inf)  # rows of words that the text has not are 0
        y = x * self._scale
        exponents = torch.frexp(x[x.isfinite()]).exponent.long() - _LEAST
        parts = (y <= _ZERO, (y > _ZERO) & (y < _NORMAL), y >= _INFINITE)
        for held, new in (
            (self._exponents, torch.bincount(exponents, minlength=_MOST - _LEAST)),
            (self._shares, torch.stack([part.sum() for part in parts])),
        ):
            held[name] = held[name] + new if name in held else new
        self._largest[name] = max(self._largest.get(name, 0.0), float(x.max()) if len(x) else 0.0)

    def found(self) -> ScaledGradients | None:
        """What was counted; None where no gradient came, or one that is not finite."""
        counts = {name: int(self._exponents[name].sum()) for name in self._layer if name in self._exponents}
        counts = {name: n for name, n in counts.items() if n}
        largest = max((self._largest[name] for name in counts), default=0.0)
        if not 0 < largest < math.inf:
            return None
        tensors = []
        for name, n in counts.items():
            zero, subnormal, infinite = (self._shares[name] / n).tolist()
            tensors.append(
                ScaledGradient(name=name, layer=self._layer[name], n=n, zero=zero, subnormal=subnormal,
                               infinite=infinite, largest=self._scale * self._largest[name])
            )  # fmt: skip
        power = math.floor(math.log2(_INFINITE / _HEADROOM / largest))
        lost = max(float(self._exponents[name][: max(-24 - power - _LEAST, 0)].sum()) / n for name, n in counts.items())
        return ScaledGradients(scale=self._scale, tensors=tuple(tensors), fitting=2.0**power, lost=lost)


def _layers_of(attached: Anatomy) -> dict[int, int]:
    """The layer of every weight of a sublayer, by its id."""
    out: dict[int, int] = {}
    for k, rows in enumerate(groups(attached.layout)):
        for row in (attached.rows[i] for i in rows):
            for held in row.weights.values():
                if not held.problem:
                    out.setdefault(id(held.weight), k)
    return out
