"""The band that the theory predicts for the signal of every layer, and layers that have left it.

See `docs/monitoring.md` for the parts of the bands, and `docs/papers/curse-of-depth.md` for the growth laws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.monitoring.places import Place, named
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import layer_ends, layout
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.theory.bounds import sublayer_variance_range

# Tokens per sequence up to which token kernels are followed where averages over positions cannot (shaped attention).
_KERNEL_TOKENS = 128
# Factors that bands are widened by: beyond what small healthy trainings used (docs/monitoring.md).
TOLERANCES = {
    "variance": 1e4,
    "gradient": 100.0,
    "token_correlation": 3e3,
    "score_std": 5.0,
    "largest_score": 10.0,
    "attention_entropy": 50.0,
    "lowest_entropy": 1000.0,
    "update": 1e4,
    "expert_load": 100.0,
}
WORDS = {
    "variance": "signal variance after",
    "gradient": "gradient variance (relative to the last layer's) after",
    "token_correlation": "token correlation after",
    "score_std": "deviation of attention scores in",
    "largest_score": "largest attention score in",
    "attention_entropy": "attention entropy (1: equal weights) in",
    "lowest_entropy": "entropy of the head with the least (1: equal weights) in",
    "update": "update over weights of",
    "expert_load": "load of the expert with the least (1: an equal share) in",
}


Numbers = Mapping[str, Sequence[float | None]]  # by quantity, one of every sublayer or layer; None: not measured


@dataclass(frozen=True, eq=False)
class Band:
    """Lowest and highest expected value (`low`, `high`) by sublayer or layer; -inf and inf where none is predicted."""

    low: FloatArray
    high: FloatArray

    @typed
    def outside(self, values: FloatArray) -> Any:
        """Which values are outside; NaN, a value that was not measured, is not."""
        return (values < self.low) | (values > self.high)

    @typed
    def words(self, index: int) -> str:
        """The band of value `index` in words."""
        low, high = self.low[index], self.high[index]
        if high == np.inf:
            return f"at least {low:.3g}"
        return f"at most {high:.3g}" if low == -np.inf or low < -1 else f"{low:.3g} to {high:.3g}"


@dataclass(frozen=True)
class Departure:
    """Sublayers whose signal has left its band, or is not finite, or moved first where the loss or a gradient jumped.

    Attributes:
        step: number of the optimizer step, from 1. quantity: of `WORDS`, or `finite`, `loss` or `gradient_norm`.
        places: that left now, in the order of the signal. place: the worst of them (None: none); value: its value.
        text: all of it in one line.
    """

    step: int
    quantity: str
    places: tuple[Place, ...]
    place: Place | None
    value: float
    text: str

    @property
    def layers(self) -> tuple[int, ...]:
        """Those of the places, from 0, the encoder's first."""
        return tuple(dict.fromkeys(place.layer for place in self.places))

    @property
    def layer(self) -> int:
        """The worst; -1: none."""
        return -1 if self.place is None else self.place.layer


def limits(
    measured: Mapping[str, Sequence[float | None]],
    tokens: int,
    tolerances: Mapping[str, float],
    first: Mapping[str, Sequence[float | None]] | None = None,
) -> dict[str, Band]:
    """Bands of what no weights predict, of every such quantity that was measured.

    score_std: scores of standard deviation s = sqrt(2 log n) over n keys are where a softmax of random scores begins to
    look at a few of them (the freezing of the random energy model, Giorlandino and Goldt 2025); largest_score: the
    largest of n such scores, s sqrt(2 log n) = 2 log n. attention_entropy, lowest_entropy: against equal weights, of
    the mean of the heads and of the head with the least. update: against the sublayer that moved most, and none as far
    as its size. expert_load: against an equal share.

    Args:
        tokens: that attention can look at. first: what the first sample measured: scores may be three times as large as
            there, where its entropy was inside (trained models with large biases), and the least entropy of a head half
            of what it was there.
    """
    factors = {**TOLERANCES, **tolerances}
    extreme = 2 * np.log(max(tokens, 2))
    most = max((value for value in measured.get("update", ()) if value is not None), default=0.0)
    edges = {
        "score_std": (-np.inf, np.sqrt(extreme) * factors["score_std"]),
        "largest_score": (-np.inf, extreme * factors["largest_score"]),
        "attention_entropy": (1 / factors["attention_entropy"], np.inf),
        "lowest_entropy": (1 / factors["lowest_entropy"], np.inf),
        "update": (min(most, 1.0) / factors["update"], max(1.0, factors["update"] * 1e-4)),
        "expert_load": (1 / factors["expert_load"], np.inf),
    }
    out = {
        name: Band(*(np.full(len(measured[name]), edge) for edge in both))
        for name, both in edges.items()
        if name in measured
    }
    known = {name: np.array(values, np.float64) for name, values in (first or {}).items()}  # NaN for None
    if "attention_entropy" in known and "attention_entropy" in out:
        healthy = ~out["attention_entropy"].outside(known["attention_entropy"])
        for name in {"score_std", "largest_score"} & out.keys():
            out[name] = Band(out[name].low, np.fmax(out[name].high, np.where(healthy, 3 * known[name], np.nan)))
    if "lowest_entropy" in known and "lowest_entropy" in out:
        band = out["lowest_entropy"]
        out["lowest_entropy"] = Band(np.fmin(band.low, known["lowest_entropy"] / 2), band.high)
    return out


