"""docs/reach.md, from docs/reach.json and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.other_models import OTHERS
from signalprop.files.storage import write_text

ROOT = Path(__file__).resolve().parent.parent
FILE, PAGE = ROOT / "docs" / "reach.json", ROOT / "docs" / "reach.md"
RIGHT, EXACT = 1e-6, 1e-5  # relative differences up to which a variance is right, and a fold exact
SCHEMES = ("lns", "layerscale")
Record = Mapping[str, Any]

INTRODUCTION = """\
# Reach

Written by `python -m benchmarks.reach` from `docs/reach.json`: do not edit. `python -m benchmarks.reach NAME` runs one
model anew, `--page` only writes this page.

Which models are read, and how far that is proved. Every config type of transformers {transformers} is built small
(width 64, one layer of each kind, two at least, random weights; no download, no code from a hub) and run with PyTorch
{torch}, in single precision.

* *by*: the family's row in the table, or the anatomy that was found in the model itself.
* *layers*: how many, and of which `ModuleList`: of several stacks, the one with most parameters is measured.
* *measured*: largest relative difference between the stream's variance by `signalprop.measure` and by plain PyTorch
  hooks (on the layers, and on the norms within them), which know nothing of signalprop. Up to {right:.0e} is right.
* *gradient*: the same for the gradient of a random projection of the output, at the layers.
* *lns*, *layerscale*: the scheme applied to the model as it is, then folded into plain weights: largest difference of
  outputs over the largest output; up to {exact:.0e} is exact. LNS is also held against norms that plain hooks divide,
  and the larger of both differences stands here. `–`: refused.
* *silenced*: SkipInit multiplies every branch with 0, so that the stream has to leave each layer as it entered: largest
  relative difference of the variances, by plain hooks. Empty: a post-norm follows.
* *predicted*: whether every weight's role is known, so that a prediction can be made.
"""


def text(stored: Mapping[str, Any]) -> str:
    """The page.

    Args:
        stored: what docs/reach.json holds.
    """
    models = stored["models"]
    types = {name: record for name, record in models.items() if name not in OTHERS}
    others = {name: record for name, record in models.items() if name in OTHERS}
    introduction = INTRODUCTION.format(**stored["versions"], right=RIGHT, exact=EXACT)
    return "\n\n".join([
        introduction + "\n" + counts(types, others),
        "## Config types of transformers", *_section(types),
        "## Models of others, with no mapping given",
        "diffusers and x-transformers are installed for this page alone; timm cannot be "
        "imported without a torchvision that fits the installed PyTorch.", *_section(others),
    ]) + "\n"  # fmt: skip


def write_page(stored: Mapping[str, Any]) -> None:
    """The page of what is stored."""
    write_text(PAGE, text(stored))


def right(record: Record) -> bool:
    """Measured, and right: forward, within layers, and backward where the gradient was compared."""
    measured = record.get("measured", {})
    return (
        max((measured.get(key, 0.0) for key in ("difference", "inner")), default=1.0) <= RIGHT
        and "difference" in measured
    )


def exact(record: Record, scheme: str) -> bool:
    """The scheme was applied, and its fold computes the same."""
    held = record.get(scheme, {})
    return "fold" in held and max(held["fold"], held.get("expected", 0.0)) <= EXACT


def counts(types: Mapping[str, Record], others: Mapping[str, Record]) -> str:
    """The summary."""
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
        ]  # fmt: skip
        rows.append([kind, *map(str, numbers)])
    head = [
        "",
        "tried",
        "ran",
        "measured",
        "right",
        "differ",
        "errors",
        "LNS or LayerScale folded",
        "LNS",
        "LayerScale",
        "predicted",
    ]
    return _table(head, rows)


def _section(records: Mapping[str, Record]) -> list[str]:
    """Tables of what was measured, of what was refused, and of what did not run, each with its reasons."""
    measured = {n: r for n, r in records.items() if r["ran"] and "difference" in r["measured"]}
    refused = {n: r for n, r in records.items() if r["ran"] and "difference" not in r["measured"]}
    idle = {n: r for n, r in records.items() if not r["ran"]}
    head = ["model", "class", "by", "layers", "measured", "gradient", *SCHEMES, "silenced", "predicted"]
    parts = [_table(head, [_row(name, record) for name, record in measured.items()])] if measured else []
    reasons = {scheme: Counter[str]() for scheme in (*SCHEMES, "silenced", "predicted")}
    for record in measured.values():
        for key, seen in reasons.items():
            if "reason" in record.get(key, {}):
                seen[_clean(record[key]["reason"])] += 1
    lines = [f"* {key}, {n}: {reason}" for key, seen in reasons.items() for reason, n in seen.most_common(25)]
    parts += ["Why not (`–`), with how many models; the commonest:", "\n".join(lines)] if lines else []
    if refused:
        parts += ["### Run, and not measured", _table(["model", "class", "how", "reason"], [
            [f"`{n}`", r["class"], r["measured"]["how"], _clean(r["measured"]["reason"])]
            for n, r in refused.items()])]  # fmt: skip
    if idle:
        parts += [
            "### Not run",
            _table(["model", "reason"], [[f"`{n}`", _clean(r["reason"])] for n, r in idle.items()]),
        ]
    return parts


def _row(name: str, record: Record) -> list[str]:
    held = record["measured"]
    return [
        f"`{name}`",
        record["class"],
        held["by"],
        ", ".join(f"{n} of `{path}`" for path, n in held["stacks"].items()),
        f"{max(held['difference'], held.get('inner', 0.0)):.0e}",
        f"{held['gradient']:.0e}" if "gradient" in held else "",
        *(_largest(record.get(scheme, {}), "fold", "expected") for scheme in SCHEMES),
        "" if "silenced" not in record else _largest(record["silenced"], "identity"),
        "yes" if "stream" in record.get("predicted", {}) else "–",
    ]


def _largest(held: Record, *keys: str) -> str:
    """The largest of these numbers."""
    numbers = [held[key] for key in keys if key in held]
    return f"{max(numbers):.0e}" if numbers else "–"


def _clean(reason: str) -> str:
    """A reason as one cell."""
    return (
        reason.replace("|", "/")
        .replace("<", "‹")
        .replace(">", "›")
        .replace("*", "∗")
        .replace("`", "'")
        .replace("{", "(")
        .replace("}", ")")
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
