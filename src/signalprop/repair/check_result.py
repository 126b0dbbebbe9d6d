"""What `check` finds: a row for every weight and multiplier."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from signalprop.files.validation import typed
from signalprop.repair.check_table import check_table

SCHEMA = "signalprop/check/1"
Verdict = Literal["ok", "off", "missing", "twice"]


@dataclass(frozen=True)
class Row:
    """One weight, bias, gain or multiplier.

    Attributes:
        place: `layer 3 attention`, `embedding`, `head`. stack, layer, kind: of a sublayer; None at the two ends.
        name: role (`down`, `down bias`, `norm gain`) or multiplier (`skip`, `branch`, `score_scale`).
        path: the parameter's name in the model; empty for multipliers.
        wanted, measured: standard deviations; of gains the value (root mean square); of multipliers the number.
        standard_error: of a drawn weight's measured standard deviation; 0 for numbers that are not drawn.
        mean, kurtosis, entries: of the weight; the kurtosis is the fourth central moment over the variance squared.
        verdict: ok; off; missing (no such tensor); twice (another role had the same numbers before).
        note: why, or what else was seen.
    """

    place: str
    stack: str | None
    layer: int | None
    kind: str | None
    name: str
    path: str = ""
    wanted: float | None = None
    measured: float | None = None
    standard_error: float = 0.0
    mean: float | None = None
    kurtosis: float | None = None
    entries: int = 1
    verdict: Verdict = "ok"
    note: str = ""


@dataclass(frozen=True)
class Check:
    """What `check` found.

    Attributes:
        scheme, options: what was asked for. model: class of the model.
        rows: one per weight, bias, gain and multiplier.
        deviations: how many standard errors a drawn weight may lie off.
        notes: what was not checked.
    """

    scheme: str
    options: dict[str, Any]
    model: str
    rows: tuple[Row, ...]
    deviations: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is off, missing or matched twice."""
        return not self.wrong

    @property
    def wrong(self) -> list[Row]:
        """The rows that are not ok."""
        return [row for row in self.rows if row.verdict != "ok"]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary (schema signalprop/check/1)."""
        return {
            "schema": SCHEMA,
            "scheme": self.scheme,
            "options": dict(self.options),
            "model": self.model,
            "ok": self.ok,
            "counts": {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in get_args(Verdict)},
            "deviations": self.deviations,
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    @typed
    def table(self, *, everything: bool = False) -> str:
        """As text: what is wrong; `everything`: what is right as well (`signalprop.repair.check_table.check_table`)."""
        return check_table(self, everything=everything)

    def summary(self) -> str:
        """One line: whether all is well, and the first thing that is not."""
        wrong, total = self.wrong, len(self.rows)
        what = "weights and multipliers" if any(row.path for row in self.rows) else "multipliers"
        if not wrong:
            return f"{self.model} carries scheme {self.scheme!r}: all {total} {what} are right"
        first = wrong[0]
        numbers = f"{first.measured:.4g} instead of {first.wanted:.4g}" if first.measured and first.wanted else ""
        why = "; ".join(part for part in (numbers, first.note) if part)
        return (
            f"{self.model} does not carry scheme {self.scheme!r}: {len(wrong)} of {total} {what} are "
            f"wrong, first {first.place} {first.name}{f' ({first.path})' if first.path else ''}: {why or first.verdict}"
        )

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"
