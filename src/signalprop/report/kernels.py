"""Token kernels in the report: what `signalprop kernel` writes, as heat maps and as numbers over depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import ConfigDict

from signalprop.errors import InputError
from signalprop.files.storage import finite
from signalprop.files.validation import Value
from signalprop.kernels.scaled_kernel import normalised
from signalprop.kernels.trace import Trace
from signalprop.network.moments import FloatArray
from signalprop.report.parts import Items, Part, numbered
from signalprop.report.sections import Card, Chart, Curve, HeatMap, Line, Section, Table, logarithmic, numbers
from signalprop.results.text import number, spread

SCHEMA = "signalprop/kernel/1"
Number = float | None
_BANDS = 3  # networks with bands
_LOWEST = 1e-16  # of 1 - cosine on a logarithmic axis: below is rounding


class Curves(Value):
    """Numbers of one configuration over depth, as the JSON form of a Trace has them (what the report draws)."""

    model_config = ConfigDict(title="kernel", extra="ignore")
    n_layers: int
    n_tokens: int
    scheme: str = ""
    source: str = ""
    collapse_depth: int | None = None
    rank_collapse_depth: int | None = None
    forward: dict[str, list[Number]]
    gradient: dict[str, list[Number]] | None = None


@dataclass(frozen=True, eq=False)
class Kernels:
    """One network's kernels: numbers over depth, and raw kernels by depth (of a Trace, none in a file)."""

    curves: Curves
    forward: Mapping[int, FloatArray] = field(default_factory=dict)
    gradient: Mapping[int, FloatArray] = field(default_factory=dict)


# --- reading -----------------------------------------------------------------------------------------------------


def of_trace(trace: Trace) -> Kernels:
    """What the report shows of a Trace."""
    return Kernels(_curves(finite(trace.to_json())), trace.kernels, trace.gradients)


def of_json(data: Mapping[str, Any]) -> dict[str, Kernels]:
    """The configurations in the JSON form of `signalprop kernel`, by name."""
    items = data.get("configurations")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError("it has no list of configurations; write it with signalprop kernel --json")
    return {str(item.get("name", "")): Kernels(_curves(item)) for item in items}


def _curves(data: Mapping[str, Any]) -> Curves:
    curves = Curves(**{str(key): value for key, value in data.items()})
    for column in (*curves.forward.values(), *(curves.gradient or {}).values()):
        if len(column) != curves.n_layers + 1:
            raise InputError(f"a column has {len(column)} numbers; expected {curves.n_layers + 1}, one per depth")
    return curves


# --- sections ----------------------------------------------------------------------------------------------------


def kernel_section(items: Mapping[str, Kernels]) -> Section:
    """Heat maps of cosines with a depth slider, and the numbers over depth."""
    return Section(
        "Token kernels",
        [*_heat_maps(items), *_charts(items), *_table(items)],
        lead="Cosines of all pairs of tokens after every layer. Rank collapse is a map of ones.",
    )


def cosine_maps(traces: Mapping[str, Trace], at: Sequence[int] | None = None) -> list[HeatMap]:
    """A map of every trace at every depth, row by row, on one scale of colours.

    Args:
        at: depths; default: all that every trace kept, at most six of them.
    """
    if not traces:
        raise InputError("there is nothing to draw; give at least one trace")
    kept = set.intersection(*(set(item.kernels) for item in traces.values()))
    depths = spread(sorted(kept), 6) if at is None else list(at)
    missing = [depth for depth in depths if depth not in kept]
    if missing or not depths:
        said = f"depth {missing[0]}" if missing else "any depth in common"
        raise InputError(f"these traces did not keep {said}; ask for depths in `at` of trace, the same for all")
    cosines = {(name, depth): item.cosines(depth) for name, item in traces.items() for depth in depths}
    low = min(0.0, math.floor(10 * min(float(matrix.min()) for matrix in cosines.values())) / 10)
    return [
        HeatMap(f"{name}, depth {depth}: {_mean_cosine(matrix)}", {"": matrix}, "token", "token", (low, 1.0),
                value="cosine", down=True)
        for (name, depth), matrix in cosines.items()
    ]  # fmt: skip


def _mean_cosine(matrix: FloatArray) -> str:
    """The mean cosine off the diagonal of a matrix that is drawn."""
    t = len(matrix)
    distance = 1 - (float(matrix.sum()) - t) / (t * (t - 1)) if t > 1 else 0.0
    if distance < 1e-3:
        return "1" if distance < _LOWEST * 10 else f"1 − {distance:.0e}".replace("e-0", "e-")
    return f"{1 - distance:.3f}"


