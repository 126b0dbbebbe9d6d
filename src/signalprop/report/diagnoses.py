"""Diagnoses in the report: what the layers of trained models do and are worth, one or two on the same axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    mean_of,
    paired,
)
from signalprop.report import diagnosis_tables
from signalprop.report.parts import Items, Part, numbered
from signalprop.report.plots import sections_figure
from signalprop.report.sections import Card, Chart, Curve, HeatMap, Line, Section, Table, numbers, with_errors

Values = Sequence[Number | Estimate]
_LINES: dict[str, Line] = {
    "measured": "solid", "predicted from weights": "dashed", "first positions": "dotted", "feed-forward": "mixed",
}  # fmt: skip
_PAIR = "signalprop/diagnoses/1"


def figure(results: Sequence[Diagnosis]) -> Any:
    """The sections of the page as a matplotlib Figure."""
    named = numbered([(item.model, item) for item in results])
    return sections_figure(diagnosis_sections(named), " against ".join(names_of(named)))


def names_of(items: Mapping[str, Diagnosis]) -> list[str]:
    """A label per diagnosis: the model, and the file's name where two are of one model."""
    models = [d.model for d in items.values()]
    return [d.model if models.count(d.model) == 1 else f"{d.model} ({name})" for name, d in items.items()]


def diagnosis_sections(items: Items) -> list[Section]:
    """What the page shows of diagnoses by name."""
    named = dict(zip(names_of(items), items.values(), strict=True))
    marks = [(float(k), label) for k, label in worst(items).values()]
    blocks: list[Any] = [*(replace(chart, marks=marks) for chart in _charts(named)), *_angles(named), *_tables(named)]
    lead = " ".join(_lead(d, name) for name, d in named.items())
    casts = [_casts(d, name) for name, d in named.items() if d.casts]
    return [Section("What the layers do", blocks, lead), *casts]


def _lead(d: Diagnosis, name: str) -> str:
    loss = f" Loss {d.loss.value:.3f} nats per token." if d.loss is not None and d.loss.value is not None else ""
    return (
        f"{name}: {d.data.tokens:,} tokens of {d.data.source}; statistics leave out the first {d.data.skip_first} "
        f"positions of every sequence.{loss}"
    )


def _layers(d: Diagnosis) -> list[str]:
    both = len({s.stack for s in d.signal}) > 1
    return [f"{s.stack} " * both + f"layer {s.layer}" for s in d.signal]


def _charts(named: Mapping[str, Diagnosis]) -> list[Chart]:
    def drawn(column: Callable[[Diagnosis], Values], source: str = "measured") -> list[Curve]:
        """A curve of every diagnosis that has such numbers; estimates bring their errors."""
        out = []
        for k, (name, d) in enumerate(named.items()):
            rows = column(d)
            values = [e.value if isinstance(e, Estimate) else e for e in rows]
            errors = [e.standard_error or 0.0 if isinstance(e, Estimate) else 0.0 for e in rows]
            if known(values):
                label = ", ".join([name] * (len(named) > 1) + [source] * (source != "measured" or len(named) == 1))
                curve = Curve(label, np.arange(float(len(rows))), numbers(values), colour=k, line=_LINES[source],
                              names=_layers(d))  # fmt: skip
                out.append(with_errors(curve, errors) if any(errors) else curve)
        return out

    def measured(value: Callable[[LayerSignal], Number], source: str = "measured") -> list[Curve]:
        return drawn(lambda d: [value(s) for s in d.signal], source)

    def predicted(value: Callable[[Weights], Number]) -> list[Curve]:
        return drawn(lambda d: [None if w is None else value(w) for _, w in paired(d)], "predicted from weights")

    def heads(value: Callable[[LayerSignal], Numbers]) -> list[Curve]:
        """The mean over heads, and their range where there is one diagnosis."""
        made = drawn(lambda d: [mean_of(value(s)) for s in d.signal])
        if len(named) > 1 or not made:
            return made
        (only,) = named.values()
        found = [known(value(s)) or [np.nan] for s in only.signal]
        return [replace(made[0], low=np.array([min(v) for v in found]), high=np.array([max(v) for v in found]))]

    def chart(title: str, curves: list[Curve], y: str, caption: str = "", log: bool = False) -> Chart:
        return Chart(title, curves, "layer", y, log=log, positive=log, caption=caption)

    near = drawn(lambda d: d.identity.jacobian if d.identity else ())
    made = [
        chart("Variance of the stream", measured(lambda s: s.variance) + predicted(lambda w: w.predicted_variance)
              + measured(lambda s: s.first_variance, "first positions"), "variance",
              "The first positions are apart, where trained models park huge activations.", log=True),
        chart("Variance of the gradient", measured(lambda s: s.gradient) + predicted(lambda w: w.predicted_gradient),
              "variance, last = 1", log=True),
        chart("Token correlation", measured(lambda s: s.token_correlation), "correlation"),
        chart("Effective rank", measured(lambda s: s.effective_rank), "tokens", log=True),
        chart("Share of the stream's variance that a branch adds", measured(lambda s: s.attention_share)
              + measured(lambda s: s.feed_forward_share, "feed-forward"), "share",
              "Attention, and the feed-forward as a line of dashes and dots.", log=True),
        chart("Entropy of attention", heads(lambda s: s.entropy), "of equal weights' entropy",
              "Mean over heads, and their range."),
        chart("Standard deviation of attention scores", heads(lambda s: s.score_std), "standard deviation",
              "Mean over heads, and their range.", log=True),
        chart("Outliers: largest entry over root mean square", measured(lambda s: s.outlier)
              + measured(lambda s: s.first_outlier, "first positions"), "ratio", log=True),
        chart("Cosine of the stream before and after a layer", drawn(lambda d: d.identity.cosine if d.identity else ()),
              "cosine"),
        chart("How far a layer is from the identity: |J - I|", near and near + predicted(lambda w: w.identity),
              "root mean square", "0: a change of its input passes unchanged.", log=True),
        chart("Increase of the loss without a layer", drawn(_without), "nats per token", "0: the layer could go."),
    ]  # fmt: skip
    return [item for item in made if item.curves]


