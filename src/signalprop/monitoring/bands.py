"""The band that the theory predicts for the signal of every layer, and layers that have left it.

See `docs/monitoring.md` for what the bands are made of, and `docs/theory/depth.md` for the growth laws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from signalprop.diagnosis.layers import groups
from signalprop.diagnosis.verdict import ranges
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import layout
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.theory.bounds import nearness, variance_range

# Tokens per sequence up to which token kernels are followed where averages over positions cannot (shaped attention).
_KERNEL_TOKENS = 128
# Factors that bands are widened by: beyond what small healthy trainings used (docs/monitoring.md).
TOLERANCES = {"variance": 1e4, "gradient": 100.0, "token_correlation": 3e3, "jacobian": 100.0}
WORDS = {
    "variance": "signal variance",
    "gradient": "gradient variance (relative to the last layer's)",
    "token_correlation": "token correlation",
    "jacobian": "|J - I|",
}


@dataclass(frozen=True, eq=False)
class Band:
    """Lowest and highest expected value (`low`, `high`) behind every layer; -inf and inf where none is predicted."""

    low: FloatArray
    high: FloatArray

    @typed
    def outside(self, values: FloatArray) -> Any:
        """Which layers' values are outside; NaN, a value that was not measured, is not."""
        return (values < self.low) | (values > self.high)

    @typed
    def words(self, layer: int) -> str:
        """The band of a layer in words."""
        low, high = self.low[layer], self.high[layer]
        return f"at most {high:.3g}" if low == -np.inf or low < -1 else f"{low:.3g} to {high:.3g}"


@dataclass(frozen=True)
class Departure:
    """Layers whose signal has left its band, or is not finite.

    Attributes:
        step: number of the optimizer step, from 1. quantity: of `WORDS`, or `finite`.
        layers: those that left now, from 0, the encoder's first. layer: the worst of them; value: its value.
        text: all of it in one line.
    """

    step: int
    quantity: str
    layers: tuple[int, ...]
    layer: int
    value: float
    text: str


def bands(
    p: Parametrization,
    inputs: InputStatistics | None = None,
    *,
    tolerances: Mapping[str, float] | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
) -> dict[str, Band]:
    """The band of every quantity behind every layer, for random weights of the sizes that a Parametrization holds.

    variance: from branches uncorrelated with the stream to branches aligned with it (`variance_range`), widened by the
    tolerance on both sides; where that has no bounds (other norm placements), the prediction itself, widened. gradient,
    relative to the last layer's: from conserved to predicted, widened. jacobian, |J - I|: the prediction, widened.
    token_correlation r: tokens may not grow alike, so 1 - r may not be below the predicted one over the tolerance.

    Fidelity `moments`, a few milliseconds at any length: right to some ten percent, which the tolerance covers.

    Args:
        tolerances: factors above 1, by quantity; default: `TOLERANCES`.
        seq_len, target_len: tokens of the sequences that are measured.

    Raises:
        InputError: there is no closed form for this architecture.
    """
    a = p.architecture
    lengths = {"seq_len": seq_len or a.seq_len}
    if a.kind == "encoder-decoder":
        lengths["target_len"] = target_len or a.target_len or a.seq_len
    p = replace(p, architecture=a.replace(**lengths))
    profile = _predicted(p, inputs)
    p = replace(p, architecture=profile.architecture)
    ends = [group[-1] for group in groups(layout(p.architecture))]
    low = high = profile.forward["stream_out"].log_variance[ends]
    try:
        least, most = variance_range(p, profile)
        low, high = np.minimum(low, least), np.maximum(high, most)
    except InputError:
        pass  # sandwich, res-post or shaped attention: the prediction alone
    factors = {**TOLERANCES, **(tolerances or {})}
    margin, steeper = np.log(factors["variance"]), np.log(factors["gradient"])
    with np.errstate(over="ignore"):
        out = {
            "variance": Band(np.exp(low - margin), np.exp(high + margin)),
            "token_correlation": Band(
                np.full(len(ends), -np.inf),
                1 - (1 - profile.forward["stream_out"].token_correlation[ends]) / factors["token_correlation"],
            ),
        }
        if profile.gradient is not None:
            gradient = profile.gradient["stream_out"].log_variance[ends]
            # one that layers conserve is no fault, whatever large scores of trained queries and keys make theory expect
            least, most = np.minimum(gradient, 0.0), np.maximum(gradient, 0.0)
            out["gradient"] = Band(np.exp(least - steeper), np.exp(most + steeper))
    try:
        distance = nearness(p, profile).identity_distance
        out["jacobian"] = Band(distance / factors["jacobian"], distance * factors["jacobian"])
    except InputError:
        pass  # shaped attention: no closed form
    return out


def _predicted(p: Parametrization, inputs: InputStatistics | None) -> Profile:
    try:
        return predict(p, inputs, fidelity="moments")
    except InputError:
        a = p.architecture
        if a.seq_len > _KERNEL_TOKENS:
            p = replace(p, architecture=a.replace(seq_len=_KERNEL_TOKENS))
        return predict(p, None, fidelity="kernel")


class Watch:
    """Holds measured layers against the band at the start and against that of today's weights; tells each layer once.

    Args:
        start: the bands of the weights at the start.
    """

    def __init__(self, start: Mapping[str, Band]) -> None:
        self.start = dict(start)
        self.outside: dict[str, set[int]] = {}
        self._told: dict[str, set[int]] = {}

    def check(
        self, step: int, measured: Mapping[str, Sequence[float | None]], now: Mapping[str, Band]
    ) -> list[Departure]:
        """Layers that are outside a band and were not before, one Departure per quantity."""
        found = []
        for quantity, numbers in measured.items():
            start, today = self.start.get(quantity), now.get(quantity)
            if start is None:
                continue
            values = np.array([np.nan if value is None else value for value in numbers])
            wrong = start.outside(values) | (False if today is None else today.outside(values))
            self.outside[quantity] = set(np.flatnonzero(wrong).tolist())
            new = sorted(self.outside[quantity] - self._told.setdefault(quantity, set()))
            if not new:
                continue
            self._told[quantity] |= set(new)
            worst = max(new, key=lambda k: _distance(quantity, float(values[k]), start, today, k))
            expected = f"weights at the start predict {start.words(worst)}"
            if today is not None:
                expected += f", today's {today.words(worst)}"
            text = (
                f"step {step}: {WORDS[quantity]} behind {named(new)} left the predicted band: {values[worst]:.3g} "
                f"behind layer {worst}, {expected}"
            )
            found.append(Departure(step, quantity, tuple(new), worst, float(values[worst]), text))
        return found


def _distance(quantity: str, value: float, start: Band, today: Band | None, k: int) -> float:
    """How far a value is outside, in units that compare layers: logarithms (of 1 - r for a correlation)."""
    if quantity == "token_correlation":
        return value
    with np.errstate(divide="ignore"):
        log = float(np.log(value)) if value > 0 else -np.inf
        bands = [band for band in (start, today) if band is not None]
        return max(max(float(np.log(band.low[k])) - log, log - float(np.log(band.high[k]))) for band in bands)


def named(layers: Sequence[int]) -> str:
    """`layer 3`, or `layers 0, 3-5`."""
    return f"layer{'' if len(layers) == 1 else 's'} {ranges(layers)}"
