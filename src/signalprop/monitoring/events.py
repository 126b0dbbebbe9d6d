"""What an event of a training likely comes from and what to do next: a Departure as a Finding."""

from __future__ import annotations

import math

from signalprop.monitoring.bands import Departure
from signalprop.results.findings import Finding

_RATE = "lower the learning rate or warm up longer, from the last checkpoint before this step"
# By quantity: name; what likely causes it; what to do next.
_EVENTS: dict[str, tuple[str, str, str]] = {
    "finite": (
        "not finite", "an overflow, or a broken gradient in the step before",
        "signalprop diagnose names the operation; go back to the last checkpoint, or train in bfloat16",
    ),
    "loss": ("loss jump", "an update that was too large where it moved first", _RATE + ", or clip gradients"),
    "gradient_norm": (
        "gradient jump", "a batch or an update that was too large where it moved first", f"clip gradients; {_RATE}",
    ),
    "variance": ("variance out of its band", "weights that grew, or branches that all point one way", _RATE),
    "gradient": ("gradient out of its band", "layers that multiply the gradient on its way down", _RATE),
    "token_correlation": (
        "rank collapse", "collapsed tokens: layers below get little gradient",
        _RATE + "; larger skips, or smaller attention branches",
    ),
    "score_std": ("scores too large", "queries and keys that grew", "QK-norm, or a smaller rate for queries and keys"),
    "largest_score": ("scores too large", "queries and keys that grew", "QK-norm, or QK-clip"),
    "attention_entropy": ("one-hot attention", "queries and keys that grew", "QK-norm, or a smaller rate for them"),
    "lowest_entropy": ("one-hot head", "queries and keys of a head that grew", "QK-norm, or a smaller rate for them"),
    "update": ("update out of its band", "a rate that does not suit these weights", "give them a separate rate"),
    "stalled": (
        "updates are rounded away", "updates below half of the number format's step, 0.2 to 0.4 % in bfloat16",
        "weights in float32 (with autocast), or an optimizer with stochastic rounding",
    ),
    "expert_load": (
        "idle expert", "a router that sends nothing to it: it learns nothing",
        "a load-balancing loss or bias, or draw the router anew",
    ),
}  # fmt: skip


def finding_of(item: Departure) -> Finding:
    """An event as a value; its cause is possible, as no test of it ran."""
    name, cause, remedy = _EVENTS[item.quantity]
    return Finding(
        name=name, severity="fault" if item.quantity == "finite" else "warning", text=item.text, layers=item.layers,
        quantity=item.quantity, value=item.value if math.isfinite(item.value) else None,
        cause=f"possible, not tested: {cause}", remedy=remedy, page="docs/monitoring.md", step=item.step,
    )  # fmt: skip


def line_of(item: Departure) -> str:
    """An event in one line: step, what, where, what it may come from, what to do next."""
    found = finding_of(item)
    return f"{item.text}. {found.cause.capitalize()}. Next: {found.remedy}"
