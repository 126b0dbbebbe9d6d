"""How many models of records/reach.json are read, and how far that is proved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.other_models import OTHERS
from benchmarks.timing import compact

FILE = Path(__file__).resolve().parent.parent / "records" / "reach.json"
RIGHT, EXACT = 1e-6, 1e-5  # relative differences up to which a variance is right, and a fold exact
CORRELATED = 1e-5  # difference up to which a correlation is right
SCHEMES = ("lns", "layerscale")
WEIGHTS = ("predicted", "initialised")
Record = Mapping[str, Any]


def right(record: Record) -> bool:
    """Measured, and right: forward, within layers, and correlations where shapes tell which axis holds tokens."""
    measured = record.get("measured", {})
    return (
        max((measured.get(key, 0.0) for key in ("difference", "inner")), default=1.0) <= RIGHT
        and measured.get("correlation", 0.0) <= CORRELATED
        and "difference" in measured
    )


def exact(record: Record, scheme: str) -> bool:
    """The scheme was applied, and its fold computes the same."""
    held = record.get(scheme, {})
    return "fold" in held and max(held["fold"], held.get("expected", 0.0)) <= EXACT


def counts(models: Mapping[str, Record]) -> str:
    """The summary, as a Markdown table.

    Args:
        models: by name, what is stored of each.
    """
    types = {name: record for name, record in models.items() if name not in OTHERS}
    others = {name: record for name, record in models.items() if name in OTHERS}
    rows = []
    for kind, records in (("config types of transformers", types), ("models of others", others)):
        held = list(records.values())
        ran = [r for r in held if r["ran"]]
        measured = [r for r in ran if "difference" in r["measured"]]
        numbers = [
            len(held), len(ran), len(measured), sum(map(right, measured)), sum(not right(r) for r in measured),
            sum(r["measured"].get("how") == "error" for r in ran),
            sum(exact(r, "lns") or exact(r, "layerscale") for r in measured),
            sum(exact(r, "lns") for r in measured), sum(exact(r, "layerscale") for r in measured),
            sum("stream" in r.get("predicted", {}) for r in measured),
            sum("weights" in r.get("initialised", {}) for r in measured),
        ]  # fmt: skip
        rows.append([kind, *map(str, numbers)])
    head = ["", "tried", "ran", "measured", "right", "differ", "errors", "LNS or LayerScale folded"]
    return compact([*head, "LNS", "LayerScale", *WEIGHTS], rows)
