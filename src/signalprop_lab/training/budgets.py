"""What a sweep's runs had beside what the paper's had: the variant, the warm-up, tokens per parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from signalprop_lab.training.grid import Grid, Point, grid_of
from signalprop_lab.training.sweep_cells import Summary
from signalprop_lab.training.sweep_definition import Sweep

NEAR = 5.0  # up to this factor apart two budgets count as one


class Had(NamedTuple):
    """What the runs of a cell had.

    Attributes:
        scheme: of the recipe, or "its own" of a model that comes as it is. warm_up: in words.
        per_parameter: tokens (images, ...) that a run reads over all its steps, by the parameters of its network.
    """

    scheme: str
    warm_up: str
    per_parameter: float


def budgets(store: Mapping[str, Any], items: Iterable[Summary]) -> dict[str, Had]:
    """By cell, at its best setting; none of a cell without a run."""
    grid = grid_of(Sweep(**store["sweep"]), store["base"])
    return {item.name: _had(grid, item) for item in items if item.rows}


def _had(grid: Grid, item: Summary) -> Had:
    row = item.rows[0]
    recipe = grid.recipe(Point(row["cell"], item.rate, row["seed"]))
    read = recipe.budget.steps * recipe.budget.batch_size * (recipe.data.seq_len if row.get("unit") == "tokens" else 1)
    part = recipe.schedule.warmup
    return Had(
        recipe.model.scheme or "its own",
        f"{part:.0%}" if part < 1 else f"{part:,.0f} steps",
        read / row["parameters"],
    )


def share_of(name: str, all_: Mapping[str, Had], sweep: Sweep) -> float | None:
    """A cell's budget over the paper's; None: the sweep judges no paper's claim, or the cell has no run."""
    if sweep.paper is None or name not in all_:
        return None
    return all_[name].per_parameter / sweep.paper.per_parameter


def near(shares: Iterable[float]) -> bool:
    """Whether all budgets are within a factor of 5 of the paper's."""
    return all(1 / NEAR <= share <= NEAR for share in shares)


def ratio(shares: Iterable[float]) -> str:
    """The smallest share, such as `1/1,900` or `1.5 times`; "" without any."""
    least = min(shares, default=None)
    if least is None:
        return ""
    return f"1/{_round(1 / least)}" if least < 1 else f"{_round(least)} times"


def in_words(shares: Iterable[float], unit: str) -> str:
    """Such as `at 1/1,900 of the paper's tokens per parameter`; "" without any."""
    text = ratio(shares)
    return f"at {text}{' of' if text.startswith('1/') else ''} the paper's {unit} per parameter" if text else ""


def _round(value: float) -> str:
    """Two digits."""
    return f"{value:.2g}" if value < 10 else f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"
