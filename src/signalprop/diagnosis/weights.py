"""The weights of every layer, and what theory makes of their sizes alone, beside what is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from signalprop.attachment.mapping import Mapping, find_any
from signalprop.attachment.parametrization_of import read_parametrization, tensors_of
from signalprop.diagnosis.layers import groups
from signalprop.diagnosis.result import Number, Weights, number
from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kind_of
from signalprop.network.layout import ROLES, STACKS, layout, roles_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict


def live_weights(
    model: nn.Module, mapping: Mapping, inputs: InputStatistics | None = None, length: int | None = None
) -> tuple[tuple[Weights, ...], tuple[str, ...]]:
    """(one row per layer, notes). Predictions are those of random weights with the standard deviations that these have.

    Args:
        inputs: statistics of the data. length: tokens of a sequence (default: the model's).
    """
    rows = layout(mapping.architecture)
    stds = _stds(model, mapping)
    layers = groups(rows)
    found = [
        Weights(
            layer=k,
            stack=STACKS[rows.stack[group[0]]],
            std={role: std for i in group for role, std in stds[i].items()},
            norm_scale=tuple(mapping.sublayers[i].norm_scale for i in group),
            norm_gain=tuple(_gain(model, mapping, i) for i in group),
        )
        for k, group in enumerate(layers)
    ]
    if any(std is None for w in found for std in w.std.values()):
        return tuple(found), ("no prediction: some weights are not finite",)
    try:
        variance, gradient, distance, notes = _predicted(read_parametrization(model, mapping=mapping), inputs, length)
    except InputError as error:
        return tuple(found), (f"no prediction: {error}",)
    ends = [group[-1] for group in layers]
    return (
        tuple(
            w.model_copy(
                update={
                    "predicted_variance": number(variance[end]),
                    "predicted_gradient": None if gradient is None else number(gradient[end]),
                    "identity": None if distance is None else number(distance[k]),
                }
            )
            for k, (w, end) in enumerate(zip(found, ends, strict=True))
        ),
        notes,
    )


def _gain(model: nn.Module, mapping: Mapping, row: int) -> Number:
    """Root mean square of the gains of a sublayer's norm; None where it has none."""
    reference = mapping.sublayers[row].norm
    weight = None if reference is None else getattr(find_any(model, reference, "norm"), "weight", None)
    if weight is None:
        return None
    gain = weight.detach().double() + mapping.gain_offset
    return number(float(gain.square().mean().sqrt()))


def _stds(model: nn.Module, mapping: Mapping) -> list[dict[str, Any]]:
    """Root mean square of every role's weight, per sublayer; None where it is not finite."""
    rows = layout(mapping.architecture)
    masks = roles_of(mapping.architecture, rows.kind)
    out: list[dict[str, Any]] = []
    for i, item in enumerate(mapping.sublayers):
        # roles of cross-attention have names of their own, since a layer holds both kinds
        prefix = "cross_" if kind_of(rows, i).reads_memory else ""
        row = {}
        for role in ROLES:
            if role not in item.weights or not masks[role][i]:
                continue
            weight = tensors_of(model, item.weights[role], role)[0].detach()
            row[f"{prefix}{role}"] = number(float(weight.float().square().mean(dtype=torch.float64).sqrt()))
        out.append(row)
    return out


def _predicted(
    p: Parametrization, inputs: InputStatistics | None, length: int | None
) -> tuple[FloatArray, FloatArray | None, FloatArray | None, tuple[str, ...]]:
    """(stream variance, relative gradient variance behind every sublayer, |J - I| of every layer, notes)."""
    from signalprop.theory.bounds import nearness

    if length is not None and p.architecture.kind != "encoder-decoder" and length != p.architecture.seq_len:
        p = replace(p, architecture=p.architecture.replace(seq_len=length))
    profile = predict(p, inputs)
    gradient = None if profile.gradient is None else profile.gradient["stream_out"].variance
    try:
        distance = nearness(p, profile).identity_distance
    except InputError:
        distance = None
    return profile.forward["stream_out"].variance, gradient, distance, profile.notes
