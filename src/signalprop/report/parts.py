"""What a report knows of one kind of result: how it is read, its cards and its sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from signalprop.report.sections import Card, Section

Items = Mapping[str, Any]
Reader = Callable[[Path, dict[str, Any]], dict[str, Any]]


def _none(*_: Any) -> list[Any]:
    return []


def numbered(named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Items by name; a name that comes again gets a number."""
    out: dict[str, Any] = {}
    for name, item in named:
        key, k = name, 2
        while key in out:
            key, k = f"{name} #{k}", k + 1
        out[key] = item
    return out


@dataclass(frozen=True)
class Part:
    """One kind of result in a report.

    Attributes:
        types: of the items that it shows. sections: from the items by name and the directory that the page will lie in.
        cards: findings on top of the page. names: what a title says of the items. notes: what to know about them.
        subtitle: of the page. together: items by name, from pairs in which a name may come twice.
        readers: by the schema of a JSON file, from its path and content to items. folder: what a directory holds, or
            None where it is of another kind. lines: what a .jsonl file holds.
    """

    types: tuple[type, ...]
    sections: Callable[[Items, Path | None], list[Section]]
    cards: Callable[[Items], list[Card]] = _none
    names: Callable[[Items], list[str]] = _none
    notes: Callable[[Items], list[str]] = _none
    subtitle: Callable[[Items], str] = lambda _: ""
    together: Callable[[Sequence[tuple[str, Any]]], Items] = numbered
    readers: Mapping[str, Reader] = field(default_factory=dict)
    folder: Callable[[Path], dict[str, Any] | None] | None = None
    lines: Callable[[Path], dict[str, Any]] | None = None
