"""A diagnosis as text: a screen with the findings first, and all of it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from signalprop.diagnosis.result import (
    ONE_SCALE,
    RANGES,
    Diagnosis,
    Estimate,
    Number,
    Removal,
    ScaledGradients,
    mean_of,
    paired,
)
from signalprop.network.shown import COLUMNS
from signalprop.results.findings import Finding
from signalprop.results.text import number, spread, text_table

Rows = tuple[list[str], list[list[str]]]  # header and cells
SCREEN = 24  # lines
_SHOWN = {"variance", "predicted", "token r", "attn share", "ff share", "branch share", "gradient"}


def screen(d: Diagnosis) -> str:
    """24 lines of 80 columns, more for a long first finding: findings, loss, six layers, and the names of the rest."""
    columns = columns_of(d)
    costs = {} if d.removal is None else {item.layers[0]: item.increase.value for item in d.removal.single}
    shown_columns = [name for name in columns if name in _SHOWN]
    table = []
    for k in spread(range(len(d.signal)), 6):
        near = columns["|J-I|"][k] if columns["|J-I|"] else None
        cells = [number(columns[name][k]) for name in shown_columns]
        table.append([f"{d.signal[k].layer}", *cells, number(costs.get(k) if costs else near)])
    about = header(d).replace("; statistics leave out", ", without").splitlines()
    below = ["", *(folded for line in about for folded in textwrap.wrap(line, COLUMNS)), ""]
    below += text_table(["layer", *shown_columns, "removed" if costs else "|J-I|"], table).splitlines()
    below += textwrap.wrap(_cast_costs(d), COLUMNS) if d.casts else []
    below += textwrap.wrap(_gradient_shares(d.gradients), COLUMNS) if d.gradients is not None else []
    findings, shown = list(d.findings), list[str]()
    while findings and (not shown or len(shown) + _paragraph(findings[0]).count("\n") + len(below) < SCREEN - 4):
        shown += _paragraph(findings.pop(0)).splitlines()
    more = [f"also: {_named(findings)}"] if findings else []
    notes = f" and {len(d.notes)} note{'s' * (len(d.notes) > 1)}" if d.notes else ""
    more.append(f"--all prints every layer, every number{notes}")
    shown = shown or ["no fault, no warning, no note"]
    return "\n".join([*shown, *below, "", *textwrap.wrap("; ".join(more), COLUMNS)])


def _cast_costs(d: Diagnosis) -> str:
    """The increase of the loss by format, of weights and activations; with scales, which come after those without."""
    both = {c.format: c.increase.value for c in d.casts if c.of == "both"}
    costs = (f"{form} {'not finite' if cost is None else number(cost)}" for form, cost in both.items())
    return f"rise of the loss, weights and activations cast with scales: {', '.join(costs)}"


def _gradient_shares(g: ScaledGradients) -> str:
    """The worst of any tensor in float16, and the scale that fits."""
    zero, subnormal = max(t.zero for t in g.tensors), max(t.subnormal for t in g.tensors)
    largest = max(t.largest or 0.0 for t in g.tensors)
    return (
        f"gradients in float16, loss x {g.scale:g}: of a tensor at most {zero:.2g} become 0, {subnormal:.2g} "
        f"subnormal; largest {largest:.3g}; a scale of {g.fitting:g} fits"
    )


def diagnosis_text(d: Diagnosis, room: int | None = None) -> str:
    """All sections that there are; in a terminal of so many columns (`room`) wide tables are folded."""
    found = "\n".join(map(_paragraph, d.findings)) or "no fault, no warning, no note"
    parts = [header(d), found, text_table(*layer_rows(d), room=room)]
    parts.append(range_line(d))
    if d.identity is not None:
        parts.append(span_line(d))
    if d.removal is not None and d.removal.single:
        parts.append(text_table(*removal_rows(d.removal)))
    if d.casts:
        parts.append(text_table(*cast_rows(d)))
    if d.gradients is not None:
        parts.append(text_table(*gradient_rows(d.gradients), room=room))
    parts += [f"note: {line}" for line in d.notes]
    return "\n\n".join(part for part in parts if part)


def header(d: Diagnosis) -> str:
    """What was diagnosed, on what, and the loss."""
    kind = f" ({d.family})" if d.family else ""
    n = d.n_parameters
    size = f"{n / 1e6:,.1f} M" if n >= 1e6 else f"{n:,}"
    several = f"{d.data.sequences} sequences" if d.data.sequences != 1 else "1 sequence"
    lines = [
        f"{d.model}{kind}, {size} parameters, {len(d.signal)} layers",
        f"{d.data.tokens:,} tokens of {d.data.source} in {several} of {d.data.length}; statistics leave out the first "
        f"{d.data.skip_first} positions",
    ]
    if d.loss is not None:
        lines.append(f"loss {_with_error(d.loss)} nats per token, perplexity {number(d.perplexity)}")
    if d.accuracy is not None:
        lines.append(f"accuracy {_with_error(d.accuracy)}")
    return "\n".join(lines)


def _paragraph(finding: Finding) -> str:
    body = finding.text + (f". Likely cause: {finding.cause}" if finding.cause else "")
    body += f". Advice: {finding.remedy}" if finding.remedy else ""
    return textwrap.fill(f"{finding.severity.upper():<8}{finding.name}: {body}", COLUMNS, subsequent_indent=" " * 8)


def columns_of(d: Diagnosis) -> dict[str, Sequence[Number]]:
    """The numbers of every layer, by the heading of their column; without distances from the identity none of those."""
    signal, near = d.signal, d.identity
    rest = "ff share" if any(s.attention_share for s in signal) else "branch share"  # of Mamba: of its mixers
    return {
        "variance": [s.variance for s in signal],
        "predicted": [None if w is None else w.predicted_variance for _, w in paired(d)],
        "first": [s.first_variance for s in signal],
        "token r": [s.token_correlation for s in signal],
        "eff. rank": [s.effective_rank for s in signal],
        "attn share": [s.attention_share for s in signal],
        rest: [s.feed_forward_share for s in signal],
        "gradient": [s.gradient for s in signal],
        "score sd": [mean_of(s.score_std) for s in signal],
        "entropy": [mean_of(s.entropy) for s in signal],
        "largest": [s.largest for s in signal],
        "max/rms": [s.outlier for s in signal],
        "cosine": [None] * len(signal) if near is None else near.cosine,
        "|J-I|": [] if near is None else [distance.value for distance in near.jacobian],
    }


def layer_rows(d: Diagnosis) -> Rows:
    """Header and cells of a table with a row per layer."""
    columns, near = columns_of(d), () if d.identity is None else d.identity.jacobian
    columns.pop("|J-I|")
    rows = [
        [f"{s.layer}", *(number(column[k]) for column in columns.values()), _with_error(near[k]) if near else ""]
        for k, s in enumerate(d.signal)
    ]
    return ["layer", *columns, "|J-I|"], rows


def range_line(d: Diagnosis) -> str:
    """The largest activation against what number formats hold without a scale."""
    known = [(s.largest, s.layer) for s in d.signal if s.largest is not None]
    if not known:
        return ""
    largest, layer = max(known)
    shares = ", ".join(f"{name} {largest / top:.2g}" for name, top in RANGES.items())
    return f"largest activation {number(largest)} (layer {layer}); over the largest number of each format: {shares}"


def span_line(d: Diagnosis) -> str:
    """The flattest stretch of layers for some lengths."""
    assert d.identity is not None
    lines = []
    for span in (1, 2, 4, 8, 16):
        if span > len(d.identity.angular):
            break
        known = [(value, k) for k, value in enumerate(d.identity.angular[span - 1]) if value is not None]
        if known:
            value, k = min(known)
            what = f"layer {k}" if span == 1 else f"layers {k}-{k + span - 1}"
            lines.append(f"  {span:>2} {'layer ' if span == 1 else 'layers'}  {what:<14} angular distance {value:.3f}")
    return "flattest stretches:\n" + "\n".join(lines)


def removal_rows(removal: Removal) -> Rows:
    """Header and cells of what the loss becomes without layers."""
    rows = [[without(r.layers), *_costs(r.loss, r.increase, r.accuracy)] for r in removal.single]
    return ["removed", "loss", "increase", "accuracy"][: len(rows[0]) if rows else None], rows


def without(layers: Sequence[int]) -> str:
    """Which were removed, in words."""
    return f"without layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def cast_rows(d: Diagnosis) -> Rows:
    """Header and cells of what casts cost."""
    rows = []
    for cast in d.casts:
        known = [(value, k) for k, value in enumerate(cast.signal_to_noise) if value is not None]
        worst = f"{min(known)[0]:.1f} dB, layer {min(known)[1]}" if known else ""
        rows.append(
            [
                f"{cast.format} {cast.of}",
                ("per tensor" if cast.format in ONE_SCALE else "of the format") if cast.scaled else "none",
                *_costs(cast.loss, cast.increase),
                worst,
            ]
        )
    header = ["cast", "scale", "loss", "increase", "least signal / noise"]
    return header, rows


def gradient_rows(g: ScaledGradients) -> Rows:
    """Header and cells of what float16 loses of gradients: per layer, of the stream after it and of its matrices."""
    rows = []
    for layer in dict.fromkeys(t.layer for t in g.tensors):
        here = [t for t in g.tensors if t.layer == layer]
        cells = []
        for part in ([t for t in here if t.name.startswith("stream")], [t for t in here if "stream" not in t.name]):
            n = sum(t.n for t in part)
            cells += [number(sum(t.n * getattr(t, k) for t in part) / n if n else None) for k in ("zero", "subnormal")]
            cells.append(number(max((t.largest or 0.0 for t in part), default=None)))
        rows.append(["ends" if layer is None else f"{layer}", *cells])
    names = ["to 0", "subnormal", "largest"]
    return [f"loss x {g.scale:g}", *(f"stream {n}" for n in names), *(f"weights {n}" for n in names)], rows


def compared(d: Diagnosis, other: Diagnosis, *, everything: bool = False) -> str:
    """Two diagnoses side by side, layer by layer where both have it; six layers, unless `everything`."""
    names = ("variance", "token r", "eff. rank", "gradient", "|J-I|")
    columns = [item[name] for name in names for item in (columns_of(d), columns_of(other))]
    rows = [
        [f"{k}", *(number(column[k]) if k < len(column) else "" for column in columns)]
        for k in range(max(len(d.signal), len(other.signal)))
    ]
    head = ["layer", *(heading for name in names for heading in (name, "against"))]
    lines = [f"{d.model} against {other.model}"]
    if d.loss is not None and other.loss is not None:
        lines.append(f"loss {_with_error(d.loss)} against {_with_error(other.loss)} nats per token")
    found = [f"{item.model}: {_named(item.findings)}" for item in (d, other)]
    table = text_table(head, spread(rows, None if everything else 6), room=COLUMNS)
    return "\n".join([*(folded for line in found for folded in textwrap.wrap(line, COLUMNS)), *lines, table])


def _named(findings: Sequence[Finding]) -> str:
    """`warning idle layers, note variance growth (2)`."""
    counts = Counter(f"{item.severity} {item.name}" for item in findings)
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items()) or "nothing found"


def _costs(loss: Estimate, increase: Estimate, accuracy: Estimate | None = None) -> list[str]:
    cells = [_with_error(loss), _with_error(increase, sign=True)]
    return cells if accuracy is None else [*cells, _with_error(accuracy)]


def _with_error(estimate: Estimate, *, sign: bool = False) -> str:
    if estimate.value is None:
        return "not finite"
    text = f"{estimate.value:+.3f}" if sign else f"{estimate.value:.3f}"
    return text if estimate.standard_error is None else f"{text} ± {estimate.standard_error:.3f}"
