"""Trained models: what their layers do and are worth, one or two on the same axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.diagnosis.result import (
    SCHEMA,
    Diagnosis,
    Estimate,
    LayerSignal,
    Number,
    Numbers,
    Weights,
    known,
    paired,
)
from signalprop.report import diagnosis_tables
from signalprop.report.html import blocks
from signalprop.report.html.blocks import Block, Scale
from signalprop.report.html.parts import Items, Part

_SOURCES: tuple[tuple[str, blocks.Style], ...] = (
    ("measured", "line"), ("predicted from weights", "dashed"), ("first positions", "dotted"),
    ("feed-forward", "mixed"),
)  # fmt: skip
MEASURED, PREDICTED, FIRST, FEED_FORWARD = range(4)


def names_of(items: Mapping[str, Diagnosis]) -> list[str]:
    """A label per diagnosis: the model, and the file's name where two are of one model."""
    models = [d.model for d in items.values()]
    return [d.model if models.count(d.model) == 1 else f"{d.model} ({name})" for name, d in items.items()]


def diagnosis_section(items: Mapping[str, Diagnosis]) -> Block:
    """Charts per layer, the angular matrix, removals and casts."""
    found, names = list(items.values()), names_of(items)
    drawn = _charts(found)
    for chart in drawn:
        if chart["x"] == "layer":
            chart["marks"] = [{"x": k, "label": label} for k, label in worst(items).values()]
    used = {series["source"] for chart in drawn for series in chart["series"]}
    sources = [source for k, source in enumerate(_SOURCES) if k in used]
    for chart in drawn:
        for series in chart["series"]:
            series["source"] = sources.index(_SOURCES[series["source"]])
    return blocks.section(
        "layers",
        "What the layers do",
        [*drawn, *_angles(found, names), *_tables(found, names)],
        lead=" ".join(_lead(d, name) for d, name in zip(found, names, strict=True)),
        groups=names,
        sources=sources,
        places=[_place(d) for d in found],
    )


def _lead(d: Diagnosis, name: str) -> str:
    loss = f" Loss {d.loss.value:.3f} nats per token." if d.loss is not None and d.loss.value is not None else ""
    return (
        f"{name}: {d.data.tokens:,} tokens of {d.data.source}; statistics leave out the first {d.data.skip_first} "
        f"positions of every sequence.{loss}"
    )


def _place(d: Diagnosis) -> Block:
    both = len({s.stack for s in d.signal}) > 1
    return blocks.place(range(len(d.signal)), [f"{s.stack} " * both + f"layer {s.layer}" for s in d.signal])


def _charts(items: Sequence[Diagnosis]) -> list[Block]:
    def measured(value: Callable[[LayerSignal], Number], source: int = MEASURED) -> list[Block]:
        return _curves(items, lambda d: [value(s) for s in d.signal], source)

    def predicted(value: Callable[[Weights], Number]) -> list[Block]:
        return _curves(items, lambda d: [None if w is None else value(w) for _, w in paired(d)], PREDICTED)

    shares = measured(lambda s: s.attention_share) + measured(lambda s: s.feed_forward_share, FEED_FORWARD)
    variances = measured(lambda s: s.variance) + predicted(lambda w: w.predicted_variance)
    near = _curves(items, lambda d: d.identity.jacobian if d.identity else ())
    made = [
        _chart("layer-variance", "Variance of the stream", variances + measured(lambda s: s.first_variance, FIRST),
               "variance", "log", "The first positions are apart, where trained models park huge activations."),
        _chart("layer-gradient", "Variance of the gradient",
               measured(lambda s: s.gradient) + predicted(lambda w: w.predicted_gradient), "variance, last = 1", "log"),
        _chart("layer-correlation", "Token correlation", measured(lambda s: s.token_correlation), "correlation"),
        _chart("layer-rank", "Effective rank", measured(lambda s: s.effective_rank), "tokens", "log"),
        _chart("layer-shares", "Share of the stream's variance that a branch adds", shares, "share", "log",
               "Attention, and the feed-forward as a line of dashes and dots."),
        _chart("layer-entropy", "Entropy of attention", _heads(items, lambda s: s.entropy),
               "of equal weights' entropy", caption="Mean over heads, and their range."),
        _chart("layer-scores", "Standard deviation of attention scores", _heads(items, lambda s: s.score_std),
               "standard deviation", "log", "Mean over heads, and their range."),
        _chart("layer-outliers", "Outliers: largest entry over root mean square",
               measured(lambda s: s.outlier) + measured(lambda s: s.first_outlier, FIRST), "ratio", "log"),
        _chart("layer-cosine", "Cosine of the stream before and after a layer",
               _curves(items, lambda d: d.identity.cosine if d.identity else ()), "cosine"),
        _chart("layer-jacobian", "How far a layer is from the identity: |J - I|",
               near and near + predicted(lambda w: w.identity), "root mean square", "log",
               "0: a change of its input passes unchanged."),
        _chart("layer-removal", "What the loss rises by without a layer", _curves(items, _without), "nats per token",
               "signed", "0: the layer could go. Near zero this axis is linear."),
    ]  # fmt: skip
    return [chart for chart in made if chart["series"]]