def bands(
    p: Parametrization,
    inputs: InputStatistics | None = None,
    *,
    tolerances: Mapping[str, float] | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
) -> dict[str, Band]:
    """The band of every quantity, for random weights of the sizes that a Parametrization holds.

    Of variance and token correlation after every sublayer, of the others after every layer: inside the first layer the
    gradient of healthy trainings goes further than that.

    variance: from branches uncorrelated with the stream to branches aligned with it (`sublayer_variance_range`),
    widened by the tolerance on both sides; where that has no bounds (other norm placements), the prediction itself,
    widened. gradient, relative to the last layer's: from conserved to predicted, widened. token_correlation r: tokens
    may not become equal, so 1 - r may not be below the predicted one over the tolerance.

    Fidelity `moments`, a few milliseconds at any length: right to some ten percent, which the tolerance covers.

    Args:
        tolerances: factors above 1, by quantity; default: `TOLERANCES`.
        seq_len, target_len: tokens of the sequences that are measured.
    """
    a = p.architecture
    lengths = {"seq_len": seq_len or a.seq_len}
    if a.kind == "encoder-decoder":
        lengths["target_len"] = target_len or a.target_len or a.seq_len
    p = replace(p, architecture=a.replace(**lengths))
    profile = _predicted(p, inputs)
    p = replace(p, architecture=profile.architecture)
    stream, ends = profile.forward["stream_out"], layer_ends(layout(p.architecture))
    low = high = stream.log_variance
    try:
        least, most = sublayer_variance_range(p, profile)
        low, high = np.minimum(low, least), np.maximum(high, most)
    except InputError:
        pass  # sandwich, res-post or shaped attention: the prediction alone
    factors = {**TOLERANCES, **(tolerances or {})}
    margin, steeper = np.log(factors["variance"]), np.log(factors["gradient"])
    with np.errstate(over="ignore"):
        out = {
            "variance": Band(np.exp(low - margin), np.exp(high + margin)),
            "token_correlation": Band(
                np.full(len(low), -np.inf), 1 - (1 - stream.token_correlation) / factors["token_correlation"]
            ),
        }
        if profile.gradient is not None:
            gradient = profile.gradient["stream_out"].log_variance[ends]
            # what layers conserve is not a fault, whatever large scores of trained queries and keys make theory expect
            least, most = np.minimum(gradient, 0.0), np.maximum(gradient, 0.0)
            out["gradient"] = Band(np.exp(least - steeper), np.exp(most + steeper))
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
    """Compares what is measured with the band of earlier weights and with that of today's; reports each place once.

    The variance may go where the weights of every sample so far that was inside would let it: healthy weights grow a
    hundredfold under Muon. A jump between two samples, and branches that all point one way, leave the bands still.

    Args:
        start: the bands of the weights at the start. places: where the numbers of a quantity are from; default: one
            from every layer.
    """

    def __init__(self, start: Mapping[str, Band], places: Mapping[str, Sequence[Place]] | None = None) -> None:
        self.start = dict(start)
        self.places = places or {}
        self.outside: dict[str, set[int]] = {}
        self._told: dict[str, set[int]] = {}
        self._were_near: set[int] = set()

    def check(
        self,
        step: int,
        measured: Numbers,
        now: Mapping[str, Band],
        fixed: Mapping[str, Band] | None = None,
    ) -> list[Departure]:
        """Places that are outside a band and were not before, one Departure per quantity.

        Args:
            now: the bands of today's weights. fixed: those that no weights predict (see `limits`).
        """
        found = []
        for quantity, (values, start, today, wrong) in self._held(measured, now, fixed).items():
            bound = (fixed or {}).get(quantity)
            self.outside[quantity] = wrong
            if quantity == "variance" and today is not None and not wrong:
                self.start[quantity] = Band(np.fmin(start.low, today.low), np.fmax(start.high, today.high))
            new = sorted(wrong - self._told.get(quantity, set()))
            if not new:
                continue
            self._told[quantity] = self._told.get(quantity, set()) | set(new)
            worst = max(new, key=lambda k: _distance(quantity, float(values[k]), start, today, k))
            expected = f"{'earlier weights predict' if bound is None else 'expected'} {start.words(worst)}"
            if today is not None:
                expected += f", today's {today.words(worst)}"
            everywhere = self.places.get(quantity, [Place(k) for k in range(len(values))])
            left = tuple(everywhere[k] for k in new)
            at = "" if len(left) == 1 else f" at {everywhere[worst]}"
            text = (
                f"step {step}: {WORDS[quantity]} {named(left, everywhere)} left the "
                f"{'predicted ' if bound is None else ''}band: {values[worst]:.3g}{at}, {expected}"
            )
            found.append(Departure(step, quantity, left, everywhere[worst], float(values[worst]), text))
        self._were_near = self._near(measured)
        return found

    def asks(self, measured: Numbers, now: Mapping[str, Band], fixed: Mapping[str, Band] | None = None) -> bool:
        """Whether the current weights should be read: a number has left its band, or a variance has newly come near.

        That is the outer quarter of the band, in logarithms: healthy weights that grow fast take it along.
        """
        held = self._held(measured, now, fixed)
        left = any(wrong - self._told.get(name, set()) for name, (*_, wrong) in held.items() if name in self.start)
        return left or bool(self._near(measured) - self._were_near)

    def _near(self, measured: Numbers) -> set[int]:
        """Sublayers whose variance is near an end of its band, or beyond."""
        band = self.start.get("variance")
        if band is None or "variance" not in measured:
            return set()
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high, value = (np.log(np.array(x, np.float64)) for x in (band.low, band.high, measured["variance"]))
            room = (high - low) / 4
            return set(np.flatnonzero((value < low + room) | (value > high - room)).tolist())

    def _held(
        self, measured: Numbers, now: Mapping[str, Band], fixed: Mapping[str, Band] | None
    ) -> dict[str, tuple[FloatArray, Band, Band | None, set[int]]]:
        """By quantity that has a band: values (NaN: not measured), the band, today's, and which values are outside."""
        out = {}
        for quantity, numbers in measured.items():
            bound = (fixed or {}).get(quantity)
            start, today = (self.start.get(quantity), now.get(quantity)) if bound is None else (bound, None)
            if start is not None:
                values = np.array(numbers, np.float64)
                wrong = start.outside(values) | (False if today is None else today.outside(values))
                out[quantity] = (values, start, today, set(np.flatnonzero(wrong).tolist()))
        return out


