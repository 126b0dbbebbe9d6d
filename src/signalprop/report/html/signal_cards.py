"""Cards on the signal: what stands out, how well prediction and measurement agree, and what would cure it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.layout import PLACEMENTS
from signalprop.prediction import predict
from signalprop.report import findings
from signalprop.report.html.blocks import Block, card
from signalprop.report.html.curves import Curve
from signalprop.report.tables import variance
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.text import number, percent
from signalprop.schemes import scheme

# Tried in this order as a cure; all are published for transformers of any task.
CURES = ("deepscalelm", "lns", "deepnorm", "noci", "stable-resnet", "deepscalelm-simple")


_SHOWN_CURES = 2


def signal_findings(curves: Sequence[Curve]) -> list[Block]:
    """A card per group: what stands out, where, and which schemes are predicted to cure it."""
    out = []
    for group in dict.fromkeys(curve.group for curve in curves):
        members = [curve for curve in curves if curve.group == group]
        best = next((curve for curve in members if curve.profile.source == "measured"), members[0])
        found = findings.warned(best.profile)
        if not found:
            out.append(card("good", group, "healthy signal", [_healthy(best)]))
            continue
        title = ", ".join(dict.fromkeys(item.name for item in found))
        out.append(card("warning", group, title, [f"{line} ({best.source})" for line in found], cure_of(best.profile)))
    return out


def agreement_findings(items: Mapping[str, Comparison], curves: Sequence[Curve]) -> list[Block]:
    """A card per comparison that comes before all others: how well prediction and measurement agree."""
    labels = {id(curve.profile): curve.group for curve in curves}
    out = []
    for item in items.values():
        median = {a.quantity: a.median for a in item.agreements}
        said = [f"{quantity} {percent(value)}" for quantity, value in median.items() if quantity in _TOLD]
        seeds = item.measured.n_seeds or 1
        text = f"median error over layers: {', '.join(said)}; {seeds} network{'s' * (seeds > 1)} measured"
        worst = max((value for quantity, value in median.items() if quantity in _TOLD), default=math.nan)
        agree = worst < _AGREE
        title = f"prediction and measurement {'agree' if agree else 'differ'}"
        out.append(card("good" if agree else "note", labels[id(item.predicted)], title, [text], first=True))
    return out


# What the card of a comparison tells of, and up to which median error it says that the two agree.
_TOLD, _AGREE = ("forward variance", "forward token correlation", "gradient variance"), 0.2


def _healthy(curve: Curve) -> str:
    p = curve.profile
    stream = p.forward["stream_out"]
    gradient = (
        "" if p.gradient is None else f", gradient variance first over last {variance(p.gradient['stream_in'], 0)}"
    )
    return (
        f"variance {number(p.input.get('variance'))} → {variance(stream, -1)}, token correlation at the top "
        f"{number(float(stream.token_correlation[-1]))}{gradient} ({curve.source})"
    )


def cure_of(p: Profile) -> str:
    """Schemes that are predicted to do without any warning on the same architecture."""
    found = list(_cures(p.architecture, p.scheme))
    if not found:
        return "no scheme that was tried is predicted to cure it: consider another norm placement or fewer layers"
    return f"the prediction for the same depth and width shows none of this with {' or '.join(found)}"


def _cures(a: Architecture, present: str) -> Iterable[str]:
    inputs, shown = default_statistics(a), 0
    for name in CURES:
        if name == present or shown == _SHOWN_CURES:
            continue
        try:
            table = scheme(name)(a, inputs)
            p = predict(table, inputs, fidelity="moments")
        except InputError:  # a scheme that does not know this architecture
            continue
        if not findings.warned(p):
            shown += 1
            ratio = "" if p.gradient is None else f"gradient ratio {variance(p.gradient['stream_in'], 0)}, "
            correlation = number(float(p.forward["stream_out"].token_correlation[-1]))
            placements = sorted({PLACEMENTS[k] for k in table.placement})
            moved = "" if placements == [a.norm_placement] else f"{' and '.join(placements)}-norm, "
            yield f"{name} ({moved}{ratio}token correlation {correlation} at the top)"
