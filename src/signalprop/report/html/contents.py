"""What a report holds: cards on top, then a section for each kind of thing that it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError
from signalprop.kernels.trace import Trace
from signalprop.network.parametrization import Parametrization
from signalprop.report.html import blocks, diagnoses, kernels, signal, tables
from signalprop.report.html.blocks import Block
from signalprop.report.html.kernels import Kernels
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop_lab.report import reproductions, sweeps, training
from signalprop_lab.report.reproductions import Reproduced
from signalprop_lab.report.runs import Run
from signalprop_lab.report.sweeps import Swept

Item = Profile | Comparison | Diagnosis | Parametrization | Trace | Kernels | Run | Swept | Reproduced
_SEVERITIES = ("fault", "warning", "note", "good")


def document(
    items: Mapping[str, Item] | Sequence[tuple[str, Item]], *, title: str | None = None, beside: Path | None = None
) -> Block:
    """The report as a JSON-ready dictionary: title, subtitle, findings, notes and sections.

    Args:
        items: by the names that tell them apart; as pairs where a name may come twice.
        beside: directory that the report will lie in, from which it links to the runs of a sweep.

    Raises:
        InputError: nothing given, or a sweep.
    """
    named = _distinct(list(items.items()) if isinstance(items, Mapping) else list(items))
    if not named:
        raise InputError(
            "there is nothing to report; give at least one profile, diagnosis, comparison, trace, run or sweep"
        )
    profiles = _of(named, Profile, Comparison)
    for profile in (p for item in profiles.values() for p in _profiles(item)):
        if profile.forward["stream_out"].variance.ndim != 1:
            raise InputError("a report cannot show a sweep; select one of its members")
    found, runs, swept = _of(named, Diagnosis), _of(named, Run), _of(named, Swept)
    reproduced = _of(named, Reproduced)
    traces = kernels.merged(
        [(name, kernels.of_trace(item) if isinstance(item, Trace) else item) for name, item in named
         if isinstance(item, (Trace, Kernels))]
    )  # fmt: skip
    parametrizations = _of(named, Parametrization)
    curves = signal.curves_of(profiles)
    cards = [
        *(signal.signal_findings(curves) if curves else []), *diagnoses.diagnosis_findings(found),
        *sweeps.sweep_findings(swept), *training.training_findings(runs), *kernels.kernel_findings(traces),
        *reproductions.reproduction_findings(reproduced),
    ]  # fmt: skip
    comparisons = {name: item for name, item in profiles.items() if isinstance(item, Comparison)}
    sections = [
        *_signal(curves, comparisons),
        *([diagnoses.diagnosis_section(found)] if found else []),
        *_casts(found),
        *sweeps.sweep_sections(swept, beside),
        *reproductions.reproduction_sections(reproduced),
        *([training.training_section(runs)] if runs else []),
        *_present(training.through_time_section(runs)),
        *([kernels.kernel_section(traces)] if traces else []),
        *([tables.parametrization_section(parametrizations)] if parametrizations else []),
    ]
    return {
        "title": title or _title(curves, found, [*(item.sweep.name for item in swept.values()), *runs, *reproduced]),
        "subtitle": signal.title_of(curves) if curves else "",
        "findings": sorted(cards, key=lambda card: _SEVERITIES.index(card["severity"])),
        "notes": [*signal.notes(curves), *dict.fromkeys(note for d in found.values() for note in d.notes)],
        "sections": sections,
    }


def _distinct(named: Sequence[tuple[str, Item]]) -> list[tuple[str, Any]]:
    """Of things that are drawn together, a name that comes again gets a number.

    Not of kernels: one file's numbers and another's matrices share a name.
    """
    out: list[tuple[str, Item]] = []
    taken: set[tuple[type, str]] = set()
    for name, item in named:
        kind = Profile if isinstance(item, Comparison) else type(item)
        key, k = name, 2
        while (kind, key) in taken and kind is not Kernels:
            key, k = f"{name} #{k}", k + 1
        taken.add((kind, key))
        out.append((key, item))
    return out


def _of(named: Sequence[tuple[str, Any]], *kinds: type) -> dict[str, Any]:
    return {name: item for name, item in named if isinstance(item, kinds)}


def _profiles(item: Profile | Comparison) -> list[Profile]:
    return [item.predicted, item.measured] if isinstance(item, Comparison) else [item]


def _signal(curves: Sequence[signal.Curve], comparisons: Mapping[str, Comparison]) -> list[Block]:
    if not curves:
        return []
    whole = signal.signal_section(curves)
    lines = [signal.glance_block(curves), *_present(signal.agreement_block(comparisons, curves))]
    return [whole, blocks.section("numbers", "In numbers", lines)]


def _casts(found: Mapping[str, Diagnosis]) -> list[Block]:
    names = diagnoses.names_of(found)
    made = (
        diagnoses.cast_section(d, name, f"casts-{k}")
        for k, (d, name) in enumerate(zip(found.values(), names, strict=True))
    )
    return [item for item in made if item is not None]


def _present(block: Block | None) -> list[Block]:
    return [] if block is None else [block]


def _title(curves: Sequence[signal.Curve], found: Mapping[str, Diagnosis], others: Sequence[str]) -> str:
    names = [*dict.fromkeys(curve.group for curve in curves), *diagnoses.names_of(found), *others]
    if not names:
        return "Signal report"
    return "Signal report: " + (
        " · ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
    )