def _chart(
    key: str, title: str, curves: list[Block], y: str, scale: Scale = "linear", caption: str = "", x: str = "layer"
) -> Block:
    return blocks.chart(key, title, curves, x=x, y=y, scale=scale, caption=caption)


def _curves(
    items: Sequence[Diagnosis],
    column: Callable[[Diagnosis], Sequence[Number | Estimate]],
    source: int = MEASURED,
) -> list[Block]:
    """A curve of every diagnosis that has such numbers; estimates bring their errors."""
    out = []
    for k, d in enumerate(items):
        rows = column(d)
        values = [e.value if isinstance(e, Estimate) else e for e in rows]
        errors = [e.standard_error or 0.0 if isinstance(e, Estimate) else 0.0 for e in rows]
        with_errors = any(isinstance(e, Estimate) for e in rows)
        if known(values):
            y = blocks.numbers(values)
            out.append(blocks.series(k, source, k, y, error=errors if with_errors else None))
    return out


def _heads(items: Sequence[Diagnosis], value: Callable[[LayerSignal], Numbers]) -> list[Block]:
    out = []
    for k, d in enumerate(items):
        columns = [known(value(s)) or [np.nan] for s in d.signal]
        mean, low, high = ([float(f(column)) for column in columns] for f in (np.mean, np.min, np.max))
        if np.isfinite(mean).any():
            out.append(blocks.series(k, MEASURED, k, mean, low=low, high=high))
    return out


def _without(d: Diagnosis) -> list[Number | Estimate]:
    """What the loss rises by without every layer."""
    found = {} if d.removal is None else {r.layers[0]: r.increase for r in d.removal.single}
    return [found.get(k) for k in range(len(d.signal))]


def cast_section(d: Diagnosis, name: str, key: str) -> Block | None:
    """Signal over noise of every cast, layer by layer, and what the casts cost; None without casts."""
    if not d.casts:
        return None
    names = [f"{cast.format} {cast.of}" + ", scaled" * cast.scaled for cast in d.casts]
    curves = [
        blocks.series(k, 0, 0, blocks.numbers(cast.signal_to_noise))
        for k, cast in enumerate(d.casts) if known(cast.signal_to_noise)
    ]  # fmt: skip
    chart = blocks.chart(f"{key}-noise", "Signal over noise after a layer", curves, x="layer", y="dB")
    header, rows = diagnosis_tables.cast_rows(d)
    return blocks.section(
        key,
        f"Few bits: {name}",
        [
            *([chart] if chart["series"] else []),
            blocks.table("Casts", header, rows, left=2, caption="Nats per token."),
        ],
        lead="The model cast directly to a format, without any tuning.",
        groups=names,
        sources=[("measured", "line")],
        places=[_place(d)],
    )


