"""A loss or a gradient that jumps, and the sublayer that moved first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from signalprop.files.storage import finite
from signalprop.monitoring.places import Place
from signalprop.network.moments import FloatArray

# A loss jumps this many robust standard deviations and this share above the median of so many steps before.
_DEVIATIONS, _RISE, _BEFORE = 6.0, 0.1, 10
# A gradient is so many times its median, and so many robust standard deviations of logarithms above it.
_STEEP = 10.0
# Steps before a jump in which a sublayer may have moved first.
_RECENT = 8
_NORMAL = 1.4826  # standard deviation over median absolute deviation, of a Gaussian


@dataclass(frozen=True, eq=False)
class Jump:
    """A loss that jumped, or the norm of all gradients.

    Attributes:
        what: `loss` or `gradient_norm`. step, value: of the jump. usual: the median before it. place: that moved
            first, None where none did; at: the step; quantity: what moved, gradient or update; factor: over its median
            before.
        steps: that were stored; losses (steps,), gradients and updates (steps, places): norms of the gradients, and of
            the update that gave the weights of the step, over that of the weights. places: of these.
    """

    what: str
    step: int
    value: float
    usual: float
    place: Place | None
    at: int
    quantity: str
    factor: float
    steps: tuple[int, ...]
    losses: FloatArray
    gradients: FloatArray
    updates: FloatArray
    places: tuple[Place, ...]

    @property
    def text(self) -> str:
        """All of it in one line."""
        what = "the loss" if self.what == "loss" else "the norm of the gradients"
        said = f"step {self.step}: {what} jumped to {self.value:.3g} from about {self.usual:.3g}; "
        if self.place is None:
            return said + "no layer's gradient or weights had moved before"
        moved = "the gradient of" if self.quantity == "gradient" else "the weights of"
        return said + f"first moved {moved} {self.place}, at step {self.at} ({self.factor:.3g} times as usual)"

    def to_json(self) -> dict[str, Any]:
        """What is written of it: the ring at full resolution."""
        return {
            "what": self.what,
            "first_layer": None if self.place is None else self.place.layer,
            "first_sublayer": None if self.place is None else self.place.sublayer,
            "ring": {
                "step": list(self.steps),
                "loss": finite(self.losses),
                "gradient_norm": finite(self.gradients),
                "update": finite(self.updates),
                "place": [str(place) for place in self.places],
            },
        }


class Jumps:
    """Finds them, each once: the same quantity can jump again when it has come back, or has stayed for ten steps.

    Args:
        places: of the tables' columns.
    """

    def __init__(self, places: tuple[Place, ...]) -> None:
        self._places = places
        self._quiet: dict[str, tuple[float, int]] = {}  # while it is above that level and before that step
        self._usual: dict[str, list[float]] = {}

    def seen(self, steps: Sequence[int], losses: FloatArray, gradients: FloatArray, updates: FloatArray) -> list[Jump]:
        """What jumped in the last step; a gradient that jumps with the loss, or soon after it, is not another.

        Args:
            losses: (steps,). gradients, updates: (steps, places).
        """
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt((gradients**2).sum(1))
        for what, values in (("loss", losses), ("gradient_norm", norms)):
            level, until = self._quiet.get(what, (math.inf, 0))
            if values[-1] > level:
                if steps[-1] < until:
                    continue
                self._usual[what] = values[:-1].tolist()  # it stays
            self._quiet.pop(what, None)
            before = [v for v in self._usual.get(what, []) if math.isfinite(v)][-_BEFORE:]  # the last: losses fall
            found = None if len(values) > 1 and math.isnan(values[-2]) else _edge(what, before, float(values[-1]))
            if found is None:
                self._usual[what] = [*before, float(values[-1])]
                continue
            usual, high = found
            self._quiet[what] = (high, steps[-1] + _BEFORE)
            if what == "loss":
                self._quiet["gradient_norm"] = (0.0, steps[-1] + _BEFORE)
            k, row, quantity, factor = first_moved(gradients, updates)
            place = None if k is None else self._places[k]
            return [
                Jump(what, steps[-1], float(values[-1]), usual, place, steps[row], quantity, factor, tuple(steps),
                     losses, gradients, updates, self._places)
            ]  # fmt: skip
        return []


def _edge(what: str, before: Sequence[float], value: float) -> tuple[float, float] | None:
    """(what is usual, the highest that is not a jump) where a value jumped; else None."""
    if len(before) < _BEFORE:
        return None
    if what == "loss":
        usual, spread = _usual(np.array(before))
        high = usual + max(_DEVIATIONS * spread, _RISE * abs(usual))
    else:
        if min(before) <= 0 or not math.isfinite(value):  # a loss scale that is too large
            return None
        middle, spread = _usual(np.log(before))
        usual, high = math.exp(middle), math.exp(middle + max(_DEVIATIONS * spread, math.log(_STEEP)))
    return None if value <= high else (usual, high)


def first_moved(gradients: FloatArray, updates: FloatArray) -> tuple[int | None, int, str, float]:
    """(place, row, quantity, factor) that first left what was usual for it, of the last rows; place None: none did.

    Of several in one step it is the one furthest from its median, in robust standard deviations of logarithms.

    Args:
        gradients, updates: (steps, places); the last step is that of the jump.
    """
    n = len(gradients)
    first = max(_BEFORE // 2, n - 1 - _RECENT)
    found = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for quantity, table in (("update", np.log(updates)), ("gradient", np.log(gradients))):
            for k in range(table.shape[1]):
                before = table[:first, k][np.isfinite(table[:first, k])]
                if len(before) < 3:
                    continue
                usual, spread = _usual(before)
                away = (table[first:, k] - usual) / max(spread, 0.1)
                moved = np.flatnonzero((away > _DEVIATIONS) | np.isnan(table[first:, k]) | (table[first:, k] == np.inf))
                if len(moved):
                    row = int(moved[0])
                    far = float(np.nan_to_num(away[row], nan=np.inf))
                    with np.errstate(over="ignore"):
                        found.append((row, -far, k, quantity, float(np.exp(table[first + row, k] - usual))))
    if not found:
        return None, n - 1, "", 1.0
    row, _, k, quantity, factor = min(found)
    return k, first + row, quantity, factor


def _usual(values: FloatArray) -> tuple[float, float]:
    """Median, and standard deviation by the median absolute deviation."""
    middle = float(np.median(values))
    return middle, _NORMAL * float(np.median(np.abs(values - middle)))
