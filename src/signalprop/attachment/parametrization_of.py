"""Read the Parametrization that a live or trained model has now: root mean squares of weights, and multipliers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach, require_roles
from signalprop.attachment.mapping import Mapping, Number, describe, number
from signalprop.attachment.rows import PACKED, AttachedRow, Held
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.hooks import whole
from signalprop.network.architecture import ADDED, Architecture
from signalprop.network.kinds import ROLE
from signalprop.network.layout import roles_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import (
    PLACEMENTS,
    ROLES,
    Embedding,
    Head,
    Parametrization,
    Trainable,
    blank,
    fan,
    layout,
)
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE
from signalprop.streams.live_model import weights_here
from signalprop.streams.proof import gain_and_bias
from signalprop.streams.wrappers import with_adapters_merged, without_adapters

SHAPE = ("shape_in", "shape_out", "shape_gain")  # columns
_ASKED = ("seq_len", "target_len", "dropout", "attention_dropout", "embedding_dropout")


@typed
def read_parametrization(
    model: nn.Module | Anatomy, mapping: Mapping | None = None, architecture: Architecture | None = None
) -> Parametrization:
    """The Parametrization of scheme `as is`: what every weight, norm and multiplier of a model is now.

    Every number is a root mean square (of all entries of a role's weight, of a bias, of a norm's gains): the
    signal is multiplied by the second moment, so a mean that training has grown counts. A Parametrization says nothing
    else about a weight: directions, outliers and low rank are not in it, nor are a class token, biases of norms on
    embeddings, on branches and after the last layer, or the gain of an encoder's final norm where it differs from the
    decoder's. Rows of an embedding that are reserved for padding are left out. Of a layer with adapters of PEFT the
    weight is the effective one: with the active adapters merged into it.

    Args:
        model: a supported Hugging Face model, one with `signalprop_mapping()`, or any with `mapping`.
        architecture: recorded in the result; default: the mapping's.

    Raises:
        InputError: unknown family, parameters on the meta device or not finite, a role that the mapping
            leaves out, or a weight whose size does not fit the architecture.
    """
    return parametrization_of(attach(model, mapping), architecture)


def parametrization_of(attached: Anatomy, architecture: Architecture | None = None) -> Parametrization:
    """As `read_parametrization`, of a model that is attached."""
    attached = require_roles(attached)
    mapping = attached.mapping
    a = mapping.architecture if architecture is None else architecture
    if mapping.found and architecture is not None:  # whoever gave it need not have known more than the stream
        a = mapping.architecture.replace(**{name: getattr(architecture, name) for name in _ASKED})
    with weights_here(attached.model):
        return _read(attached, a)


def _read(attached: Anatomy, a: Architecture) -> Parametrization:
    """The numbers of a model whose weights are there."""
    mapping, rows = attached.mapping, layout(a)
    items = attached.rows
    if len(items) != len(rows.kind):
        raise InputError(f"the model has {len(items)} sublayers, the architecture {len(rows.kind)}")
    table = blank(a, "as is")
    columns: dict[str, FloatArray] = {}
    for role, has_it in roles_of(a, rows.kind).items():
        weights, biases = np.zeros(len(items)), np.zeros(len(items))
        for i in np.flatnonzero(has_it):
            where = f"{describe(rows, int(i))} {role}"
            if role not in attached.rows[i].weights:
                raise InputError(f"{where}: the mapping names no weight of this role; expected one in `weights`")
            weight, bias = tensors_of(attached.rows[i].weights[role], where)
            if weight.numel() != ROLE[role].entries(a):
                inputs, outputs = fan(a, role)
                several = f"{ROLE[role].held(a)[0]} x " * (ROLE[role].copies is not None)
                raise InputError(
                    f"{where}: the weight has {weight.numel()} entries, the architecture {several}{inputs} x {outputs};"
                    " fix the mapping (rows of a fused map?) or the architecture"
                )
            own = mapping.architecture.role_scale.get(role, 1.0)
            weights[i] = own * rms(weight, where)
            biases[i] = 0.0 if bias is None else own * rms(bias, f"{where} bias")
        columns[f"weight__{role}"], columns[f"bias__{role}"] = weights, biases
    places = [PLACEMENTS[p] for p in rows.placement]
    found = [_columns(row, place, mapping.gain_offset) for row, place in zip(attached.rows, places, strict=True)]
    columns |= {name: np.array([one[name] for one in found]) for name in found[0]}
    columns["norm_bias"] *= a.streams is None
    return replace(
        table.with_columns(**columns),
        shaping=mapping.shaping,
        embedding=embedding(attached, a),
        head=head(attached, a),
        distribution=dict.fromkeys(ROLES, "measured"),
        branch_trainable=trainable([item.multiplier for item in items]),
        skip_trainable=trainable([item.skip for item in items]),
        attention_trainable=trainable([n for i in items for n in (i.value_skip, i.attention_gain)]) != "fixed",
    )


def _columns(row: AttachedRow, place: str, offset: float) -> dict[str, float]:
    """The numbers of a sublayer beside its weights, by column of the table; `place`: of its norm."""
    found = multipliers_of(row, offset)
    found["norm_scale"] = 1.0 if place == "none" else row.norm_scale
    return found | {
        "norm_gain": gain(None if place == "none" else row.norm, offset, f"{row.label} norm"),
        "norm_bias": norm_bias(row.norm, f"{row.label} norm") if place in NORM_BEFORE | NORM_AFTER else 0.0,
        "post_norm_gain": gain(row.post_norm, offset, f"{row.label} second norm"),
        "norm_slope": slope(row.norm),
    }


def multipliers_of(row: AttachedRow, offset: float, *, now: bool = False) -> dict[str, float]:
    """The multipliers of a sublayer, by column of the table; `now`: the factor on scores as the model holds it."""
    attends = row.kind.attends
    return {
        "skip": number(row.skip),
        "branch": number(row.multiplier),
        "norm_scale": row.norm_scale,
        "score_scale": score_scale(row, offset, now=now),
        "value_skip": number(row.value_skip) if attends else 0.0,
        "attention_gain": number(row.attention_gain) if attends else 1.0,
        **dict(zip(SHAPE, row.shape, strict=True)),
    }


def not_alike(attached: Anatomy) -> str:
    """Notes on what a prediction takes as equal, or as drawn independently, and is not."""
    return "; ".join(filter(None, (equal_layers(attached), other_class_token(attached))))


def equal_layers(attached: Anatomy) -> str:
    """A note where two layers hold equal weights: what they add to the stream is not independent, as is predicted.

    Four layers of nn.TransformerEncoder, which copies its first one: attention branches of the last were predicted a
    quarter too small, and first gradients 30 % too small (pre-norm) or 11 % too large (8 networks of width 128).
    """
    for one, other in combinations(attached.rows, 2):
        shared = [role for role in one.weights if role in other.weights]
        if one.kind is other.kind and one.stack == other.stack and shared:
            break
    else:
        return ""
    first, second = (tensors_of(row.weights[shared[0]], row.label)[0] for row in (one, other))
    if first.shape != second.shape or not torch.equal(first, second) or not bool(first.detach().std() > 0):
        return ""
    return (
        f"{one.label} and {other.label} hold equal weights (nn.TransformerEncoder begins with copies of one layer); "
        "the prediction assumes independent layers, and the branches of copies add up to a larger stream"
    )


def other_class_token(attached: Anatomy) -> str:
    """A note where the class token enters with another size than is predicted, that of two rows of the position table.

    A norm divides its gradient by that size. Of a ViT of 4 layers and width 64 whose class token begins at 0 the first
    gradient is 1.9 times the predicted.
    """
    ends = attached.ends
    if not ends.class_tokens or ends.token is None or not isinstance(ends.position, Held | None):
        return ""
    position = table_rms(ends.position, "position") ** 2
    token = rms(tensors_of(ends.class_tokens[0], "class token")[0], "class token") ** 2 + position
    if not token or not position or 2 / 3 < token / (2 * position) < 1.5:
        return ""
    return (
        f"the class token enters with a variance of {token:.2g}, and is predicted with twice that of a position, "
        f"{2 * position:.2g}: first gradients go with the inverse of that size, since a norm divides by it"
    )


def slope(norm: nn.Module | None) -> float:
    """alpha of an activation that stands in for a norm; the table's default if there is none."""
    alpha = getattr(norm, "alpha", None)
    return float(alpha.detach()) if isinstance(alpha, Tensor) and alpha.numel() == 1 else 0.5