def _without(d: Diagnosis) -> Values:
    """What the loss rises by without every layer."""
    found = {} if d.removal is None else {r.layers[0]: r.increase for r in d.removal.single}
    return [found.get(k) for k in range(len(d.signal))]


def _casts(d: Diagnosis, name: str) -> Section:
    """Signal over noise of every cast, layer by layer, and what the casts cost."""
    curves = [
        Curve(f"{cast.format} {cast.of}" + ", scaled" * cast.scaled, np.arange(float(len(cast.signal_to_noise))),
              numbers(cast.signal_to_noise), colour=k, names=_layers(d)[: len(cast.signal_to_noise)])
        for k, cast in enumerate(d.casts) if known(cast.signal_to_noise)
    ]  # fmt: skip
    chart = [Chart("Signal over noise after a layer", curves, "layer", "dB")] if curves else []
    header, rows = diagnosis_tables.cast_rows(d)
    return Section(
        f"Few bits: {name}", [*chart, Table("Casts", header, rows, left=2, caption="Nats per token.")],
        lead="The model cast directly to a format, without any tuning.",
    )  # fmt: skip


def _angles(named: Mapping[str, Diagnosis]) -> list[HeatMap]:
    out = []
    for name, d in named.items():
        if d.identity is None or not d.identity.angular:
            continue
        rows = [numbers(row) for row in d.identity.angular]
        width = max(len(row) for row in rows)
        matrix = np.array([np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows])
        highest = float(np.nanmax(matrix)) if np.isfinite(matrix).any() else 1.0
        title = "Angular distance of a stretch of layers" + (f", {name}" if len(named) > 1 else "")
        caption = "Dark: the stretch hardly turns the stream, and could be left out."
        out.append(
            HeatMap(title, {"": matrix}, "first layer", "layers in the stretch", (0.0, highest or 1.0), origin=(0, 1),
                    value="angle / π", caption=caption)
        )  # fmt: skip
    return out


def _tables(named: Mapping[str, Diagnosis]) -> list[Table]:
    out = []
    for name, d in named.items():
        of = f", {name}" if len(named) > 1 else ""
        out.append(Table(f"Layers{of}", *diagnosis_tables.layer_rows(d)))
        if d.removal is not None:
            header, rows = diagnosis_tables.removal_rows(d.removal)
            out.append(Table(f"Without layers{of}", header, rows, caption="Nats per token."))
        if d.gradients is not None:
            caption = "Shares of entries that become 0 or subnormal, and the largest entry."
            out.append(
                Table(f"Gradients in float16{of}", *diagnosis_tables.gradient_rows(d.gradients), caption=caption)
            )
    return out


def worst(items: Mapping[str, Diagnosis]) -> dict[str, tuple[int, str]]:
    """By name, the one layer to look at first, and what it is called: the first of the gravest verdict's."""
    out = {}
    for name, d in zip(names_of(items), items.values(), strict=True):
        grave = [v for severity in ("fault", "warning") for v in d.findings if v.severity == severity and v.layers]
        if grave and grave[0].layers[0] < len(d.signal):
            k = grave[0].layers[0]
            out[name] = (k, f"layer {d.signal[k].layer}: {grave[0].name}")
    return out


def _subtitle(items: Items) -> str:
    return "; ".join(f"{name}: look first at {what}" if len(items) > 1 else f"Look first at {what}"
                     for name, (_, what) in worst(items).items())  # fmt: skip


def _cards(items: Items) -> list[Card]:
    """A card per verdict; one that says so where nothing stands out."""
    out: list[Card] = []
    for name, d in zip(names_of(items), items.values(), strict=True):
        for verdict in d.findings:
            texts = [verdict.text] + ([f"likely cause: {verdict.cause}"] if verdict.cause else [])
            out.append(Card(verdict.severity, name, verdict.name, texts, verdict.remedy))
        if not d.findings:
            out.append(Card("good", name, "healthy", ["nothing stands out"]))
    return out


def _pair(source: Path, data: dict[str, Any]) -> dict[str, Any]:
    found, other = (Diagnosis.from_json(data.get(side)) for side in ("diagnosis", "against"))
    return {source.stem: found, f"{source.stem}, against": other}


PART = Part(
    types=(Diagnosis,),
    sections=lambda items, _: diagnosis_sections(items),
    cards=_cards,
    names=names_of,
    subtitle=_subtitle,
    notes=lambda items: [note for found in items.values() for note in found.notes],
    readers={SCHEMA: lambda source, data: {source.stem: Diagnosis.from_json(data)}, _PAIR: _pair},
)