def _charts(items: Mapping[str, Kernels]) -> list[Chart]:
    """Bands, of few networks: one standard deviation over sequences, or the range over positions."""
    there = [(k, name, item.curves) for k, (name, item) in enumerate(items.items())]
    bands = len(there) <= _BANDS

    def curve(k: int, name: str, y: FloatArray, line: Line = "solid") -> Curve:
        names = ["the input", *(f"after layer {layer}" for layer in range(len(y) - 1))]
        return Curve(name, np.arange(float(len(y))), y, colour=k, line=line, names=names)

    def curves(column: str, floor: float = 0.0) -> list[Curve]:
        out = []
        for k, name, c in there:
            y = np.maximum(numbers(c.forward.get(column, ())), floor)
            sd = c.forward.get(f"{column}_sd") if bands else None
            if np.isfinite(y).any():
                plain = curve(k, name, y)
                out.append(plain if sd is None else replace(plain, low=y - numbers(sd), high=y + numbers(sd)))
        return out

    def diagonal(k: int, name: str, columns: Mapping[str, list[Number]], line: Line) -> Curve:
        made = curve(k, name, numbers(columns["log_diagonal"]), line)
        if not bands or not columns.keys() >= {"diagonal_min", "diagonal_max"}:
            return made
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = (np.log(numbers(columns[name])) for name in ("diagonal_min", "diagonal_max"))
        return replace(made, low=low, high=high)

    def sides(c: Curves) -> list[tuple[Line, Mapping[str, list[Number]]]]:
        return [("solid", c.forward), ("dashed", c.gradient or {})]

    diagonals = [
        diagonal(k, name + ", gradient" * (line == "dashed"), columns, line)
        for k, name, c in there
        for line, columns in sides(c)
        if "log_diagonal" in columns
    ]  # fmt: skip
    said = "The gradient's is relative to that at the top." + " Bands: the range over positions." * bands
    distance = Chart("How far apart tokens are", curves("distance", _LOWEST), "depth", "1 - mean cosine", log=True,
                     positive=True)  # fmt: skip
    made = [
        distance,
        Chart("Mean cosine of two tokens", curves("mean_cosine"), "depth", "cosine"),
        Chart("Effective rank", curves("effective_rank"), "depth", "tokens", log=True, positive=True),
        logarithmic(
            Chart("Mean diagonal of the raw kernel", diagonals, "depth", "mean diagonal", log=True, caption=said)
        ),
    ]
    return [item for item in made if item.curves]


def _heat_maps(items: Mapping[str, Kernels]) -> list[HeatMap]:
    out = []
    for name, item in items.items():
        for direction, matrices in (("", item.forward), (", gradient", item.gradient)):
            if matrices:
                cosines = {str(depth): normalised(matrices[depth]) for depth in sorted(matrices)}
                known = [float(np.nanmin(matrix)) for matrix in cosines.values() if np.isfinite(matrix).any()]
                low = -1.0 if min(known, default=0.0) < 0 else 0.0
                out.append(HeatMap(f"{name}{direction}", cosines, "token", "token", (low, 1.0), value="cosine",
                                   down=True, slider="depth"))  # fmt: skip
    return out


def _table(items: Mapping[str, Kernels]) -> list[Table]:
    rows = [
        [
            name, str(c.n_layers), str(c.n_tokens), c.source, number(_last(c.forward.get("mean_cosine"))),
            number(_last(c.forward.get("effective_rank"))),
            "none" if c.collapse_depth is None else str(c.collapse_depth),
            "none" if c.rank_collapse_depth is None else str(c.rank_collapse_depth),
        ]
        for name, c in ((name, item.curves) for name, item in items.items())
    ]  # fmt: skip
    header = ["network", "layers", "tokens", "input", "mean cosine at the top", "effective rank at the top",
              "distances vanish from depth", "rank 1 from depth"]  # fmt: skip
    return [Table("Rank collapse", header, rows)] if rows else []


def _last(column: Sequence[Number] | None) -> Number:
    return column[-1] if column else None


def _cards(items: Items) -> list[Card]:
    """A card for every network: whether its tokens become one."""
    out = []
    for name, item in items.items():
        c = item.curves
        depth = c.collapse_depth if c.rank_collapse_depth is None else c.rank_collapse_depth
        if depth is not None:
            said = f"from depth {depth} of {c.n_layers} on all tokens are one to the kernel"
            advice = "larger skips, smaller attention branches (deepscalelm, noci), or shaped attention (e-spa)"
            out.append(Card("warning", name, "rank collapse", [said], advice))
        else:
            out.append(Card("good", name, "tokens stay apart", [f"no rank collapse in {c.n_layers} layers"]))
    return out


def _together(found: Sequence[tuple[str, Trace | Kernels]]) -> dict[str, Kernels]:
    return numbered([(name, of_trace(item) if isinstance(item, Trace) else item) for name, item in found])


PART = Part(
    types=(Trace, Kernels),
    sections=lambda items, _: [kernel_section(items)],
    cards=_cards,
    together=_together,
    readers={SCHEMA: lambda _, data: dict(of_json(data))},
)