def tensors_of(held: Held, where: str) -> tuple[Tensor, Tensor | None]:
    """(weight, bias or None) of a role; of a fused map only its rows (columns of a Conv1D, the transpose)."""
    holder = with_adapters_merged(held.holder)
    beside = held.beside if isinstance(holder, Tensor) else getattr(holder, "bias", None)
    weight, bias = numbers_of(holder), None if beside is None else numbers_of(beside)
    if weight is None:
        what = type(held.holder).__name__
        raise InputError(f"{where}: a {what} has no weight; expected a module with `weight`, or a parameter")
    return held.of(weight, held.axis), None if bias is None else held.of(bias, held.copies)


def numbers_of(owner: Any) -> Tensor | None:
    """A parameter, or the weight of a module, as plain numbers; None if there is none.

    Modules that PyTorch, torchao or bitsandbytes have quantised hold theirs packed, and are unpacked. PEFT's adapters
    are merged in. One that is sharded (FSDP2) is gathered: every process has to ask.
    """
    found = owner
    if not isinstance(owner, Tensor):
        owner = with_adapters_merged(owner)
        found = getattr(owner, "weight", owner)
    found = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(found, Tensor):
        return None
    found = whole(found)
    package = type(found).__module__.partition(".")[0]
    found = found.dequantize() if found.is_quantized or package == "torchao" else found
    if package == "bitsandbytes":
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        unpacked: Tensor = dequantize_bnb_weight(cast(nn.Parameter, found), getattr(owner, "state", None))
        found = unpacked.detach()
    if not found.is_floating_point():
        raise InputError(PACKED.format(f"a {type(owner).__name__}"))
    return found


