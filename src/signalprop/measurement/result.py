"""From what a Recorder saw to a Profile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from signalprop.attachment.mapping import number
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.moments import FloatArray
from signalprop.results.between_streams import STREAM_COVARIANCE
from signalprop.results.profile import POINTS, Profile
from signalprop.results.series import Series
from signalprop.watching.between_streams import covariance
from signalprop.watching.passes import Pass
from signalprop.watching.reduction import collect

Table = Mapping[int, FloatArray]  # (mean, variance, token correlation) by site


def profile_of(
    recorder: Pass,
    *,
    scheme: str = "",
    architecture: Architecture | None = None,
    loss_scale: float = 1.0,
    strict: bool = True,
) -> Profile:
    """The Profile of what a recorder saw.

    Args:
        strict: gradients that are not finite are an error; otherwise they are left out, with a note.
    """
    check_reached(recorder)
    forward, gradient = tables(recorder)
    problem = not_finite(recorder, forward)
    if problem:
        raise InputError(problem)
    relative, scale, note = None, None, ""
    if recorder.backward:
        problem = not_finite(recorder, gradient, gradient=True)
        if problem and strict:
            raise InputError(problem)
        relative, scale, note = (None, None, problem) if problem else relative_gradients(recorder, gradient)
    rows, items = recorder.plan.layout, recorder.attached.rows
    skips = np.array([number(items[i - 1 if rows.parallel[i] else i].skip) for i in range(len(items))])
    beta = np.array([number(item.multiplier) for item in items])
    statistics: dict[str, Any] = {}
    between = [recorder.between.get(site) for site in recorder.plan.stream_out]
    if all(found is not None for found in between):
        statistics[STREAM_COVARIANCE] = [covariance(found).tolist() for found in between if found is not None]
    if (beta != 1).any() or (skips != 1).any():
        statistics["branch_gain"] = np.divide(beta, skips, out=np.ones_like(beta), where=skips != 0) ** 2
    entry = (forward[recorder.plan.stream_in[0]] * powers(np.array([items[0].units[0]]))[0]).tolist()
    return Profile(
        source="measured",
        fidelity="model",
        architecture=as_run(recorder.mapping.architecture if architecture is None else architecture, recorder.shapes),
        scheme=scheme,
        input=dict(zip(("mean", "variance", "token_correlation"), entry, strict=True)),
        forward=series(recorder, forward),
        gradient=relative,
        gradient_scale=None if scale is None else scale / loss_scale**2,
        n_seeds=1,
        notes=tuple(line for line in (*recorder.notes(), note) if line),
        statistics=statistics,
    )


def tables(recorder: Pass) -> tuple[Table, Table]:
    """The forward and the gradient moments by site, brought to the host at once."""
    keys = [*recorder.forward, *recorder.gradient]
    values = collect([*recorder.forward.values(), *recorder.gradient.values()])
    n = len(recorder.forward)
    return dict(zip(keys[:n], values[:n], strict=True)), dict(zip(keys[n:], values[n:], strict=True))


class NotReached(InputError):
    """A pass did not reach some of the probe points: a layer was skipped, or the mapping is wrong."""


def check_reached(recorder: Pass) -> None:
    """Raise InputError if the forward pass did not reach every site."""
    reached = [i in recorder.forward for i in range(len(recorder.plan.sites))]
    if not any(reached):
        raise (NotReached if recorder.calls else InputError)(
            "no probe point was reached: the model did not run while the probe was attached, no gradient came back "
            "to its stream, or it ran inside a compiled function; give the compiled model, or compiled=True, before "
            "it first runs"
        )
    if not all(reached):
        raise NotReached(
            f"{recorder.plan.where(reached.index(False))}: this point was not reached in the forward pass "
            f"({sum(reached)} of {len(reached)} were); a layer was skipped, or the mapping names a module that is not "
            "called"
        )


def as_run(architecture: Architecture, shapes: Mapping[int, tuple[int, int]]) -> Architecture:
    """The architecture with the sequence lengths of the pass."""
    stacks = 2 if architecture.kind == "encoder-decoder" else 1
    if stacks != len(shapes):
        raise InputError(f"architecture is of {stacks} stacks, the model ran {len(shapes)}; give the model's, or none")
    if stacks == 2:
        lengths = {"seq_len": shapes[0][1], "target_len": shapes[1][1]}
    else:
        lengths = {"seq_len": next(iter(shapes.values()))[1]}
    if all(getattr(architecture, name) == value for name, value in lengths.items()):
        return architecture
    return architecture.replace(**lengths)


def site_of(recorder: Pass, point: str, row: int, *, gradient: bool = False) -> int:
    """Key of a point in the recorder's results."""
    index: int = getattr(recorder.plan, point)[row]
    if index >= 0:
        return index
    # the sum that a parallel layer does not form: its gradient is that of the layer's output
    return recorder.plan.stream_out[row + 1] if gradient else -1 - row


