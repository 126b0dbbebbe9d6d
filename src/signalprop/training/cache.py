"""A cache of files: made once, checked when read, safe when several processes ask for the same."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from signalprop.errors import InputError, require
from signalprop.storage import opened, read_json
from signalprop.training.recipe import Data

_SUMS = "sums.json"


def cache_directory(data: Data) -> Path:
    """Where tokenizers and ids are kept: data.cache, or `signalprop` in the user's cache directory."""
    if data.cache is not None:
        return Path(data.cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "signalprop"


def cached(root: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """The directory `name` under `root` with what `fill` writes into an empty one.

    It appears whole or not at all. One process makes it while the others wait; one that is damaged is made anew.

    Args:
        name: says all that the content depends on.

    Raises:
        InputError: it cannot be written.
    """
    filelock = require("filelock", "training")
    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{name}.lock"):
            if not _undamaged(folder):
                _make(folder, fill)
    except OSError as error:
        raise InputError(
            f"cannot write the cache {root}: {error.strerror or error}; name another directory with data.cache"
        ) from None
    return folder


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory beside, then give it its name."""
    for begun in folder.parent.glob(f"{folder.name}.*.tmp"):  # by processes that are dead: this one has the lock
        shutil.rmtree(begun, ignore_errors=True)
    beside = folder.with_name(f"{folder.name}.{token_hex(8)}.tmp")
    beside.mkdir()
    try:
        fill(beside)
        sums = {file.name: _sum(file) for file in sorted(beside.iterdir())}
        (beside / _SUMS).write_text(json.dumps(sums), "utf-8")
        if folder.exists():  # damaged
            shutil.rmtree(folder)
        os.rename(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _undamaged(folder: Path) -> bool:
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        sums = read_json(folder / _SUMS)
        return all(Path(name).name == name and _sum(folder / name) == expected for name, expected in sums.items())
    return False


def _sum(path: Path) -> int:
    total = 0
    with opened(path) as file:
        while block := file.read(1 << 20):
            total = zlib.crc32(block, total)
    return total
