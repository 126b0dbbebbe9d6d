"""What a direct cast to few bits does to a model: its loss, and the noise in the stream after every layer.

Weights: those of the branches' linear maps (embedding, head and norms stay). Activations: what those maps read. Numbers
are cast and cast back, so that the arithmetic in between stays in the model's own precision: this is the error of the
format, not of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from signalprop.attachment.attached import attach, is_transposed, require_roles
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.diagnosis.kept import Kept, result_of
from signalprop.diagnosis.layers import Positions, Progress, has_modules, layer_modules, run, sequences, stacks_of
from signalprop.diagnosis.number_formats import FORMATS, PER_TENSOR, Format
from signalprop.diagnosis.removal import difference, estimate
from signalprop.diagnosis.result import Cast, Number, number
from signalprop.diagnosis.stream import LossResult, loss
from signalprop.errors import InputError
from signalprop.hooks import Hooks
from signalprop.measurement.measuring import arguments_of

Of = Literal["weights", "activations", "both"]


def maps_of(model: nn.Module, mapping: Mapping) -> list[nn.Module]:
    """The linear maps of all branches, each once."""
    holders = [held.holder for row in require_roles(attach(model, mapping)).rows for held in row.weights.values()]
    return list({id(holder): holder for holder in holders if isinstance(holder, nn.Module)}.values())


@contextmanager
def cast(
    model: nn.Module, mapping: Mapping, form: Format, of: Of, maps: Sequence[nn.Module] | None = None
) -> Iterator[None]:
    """The model with cast weights, activations or both, for as long as the block runs. One map's weights at a time.

    Args:
        maps: of `maps_of`; default: all.
    """
    kept: dict[int, Tensor] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if of != "activations":
            weight: nn.Parameter = module.weight  # type: ignore[assignment]
            kept[id(module)] = weight.data
            weight.data = form(weight.data.mT).mT if is_transposed(module) else form(weight.data)
        if of != "weights" and args and isinstance(args[0], Tensor):
            return (form(args[0]), *args[1:]), kwargs
        return None

    def after(module: nn.Module, *_: Any) -> None:
        if id(module) in kept:
            weight: nn.Parameter = module.weight  # type: ignore[assignment]
            weight.data = kept.pop(id(module))

    hooks, maps = Hooks(model), maps_of(model, mapping) if maps is None else maps
    for module in maps:
        hooks.before(module, before)
        hooks.after(module, after, always=True)
    try:
        with hooks:
            yield
    finally:
        for module in maps:
            after(module)


def casts(
    model: nn.Module,
    batches: Sequence[Batch],
    mapping: Mapping,
    *,
    formats: Sequence[str] = tuple(PER_TENSOR),
    of: Sequence[Of] = ("weights", "activations", "both"),
    scaled: Sequence[bool] = (False, True),
    whole: LossResult | None = None,
    skip_first: int = 4,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> tuple[Cast, ...]:
    """Loss and signal-to-noise ratio under every combination of format, what is cast, and scale.

    bfloat16 is cast without a scale alone: it has the range of float32; formats with scales of their own with them.

    Args:
        whole: the loss without any cast, where it is known. skip_first: positions that the ratios leave out (losses
            count them all). Ratios are of the first sequence.
        kept: where what is done stays, and what an interrupted call had done is found (see `diagnose`).
        progress: called with (combinations done, all).

    Raises:
        InputError: an unknown format, or as `loss`.
    """
    for name in formats:
        if name not in FORMATS:
            raise InputError(f"unknown format {name!r}; formats: {', '.join(FORMATS)}")
    whole = whole or loss(model, batches, mapping=mapping)
    first = next(sequences(batches[0]))
    layered = has_modules(mapping)
    clean = _streams(model, first, mapping, skip_first) if layered else []
    combinations = [
        (Format(name, scale), part) for name in formats for part in of
        for scale in (scaled if name in PER_TENSOR else (True,)) if not (scale and name == "bfloat16")
    ]  # fmt: skip

    def measured(form: Format, part: Of) -> Cast:
        with cast(model, mapping, form, part):
            found = loss(model, batches, mapping=mapping)
            noisy = _streams(model, first, mapping, skip_first) if layered else []
        return Cast(
            format=form.name,
            of=part,
            scaled=form.scaled,
            loss=estimate(found),
            increase=difference(found, whole),
            signal_to_noise=tuple(ratio(x, y) for x, y in zip(clean, noisy, strict=True)),
        )

    out = []
    for done, (form, part) in enumerate(combinations):
        key = ("cast", form.name, part, form.scaled)
        out.append(result_of(kept, key, Cast, partial(measured, form, part)))
        if progress is not None:
            progress(done + 1, len(combinations))
    return tuple(out)


def _streams(model: nn.Module, one: Batch, mapping: Mapping, skip_first: int) -> list[Tensor]:
    """The stream after every layer at the positions that count, (positions, features)."""
    seen: list[Tensor] = []
    arguments = arguments_of(model, mapping, one)
    positions = Positions(mapping, arguments, skip_first)

    def leaves(stack: int, x: Tensor | None) -> None:
        if x is not None:
            seen.append(x.detach()[positions.keep(stack, x)].float())

    hooks = Hooks(model)
    for layer, stack in zip(layer_modules(model, mapping), stacks_of(mapping), strict=True):
        hooks.outputs(layer, partial(leaves, stack))
    with hooks, torch.no_grad():
        run(model, arguments)
    return seen


def ratio(clean: Tensor, noisy: Tensor) -> Number:
    """10 log10 of signal over noise; None where it is not finite or there is no noise."""
    signal, noise = (float(t.double().square().sum()) for t in (clean, clean - noisy))
    good = math.isfinite(signal) and math.isfinite(noise) and noise > 0 and signal > 0
    return number(10 * math.log10(signal / noise)) if good else None