def factor_of(recorder: Pass, point: str, row: int, *, gradient: bool = False) -> float:
    """What makes the tensor (the gradient) seen at a point that of the Parametrization: `SublayerMap.units`."""
    if getattr(recorder.plan, point)[row] < 0:  # the sum of a parallel layer, which the recorder forms in right units
        if not gradient:
            return 1.0
        row += 1  # its gradient is that of the layer's output
    unit = recorder.attached.rows[row].units[POINTS.index(point)]
    return 1 / unit if gradient else unit


def dropout_behind(recorder: Pass, row: int) -> float:
    """Rate of a dropout between where a branch is seen and the addition: a function call, which no hook sees."""
    attached = recorder.attached.rows[row]
    if attached.dropout is None:
        return 0.0
    owner, name = attached.dropout
    return float(getattr(owner, name)) if owner.training and not isinstance(owner, nn.Dropout) else 0.0


def dropped(
    recorder: Pass, table: Table, point: str, row: int, values: FloatArray, rate: float, *, gradient: bool
) -> FloatArray:
    """Moments `values` of a point; of a branch after its dropout, in expectation, where it is seen before it.

    Dropout of rate p makes (v + p m^2) / (1 - p) of the variance v, and leaves mean and covariance. A gradient that
    is seen before it has 1 / (1 - p) times its variance.
    """
    virtual = recorder.plan.stream_out[row] < 0 and point == "stream_out" and not gradient
    if not (point == "branch" or virtual):
        return values
    mean, variance, correlation = values.tolist()
    if virtual:  # the recorder's sum of the stream and the branch
        m, v, _ = table[recorder.plan.branch[row]].tolist()
        item = recorder.attached.rows[row]
        factor = number(item.multiplier) * item.units[1]
        after = variance + factor * factor * (v + m * m) * rate / (1 - rate)
    elif gradient:
        after = variance * (1 - rate) - mean * mean * rate
    else:
        after = (variance + rate * mean * mean) / (1 - rate)
    return np.array([mean, after, correlation * variance / after if after > 0 else 0.0])


def powers(factors: FloatArray) -> FloatArray:
    """(n, 3): means, variances and token correlations of tensors after factors on them."""
    return np.stack([factors, factors * factors, np.ones_like(factors)], axis=1)


def series(recorder: Pass, table: Table, *, unit: float = 1.0, gradient: bool = False) -> dict[str, Series]:
    """Series by probe point, in units of the variance `unit`."""
    out, rows = {}, range(len(recorder.plan.branch))
    rates = [dropout_behind(recorder, row) for row in rows]
    for point in POINTS:
        seen = np.array([table[site_of(recorder, point, row, gradient=gradient)] for row in rows])
        for row in np.flatnonzero(rates).tolist():
            seen[row] = dropped(recorder, table, point, row, seen[row], rates[row], gradient=gradient)
        values = seen * powers(np.array([factor_of(recorder, point, row, gradient=gradient) for row in rows]))
        out[point] = Series.of(values[:, 1] / unit, values[:, 2], mean=values[:, 0] / math.sqrt(unit))
    return out


def relative_gradients(recorder: Pass, table: Table) -> tuple[dict[str, Series] | None, float | None, str]:
    """(gradients relative to the last stream_out, the absolute variance there, a note)."""
    if not table:
        return None, None, "no gradients: the step had no backward pass through the stream"
    missing = [i for i in range(len(recorder.plan.sites)) if i not in table]
    if missing:
        return (
            None,
            None,
            f"no gradients: none reached {recorder.plan.where(missing[0])} (frozen parameters before it?)",
        )
    last = len(recorder.plan.stream_out) - 1
    factor = factor_of(recorder, "stream_out", last, gradient=True)
    scale = float(table[recorder.plan.stream_out[last]][1]) * factor * factor
    note = "" if scale > 0 else "the gradient at the last stream_out is zero; the gradients are absolute"
    return series(recorder, table, unit=scale if scale > 0 else 1.0, gradient=True), scale, note


def not_finite(recorder: Pass, table: Table, *, gradient: bool = False) -> str:
    """Which sublayer and point is the first (in the order of computation) that is not finite, and why; or ''."""
    if not table or np.isfinite(np.stack(list(table.values()))).all():
        return ""
    bad = {key for key, values in table.items() if not np.isfinite(values).all()}
    order = [site_of(recorder, point, row) for row in range(len(recorder.plan.branch)) for point in POINTS]
    first = next(key for key in (reversed(order) if gradient else order) if key in bad)
    parameters = recorder.model.named_parameters()
    culprit = next((name for name, p in parameters if p.is_floating_point() and not torch.isfinite(p).all()), None)
    if culprit is not None:
        cause = f"parameter {culprit} is not finite"
    elif gradient:
        cause = "lower the loss scale, or leave such steps out"
    else:
        cause = "the parameters are finite, so the computation overflowed there"
    what = "gradient" if gradient else "signal"
    return f"{recorder.plan.where(first)}: the {what} holds NaN or infinite values first here; {cause}"
