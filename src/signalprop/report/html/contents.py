"""What a report holds: cards on top, then a section for each kind of thing that it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from signalprop.comparison import Comparison
from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError
from signalprop.kernels.trace import Trace
from signalprop.parametrization import Parametrization
from signalprop.profile import Profile
from signalprop.report.html import blocks, diagnoses, kernels, signal, tables, training
from signalprop.report.html.blocks import Block
from signalprop.report.html.kernels import Kernels
from signalprop.report.html.runs import Run

Item = Profile | Comparison | Diagnosis | Parametrization | Trace | Kernels | Run
_SEVERITIES = ("fault", "warning", "note", "good")


def document(items: Mapping[str, Item] | Sequence[tuple[str, Item]], *, title: str | None = None) -> Block:
    """The report as a JSON-ready dictionary: title, subtitle, findings, notes and sections.

    Args:
        items: by the names that tell them apart; as pairs where a name may come twice.

    Raises:
        InputError: nothing given, or a sweep.
    """
    named = _distinct(list(items.items()) if isinstance(items, Mapping) else list(items))
    if not named:
        raise InputError("there is nothing to report; give at least one profile, diagnosis, comparison, trace or run")
    profiles = _of(named, Profile, Comparison)
    for profile in (p for item in profiles.values() for p in _profiles(item)):
        if profile.forward["stream_out"].variance.ndim != 1:
            raise InputError("a report cannot show a sweep; select one of its members")
    found, runs = _of(named, Diagnosis), _of(named, Run)
    traces = kernels.merged(
        [(name, kernels.of_trace(item) if isinstance(item, Trace) else item) for name, item in named
         if isinstance(item, (Trace, Kernels))]
    )  # fmt: skip
    parametrizations = _of(named, Parametrization)
    curves = signal.curves_of(profiles)
    cards = [
        *(signal.signal_findings(curves) if curves else []), *diagnoses.diagnosis_findings(found),
        *training.training_findings(runs), *kernels.kernel_findings(traces),
    ]  # fmt: skip
    comparisons = {name: item for name, item in profiles.items() if isinstance(item, Comparison)}
    sections = [
        *_signal(curves, comparisons),
        *([diagnoses.diagnosis_section(found)] if found else []),
        *_casts(found),
        *([training.training_section(runs)] if runs else []),
        *_present(training.through_time_section(runs)),
        *([kernels.kernel_section(traces)] if traces else []),
        *([tables.parametrization_section(parametrizations)] if parametrizations else []),
    ]
    return {
        "title": title or _title(curves, found, runs),
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


def _title(curves: Sequence[signal.Curve], found: Mapping[str, Diagnosis], runs: Mapping[str, Run]) -> str:
    names = [*dict.fromkeys(curve.group for curve in curves), *diagnoses.names_of(found), *runs]
    if not names:
        return "Signal report"
    return "Signal report: " + (
        " · ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
    )