def _distance(quantity: str, value: float, start: Band, today: Band | None, k: int) -> float:
    """How far a value is outside, in units that compare places: logarithms (of 1 - r for a correlation)."""
    if quantity == "token_correlation":
        return value
    with np.errstate(divide="ignore", invalid="ignore"):
        log = float(np.log(value)) if value > 0 else -np.inf
        bands = [band for band in (start, today) if band is not None]
        return max(float(np.fmax(np.log(band.low[k]) - log, log - np.log(band.high[k]))) for band in bands)


def checked(
    every: int, tolerance: float | Mapping[str, float] | None, skip_first: int, steps_done: int, ring: int
) -> Mapping[str, float] | None:
    """Tolerances by name, from what a monitor was given."""
    if every < 1:
        raise InputError(f"every is {every}; expected a number of steps from 1 up")
    tolerances = dict.fromkeys(TOLERANCES, tolerance) if isinstance(tolerance, (int, float)) else tolerance
    known = tolerances is None or set(tolerances) <= set(TOLERANCES)
    if not known or not all(factor > 1 for factor in (tolerances or {}).values()):
        raise InputError(
            f"tolerance is {tolerance}; expected a factor above 1, such factors by name ({', '.join(TOLERANCES)}), "
            "or None"
        )
    if skip_first < 0 or steps_done < 0 or ring < 0:
        raise InputError(f"skip_first is {skip_first}, steps_done {steps_done} and ring {ring}; expected 0 or more")
    return tolerances
