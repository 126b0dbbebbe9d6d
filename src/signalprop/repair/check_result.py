"""What `check` finds: a row for every weight and multiplier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any, Literal, get_args

from signalprop.files.validation import typed
from signalprop.network.kinds import kind_named
from signalprop.network.shown import COLUMNS, Shown
from signalprop.results.text import number, text_table

SCHEMA = "signalprop/check/1"
Verdict = Literal["ok", "off", "missing", "twice"]
TOO_LARGE, TOO_SMALL = "times what is wanted", "times too small"  # how notes on sizes end, after the factor
_MOST = 16  # lines of a table
_PLAIN = {"skip": 1.0, "branch": 1.0, "norm_scale": 1.0, "attention_gain": 1.0, "scale": 1.0, "value_skip": 0.0}


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
class Check(Shown):
    """What `check` found.

    Attributes:
        scheme, options: what was asked for. model: class of the model.
        rows: one per weight, bias, gain and multiplier.
        deviations: by how many standard errors a drawn weight may deviate.
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
        """As text: what is wrong; `everything`: what is right as well (`check_table`)."""
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

    def _in_notebook(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def __repr__(self) -> str:
        return f"<Check: {self.summary()}>"

    def __str__(self) -> str:
        return f"{fill(self.summary(), COLUMNS)}\n\n{self.table()}"


def check_table(check: Check, *, everything: bool = False) -> str:
    """One line per weight; layers that follow each other with one verdict share it, with the range of their numbers.

    Zero biases, and gains and multipliers of 1, that are as they should be are only counted, unless `everything`.
    """
    runs: dict[tuple[object, ...], list[list[Row]]] = {}
    for row in check.rows:
        found = runs.setdefault((row.stack or row.place, row.kind, row.name), [])
        if found and _continues(found[-1][-1], row):
            found[-1].append(row)
        else:
            found.append([row])
    both = len({row.stack for row in check.rows if row.stack}) > 1
    lines, left_out = [], 0
    for run in (run for group in runs.values() for run in group):
        if everything or not all(_is_plain(row) for row in run):
            lines.append(_line(run, both))
        else:
            left_out += len(run)
    hidden = 0 if everything else max(0, len(lines) - _MOST)
    worst = sorted(range(len(lines)), key=lambda i: (lines[i][5] == "ok", i))[: len(lines) - hidden]
    lines = [lines[i] for i in sorted(worst)]
    *cells, notes = zip(*lines, strict=True) if lines else ((),) * 7
    header = ["layer", "weight", "wanted", "measured", "± se", "verdict"]
    text = text_table(header, list(zip(*cells, strict=True)), left=2) if lines else ""
    for line, note in zip(lines, notes, strict=True):
        text += f"\n{line[0]} {line[1]}: {note}" if note else ""
    if hidden:
        text += f"\nand {hidden} rows more; --json and table(everything=True) have them"
    if left_out:
        text += f"\nand {left_out} more as they should be: zero biases, gains and multipliers of 1"
    return text.lstrip("\n")


def _continues(before: Row, row: Row) -> bool:
    follows = before.layer is not None and row.layer is not None and row.layer - before.layer == 1
    return follows and before.verdict == row.verdict and bool(before.note) == bool(row.note)


def _is_plain(row: Row) -> bool:
    neutral = 0.0 if row.name.endswith("bias") else 1.0 if row.name.endswith("gain") else _PLAIN.get(row.name)
    return row.verdict == "ok" and not row.note and row.wanted == neutral


def _line(run: Sequence[Row], both: bool) -> list[str]:
    first, last = run[0], run[-1]
    layer = first.place
    if first.kind is not None:
        layers = f"{first.layer}" if first.layer == last.layer else f"{first.layer}-{last.layer}"
        layer = f"{first.stack} {layers}" if both else layers
    drawn = any(row.standard_error > 0 for row in run)
    return [
        layer,
        f"{kind_named(first.kind).short} {first.name}" if first.kind else first.name,
        _range([row.wanted for row in run]),
        _range([row.measured for row in run]),
        f"{max(row.standard_error for row in run):.1e}" if drawn else "",
        first.verdict,
        "" if first.note.endswith((TOO_LARGE, TOO_SMALL)) else first.note,  # wanted and measured say that factor
    ]


def _range(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    low, high = number(known[0]), number(known[-1])
    return low if low == high else f"{low}–{high}"