def rms(tensor: Tensor, where: str) -> float:
    """Root mean square of all entries."""
    if tensor.is_meta:
        raise InputError(
            f"{where}: the parameter is on the meta device and holds no numbers; load or initialise the model first"
        )
    value = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) / math.sqrt(max(1, tensor.numel()))
    if not math.isfinite(value):
        raise InputError(f"{where}: the parameter holds NaN or infinite values")
    return value


def gain(norm: nn.Module | None, offset: float, where: str) -> float:
    """Root mean square of a norm's gains; 1 without a norm, or for a norm without weight."""
    weight = numbers_of(gain_and_bias(norm)[0])
    return 1.0 if weight is None else rms(weight if offset == 0 else weight + offset, where)


def norm_bias(norm: nn.Module | None, where: str) -> float:
    """Root mean square of a norm's bias over features; 0 without one."""
    bias = numbers_of(gain_and_bias(norm)[1])
    return 0.0 if bias is None else rms(bias, f"{where} bias")


def score_scale(row: AttachedRow, offset: float, *, now: bool = False) -> float:
    """Factor on the scalar product of query and key, with the gains of QK-norm in it; `now`: as the model holds it."""
    own = float(getattr(*row.scaling)) if now and row.scaling is not None else row.score_scale
    return own * gain(row.query_norm, offset, "query norm") * gain(row.key_norm, offset, "key norm")


def trainable(multipliers: list[Number]) -> Trainable:
    """`fixed`, `scalar` or `channel`: of what kind multipliers are."""
    sizes = [value.numel() for value in multipliers if isinstance(value, nn.Parameter)]
    return "fixed" if not sizes else "scalar" if max(sizes) == 1 else "channel"


def table_rms(table: Held | float | None, where: str) -> float:
    """Root mean square of an embedding table (or patch map) without its padding row; 0 if there is none.

    A number passes through: it is the root mean square of a table that the model computes.
    """
    if not isinstance(table, Held):
        return float(table or 0)
    weight, _ = tensors_of(table, where)
    skip = getattr(without_adapters(table.holder), "padding_idx", None)
    if skip is not None and weight.shape[0] > 1:
        weight = torch.cat([weight[:skip], weight[skip + 1 :]])
    return rms(weight, where)


def embedding(attached: Anatomy, a: Architecture) -> Embedding:
    """The embedding row."""
    e, scale, offset = attached.ends, attached.mapping.embedding.scale, attached.mapping.gain_offset
    needed = [("token", a.has_token_table or a.input == "patches"), ("position", a.positions in ADDED)]
    needed += [("segment", a.n_segments > 0), ("convolutions", a.input == "frames")]
    needed += [("decoder_position", a.decoder_positions in ADDED and a.decoder_positions != a.positions)]
    for name, wanted in [*needed, ("norm", a.embedding_norm and not attached.mapping.embedding.normed)]:
        if wanted and (getattr(e, name) is None or (name == "convolutions" and not e.convolutions)):
            raise InputError(
                f"the mapping's embedding names no {name}, which the architecture has; give EmbeddingMap({name}=...)"
            )
    bias = tensors_of(e.token, "embedding")[1] if a.input == "patches" and e.token is not None else None
    convolutions = [tensors_of(layer, "convolution") for layer in e.convolutions]
    return Embedding(
        token=table_rms(e.token, "token embedding"),
        position=table_rms(e.position, "position embedding"),
        decoder_position=None
        if e.decoder_position is None
        else table_rms(e.decoder_position, "decoder position embedding"),
        segment=table_rms(e.segment, "segment embedding"),
        patch_bias=0.0 if bias is None else rms(bias, "patch bias"),
        convolutions=tuple(rms(weight, "convolution") for weight, _ in convolutions),
        convolution_biases=tuple(0.0 if b is None else rms(b, "convolution bias") for _, b in convolutions),
        scale=scale,
        norm_gain=gain(e.norm, offset, "embedding norm"),
        distribution="measured",
    )


def head(attached: Anatomy, a: Architecture) -> Head:
    """The head row; the token table stands in for a tied head that the mapping does not name."""
    ends, mapping = attached.ends, attached.mapping
    weight = ends.token if ends.head is None and a.tied_embeddings else ends.head
    if a.head != "none" and weight is None:
        raise InputError(
            "the mapping's head names no weight; expected HeadMap(weight=...), or an architecture with head 'none'"
        )
    if a.head_transform and ends.transform is None:
        raise InputError(
            "the mapping's head names no transform, which the architecture has; expected HeadMap(transform=...)"
        )
    return Head(
        weight=0.0 if a.head == "none" else table_rms(weight, "head"),
        scale=mapping.head.scale,
        transform=0.0
        if ends.transform is None
        else rms(tensors_of(ends.transform, "head transform")[0], "head transform"),
        final_norm_slope=slope(ends.final_norm),
        final_norm_gain=gain(ends.final_norm, mapping.gain_offset, "final norm"),
        distribution="measured",
    )
