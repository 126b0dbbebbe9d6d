"""What a report holds: cards on top, then the sections of each kind of result that it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.report.html.blocks import Block, Severity
from signalprop.report.html.parts import Items, Part
from signalprop.report.html.registry import parts

Item = Any  # of one of the types of a Part
_SEVERITIES = get_args(Severity)


@typed
def document(
    items: Mapping[str, Item] | Sequence[tuple[str, Item]], *, title: str | None = None, beside: Path | None = None
) -> Block:
    """The report as a JSON-ready dictionary: title, subtitle, findings, notes and sections.

    Args:
        items: by the names that tell them apart; as pairs where a name may come twice.
        beside: directory that the report will lie in, from which it links to the runs of a sweep.

    Raises:
        InputError: nothing given, something that a report cannot show, or a sweep.
    """
    found = _by_part(list(items.items()) if isinstance(items, Mapping) else list(items))
    if not found:
        raise InputError(
            "there is nothing to report; give at least one profile, diagnosis, comparison, trace, run or sweep"
        )
    sections = [section for part, own in found for section in part.sections(own, beside)]
    names = [name for part, own in found for name in part.names(own)]
    subtitles = [part.subtitle(own) for part, own in found]
    cards = [card for part, own in found for card in part.cards(own)]
    return {
        "title": title or _title(names),
        "subtitle": next(filter(None, subtitles), ""),
        "findings": folded(sorted(cards, key=lambda card: (not card["first"], _SEVERITIES.index(card["severity"])))),
        "notes": list(dict.fromkeys(note for part, own in found for note in part.notes(own))),
        "sections": sections,
    }


def folded(cards: Sequence[Block]) -> list[Block]:
    """Cards of one severity and title as one, from three on: its subject counts them, `more` holds what they say."""
    alike: dict[tuple[str, str], list[Block]] = {}
    for card in cards:
        alike.setdefault((card["severity"], card["title"]), []).append(card)
    out: list[Block] = []
    for several in alike.values():
        if len(several) < 3:
            out += several
            continue
        more = [f"{card['subject']}: {' '.join(card['texts'])}" for card in several]
        cures = {card["cure"] for card in several}
        subject = f"{several[0]['subject']} and {len(several) - 1} more"
        out.append({**several[0], "subject": subject, "texts": [], "more": more, "cure": cures.pop() * (not cures)})
    return out


def _by_part(named: Sequence[tuple[str, Item]]) -> list[tuple[Part, Items]]:
    """The items of each part that has some."""
    for name, item in named:
        if not any(isinstance(item, part.types) for part in parts()):
            raise InputError(f"a report cannot show {name!r:.60}, a {type(item).__name__}")
    found = [(part, [(name, item) for name, item in named if isinstance(item, part.types)]) for part in parts()]
    return [(part, part.together(own)) for part, own in found if own]


def _title(names: Sequence[str]) -> str:
    if not names:
        return "Signal report"
    return "Signal report: " + (
        " · ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
    )
