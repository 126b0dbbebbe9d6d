"""Optimizer groups: the learning rates that a scheme asks for, as plain parameter groups by name."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from signalprop.attachment.attached import Attached, attach
from signalprop.attachment.live_model import unwrapped
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.models.transformer import Transformer
from signalprop.network.parametrization import Parametrization
from signalprop.repair.record import Record, attached_vanilla, the_record
from signalprop.repair.weight_assignment import assignments

Optimizer = Literal["adamw", "adam", "sgd"]


@typed
def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    optimizer: Optimizer = "adamw",
) -> list[dict[str, Any]]:
    """Every trainable parameter of an applied model, or of one from `build`, in groups for a PyTorch optimizer.

    Learning-rate factors of the Parametrization (muP) multiply `lr`; there `weight_decay` is divided by the factor, so
    that lr times weight decay is what it would be without (decoupled decay). In absorbed mode a parameter that was
    multiplied with c gets the numbers that make its training that of the multiplied model: AdamW lr c, eps / c, weight
    decay / c; SGD lr c^2, weight decay / c^2 (docs/theory/gauge.md). Exact until gradients are clipped by their global
    norm, which these factors change. Biases, gains and multipliers have no weight decay. For Adam with an L2 penalty
    (`adam`), whose penalty passes through the normalisation, the decay is divided by c^2.

    Returns:
        One dictionary per group: `params`, `names` (of the parameters), `lr`, `weight_decay`, and `eps` except for SGD.

    Raises:
        InputError: the model carries no scheme, one tensor would need two learning rates (a fused query, key and
            value), or another optimizer.
    """
    if optimizer not in ("adamw", "adam", "sgd"):
        raise InputError(f"optimizer is {optimizer!r}; expected 'adamw', 'adam' or 'sgd'")
    inner = unwrapped(model)
    p, attached, rates, multiplied = _described(inner)
    found = {item.name: item.parts for item in assignments(attached, p)}
    groups: dict[tuple[float, float, float], dict[str, Any]] = {}
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
        c = multiplied.get(name, 1.0)
        key = (
            lr * factor * (c**2 if optimizer == "sgd" else c),
            _decay(weight_decay, factor, c, optimizer) if decays else 0.0,
            eps / c,
        )
        group = groups.setdefault(key, {"params": [], "names": []})
        group["params"].append(parameter)
        group["names"].append(name)
    return [
        group | {"lr": rate, "weight_decay": decay} | ({} if optimizer == "sgd" else {"eps": epsilon})
        for (rate, decay, epsilon), group in groups.items()
    ]


def _described(model: nn.Module) -> tuple[Parametrization, Attached, dict[str, float], dict[str, float]]:
    """What a model is: numbers, where they are, learning-rate factors of added parameters, and absorbed factors."""
    if isinstance(model, Transformer):
        p = model.parametrization
        attached = attach(model)
        own = {
            f"{item.branch.removesuffix('.branch')}.multiplier": float(p.learning_rates["vectors"][i])
            for i, item in enumerate(attached.mapping.sublayers)
            if isinstance(item.branch, str)
        }
        return p, attached, own, {}
    record = the_record(model)
    return record.parametrization, attached_vanilla(model), _own_rates(record, record.parametrization), record.factors


def _decay(weight_decay: float, factor: float, c: float, optimizer: Optimizer) -> float:
    """Weight decay of a tensor with a learning-rate factor that was multiplied with c."""
    if optimizer == "adamw":
        return weight_decay / (factor * c)
    return weight_decay / c**2  # an L2 penalty is part of the gradient


def _own_rates(record: Record, p: Parametrization) -> dict[str, float]:
    """Learning-rate factors of the parameters that the scheme added, by name."""
    rates = {}
    for name in record.added:
        for i, carrier in enumerate(record.carriers):
            if name.startswith(carrier + "."):
                rates[name] = float(p.learning_rates["vectors"][i])
    return rates
