"""Optimizer groups: the learning rates that a scheme asks for, as plain parameter groups by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from signalprop.attachment.anatomy import Anatomy, attach, bare
from signalprop.attachment.parameters_by_role import Part, assignments
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.models.transformer import Transformer
from signalprop.network.parametrization import Parametrization
from signalprop.repair.record import the_record
from signalprop.schemes.mup import epsilon_factors

Optimizer = Literal["adamw", "adam", "sgd", "muon", "lion", "adafactor", "schedule-free"]
Adjustment = Literal["original", "match_rms_adamw"]


@dataclass(frozen=True)
class _Rule:
    """How an optimizer's numbers follow from those of a table, which are for Adam.

    Attributes:
        decoupled: its decay is. eps: it has Adam's. width: power of the width that its update of a hidden matrix has
            less than Adam's.
    """

    decoupled: bool = True
    eps: bool = False
    width: float = 0.0


_RULES = {
    "adamw": _Rule(eps=True),
    "schedule-free": _Rule(eps=True),
    "adam": _Rule(decoupled=False, eps=True),
    "sgd": _Rule(decoupled=False),
    "lion": _Rule(),
    "adafactor": _Rule(width=0.5),
    "original": _Rule(width=1.0),
    "match_rms_adamw": _Rule(width=0.5),
}


@typed
def parameter_groups(
    model: nn.Module | Anatomy,
    *,
    lr: float,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    optimizer: Optimizer = "adamw",
    adjust_lr_fn: Adjustment = "original",
    rest_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Every trainable parameter of an applied model, or of one from `build`, in groups for a PyTorch optimizer.

    Learning-rate factors of the Parametrization (muP) multiply `lr`; there `weight_decay` is divided by the factor, so
    that lr times weight decay is what it would be without (decoupled decay), and scheme `completep` has factors on
    `eps` as well. Biases, gains and multipliers have no weight decay.

    Factors on learning rates are Adam's, whose update of a hidden matrix grows with the width n. Of `lion` and
    `schedule-free` the same holds. `adafactor` (torch.optim.Adafactor) multiplies with the size of the weights, which
    is 1/sqrt(n) in muP. `muon` (torch.optim.Muon) gives updates whose spectral norm is
    sqrt(max(1, out/in)), or .2 sqrt(max(out, in)) with `adjust_lr_fn="match_rms_adamw"`; so of muP's 1/m the first
    needs nothing, the second and Adafactor 1/sqrt(m) (Yang, Simon and Bernstein 2023, arXiv:2310.17813, condition 1),
    and factors for the depth stay. Matrices that a model stores as (in, out) are taken into account. Muon takes the
    layers' matrices alone: a second optimizer takes the rest.

    Args:
        adjust_lr_fn: as passed to Muon. rest_lr: the learning rate of what Muon does not train; default: `lr`.

    Returns:
        One dictionary per group: `params`, `names` (of the parameters), `lr`, `weight_decay`, `eps` for Adam and AdamW,
        and with `muon` also `use_muon`, whether it is for Muon (with its `adjust_lr_fn`) or for AdamW.

    Raises:
        InputError: the model carries no scheme, one tensor would need two learning rates (a fused query, key and
            value), or another optimizer.
    """
    if optimizer not in get_args(Optimizer):
        raise InputError(f"optimizer is {optimizer!r}; expected one of {', '.join(get_args(Optimizer))}")
    inner = bare(model)
    p, attached, rates = _described(inner)
    found = {item.name: item.parts for item in assignments(attached, p)}
    wider = p.architecture.d_model / float(p.options.get("base_width") or p.architecture.d_model)
    in_layers, at_ends = epsilon_factors(p)
    groups: dict[tuple[float, float, float, bool], dict[str, Any]] = {}
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = found.get(name, [])
        factors = {part.learning_rate for part in parts} or {rates.get(name, 1.0)}
        if len(factors) > 1:
            raise InputError(
                f"{name} holds {', '.join(part.name for part in parts)}, for which scheme {p.scheme!r} wants learning "
                f"rates {sorted(factors)}: one tensor has one; use a model with separate maps"
            )
        factor = factors.pop()
        decays = any(part.decays for part in parts) if parts else parameter.ndim > 1
        by_muon = optimizer == "muon" and _is_inner(parts) and parameter.ndim == 2
        rule = _RULES[adjust_lr_fn if by_muon else "adamw" if optimizer == "muon" else optimizer]
        if _is_inner(parts) and rule.width:
            factor *= wider**rule.width
        if by_muon and adjust_lr_fn == "original" and parts[0].transposed:
            inputs, outputs = parameter.shape  # of which Muon takes the first for outputs
            factor *= math.sqrt(max(1.0, outputs / inputs) / max(1.0, inputs / outputs))
        rate = lr if by_muon or optimizer != "muon" or rest_lr is None else rest_lr
        decay = weight_decay / (factor if rule.decoupled else 1.0)  # a penalty is in the gradient
        row = parts[0].row if parts else None
        epsilon = eps * float(at_ends if row is None else in_layers[row]) if rule.eps else 0.0
        key = (rate * factor, decay if decays else 0.0, epsilon, by_muon)
        group = groups.setdefault(key, {"params": [], "names": []})
        group["params"].append(parameter)
        group["names"].append(name)
    return [
        group
        | {"lr": rate, "weight_decay": decay}
        | ({"eps": epsilon} if epsilon else {})
        | ({"use_muon": inner} if optimizer == "muon" else {})
        | ({"adjust_lr_fn": adjust_lr_fn} if inner else {})
        for (rate, decay, epsilon, inner), group in groups.items()
    ]


def _is_inner(parts: Sequence[Part]) -> bool:
    """Whether a parameter is a matrix of a layer: no end, no vector."""
    return bool(parts) and all(part.row is not None and part.decays for part in parts)


def _described(model: nn.Module) -> tuple[Parametrization, Anatomy, dict[str, float]]:
    """What a model is: numbers, where they are, and learning-rate factors of trained multipliers."""
    p = model.parametrization if isinstance(model, Transformer) else the_record(model).parametrization
    attached = attach(model)
    of = {id(row.multiplier): float(p.learning_rates["vectors"][i]) for i, row in enumerate(attached.rows)}
    return p, attached, {name: of[id(q)] for name, q in model.named_parameters() if id(q) in of}
