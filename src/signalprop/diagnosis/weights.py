"""The weights of every layer, and what theory predicts from their sizes alone, beside what is measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.parametrization_of import parametrization_of, tensors_of
from signalprop.attachment.rows import AttachedRow
from signalprop.diagnosis.layers import groups
from signalprop.diagnosis.result import Number, Weights, number
from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import ROLES, STACKS, roles_of
from signalprop.prediction import predict
from signalprop.streams.proof import gain_and_bias
from signalprop.theory.bounds import identity_distances


def live_weights(
    attached: Anatomy, inputs: InputStatistics | None = None, length: int | None = None
) -> tuple[tuple[Weights, ...], tuple[str, ...]]:
    """(one row per layer, notes). Predictions are those of random weights with the standard deviations that these have.

    Args:
        inputs: statistics of the data. length: tokens of a sequence (default: the model's).
    """
    rows, stds = attached.layout, _stds(attached)
    layers = groups(rows)
    found = [
        Weights(
            layer=k,
            stack=STACKS[rows.stack[group[0]]],
            std={role: std for i in group for role, std in stds[i].items()},
            norm_scale=tuple(attached.rows[i].norm_scale for i in group),
            norm_gain=tuple(_gain(attached.rows[i], attached.mapping.gain_offset) for i in group),
        )
        for k, group in enumerate(layers)
    ]
    if any(std is None for w in found for std in w.std.values()):
        return tuple(found), ("no prediction: some weights are not finite",)
    try:
        p = parametrization_of(attached)
        if length is not None and p.architecture.kind != "encoder-decoder" and length != p.architecture.seq_len:
            p = replace(p, architecture=p.architecture.replace(seq_len=length))
        profile = predict(p, inputs)
    except InputError as error:
        return tuple(found), (f"no prediction: {error}",)
    ends = [group[-1] for group in layers]
    columns = {"predicted_variance": profile.forward["stream_out"].variance[ends]}
    if profile.gradient is not None:
        columns["predicted_gradient"] = profile.gradient["stream_out"].variance[ends]
    with suppress(InputError):
        columns["identity"] = identity_distances(p, profile)
    told = [{name: number(column[k]) for name, column in columns.items()} for k in range(len(found))]
    return tuple(w.model_copy(update=update) for w, update in zip(found, told, strict=True)), profile.notes


def _gain(row: AttachedRow, offset: float) -> Number:
    """Root mean square of the gains of a sublayer's norm; None if it has none."""
    weight, _ = gain_and_bias(row.norm)
    if weight is None:
        return None
    gain = weight.detach().double() + offset
    return number(float(gain.square().mean().sqrt()))


def _stds(attached: Anatomy) -> list[dict[str, Any]]:
    """Root mean square of every role's weight, per sublayer; None where it is not finite."""
    masks = roles_of(attached.mapping.architecture, attached.layout.kind)
    out: list[dict[str, Any]] = []
    for i, row in enumerate(attached.rows):
        # roles of cross-attention have other names, since a layer holds both kinds
        prefix = "cross_" if row.kind.reads_memory else ""
        found = {}
        for role, held in row.weights.items():
            if masks[role][i]:
                weight = tensors_of(held, f"{row.label} {role}")[0].detach()
                found[f"{prefix}{role}"] = number(float(weight.float().square().mean(dtype=torch.float64).sqrt()))
        out.append({f"{prefix}{role}": found[f"{prefix}{role}"] for role in ROLES if f"{prefix}{role}" in found})
    return out
