"""What a monitor measured, compared with its bands, with the sublayer that every number is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.parametrization_of import parametrization_of
from signalprop.attachment.rows import AttachedRow
from signalprop.errors import InputError
from signalprop.monitoring.bands import Band, Departure, Watch, bands, limits
from signalprop.monitoring.layer_numbers import steepest
from signalprop.monitoring.logs import Logs
from signalprop.monitoring.places import Place, sublayers_of
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile


class Checks:
    """Of one monitor, from its first sample on.

    Args:
        start: what the weights were when the training began; None: what they are at the first sample.
        inputs: of the training.
        moving: the places whose updates are measured.
    """

    def __init__(
        self,
        attached: Anatomy,
        tolerances: Mapping[str, float],
        logs: Logs,
        start: Parametrization | None,
        inputs: InputStatistics | None,
        moving: Sequence[Place],
    ) -> None:
        self._rows, self._tolerances, self._logs, self._start = attached.rows, tolerances, logs, start
        self._inputs = inputs
        self._sublayers = sublayers_of(attached.layout)
        self._moving = moving
        self._watch: Watch | None = None
        self._today: dict[str, Band] = {}
        self._first: dict[str, Sequence[float | None]] = {}

    def outside(
        self,
        step: int,
        profile: Profile,
        measured: Mapping[str, Sequence[float | None]],
        read: Callable[[], Parametrization | None],
        due: bool,
    ) -> int:
        """How many numbers are outside, after a warning of those that have newly left their band.

        Args:
            read: what the weights are now; None: they cannot be read, and predict no band. due: whether their band is
                predicted anew; it is too where a number comes near the end of its band, or leaves it.
        """
        if self._watch is None:
            weights = read()
            self._today = self._bands(weights, profile)
            start = self._today if self._start is None else self._bands(self._start, profile)
            self._watch = Watch(start, self._places())
            self._first = dict(measured)
            due = False
        fixed = limits(measured, profile.architecture.seq_len, self._tolerances, self._first)
        if self._watch.start and (due or self._watch.asks(measured, self._today, fixed)):
            weights = read()
            self._today = self._today if weights is None else self._bands(weights, profile)
        found = self._watch.check(step, measured, self._today, fixed)
        self._logs.tell([_with_steepest(i, profile, self._sublayers) if i.quantity == "gradient" else i for i in found])
        return sum(len(held) for held in self._watch.outside.values())

    def _bands(self, p: Parametrization | None, profile: Profile) -> dict[str, Band]:
        a = profile.architecture
        try:
            lengths = {"seq_len": a.seq_len, "target_len": a.target_len}
            return {} if p is None else bands(p, self._inputs, tolerances=self._tolerances, **lengths)
        except InputError as error:
            self._logs.say_once(f"no bands: {error}")
            return {}

    def _places(self) -> dict[str, Sequence[Place]]:
        """Where the numbers of every quantity that has sublayers are from."""
        layers = sorted({place.layer for place in self._sublayers})

        def first(chosen: Callable[[AttachedRow], bool]) -> list[Place]:
            rows = [*zip(self._sublayers, self._rows, strict=True)]
            found = {place.layer: place for place, row in reversed(rows) if chosen(row)}
            return [found.get(k, Place(k)) for k in layers]

        attention = first(lambda row: row.kind.attends_itself)
        return {
            **dict.fromkeys(("variance", "token_correlation"), self._sublayers),
            **dict.fromkeys(("score_std", "largest_score", "attention_entropy", "lowest_entropy"), attention),
            "expert_load": first(lambda row: row.kind.has_copies),
            "update": self._moving,
        }


def weights_of(attached: Anatomy, logs: Logs) -> Parametrization | None:
    """What the weights are now; None where they cannot be read, or one is not finite."""
    try:
        return parametrization_of(attached)
    except InputError as error:
        logs.say_once(f"no bands: {error}")
        return None


def _with_steepest(item: Departure, profile: Profile, sublayers: Sequence[Place]) -> Departure:
    """A gradient's departure, with the sublayer that it comes from most of all."""
    grows = item.value > 1
    place = sublayers[steepest(profile, grows=grows)]
    return replace(item, place=place, text=f"{item.text}; it {'grows' if grows else 'shrinks'} most through {place}")
