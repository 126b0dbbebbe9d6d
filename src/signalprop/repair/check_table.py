"""The result of `signalprop.check` as a text table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from signalprop.network.kinds import kind_named
from signalprop.results.text import number, text_table

if TYPE_CHECKING:
    from signalprop.repair.check_result import Check, Row

_PLAIN = {"skip": 1.0, "branch": 1.0, "norm_scale": 1.0, "attention_gain": 1.0, "scale": 1.0, "value_skip": 0.0}


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
    header = ["layer", "weight", "wanted", "measured", "± se", "mean", "verdict", "note"]
    text = text_table(header, lines, left=2) if lines else ""
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
        _extreme([row.mean for row in run]) if drawn else "",
        first.verdict,
        first.note,
    ]


def _range(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    low, high = number(known[0]), number(known[-1])
    return low if low == high else f"{low} to {high}"


def _extreme(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known, key=abs):.1e}" if known else "-"
