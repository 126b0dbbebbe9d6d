"""What a direct cast to few bits does to a model: its loss, and the noise in the stream after every layer.

Weights: those of the branches' linear maps, experts' too (embedding, head and norms stay). Activations: what those maps
read. Numbers are cast and cast back, so that the arithmetic in between stays in the model's precision: this is the
error of the format, not of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, require_roles
from signalprop.data.batches import Batch
from signalprop.diagnosis.layers import Progress, first_sequences, has_modules, layer_calls, run
from signalprop.diagnosis.number_formats import PER_TENSOR, Format
from signalprop.diagnosis.result import Cast, Number, number
from signalprop.diagnosis.stream import LossResult, loss
from signalprop.hooks import Hooks, Products
from signalprop.measurement.measuring import arguments_of
from signalprop.network.kinds import ROLE

Of = Literal["weights", "activations", "both"]


class LinearMap(NamedTuple):
    """A linear map of a branch, or all experts' of one role.

    Attributes:
        module: which reads its input and has `parameter`. turned: the weight is stored as (inputs, outputs).
        experts: a stack of matrices. inside: its input is computed within the module, so no hook sees it.
    """

    module: nn.Module
    parameter: str
    turned: bool
    experts: bool
    inside: bool

    @property
    def weight(self) -> Any:
        """The parameter."""
        return getattr(self.module, self.parameter)

    def held(self, form: Format) -> Tensor:
        """The weight as a format holds it; every expert's by itself."""
        x = self.weight.data.mT if self.turned else self.weight.data
        x = torch.stack([form(one) for one in x]) if self.experts else form(x)
        return x.mT.contiguous() if self.turned and self.experts else x.mT if self.turned else x


def maps_of(attached: Anatomy) -> list[LinearMap]:
    """The linear maps of branches, each once."""
    bare = {id(p): name for name, p in attached.model.named_parameters(remove_duplicate=False)}
    found: dict[int, LinearMap] = {}
    for role, held in ((r, h) for row in attached.rows for r, h in row.weights.items()):
        key = id(held.holder)
        if isinstance(held.holder, nn.Module):
            made = LinearMap(held.holder, "weight", held.transposed, held.copies, inside=False)
        elif held.copies and key in bare:  # other bare parameters are not maps (Mamba's rates)
            place, _, name = bare[key].rpartition(".")
            owner = attached.model.get_submodule(place)
            made = LinearMap(owner, name, held.transposed, True, inside=ROLE[role].writes)
        else:
            continue
        found.setdefault(key, made)
    return list(found.values())


@contextmanager
def cast(model: nn.Module, form: Format, of: Of, maps: Iterable[LinearMap]) -> Iterator[None]:
    """The model with cast weights, activations or both, for as long as the block runs. One module's weights at a time.

    Args:
        maps: of `maps_of`.
    """
    kept: dict[int, list[tuple[LinearMap, Tensor]]] = {}
    held: dict[int, list[LinearMap]] = {}
    for one in maps:
        held.setdefault(id(one.module), []).append(one)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = held[id(module)]
        if of != "activations":
            kept[id(module)] = [(one, one.weight.data) for one in here]
            for one in here:
                one.weight.data = one.held(form)
        if of != "weights" and args and isinstance(args[0], Tensor) and not all(one.inside for one in here):
            return (form(args[0]), *args[1:]), kwargs
        return None

    def after(module: nn.Module, *_: Any) -> None:
        for one, weight in kept.pop(id(module), ()):
            one.weight.data = weight

    made_inside = [one.weight for parts in held.values() for one in parts if one.inside]
    products = Products(made_inside, lambda _, x: form(x)) if of != "weights" and made_inside else nullcontext()
    hooks, modules = Hooks(), [parts[0].module for parts in held.values()]
    for module in modules:
        hooks.before(module, before)
        hooks.after(module, after, always=True)
    try:
        with hooks, products:
            yield
    finally:
        for module in modules:
            after(module)


def casts(
    attached: Anatomy,
    batches: Sequence[Batch],
    formats: Sequence[str],
    of: Sequence[Of],
    whole: LossResult,
    skip_first: int = 4,
    progress: Progress | None = None,
) -> tuple[Cast, ...]:
    """Loss and signal-to-noise ratio under every combination of format, what is cast, and with one scale or none.

    bfloat16 is cast without a scale alone: it has the range of float32; formats that have scales with them.

    Args:
        formats: of `FORMATS`. whole: the loss without any cast. skip_first: positions that the ratios leave out (losses
            count them all). Ratios are of the first sequence.
        progress: called with (combinations done, all).
    """
    (first,) = first_sequences(batches, 1)
    layered = has_modules(attached.mapping)
    clean = _streams(attached, first, skip_first) if layered else []
    maps = maps_of(require_roles(attached))
    combinations = [
        (Format(name, scale), part) for name in formats for part in of
        for scale in ((False, True) if name in PER_TENSOR else (True,)) if not (scale and name == "bfloat16")
    ]  # fmt: skip

    def measured(form: Format, part: Of) -> Cast:
        with cast(attached.model, form, part, maps):
            found = loss(attached, batches)
            noisy = _streams(attached, first, skip_first) if layered else []
        return Cast(
            format=form.name,
            of=part,
            scaled=form.scaled,
            loss=found.estimate,
            increase=found.above(whole),
            signal_to_noise=tuple(ratio(x, y) for x, y in zip(clean, noisy, strict=True)),
        )

    out = []
    for done, (form, part) in enumerate(combinations):
        out.append(measured(form, part))
        if progress is not None:
            progress(done + 1, len(combinations))
    return tuple(out)


def _streams(attached: Anatomy, one: Batch, skip_first: int) -> list[Tensor]:
    """The stream after every layer at the positions that count, (positions, features)."""
    arguments = arguments_of(attached, one)
    with torch.no_grad(), layer_calls(attached, arguments, skip_first) as calls:
        run(attached.model, arguments)
    return [calls[k].kept(calls[k].output) for k in range(len(calls))]


def ratio(clean: Tensor, noisy: Tensor) -> Number:
    """10 log10 of signal over noise; None where it is not finite or there is no noise."""
    signal, noise = (float(t.double().square().sum()) for t in (clean, clean - noisy))
    good = math.isfinite(signal) and math.isfinite(noise) and noise > 0 and signal > 0
    return number(10 * math.log10(signal / noise)) if good else None
