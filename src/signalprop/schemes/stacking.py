"""Methods that say nothing of weights stand on a scheme that draws them: its table, and a warning where both scale.

Such a method has an option `base`, the name of that scheme at its default options.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Annotated

import numpy as np

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.kernels.averages import predict_averages
from signalprop.network.architecture import Architecture, Placement
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.schemes.base import Scheme, scheme


def placed(architecture: Architecture, placement: Placement) -> Architecture:
    """The architecture with its norms at `placement`; as it is where they stand there already."""
    if set(architecture.placements) == {placement}:
        return architecture
    return architecture.replace(norm_placement=placement)


def _check_base(owner: Scheme, _: str, base: str) -> None:
    """Refuse a base that does not exist, or the method itself."""
    scheme(base)
    if base == owner.name:
        raise InputError(f"scheme {base!r} cannot be its base; choose one that draws weights, such as 'xavier'")


Base = Annotated[str, _check_base]  # name of the scheme that a method stands on


def base_table(owner: Scheme, base: str, architecture: Architecture, inputs: InputStatistics | None) -> Parametrization:
    """The table of scheme `base`, under the name and options of the method that stands on it."""
    table = scheme(base)(architecture, inputs)
    if table.architecture != architecture or (table.norm_scale != 1).any():
        raise InputError(
            f"schemes {owner.name!r} and {base!r} both say what norms do; choose a base that only draws weights, "
            "such as 'xavier'"
        )
    return replace(table, scheme=owner.name, options=owner.options())


def warn_if_depth_scaled(table: Parametrization, base: str, inputs: InputStatistics | None) -> None:
    """Warn where the base makes branches smaller in deeper networks, as the method on top of it does.

    The warning (a UserWarning) says how much less all branches together are predicted to add to the stream.
    """
    a = table.architecture
    shallow = a.replace(
        n_layers=1,
        n_decoder_layers=1 if a.n_decoder_layers else None,
        branches=tuple(a.layer_branches[i] for i in ((0, -1) if a.n_decoder_layers else (-1,))),
        norm_placement=PLACEMENTS[table.placement[-1]],
        final_norm=a.final_norm,
    )
    alone = scheme(base)(a, inputs)
    if not _last_branch(alone) < _last_branch(scheme(base)(shallow, inputs)) * (1 - 1e-6):
        return
    warnings.warn(
        f"{table.scheme} on {base}: both make branches smaller with depth; the layers together are predicted to add "
        f"{_added(table, inputs):.3g} times the variance that the input has left, {_added(alone, inputs):.3g} times "
        f"with {base} alone; choose a base that does not know the depth, such as 'xavier' or 'fixed'",
        stacklevel=4,
    )


def _last_branch(table: Parametrization) -> float:
    """Size of the last feed-forward sublayer's branch, up to what does not depend on depth."""
    return float(table.branch[-1] * table.weights["up"][-1] * table.weights["down"][-1])


def _added(table: Parametrization, inputs: InputStatistics | None) -> float:
    """Predicted variance that the last stack's layers add, over what is left of its input's after all skips."""
    statistics = inputs or default_statistics(table.architecture)
    forward = predict_averages(table, statistics, backward=False).forward
    mine = np.flatnonzero(table.stack == table.stack[-1])
    with np.errstate(divide="ignore"):
        skips = np.where(table.parallel, 0.0, np.log(table.skip**2))[mine].sum()
    log_ratio = forward["stream_out"].log_variance[-1] - forward["stream_in"].log_variance[mine[0]] - skips
    return float(np.expm1(np.clip(log_ratio, 0, 700)))
