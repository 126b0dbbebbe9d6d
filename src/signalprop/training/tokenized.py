"""Text as ids: tokenized once, kept in a cache directory, read from there by every process and later run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.inputs import IntArray
from signalprop.readers import Piece
from signalprop.storage import check_regular, opened, read_text
from signalprop.training.cache import cache_directory, cached
from signalprop.training.recipe import Data
from signalprop.training.splitting import split
from signalprop.training.tokenizers import ids_of, load, restore, separator, serialized, train

_FORMAT = "4"  # of the cache, and of whatever makes ids of text: another one is another key
_TOKENIZER = "tokenizer.json"
_LARGE = 1 << 24  # bytes of ids that are not read into memory


@dataclass(frozen=True, eq=False)
class Text:
    """The ids of a text; documents stand one behind the other, with a separator between.

    Attributes:
        tokenizer: of transformers. vocab_size: with its special ids.
    """

    tokenizer: Any
    train: NDArray[Any]
    validation: NDArray[Any]
    vocab_size: int


@dataclass(frozen=True, eq=False)
class Texts(Sequence[IntArray]):
    """Many short texts as ids, each for itself.

    Attributes:
        ids: of all of them. starts: where each begins, and the end: one more than there are texts.
    """

    ids: NDArray[Any]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return self.starts.size - 1

    def __getitem__(self, i: Any) -> Any:
        return self.ids[self.starts[i] : self.starts[i + 1]].astype(np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """In ids."""
        return np.diff(self.starts)


def tokenized(data: Data) -> Text:
    """The documents of a recipe's data as ids; a tokenizer that is trained sees the training documents only.

    Raises:
        InputError: text that cannot be read or split, or a cache directory that cannot be written.
    """
    parts = split(data)

    def fill(folder: Path) -> None:
        tokenizer = _made(data, folder, lambda: (text for text, _ in parts.train()))
        for name, read in (("train", parts.train), ("validation", parts.validation)):
            np.save(folder / f"{name}.npy", _joined(tokenizer, read()))

    folder = cached(cache_directory(data), _key(data, "text", parts.digest), fill)
    ids = [_mapped(folder / f"{name}.npy") for name in ("train", "validation")]
    tokenizer = _kept(data, folder)
    return Text(tokenizer, ids[0], ids[1], len(tokenizer))


def encoded(data: Data, train: Sequence[Sequence[str]], validation: Sequence[Sequence[str]]) -> tuple[Any, list[Texts]]:
    """The tokenizer, and the ids of short texts.

    Args:
        train, validation: columns of texts; the tokenizer is trained on the former.

    Returns:
        The tokenizer; the columns of `train`, then those of `validation`.
    """
    columns = [*train, *validation]
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        digest.update(f"{len(column)};".encode())
        for text in column:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(f"{len(content)};".encode() + content)

    def fill(folder: Path) -> None:
        tokenizer = _made(data, folder, lambda: chain.from_iterable(train))
        for i, column in enumerate(columns):
            rows = [ids.astype(_width(tokenizer)) for ids in ids_of(tokenizer, column)]
            np.save(folder / f"{i}.npy", np.concatenate(rows) if rows else np.zeros(0, _width(tokenizer)))
            np.save(folder / f"{i}-starts.npy", np.cumsum([0, *map(len, rows)]))

    folder = cached(cache_directory(data), _key(data, "texts", f"{len(train)}-{digest.hexdigest()}"), fill)
    found = [Texts(_mapped(folder / f"{i}.npy"), np.load(folder / f"{i}-starts.npy")) for i in range(len(columns))]
    return _kept(data, folder), found


def _mapped(path: Path) -> NDArray[Any]:
    """The array of a file, read as it is needed."""
    return np.asarray(np.load(path, mmap_mode="r")) if path.stat().st_size > _LARGE else np.asarray(np.load(path))


def _made(data: Data, folder: Path, texts: Callable[[], Iterable[str]]) -> Any:
    """The tokenizer, trained and kept in the folder, or loaded."""
    if data.tokenizer.path is not None:
        return load(data.tokenizer.path)
    tokenizer = train(data.tokenizer, texts)
    (folder / _TOKENIZER).write_text(serialized(tokenizer), "utf-8")
    return tokenizer


def _kept(data: Data, folder: Path) -> Any:
    if data.tokenizer.path is not None:
        return load(data.tokenizer.path)
    return restore(read_text(folder / _TOKENIZER))


def _key(data: Data, what: str, content: str) -> str:
    """A directory's name: all that the ids depend on."""
    settings = json.dumps([_FORMAT, content, data.tokenizer.model_dump()], sort_keys=True)
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    path = data.tokenizer.path
    if path is not None and (place := Path(path)).exists():
        for file in [place] if place.is_file() else sorted(f for f in place.glob("*") if f.suffix in _SMALL):
            check_regular(file)
            with opened(file) as source:
                digest.update(file.name.encode() + source.read())
    return f"{what}-{digest.hexdigest()}"


_SMALL = (".json", ".txt", ".model")  # files of a checkpoint's directory that may belong to its tokenizer


def _width(tokenizer: Any) -> type[np.integer[Any]]:
    return np.uint16 if len(tokenizer) <= 1 << 16 else np.int32


def _joined(tokenizer: Any, found: Iterable[Piece]) -> NDArray[Any]:
    end = separator(tokenizer)
    ends: list[bool] = []

    def texts() -> Iterator[str]:
        for text, ending in found:
            ends.append(ending)
            yield text

    rows: list[NDArray[Any]] = []
    for i, ids in enumerate(ids_of(tokenizer, texts())):
        rows.append(ids.astype(_width(tokenizer)))
        if ends[i] and end is not None:
            rows.append(np.array([end], _width(tokenizer)))
    return np.concatenate(rows) if rows else np.zeros(0, _width(tokenizer))
