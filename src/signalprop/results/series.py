"""Moments of one probe point over the sublayers, as arrays and as rows of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from signalprop.errors import InputError, check_index
from signalprop.files.validation import typed
from signalprop.network.moments import FloatArray

_TINY, HUGE = float(np.finfo(np.float64).tiny), float(np.finfo(np.float64).max)
NO_SIGNAL = -1e12  # predicted logarithm of a variance that is 0 for every purpose, yet finite; measured it is -inf
SILENT = NO_SIGNAL / 10  # a logarithm below it is of a variance of 0
_NEEDED = ("mean", "variance", "token_correlation")
SEQUENCES = "sequences"  # in the statistics of a measured Profile: how many each network read
BANDS = "variance_sd", "token_correlation_sd", "variance_excess", "token_correlation_excess"
_OPTIONAL = ("log_variance", "variance_se", "token_correlation_se", "feature_correlation", *BANDS)


@typed
@dataclass(frozen=True, eq=False)
class Series:
    """Moments of one probe point over the sublayers: arrays of shape (..., n_sublayers).

    Attributes:
        mean, variance, token_correlation: as in `Moments`. The correlation of a single token is 0 by convention.
        log_variance: natural logarithm of the variance; right where the variance itself over- or underflows.
        variance_se: standard error of the variance, relative to it; token_correlation_se: absolute. None: exact.
        feature_correlation: correlation of two features of one token, where it was asked for.
        variance_sd, token_correlation_sd: of a prediction, how single networks of this width that read one sequence
            scatter: standard deviation of ln of the variance, and of the correlation. variance_excess: ln of the mean
            over such networks over the variance, which is that of wide ones; token_correlation_excess: their mean
            correlation less that of wide ones. None: not derived, or a measurement. Of a prediction these four are
            derived when one of them is first read.
    """

    mean: FloatArray
    variance: FloatArray
    token_correlation: FloatArray
    log_variance: FloatArray
    variance_se: FloatArray | None = None
    token_correlation_se: FloatArray | None = None
    feature_correlation: FloatArray | None = None
    # factories, as a default would be an attribute of the class, and __getattr__ never asked
    variance_sd: FloatArray | None = field(default_factory=type(None))
    token_correlation_sd: FloatArray | None = field(default_factory=type(None))
    variance_excess: FloatArray | None = field(default_factory=type(None))
    token_correlation_excess: FloatArray | None = field(default_factory=type(None))

    def __getattr__(self, name: str) -> Any:
        """Bands, which are derived when they are first read."""
        if name not in BANDS or "_banded" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        banded = self._banded()
        self.__dict__.update({band: getattr(banded, band) for band in BANDS})
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @typed
    def awaiting(self, banded: Callable[[], Series]) -> Series:
        """The series with the bands of another one.

        Args:
            banded: makes that other one, when its bands are first read.
        """
        out = object.__new__(Series)
        out.__dict__.update({k: v for k, v in self.__dict__.items() if k not in BANDS}, _banded=banded)
        return out

    @staticmethod
    @typed
    def of(
        variance: ArrayLike | None = None,
        token_correlation: ArrayLike = 0.0,
        *,
        mean: ArrayLike = 0.0,
        log_variance: ArrayLike | None = None,
        variance_se: ArrayLike | None = None,
        token_correlation_se: ArrayLike | None = None,
        feature_correlation: ArrayLike | None = None,
        variance_sd: ArrayLike | None = None,
        token_correlation_sd: ArrayLike | None = None,
        variance_excess: ArrayLike | None = None,
        token_correlation_excess: ArrayLike | None = None,
    ) -> Series:
        """Build a Series from the variance, or from its logarithm where products may overflow.

        The logarithm may be -inf (variance 0). A variance beyond the range of doubles is held at its ends.

        Args:
            variance, log_variance: one of the two, shape (..., sublayers), as all others here.
            token_correlation, mean, feature_correlation: of the same points; numbers stand for constant columns.
            variance_se, token_correlation_se: standard errors over networks, where there are several.
            variance_sd, token_correlation_sd: of single networks around a prediction. variance_excess,
            token_correlation_excess: of their mean.

        Raises:
            InputError: a variance that is negative, NaN or infinite, a correlation outside [-1, 1], or another number
                that is not finite.
        """
        if (variance is None) == (log_variance is None):
            raise InputError("a Series needs either variance or log_variance")
        if log_variance is None:
            plain = np.asarray(variance, np.float64)
            if not ((plain >= 0) & np.isfinite(plain)).all():
                raise InputError("a variance is negative, NaN or infinite; expected finite numbers >= 0")
            given = None
        else:
            given = np.asarray(log_variance, np.float64)
            if not (given < np.inf).all():
                raise InputError("a log variance is NaN or infinite; expected finite numbers, or -inf for variance 0")
            plain = np.exp(np.minimum(np.maximum(given, -800.0), np.log(HUGE)))

        def full(values: ArrayLike, name: str) -> FloatArray:
            try:
                column = np.array(np.broadcast_to(values, plain.shape), np.float64, order="K")  # sweeps come transposed
            except ValueError:
                shape = np.shape(values)
                raise InputError(f"{name} has shape {shape}; expected {plain.shape}, as the variances") from None
            if not np.isfinite(column).all():
                raise InputError(f"{name} holds NaN or infinite values; expected finite numbers")
            return column

        more = {
            "variance_se": variance_se, "token_correlation_se": token_correlation_se,
            "feature_correlation": feature_correlation, "variance_sd": variance_sd,
            "token_correlation_sd": token_correlation_sd, "variance_excess": variance_excess,
            "token_correlation_excess": token_correlation_excess,
        }  # fmt: skip
        r = full(token_correlation, "token_correlation")
        if not (np.abs(r) <= 1 + 1e-9).all():
            raise InputError(f"a token correlation is {r.flat[int(np.argmax(np.abs(r)))]}; expected [-1, 1]")
        return Series(
            mean=full(mean, "mean"),
            variance=plain,
            token_correlation=np.minimum(np.maximum(r, -1.0), 1.0),
            log_variance=_logarithm(plain, given),
            **{name: full(values, name) for name, values in more.items() if values is not None},
        )

    @typed
    def at(self, index: int) -> dict[str, float]:
        """The moments at sublayer `index`, from 0, as a dictionary, as in the JSON form. Not for sweeps.

        Raises:
            InputError: there is no such sublayer.
        """
        check_index("sublayer", index, self.variance.shape[-1])
        return self._map(lambda column: column[..., [index]]).rows()[0]

    def rows(self) -> list[dict[str, float]]:
        """The moments at every sublayer. `log_variance` is there where it says more than the variance.

        Raises:
            InputError: a sweep.
        """
        if self.variance.ndim != 1:
            raise InputError(f"this is a sweep of shape {self.variance.shape[:-1]}; select one of its members")
        columns = {name: getattr(self, name) for name in (*_NEEDED, *_OPTIONAL[1:])}
        lists = {name: column.tolist() for name, column in columns.items() if column is not None}
        out: list[dict[str, float]] = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        telling = np.isfinite(self.log_variance) & (self.log_variance != _logarithm(self.variance, None))
        for i in np.flatnonzero(telling):
            out[i]["log_variance"] = float(self.log_variance[i])
        return out

    @staticmethod
    @typed
    def from_rows(rows: Sequence[Mapping[str, Any]]) -> Series:
        """The inverse of `rows`.

        Raises:
            InputError: a missing or unknown name, something that is not a number, or as `of`.
        """
        for i, row in enumerate(rows):
            unknown = row.keys() - {*_NEEDED, *_OPTIONAL}
            if unknown:
                raise InputError(f"sublayer {i} has unknown moments {', '.join(map(repr, sorted(unknown, key=str)))}")
        columns = {name: _column(rows, name) for name in _NEEDED}
        extra = {name: _column(rows, name) for name in _OPTIONAL[1:] if any(name in row for row in rows)}
        series = Series.of(**columns, **extra)
        logs = series.log_variance.copy()
        given = [i for i, row in enumerate(rows) if "log_variance" in row]
        logs[given] = _column(rows, "log_variance", given)
        if not (logs < np.inf).all():
            raise InputError("a log variance is NaN or infinite; expected finite numbers")
        return replace(series, log_variance=_logarithm(series.variance, logs))

    @staticmethod
    @typed
    def joined(parts: Sequence[Series]) -> Series:
        """The `parts` of a sweep, one after the other along its first axis.

        Raises:
            InputError: no parts, or parts that are not members of one sweep.
        """
        if not parts:
            raise InputError("parts is empty; expected at least one Series")
        columns = {item.name: [getattr(part, item.name) for part in parts] for item in fields(Series)}
        try:
            present = {name: np.concatenate(column) for name, column in columns.items() if column[0] is not None}
        except ValueError:
            shapes = ", ".join(str(part.variance.shape) for part in parts)
            raise InputError(f"parts have shapes {shapes:.200}; expected series with one first axis to join") from None
        return replace(parts[0], **present)

    @typed
    def select(self, rows: NDArray[np.bool_] | int | slice) -> Series:
        """The same series at some sublayers (`rows`: a mask, a number or a slice) only.

        Raises:
            InputError: there is no such sublayer, or the mask is of another length.
        """
        n = self.variance.shape[-1]
        if isinstance(rows, np.ndarray) and (rows.dtype != bool or rows.shape != (n,)):
            raise InputError(f"rows is a {rows.dtype} array of shape {rows.shape}; expected a mask of {n} sublayers")
        chosen = check_index("sublayer", rows, n) if isinstance(rows, int) else rows
        return self._map(lambda column: column[..., chosen])

    def _map(self, change: Callable[[FloatArray], FloatArray]) -> Series:
        out = object.__new__(Series)
        out.__dict__.update({k: change(v) if isinstance(v, np.ndarray) else v for k, v in vars(self).items()})
        if "_banded" in vars(self):
            out.__dict__["_banded"] = lambda: self._banded()._map(change)
        return out

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return NotImplemented
        pairs = [(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)]
        return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


def _logarithm(variance: FloatArray, given: FloatArray | None) -> FloatArray:
    """log(variance); outside the range of normal doubles the given logarithm, which a JSON form carries too."""
    if given is not None and given.ndim > 1:
        return given  # a sweep has no JSON form to agree with to the last digit
    with np.errstate(divide="ignore"):
        own = np.log(variance)
    normal = (variance >= _TINY) & (variance < HUGE / 4)
    return own if given is None else np.where(normal, own, given)


def _column(rows: Sequence[Mapping[str, Any]], name: str, where: Sequence[int] | None = None) -> FloatArray:
    """A name's numbers in some of the rows (default: in all)."""
    indices = range(len(rows)) if where is None else where
    values = [rows[i].get(name) for i in indices]
    for i, value in zip(indices, values, strict=True):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > HUGE:
            raise InputError(f"{name} of sublayer {i} is {value!r:.60}; expected a number")
    return np.array(values, np.float64)