def _angles(items: Sequence[Diagnosis], names: Sequence[str]) -> list[Block]:
    out = []
    for k, (d, name) in enumerate(zip(items, names, strict=True)):
        if d.identity is None or not d.identity.angular:
            continue
        rows = [blocks.numbers(row) for row in d.identity.angular]
        width = max(len(row) for row in rows)
        matrix = np.array([np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows])
        stride = blocks.every(max(matrix.shape), 1)
        highest = float(np.nanmax(matrix)) if np.isfinite(matrix).any() else 1.0
        title = "Angular distance of a stretch of layers" + (f", {name}" if len(items) > 1 else "")
        block = blocks.heat_map(
            f"layer-angles-{k}", title, {"all": matrix[::stride, ::stride]}, x="first layer", y="layers in the stretch",
            limits=(0.0, highest or 1.0), origin=(0, 1), step=(stride, stride), value="angle / π",
            caption="Dark: the stretch hardly turns the stream, and could be left out.",
        )  # fmt: skip
        out.append({**block, "group": k, "source": 0})
    return out


def _tables(items: Sequence[Diagnosis], names: Sequence[str]) -> list[Block]:
    out = []
    for d, name in zip(items, names, strict=True):
        of = f", {name}" if len(items) > 1 else ""
        header, rows = diagnosis_tables.layer_rows(d)
        out.append(blocks.table(f"Layers{of}", header, rows, search=True))
        if d.removal is not None:
            header, rows = diagnosis_tables.removal_rows(d.removal)
            out.append(blocks.table(f"Without layers{of}", header, rows, search=True, caption="Nats per token."))
    return out


def worst(items: Mapping[str, Diagnosis]) -> dict[str, tuple[int, str]]:
    """By name, the one layer to look at first, and what it is called: the first of the gravest verdict's."""
    out = {}
    for name, d in zip(names_of(items), items.values(), strict=True):
        grave = [v for severity in ("fault", "warning") for v in d.verdicts if v.severity == severity and v.layers]
        if grave and grave[0].layers[0] < len(d.signal):
            k = grave[0].layers[0]
            out[name] = (k, f"layer {d.signal[k].layer}: {grave[0].kind}")
    return out


def _subtitle(items: Mapping[str, Diagnosis]) -> str:
    found = worst(items)
    return "; ".join(f"{name}: look first at {what}" if len(items) > 1 else f"Look first at {what}"
                     for name, (_, what) in found.items())  # fmt: skip


def diagnosis_findings(items: Mapping[str, Diagnosis]) -> list[Block]:
    """A card per verdict; one that says so where nothing stands out."""
    out: list[Block] = []
    for name, d in zip(names_of(items), items.values(), strict=True):
        for verdict in d.verdicts:
            texts = [verdict.text] + ([f"likely cause: {verdict.cause}"] if verdict.cause else [])
            out.append(blocks.card(verdict.severity, name, verdict.kind, texts, verdict.advice))
        if not d.verdicts:
            out.append(blocks.card("good", name, "healthy", ["nothing stands out"]))
    return out


_PAIR = "signalprop/diagnoses/1"


def diagnosis_sections(items: Items) -> list[Block]:
    """What the page shows of diagnoses by name."""
    pairs = zip(items.values(), names_of(items), strict=True)
    casts = [cast_section(d, name, f"casts-{k}") for k, (d, name) in enumerate(pairs)]
    return [diagnosis_section(items), *(section for section in casts if section is not None)]


def _pair(source: Path, data: dict[str, Any]) -> dict[str, Any]:
    found, other = (Diagnosis.from_json(data.get(side)) for side in ("diagnosis", "against"))
    return {source.stem: found, f"{source.stem}, against": other}


PART = Part(
    types=(Diagnosis,),
    sections=lambda items, _: diagnosis_sections(items),
    cards=diagnosis_findings,
    names=names_of,
    subtitle=_subtitle,
    notes=lambda items: [note for found in items.values() for note in found.notes],
    readers={SCHEMA: lambda source, data: {source.stem: Diagnosis.from_json(data)}, _PAIR: _pair},
)
