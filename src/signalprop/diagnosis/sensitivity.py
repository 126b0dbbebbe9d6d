"""Which maps a cast hurts most at the logits: the noise of each map alone, weighed by the gradient where it enters.

A change d of the stream after a layer changes the loss by g d to first order, whose sign is chance, and the predicted
distribution by half the mean of (g d)^2 in nats (its Fisher information; the gradients g are those of the text). So
the damage of a map is that, summed over tokens, per token. The first positions are left out: trained models park
activations there whose size norms take away again, so that a first order says too much. A gain from the sizes of
weights alone does not rank the layers of trained models: outlier features carry most of the noise, and the logits
hardly read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from signalprop.attachment.arguments import read_by
from signalprop.attachment.attached import Attached, require_roles
from signalprop.data.batches import Batch
from signalprop.diagnosis.casts import LinearMap, cast, maps_of
from signalprop.diagnosis.layers import Call, Progress, first_sequences, groups, layer_calls, lean
from signalprop.diagnosis.number_formats import Format
from signalprop.diagnosis.result import LEAST_DAMAGE, Cast, LeftOut, MapNoise, number, tuples
from signalprop.hooks import Hooks
from signalprop.measurement.measuring import arguments_of, lent_gradients, loss_of
from signalprop.repair.left_out import left_out

# A mean over so many sequences.
SEQUENCES = 4
OUTLYING = 6.0  # times the root mean square, from where on a channel or token is told; a convention


class _Met(NamedTuple):
    """What a layer met in a pass, and the gradient of the mean loss where its stream leaves it."""

    call: Call
    gradient: Tensor


def by_map(
    attached: Attached,
    batches: Sequence[Batch],
    rows: Sequence[Cast],
    *,
    skip_first: int = 4,
    progress: Progress | None = None,
) -> tuple[Cast, ...]:
    """The casts, each with what it does to every map by itself. Every layer runs again on what it met without a cast.

    Args:
        batches: their first `SEQUENCES` sequences are taken, of which damages and noises are means; one alone ranks
            worse. skip_first: positions that do not count. progress: called with (casts done, all).
    """
    attached = require_roles(attached)
    model = attached.model
    maps = [maps_of(attached, [attached.rows[i] for i in group]) for group in groups(attached.layout)]
    read = first_sequences(batches, SEQUENCES)
    found: list[list[list[MapNoise]]] = [[] for _ in rows]  # by cast and sequence
    for done, one in enumerate(read):
        met = _met(attached, one, skip_first)
        targets = int((one.targets >= 0).sum())
        outliers = [_outliers(seen.call, of) for seen, of in zip(met, maps, strict=True)]
        for number_of_row, row in enumerate(rows):
            found[number_of_row].append(
                [item for k, seen in enumerate(met) for item in _layer(
                    model, seen, maps[k], row, k, targets, {} if done else outliers[k])]
            )  # fmt: skip
            if progress is not None:
                progress(done * len(rows) + number_of_row + 1, len(read) * len(rows))
    return tuple(
        row.model_copy(update={"maps": tuple(map(_mean, zip(*of, strict=True)))})
        for row, of in zip(rows, found, strict=True)
    )


def _layer(
    model: nn.Module, seen: _Met, maps: Sequence[LinearMap], row: Cast, k: int, targets: int,
    outliers: dict[str, dict[str, Any]],
) -> Iterator[MapNoise]:  # fmt: skip
    """What a cast of every map of layer k does in one sequence, of so many targets."""
    form, call = Format(row.format, row.scaled), seen.call
    signal = float(call.output[call.keep].double().square().sum())
    for one in maps:
        with cast(model, form, row.of, [one]), torch.no_grad():
            output = call.again()
        noise = (output - call.output)[call.keep].double()
        changes = (noise * seen.gradient[call.keep]).sum(-1)
        yield MapNoise(
            name=one.path,
            layer=k,
            noise=number(float(noise.square().sum()) / signal) if signal > 0 else None,
            damage=number(0.5 * targets * float(changes.square().sum())),
            **outliers.get(one.path, {}),
        )


def _mean(of: Sequence[MapNoise]) -> MapNoise:
    """Of one map over the sequences; outliers are those of the first."""
    means = {}
    for name in ("noise", "damage"):
        values = [getattr(item, name) for item in of]
        known = [value for value in values if value is not None]
        means[name] = sum(known) / len(known) if len(known) == len(values) else None
    return of[0].model_copy(update=means)


def _outliers(call: Call, maps: Sequence[LinearMap]) -> dict[str, dict[str, Any]]:
    """Of each map of a layer, by its path: the outliers of what it reads, as `MapNoise` has them."""
    read: dict[str, Tensor] = {}
    hooks = Hooks(call.layer)
    for path, module in ((one.path, one.module) for one in maps if not one.inside):
        hooks.before(module, lambda _, args, kwargs, path=path: read.update({path: args[0].detach()} if args else {}))
    with hooks, torch.no_grad():
        call.again()
    found = {}
    for name, x in read.items():
        x = x.flatten(0, -2)  # experts read tokens without their sequence
        squares = (x[call.keep.flatten()] if len(x) == call.keep.numel() else x).double().square()
        whole = squares.mean()
        if whole > 0:
            channels, tokens = squares.mean(0) / whole, squares.mean(-1) / whole
            found[name] = {
                "channel": number(float(channels.max().sqrt())),
                "token": number(float(tokens.max().sqrt())),
                "largest_channel": int(channels.argmax()),
            }
    return found


def to_leave_out(model: nn.Module, rows: Sequence[Cast]) -> tuple[LeftOut, ...]:
    """Of every format whose cast is predicted to cost more than `LEAST_DAMAGE`: which maps to spare, the worst first.

    Args:
        rows: with `maps`; of a format the last is taken, which casts most.
    """
    out = []
    for row in {row.format: row for row in rows}.values():
        known = sorted(((item.damage, item.name) for item in row.maps if item.damage), reverse=True)
        whole, held = sum(damage for damage, _ in known), 0.0
        reasons: dict[str, str] = {}
        for damage, name in known[: -(-len(row.maps) // 10)]:
            if whole < LEAST_DAMAGE or held >= whole / 2:
                break
            held += damage
            reasons[name] = f"{100 * damage / whole:.0f} % of the damage, {damage:.2g} nats per token{_told(row, name)}"
        if reasons:
            out.append(LeftOut(format=row.format, of=row.of, **tuples(left_out(model, reasons))))
    return tuple(out)


def _told(row: Cast, name: str) -> str:
    """An outlier of what a map reads, in words, where it is one."""
    item = next(item for item in row.maps if item.name == name)
    if (item.channel or 0.0) > OUTLYING:
        return f"; channel {item.largest_channel} of what it reads is {item.channel:.0f} times the root mean square"
    return f"; a token is {item.token:.0f} times the root mean square" if (item.token or 0.0) > OUTLYING else ""


def _met(attached: Attached, one: Batch, skip_first: int) -> list[_Met]:
    model = attached.model
    one = read_by(attached.mapping.arguments, one)
    arguments = arguments_of(model, attached.mapping, one)
    with (
        torch.inference_mode(False), torch.enable_grad(), lent_gradients(model),
        layer_calls(attached, arguments, skip_first) as found,
    ):  # fmt: skip
        loss = loss_of(lean(model, arguments), one, None)
        calls = [found[k] for k in range(len(found))]
        gradients = torch.autograd.grad(loss, [call.output for call in calls])
    return [
        _Met(call._replace(output=call.output.detach()), gradient)
        for call, gradient in zip(calls, gradients, strict=True)
    ]
