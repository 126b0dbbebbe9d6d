"""Text as ids: tokenized once, kept in a cache directory, read from there by every process and later run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError, require
from signalprop.files.storage import check_regular, opened, write_bytes
from signalprop.network.inputs import IntArray
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.stream_offset import StreamOffset
from signalprop_lab.training.tokenizers import ids_of, load, restore, serialized
from signalprop_lab.training.tokenizers import train as trained
from signalprop_lab.training.validation_split import Split

_FORMAT = "5"  # of the cache, and of whatever makes ids of text: another one is another key
_SMALL = (".json", ".txt", ".model")  # files of a checkpoint's directory that may belong to its tokenizer
T = TypeVar("T")
Ids = tuple[IntArray, ...]  # of the texts of an example


@dataclass(frozen=True, eq=False)
class Texts(Sequence[IntArray]):
    """Texts as ids, each for itself.

    Attributes:
        ids: of all of them. starts: where each begins, and the end: one more than there are texts.
    """

    ids: NDArray[Any]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return self.starts.size - 1

    def __getitem__(self, i: Any) -> Any:
        return self.ids[self.starts[i] : self.starts[i + 1]].astype(np.int64)


def tokenized(data: Data, found: Split[T], *texts: Callable[[T], str]) -> tuple[Any, Split[tuple[T, Ids]]]:
    """The tokenizer, and the examples with the ids of their texts.

    Args:
        texts: what of an example is text. A tokenizer that is trained sees those of the training examples only.
    """
    columns = [[text(x) for x in side] for side in (found.train, found.validation) for text in texts]
    tokenizer, ids = encoded(data, columns[: len(texts)], columns[len(texts) :])
    stream = found.stream

    def read(offset: StreamOffset) -> Iterator[list[tuple[T, Ids]]]:
        assert stream is not None
        for chunk in stream(offset):
            of_texts = [ids_of(tokenizer, [text(x) for x in chunk]) for text in texts]
            yield list(zip(chunk, zip(*of_texts, strict=True), strict=True))

    parts = ids[: len(texts)], ids[len(texts) :]
    train, validation = (
        list(zip(side, zip(*part, strict=True), strict=True))
        for side, part in zip((found.train, found.validation), parts, strict=True)
    )
    return tokenizer, Split(train, validation, None if stream is None else read)


def encoded(data: Data, train: Sequence[Sequence[str]], validation: Sequence[Sequence[str]]) -> tuple[Any, list[Texts]]:
    """The tokenizer, and the ids of columns of texts, from the cache where it has them.

    Returns:
        The tokenizer, trained on the columns of `train`; the columns of `train`, then those of `validation`.
    """
    filelock = require("filelock", "training")
    columns = [*train, *validation]
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "signalprop"
    folder = own if data.cache is None else Path(data.cache).expanduser()
    path = folder / f"texts-{_key(data, len(train), columns)}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock"):  # one process makes it while the others wait
            kept = _read(data, path)
            if kept is None:
                source, texts = data.tokenizer.path, list(chain.from_iterable(train))
                tokenizer = trained(data.tokenizer, lambda: texts) if source is None else load(source)
                write_bytes(path, _packed(data, tokenizer, columns))
                kept = _read(data, path)
    except OSError as error:
        raise InputError(
            f"cannot write the cache {folder}: {error.strerror or error}; name another directory with data.cache"
        ) from None
    assert kept is not None
    return kept


def _packed(data: Data, tokenizer: Any, columns: Sequence[Sequence[str]]) -> bytes:
    """Ids, and the tokenizer that made them, as a file of safetensors."""
    numpy = require("safetensors.numpy", "models")
    width = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    arrays = {}
    for i, column in enumerate(columns):
        rows = [ids.astype(width) for ids in ids_of(tokenizer, column)]
        arrays[f"{i}/ids"] = np.concatenate(rows) if rows else np.zeros(0, width)
        arrays[f"{i}/starts"] = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    written = serialized(tokenizer) if data.tokenizer.path is None else ""
    content: bytes = numpy.save(arrays, {"tokenizer": written})
    return content


def _read(data: Data, path: Path) -> tuple[Any, list[Texts]] | None:
    """What is kept in a file; None: nothing, or it is damaged."""
    safetensors = require("safetensors", "models")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            texts = [
                Texts(file.get_tensor(f"{i}/ids"), file.get_tensor(f"{i}/starts")) for i in range(len(file.keys()) // 2)
            ]
            written = file.metadata()["tokenizer"]
            return (restore(written) if data.tokenizer.path is None else load(data.tokenizer.path)), texts
    except FileNotFoundError:
        return None
    except (OSError, safetensors.SafetensorError, InputError, LookupError, TypeError):
        path.unlink(missing_ok=True)
        return None


def _key(data: Data, n_train: int, columns: Sequence[Sequence[str]]) -> str:
    """A file's name: all that the ids depend on."""
    settings = [_FORMAT, n_train, list(map(len, columns)), data.tokenizer.model_dump()]
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for text in chain.from_iterable(columns):
        content = text.encode("utf-8", "surrogatepass")
        digest.update(f"{len(content)};".encode() + content)
    path = data.tokenizer.path
    if path is not None and (place := Path(path)).exists():
        for file in [place] if place.is_file() else sorted(f for f in place.glob("*") if f.suffix in _SMALL):
            check_regular(file)
            with opened(file) as source:
                digest.update(file.name.encode() + source.read())
    return digest.hexdigest()
