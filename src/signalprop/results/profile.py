"""The one result type: the moments at every probe point, forward and backward, from theory or from measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pydantic import ConfigDict, Field

from signalprop.errors import InputError, require
from signalprop.files.documents import Document, fields_of
from signalprop.files.storage import finite
from signalprop.files.validation import Value, typed
from signalprop.network.architecture import Architecture
from signalprop.network.layout import KINDS, STACKS, layer_starts, layout
from signalprop.network.moments import FloatArray
from signalprop.results.between_streams import STREAM_COVARIANCE, alike, check_covariance, covariance_of
from signalprop.results.findings import Findings
from signalprop.results.series import HUGE, Series
from signalprop.results.text import network_in_words, number
from signalprop.results.verdicts import findings_of
from signalprop.results.views import Shown

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = "signalprop/profile/1"
SEVERAL = "signalprop/profiles/1"  # a list of them, as `predict` with several schemes or depths writes
EXPERT_LOAD = "expert_load_variation"  # in a Profile's statistics
DRAWN = "drawn_networks"  # likewise: over how many drawn networks a prediction is the mean
POINTS = ("stream_in", "branch", "stream_out")
Source = Literal["theory", "measured", "simulated"]


@typed
@dataclass(frozen=True, eq=False, repr=False)
class Profile(Document, Shown):
    """The signal of a network, sublayer by sublayer.

    Attributes:
        source: `theory`, `measured` (hooks on a live model) or `simulated` (random-weight networks).
        fidelity: `moments`, `kernel`, `simulate`, or `model` for a measurement.
        architecture, scheme: what it describes. reads: what is read there, in words; "" where that is not known.
        input: statistics of the stream that enters the first sublayer: mean, variance, token_correlation.
        forward: Series by probe point (`stream_in`, `branch`, `stream_out`).
        gradient: likewise, relative to the variance at the last sublayer's stream_out (of the last stack); None
            when no backward pass was asked for.
        gradient_scale: that variance itself, where it is known.
        n_seeds: how many networks were averaged.
        notes: what the reader should know (approximations, exclusions), one sentence each.
        statistics: further numbers by name, e.g. `branch_gain`, the squared ratio (beta / lambda)^2 per sublayer, or
            `expert_load_variation`: standard deviation of the experts' loads over their mean, per layer, 0 without;
            `stream_covariance`: of several residual streams after every sublayer, over the mean of their variances.
    """

    source: Source
    architecture: Architecture
    scheme: str
    input: Mapping[str, float]
    forward: Mapping[str, Series]
    gradient: Mapping[str, Series] | None = None
    gradient_scale: float | None = None
    fidelity: str = "moments"
    n_seeds: int | None = None
    notes: tuple[str, ...] = ()
    reads: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        shape = self.forward["stream_out"].variance.shape[:-1]
        end = f"sweep of shape {shape}" if shape else f"gradient ratio {number(self.gradient_ratio)}"
        network = ", ".join(filter(None, (network_in_words(self.architecture), self.scheme)))
        return f"<Profile: {network}; {self.source} ({self.fidelity}); {end}>"

    @property
    def gradient_ratio(self) -> float | None:
        """Variance of the gradient at the first sublayer's input over that at the last one's output.

        None where no backward pass was asked for.

        Raises:
            InputError: a sweep.
        """
        if self.gradient is None:
            return None
        first = self.gradient["stream_in"].variance
        if first.ndim != 1:
            raise InputError(f"this is a sweep of shape {first.shape[:-1]}; select one of its members")
        return float(first[0])

    @property
    def findings(self) -> Findings:
        """The findings of the rules; empty for a healthy signal, and for sweeps."""
        return Findings() if self.forward["stream_out"].variance.ndim > 1 else findings_of(self)

    def to_dataframe(self) -> DataFrame:
        """A pandas DataFrame: one row per sublayer; stack, layer, kind, and a column for every quantity.

        Columns are named as `stream_out_variance`, those of the gradient as `gradient_stream_in_variance`; of several
        residual streams `stream_out_between_streams` is the mean correlation of two of them.

        Raises:
            InputError: a sweep. MissingExtra: pandas is not installed.
        """
        return data_frame(self)

    @property
    def stream_covariance(self) -> FloatArray | None:
        """Covariance of the residual streams after every sublayer, (sublayers, n, n), over the mean of their variances.

        The series are means over streams. None for one stream, or if it is not known.
        """
        return covariance_of(self.statistics)

    @property
    def n_sublayers(self) -> int:
        """Sublayers of all stacks."""
        return int(self.forward["stream_out"].variance.shape[-1])

    @property
    def sensitivity_ratios(self) -> FloatArray:
        """Variance that each sublayer adds (beta^2 / lambda^2 included) over the stream variance that enters it.

        Needs `statistics["branch_gain"]`, the squared ratio (beta / lambda)^2 per sublayer; 1 where it is absent.
        """
        gain = np.asarray(self.statistics.get("branch_gain", 1.0), np.float64)
        branch, stream = self.forward["branch"].log_variance, self.forward["stream_in"].log_variance
        with np.errstate(invalid="ignore", over="ignore"):  # a skip of next to nothing: infinite
            log_ratio = np.where(branch == -np.inf, -np.inf, branch - stream)  # no branch: 0, also on no stream
            return np.asarray(gain * np.exp(np.minimum(log_ratio, 300)))

    @property
    def layer_sensitivities(self) -> FloatArray:
        """Per layer (encoder first): the sum of its sublayers' branches over the stream that enters the layer.

        TGS section 4.6 by the definition on `docs/theory/network.md` (the printed one inverts the ratio).

        Raises:
            InputError: a sweep.
        """
        stream = self.forward["stream_in"].log_variance
        if stream.ndim != 1:
            raise InputError("sensitivity needs a single profile, this is a sweep; select one of its members")
        starts = layer_starts(layout(self.architecture))
        entering = np.repeat(stream[starts], np.diff(starts, append=len(stream)))
        with np.errstate(invalid="ignore", over="ignore"):
            shift = np.where(stream == entering, 0.0, stream - entering)
            return np.asarray(np.add.reduceat(self.sensitivity_ratios * np.exp(np.minimum(shift, 300)), starts))

    def sensitivity(self) -> dict[str, float]:
        """Mean and median over layers of `layer_sensitivities`, times the number of layers. Not for sweeps."""
        layers = self.layer_sensitivities
        n, ordered = len(layers), np.sort(layers)  # np.median would import numpy.ma
        return {"mean": float(np.sum(layers)), "median": float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2 * n}

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_json` gives the same Profile back. Not for sweeps."""
        rows = layout(self.architecture)
        forward = {point: self.forward[point].rows() for point in POINTS}
        gradient = {point: series.rows() for point, series in (self.gradient or {}).items()}
        sublayers = []
        for i in range(self.n_sublayers):
            row: dict[str, Any] = {
                "index": i,
                "layer": int(rows.layer[i]),
                "stack": STACKS[rows.stack[i]],
                "kind": KINDS[rows.kind[i]],
            }
            row.update({point: forward[point][i] for point in POINTS})
            if gradient:
                row["gradient"] = {point: gradient[point][i] for point in POINTS}
            sublayers.append(row)
        return {"schema": SCHEMA, **self._header(), "findings": self.findings.to_json(), "sublayers": sublayers}

    def _header(self) -> dict[str, Any]:
        """Everything but the series, JSON-ready."""
        whole = self.architecture.model_dump(mode="json", exclude_defaults=True)
        return {"architecture": whole} | {name: finite(getattr(self, name)) for name in _HEADER[1:]}

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read what `to_json` wrote (`data`).

        Raises:
            InputError: another schema version, a missing or unknown field, a value out of range, or sublayers that the
                architecture does not have.
        """
        found = fields_of(data, SCHEMA, "a profile")
        rows = found.pop("sublayers", None)
        found.pop("findings", None)  # they follow from the rest
        header = _Header(**found)
        table = layout(header.architecture)
        if not isinstance(rows, list) or len(rows) != len(table.kind):
            got = f"{len(rows)} rows" if isinstance(rows, list) else f"a {type(rows).__name__}"
            raise InputError(f"sublayers has {got}; the architecture has {len(table.kind)} sublayers")
        for i, row in enumerate(rows):
            if not isinstance(row, dict) or row.get("kind") != KINDS[table.kind[i]]:
                raise InputError(f"sublayer {i} is not {KINDS[table.kind[i]]!r}, which the architecture has there")

        _check_gain(header.statistics.get("branch_gain", 1.0), len(rows))
        streams = header.architecture.streams
        check_covariance(header.statistics, len(rows), None if streams is None else streams.n)
        gradients = [row.get("gradient") for row in rows]
        without = all(item is None for item in gradients)
        return cls(
            **{name: getattr(header, name) for name in _HEADER},
            forward=_points(rows, "sublayer"),
            gradient=None if without else _points(gradients, "gradient of sublayer"),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Profile):
            return NotImplemented
        return (self._header(), self.forward, self.gradient) == (other._header(), other.forward, other.gradient)

    __hash__ = None  # type: ignore[assignment]


def _points(rows: Sequence[Any], what: str) -> dict[str, Series]:
    """Series by probe point, from a dictionary of points per sublayer."""
    out = {}
    for point in POINTS:
        items: list[Any] = [row.get(point) if isinstance(row, dict) else None for row in rows]
        missing = next((i for i, item in enumerate(items) if not isinstance(item, dict)), None)
        if missing is not None:
            raise InputError(f"{what} {missing} has no moments at {point}; expected a dictionary")
        out[point] = Series.from_rows(items)
    return out


def _check_gain(gain: Any, n: int) -> None:
    """The one of the statistics that is reckoned with: a number, or one per sublayer."""
    values = gain if isinstance(gain, list) else [gain]
    if len(values) != (n if isinstance(gain, list) else 1):
        raise InputError(f"statistics.branch_gain has {len(values)} numbers; there are {n} sublayers")
    for value in values:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= HUGE:
            raise InputError(f"statistics.branch_gain holds {value!r:.60}; expected numbers that are not negative")


class _Header(Value):
    """The JSON form without its sublayers."""

    model_config = ConfigDict(title="profile")
    schema_: Literal["signalprop/profile/1"] = Field(alias="schema")
    architecture: Architecture
    scheme: str
    reads: str = ""
    input: dict[str, float]
    source: Source
    fidelity: str = "moments"
    gradient_scale: float | None = None
    n_seeds: int | None = None
    notes: tuple[str, ...] = Field((), strict=False)  # JSON has no tuples
    statistics: dict[str, Any] = Field(default_factory=dict)


_HEADER = [name for name in _Header.model_fields if name != "schema_"]


@typed
def average(profiles: Sequence[Profile]) -> Profile:
    """Mean over profiles of networks that differ in their seed alone, with standard errors.

    Variances and correlations are averaged themselves (theory predicts ensemble means); `variance_se` is the standard
    error relative to the mean. A single profile stays as it is.

    Raises:
        InputError: none given, or they differ in architecture.
    """
    if not profiles:
        raise InputError("there is no profile to average; give at least one")
    first = profiles[0]
    if len(profiles) == 1:
        return replace(first, n_seeds=first.n_seeds or 1)
    if any(p.architecture != first.architecture for p in profiles):
        raise InputError("profiles of different architectures cannot be averaged")
    gradients = [p.gradient for p in profiles if p.gradient is not None]
    scales = [p.gradient_scale for p in profiles if p.gradient_scale is not None]
    every = len(profiles)
    loads = [p.statistics[EXPERT_LOAD] for p in profiles if EXPERT_LOAD in p.statistics]
    spread = {EXPERT_LOAD: np.sqrt(np.square(loads).mean(0)).tolist()} if len(loads) == every else {}
    between = [p.stream_covariance for p in profiles if p.stream_covariance is not None]
    if len(between) == every:
        spread[STREAM_COVARIANCE] = np.mean(between, axis=0).tolist()
    return replace(
        first,
        statistics={**first.statistics, **spread},
        input={key: float(np.mean([p.input[key] for p in profiles])) for key in first.input},
        forward={k: _mean_series([p.forward[k] for p in profiles]) for k in POINTS},
        gradient={k: _mean_series([g[k] for g in gradients]) for k in POINTS} if len(gradients) == every else None,
        gradient_scale=float(np.mean(scales)) if len(scales) == every else None,
        n_seeds=sum(p.n_seeds or 1 for p in profiles),
    )


def _mean_series(items: Sequence[Series]) -> Series:
    n = len(items)
    logs = np.stack([s.log_variance for s in items])
    top = logs.max(0)
    top = np.where(np.isfinite(top), top, 0.0)
    scaled = np.exp(logs - top)  # in units of the largest, so that nothing overflows
    mean = scaled.mean(0)
    spread = scaled.std(0, ddof=1) / np.sqrt(n)
    r = np.stack([s.token_correlation for s in items])
    features = [s.feature_correlation for s in items if s.feature_correlation is not None]
    with np.errstate(divide="ignore"):
        log_mean = np.log(mean) + top
    return Series.of(
        log_variance=log_mean,
        token_correlation=r.mean(0),
        mean=np.stack([s.mean for s in items]).mean(0),
        variance_se=np.divide(spread, mean, out=np.zeros_like(mean), where=mean > 0),
        token_correlation_se=r.std(0, ddof=1) / np.sqrt(n),
        feature_correlation=np.stack(features).mean(0) if len(features) == n else None,
    )


def data_frame(profile: Profile, prefix: str = "") -> DataFrame:
    """The series of a profile, one row per sublayer; see `Profile.to_dataframe`.

    Args:
        prefix: of the columns that hold a quantity.
    """
    rows = layout(profile.architecture)
    columns: dict[str, Any] = {
        "stack": [STACKS[k] for k in rows.stack], "layer": rows.layer, "kind": [KINDS[k] for k in rows.kind],
    }  # fmt: skip
    for direction, points in (("", profile.forward), ("gradient_", profile.gradient or {})):
        for point, series in points.items():
            found = {item.name: getattr(series, item.name) for item in fields(series)}
            columns |= {f"{prefix}{direction}{point}_{k}": v for k, v in found.items() if v is not None}
    if profile.stream_covariance is not None:
        columns[f"{prefix}stream_out_between_streams"] = alike(profile.stream_covariance)
    if np.ndim(profile.forward["stream_out"].variance) != 1:
        raise InputError("a data frame needs a single profile, this is a sweep; select one of its members")
    return cast("DataFrame", require("pandas", "pandas").DataFrame(columns))
