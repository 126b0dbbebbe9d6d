"""Predictions of many schemes of one architecture, to be ranked: rougher and faster than `predict`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kinds_in
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import Cost, cheapest, expected_cost, finished, predicted
from signalprop.results.profile import Profile
from signalprop.sublayers.attention.heads import mixes
from signalprop.sublayers.attention.roles import Settings

if TYPE_CHECKING:
    from signalprop.kernels.position_grid import Grid


def predict_for_ranking(parametrization: Parametrization, inputs: InputStatistics) -> Profile:
    """`predict` in about half the time: without bands, and token kernels on a coarse grid where `predict` takes one.

    Gradients below 1e6 are within .9 % of `predict`, streams within .06 % (`grid_for`).
    """
    return predicted(parametrization, inputs, "auto", roughly=True)


def predict_all_for_ranking(
    tables: Sequence[Parametrization], inputs: InputStatistics
) -> Iterator[tuple[int, Profile | InputError]]:
    """`predict_for_ranking` of each table, with its place, in any order; or why it cannot be predicted.

    Those of one architecture and placement of norms are followed together if they are followed on a grid.
    """
    from signalprop.kernels.passes import most_together
    from signalprop.kernels.position_grid import grid_for
    from signalprop.kernels.predicting import predict_together

    groups: dict[Any, tuple[Grid | None, list[int]]] = {}
    for place, table in enumerate(tables):
        grid = grid_for(table, inputs, coarse=True) if _goes_together(table) else None
        key = place if grid is None else (table.architecture.model_dump_json(), table.placement.tobytes())
        groups.setdefault(key, (grid, []))[1].append(place)
    for grid, places in groups.values():
        first = tables[places[0]]
        most = 1 if grid is None else max(most_together(first, grid), 1)
        for some in (places[i : i + most] for i in range(0, len(places), most)):
            if grid is not None and len(some) > 1:
                note = cheapest(first, inputs)[1]
                found = predict_together([tables[place] for place in some], inputs, grid)
                for place, profile in zip(some, found, strict=True):
                    yield place, finished(tables[place], inputs, profile, (note,))
                continue
            for place in some:
                try:
                    yield place, predict_for_ranking(tables[place], inputs)
                except InputError as error:
                    yield place, error


_TOGETHER = {"attention", "feed_forward"}


def _goes_together(p: Parametrization) -> bool:
    """Whether a decoder has only feed-forwards and attention of the usual kind."""
    a = p.architecture
    usual = not (a.qk_norm or a.layer_inputs or a.several_streams or mixes(p)) and Settings.of(a) == Settings()
    return a.kind == "decoder" and usual and {kind.name for kind in kinds_in(p)} <= _TOGETHER


def expected_cost_of_ranking(p: Parametrization, inputs: InputStatistics, together: bool = False) -> Cost:
    """What `predict_for_ranking` takes of what `predict` does: measured on token kernels (gpt2 of 48 layers), at most
    .4.

    Args:
        together: with others of the architecture, by `predict_all_for_ranking`: at most .1 where they go together.
    """
    cost = expected_cost(p, inputs, "auto")
    return cost._replace(seconds=(0.1 if together and _goes_together(p) else 0.4) * cost.seconds)
