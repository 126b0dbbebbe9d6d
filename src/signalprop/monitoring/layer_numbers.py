"""The numbers of a sampled step: by layer, and what sums them up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from signalprop.attachment.probe_points import Plan
from signalprop.diagnosis.layers import groups
from signalprop.measurement.result import tables
from signalprop.network.layout import layout
from signalprop.results.profile import Profile
from signalprop.theory.bounds import growth_exponent
from signalprop.watching.passes import Pass

# Layers from which on an exponent of growth means something.
_GROWTH_LAYERS = 6


def per_sublayer(profile: Profile) -> dict[str, list[float | None]]:
    """Variance and token correlation after every sublayer of a measured Profile."""
    stream = profile.forward["stream_out"]
    return {"variance": stream.variance.tolist(), "token_correlation": stream.token_correlation.tolist()}


def per_layer(profile: Profile) -> dict[str, list[float | None]]:
    """Variance, token correlation, gradient and branch share of every layer of a measured Profile."""
    members = groups(layout(profile.architecture))
    ends = [group[-1] for group in members]
    met = profile.forward["stream_in"].variance
    with np.errstate(divide="ignore", invalid="ignore"):
        added = profile.sensitivity_ratios * met
        shares = [float(added[group].sum() / met[group[0]]) for group in members]
    out: dict[str, list[float | None]] = {
        quantity: [values[k] for k in ends] for quantity, values in per_sublayer(profile).items()
    }
    if profile.gradient is not None:
        out["gradient"] = profile.gradient["stream_out"].variance[ends].tolist()
    return {**out, "branch_share": list(shares)}


def steepest(profile: Profile, *, grows: bool) -> int:
    """The sublayer through which the gradient grows most on its way back, or shrinks most."""
    assert profile.gradient is not None
    grown = profile.gradient["stream_in"].log_variance - profile.gradient["stream_out"].log_variance
    return int(np.nanargmax(grown) if grows else np.nanargmin(grown))


def summary(profile: Profile, layers: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """What sums all layers up, by name."""
    rows = layout(profile.architecture)
    variance = np.array(layers["variance"], np.float64)
    out = {
        "input_variance": float(profile.input["variance"]),
        "sensitivity": profile.sensitivity()["mean"],
        "largest_variance": float(variance.max()),
        "largest_token_correlation": max(value for value in layers["token_correlation"] if value is not None),
    }
    if len(variance) >= _GROWTH_LAYERS and rows.stack.min() == rows.stack.max() and (variance > 0).all():
        out["growth_exponent"] = growth_exponent(variance)
    if profile.gradient is not None:
        out["gradient_ratio"] = float(profile.gradient["stream_in"].variance[0])
    return {name: value for name, value in out.items() if math.isfinite(value)}


def first_not_finite(recorder: Pass, plan: Plan) -> int:
    """The sublayer where a signal that is not finite is so first."""
    bad = {i for i, values in tables(recorder)[0].items() if not np.isfinite(values).all()}
    sites = zip(plan.stream_in, plan.branch, plan.stream_out, strict=True)
    return next(i for i, points in enumerate(sites) if bad & {*points, -1 - i})
