"""docs/reach.md, from docs/reach.json and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.other_models import OTHERS
from benchmarks.timing import compact
from signalprop.files.storage import write_text

ROOT = Path(__file__).resolve().parent.parent
FILE, PAGE = ROOT / "docs" / "reach.json", ROOT / "docs" / "reach.md"
RIGHT, EXACT = 1e-6, 1e-5  # relative differences up to which a variance is right, and a fold exact
SCHEMES = ("lns", "layerscale")
WEIGHTS = ("predicted", "initialised")
# Why a model did not run, by a pattern of the reason; the first that fits.
GROUPS = {
    "part of another model": "no model of it alone",
    "needs a package that is not installed": "requires the|ImportError|ModuleNotFoundError",
    "not small by the names of its sizes": "TooLarge|took more than",
    "its configuration refuses the small sizes": "^configuration",
    "none of the tried inputs fits": "none of the tried|missing .* required|NoneType|only one of|You must|specify",
    "the small sizes do not fit each other": "",
}
Record = Mapping[str, Any]

INTRODUCTION = """\
# Reach

Written by `python -m benchmarks.reach` from `docs/reach.json`: do not edit. `python -m benchmarks.reach NAME` runs one
model anew, `--page` only writes this page.

Which models are read, and how far that is proved. Config types of transformers {transformers} are built small (width
64, one layer of each kind, two at least, random weights; no download, no code from a hub) and run with PyTorch
{torch}, in single precision. Every config type is here, also those that do not run at these sizes, with the reason.

* *by*: the family's row in the table, or the anatomy that was found in the model itself.
* *layers*: how many, and of which list of modules: of several stacks, the one with most parameters is measured.
* *measured*: largest relative difference between the stream's variance by `signalprop.measure` and by plain PyTorch
  hooks (on the layers, and on the norms within them), which know nothing of signalprop. Up to {right:.0e} is right.
  Where a layer begins with a norm on the stream (MiniMax, RWKV, Grounding DINO), what enters it is what leaves that
  norm, by a hook on it: that is added to.
* *gradient*: the same for the gradient of a random projection of the output, at the layers.
* *lns*, *layerscale*: the scheme applied to the model as it is, then folded into plain weights: largest difference of
  outputs over the largest output; up to {exact:.0e} is exact. LNS is also held against norms that plain hooks divide,
  and the larger of both differences stands here. `–`: refused.
* *silenced*: SkipInit multiplies every branch with 0, so that the stream has to leave each layer as it entered: largest
  relative difference of the variances, by plain hooks. Empty: a post-norm follows.
* *predicted*: what every weight is has been proved (or is known from the table), so that the model's own numbers are
  read and predicted from: difference of the predicted variance after the last layer from the measured one. A prediction
  is a mean over random weights, of wide networks: at width 64 and with {rows} tokens one network differs by a tenth.
* *initialised*: Xavier's initialisation is drawn into the model: largest relative difference of a weight's root mean
  square from what was asked for (of 4,096 numbers it scatters by a hundredth). `–`: not drawn. Empty: not tried.
"""


def text(stored: Mapping[str, Any]) -> str:
    """The page.

    Args:
        stored: what docs/reach.json holds.
    """
    models = stored["models"]
    types = {name: record for name, record in models.items() if name not in OTHERS}
    others = {name: record for name, record in models.items() if name in OTHERS}
    introduction = INTRODUCTION.format(**stored["versions"], right=RIGHT, exact=EXACT, rows=12)
    return "\n\n".join([
        introduction + "\n" + counts(types, others),
        "## Config types of transformers", *_section(types),
        "## Models of others, with no mapping given",
        "diffusers, x-transformers and timm are installed for this page alone.", *_section(others),
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
            sum("weights" in r.get("initialised", {}) for r in measured),
        ]  # fmt: skip
        rows.append([kind, *map(str, numbers)])
    head = ["", "tried", "ran", "measured", "right", "differ", "errors", "LNS or LayerScale folded"]
    return compact([*head, "LNS", "LayerScale", *WEIGHTS], rows)


def _section(records: Mapping[str, Record]) -> list[str]:
    """Tables of what was measured, of what was refused, and of what did not run, each with its reasons."""
    measured = {n: r for n, r in records.items() if r["ran"] and "difference" in r["measured"]}
    refused = {n: r for n, r in records.items() if r["ran"] and "difference" not in r["measured"]}
    idle = {n: r for n, r in records.items() if not r["ran"]}
    head = ["model", "class", "by", "layers", "measured", "gradient", *SCHEMES, "silenced", *WEIGHTS]
    parts = [compact(head, [_row(name, record) for name, record in measured.items()])] if measured else []
    reasons = {scheme: Counter[str]() for scheme in (*SCHEMES, "silenced", *WEIGHTS)}
    for record in measured.values():
        for key, seen in reasons.items():
            if "reason" in record.get(key, {}):
                seen[_clean(_alike(record[key]["reason"], record["class"]))] += 1
    lines = [f"* {key}, {n}: {reason}" for key, seen in reasons.items() for reason, n in seen.most_common(25)]
    parts += ["Why not (`–`), with how many models; the commonest:", "\n".join(lines)] if lines else []
    if refused:
        parts += ["### Run, and not measured", compact(["model", "class", "how", "reason"], [
            [f"`{n}`", r["class"], r["measured"]["how"], _clean(r["measured"]["reason"])]
            for n, r in refused.items()])]  # fmt: skip
    if idle:
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for name, record in idle.items():
            groups[next(g for g, p in GROUPS.items() if re.search(p, record["reason"]))].append(
                (name, record["reason"])
            )
        parts += ["### Not run", compact(["why", "config types"], [[g, str(len(held))] for g, held in groups.items()])]
        for group, held in groups.items():
            if held:
                rows = [[f"`{name}`", _clean(reason)] for name, reason in held]
                parts += [f"{group.capitalize()}:", compact(["model", "reason"], rows)]
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
        _off(record.get("predicted", {})),
        "" if "initialised" not in record and "stream" in record.get("predicted", {})
        else _largest(record.get("initialised", {}), "weights"),
    ]  # fmt: skip


def _off(held: Record) -> str:
    """How far the prediction is from what was measured."""
    if "stream" not in held:
        return "–"
    return f"{held['stream'] / held['measured'] - 1:+.0%}" if "measured" in held else "yes"


def _alike(reason: str, name: str) -> str:
    """A reason without what differs from model to model: the class, prefixes of paths, numbers of layers."""
    short = re.sub(r"\b(?:\w+\.)+(?=[A-Za-z_])", "", reason.replace(name, "this model"))
    return re.sub(r"off by [\d.e+-]+", "off", short)


def _largest(held: Record, *keys: str) -> str:
    """The largest of these numbers."""
    numbers = [held[key] for key in keys if key in held]
    return f"{max(numbers):.0e}" if numbers else "–"


def _clean(reason: str) -> str:
    """A reason as one cell."""
    return reason.translate(str.maketrans("|<>*`{}", "/‹›∗'()"))
