"""What a report holds: what is read from files, and the cards and sections of each kind of result.

A kind of result is a `Part` (`parts.py`); ours are in the folder of this file, and installed packages add theirs by
entry points of the group `signalprop.report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop.files.validation import typed
from signalprop.report import diagnoses, kernels, monitored, parametrizations, signal
from signalprop.report.parts import Part, Reader
from signalprop.report.sections import Card, Document, Severity

GROUP = "signalprop.report"  # of entry points
Item = Any  # of one of the types of a Part


@cache
def parts() -> tuple[Part, ...]:
    """Every kind of result, in the order of the page, those of installed packages included."""
    others = [found.load() for found in sorted(entry_points(group=GROUP), key=lambda found: found.name)]
    return (signal.PART, diagnoses.PART, monitored.PART, *others, kernels.PART, parametrizations.PART)


@typed
def document(
    items: Mapping[str, Item] | Sequence[tuple[str, Item]], *, title: str | None = None, beside: Path | None = None
) -> Document:
    """The report as a value: title, subtitle, cards, notes and sections.

    Args:
        items: by names that distinguish them; as pairs where a name may come twice.
        beside: directory that the report will lie in, from which it links to the runs of a sweep.

    Raises:
        InputError: nothing given, something that a report cannot show, or a sweep.
    """
    named = list(items.items()) if isinstance(items, Mapping) else list(items)
    for name, item in named:
        if not any(isinstance(item, part.types) for part in parts()):
            raise InputError(f"a report cannot show {name!r:.60}, a {type(item).__name__}")
    sorted_out = [(part, [(name, item) for name, item in named if isinstance(item, part.types)]) for part in parts()]
    found = [(part, part.together(own)) for part, own in sorted_out if own]
    if not found:
        raise InputError(
            "there is nothing to report; give at least one profile, diagnosis, comparison, trace, run or sweep"
        )
    order = get_args(Severity)
    cards = sorted(
        (card for part, own in found for card in part.cards(own)),
        key=lambda card: (not card.first, order.index(card.severity)),
    )
    return Document(
        title=title or _title([name for part, own in found for name in part.names(own)]),
        subtitle=next(filter(None, (part.subtitle(own) for part, own in found)), ""),
        cards=folded(cards),
        notes=list(dict.fromkeys(note for part, own in found for note in part.notes(own))),
        sections=[section for part, own in found for section in part.sections(own, beside)],
    )


def folded(cards: Sequence[Card]) -> list[Card]:
    """Cards of one severity and title as one, from three on: its subject counts them, `more` holds what they say."""
    of_a_kind: dict[tuple[str, str], list[Card]] = {}
    for card in cards:
        of_a_kind.setdefault((card.severity, card.title), []).append(card)
    out: list[Card] = []
    for several in of_a_kind.values():
        if len(several) < 3:
            out += several
            continue
        first, advice = several[0], {card.advice for card in several}
        out.append(
            replace(
                first, subject=f"{first.subject} and {len(several) - 1} more", texts=(),
                more=[f"{card.subject}: {' '.join(card.texts)}" for card in several],
                advice=first.advice if len(advice) == 1 else "",
            )
        )  # fmt: skip
    return out


def _title(names: Sequence[str]) -> str:
    if not names:
        return "Signal report"
    return "Signal report: " + (
        " · ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
    )


@typed
def read(path: str | Path) -> dict[str, Any]:
    """What a file or the directory of a run (`path`) holds, by name (of the file, where it holds no names).

    Reads the JSON of predict, measure, compare, diagnose, kernel, schemes and reproduce, the JSONL of a
    SignalMonitor, directories of training runs and of sweeps, and a sweep's `results.json`.

    Raises:
        InputError: nothing there, damaged, of a newer version, or something that a report cannot show. The line names
            the file.
    """
    source = Path(path)
    if source.is_dir():
        found = (part.folder(source) for part in parts() if part.folder is not None)
        there = next((items for items in found if items is not None), None)
        if there is None:
            raise InputError(
                f"{source} is not the directory of a training run or of a sweep; give one, or a file of results"
            )
        return there
    if source.suffix == ".jsonl":
        return next(part.lines(source) for part in parts() if part.lines is not None)
    data = read_json(source)
    schema = data.get("schema") if isinstance(data, dict) else None
    readers = {name: reader for part in parts() for name, reader in part.readers.items()}
    reader = readers.get(schema) if isinstance(schema, str) else None
    if reader is None:
        raise InputError(f"{source}: {_refusal(schema, data, readers)}")
    try:
        return reader(source, data)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _refusal(schema: Any, data: Any, readers: Mapping[str, Reader]) -> str:
    known = ", ".join(sorted(readers))
    if not isinstance(schema, str):
        what = "an object without a schema" if isinstance(data, dict) else f"a {type(data).__name__}"
        return f"it holds {what}; a report shows files with the schema {known}, and directories of runs and sweeps"
    kind, _, version = schema.rpartition("/")
    if any(item.rpartition("/")[0] == kind for item in readers) and version.isdecimal():
        return f"it has schema {schema!r:.60}, newer than this version reads; update with: pip install -U signalprop"
    return f"a report cannot show schema {schema!r:.60}; it shows {known}, and directories of runs and sweeps"
