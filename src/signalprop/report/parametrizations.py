"""The numbers of a network in the report: every number of every sublayer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from signalprop.network.kinds import kinds_where
from signalprop.network.parametrization import SCHEMA, Parametrization
from signalprop.report.parts import Part
from signalprop.report.plots import sections_figure
from signalprop.report.sections import Chart, Curve, Section, Table
from signalprop.results.text import number

_WORDS = {kind.name: kind.words for kind in kinds_where(lambda _: True)}
_FIRST = ("stack", "layer", "kind", "norm")
_GROUPS = {"weights": "std", "biases": "bias std", "learning_rates": "rate"}


def _table(name: str, p: Parametrization) -> Table:
    rows = [_flat(row) for row in p.rows()]
    extra = list(dict.fromkeys(key for row in rows for key in row if key not in _FIRST))
    first = _FIRST if p.architecture.kind == "encoder-decoder" else _FIRST[1:]
    cells = [[*(row[key] for key in first), *(row.get(key, "") for key in extra)] for row in rows]
    options = ", ".join(f"{key} = {value}" for key, value in p.options.items())
    title = p.scheme if p.scheme == name else f"{p.scheme} ({name})"
    caption = f"Embedding: {_end(p.embedding)}. Head: {_end(p.head)}." + (f" Options: {options}." if options else "")
    return Table(title, [*first, *extra], cells, left=len(first), caption=caption)


def figure(p: Parametrization) -> Any:
    """A matplotlib Figure: multipliers and standard deviations over the sublayers; weights that are 0 are left out."""
    at = np.arange(float(p.skip.shape[-1]))
    multipliers = [Curve("skip", at, p.skip, colour=0), Curve("branch", at, p.branch, colour=1)]
    there = [(role, std, std > 0) for role, std in p.weights.items() if (std > 0).any()]
    weights = [Curve(role, at[kept], std[kept], colour=k) for k, (role, std, kept) in enumerate(there)]
    charts = [
        Chart("Multipliers", multipliers, "sublayer", "factor"),
        Chart("Weights", weights, "sublayer", "standard deviation"),
    ]
    return sections_figure([Section("", charts)], p.scheme, columns=2)


def _flat(row: Mapping[str, Any]) -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in row.items():
        if key in _GROUPS:
            out |= {f"{_GROUPS[key]} {role.replace('_', ' ')}": number(item) for role, item in value.items()}
        elif key != "index":
            shown = value if isinstance(value, str) else str(value) if isinstance(value, (bool, int)) else number(value)
            out[key if key in _FIRST else key.replace("_", " ")] = _WORDS.get(shown, shown)
    return out


def _end(row: Any) -> str:
    """Embedding or head in words; what does nothing is left out."""
    fields = {key: value for key, value in row.model_dump(mode="json").items() if value not in (None, 0.0, [], "")}
    shown = (f"{key.replace('_', ' ')} {_shown(value)}" for key, value in fields.items())
    return ", ".join(shown) or "none"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return number(value) if isinstance(value, float) else str(value)


PART = Part(
    types=(Parametrization,),
    sections=lambda items, _: [
        Section(
            "The numbers of the network",
            [_table(name, p) for name, p in items.items()],
            lead="Standard deviations, multipliers and norms of every sublayer.",
        )
    ],
    readers={SCHEMA: lambda source, data: {source.stem: Parametrization.from_json(data)}},
)
