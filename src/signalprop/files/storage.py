"""Files: read with one clear line when something is wrong, written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.files.limits import check_fits

# What a file system says that does not know fsync of a directory, or a directory that may be written but not read.
_NOT_FOR_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def opened(path: str | Path, copies: int = 0) -> BufferedReader:
    """A regular file, open to be read as bytes. Every file of a user is read through this.

    Pipes, devices and sockets may have no end, or nobody at the other end; those who mean it give `-` (`read_text`).

    Args:
        copies: how often the whole content will be in memory at the same time; 0: it is read piece by piece.

    Raises:
        InputError: it does not fit into memory.
        OSError: missing, unreadable, or not a regular file; `strerror` says which.
        ValueError: a null byte in the path.
    """
    found = os.stat(path)
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, "it is a directory; expected a file", str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'a special file')}; expected a regular file", str(path))
    size = copies * found.st_size
    check_fits(size, f"reading {_shown(path)} ({found.st_size:,} bytes)", "give a smaller file")
    return Path(path).open("rb")


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """What the system says of a file that is read, in one line."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot read {_shown(path)}: {_reason(error)}") from None


def check_regular(path: str | Path) -> None:
    """Refuse what is not a regular file, for libraries that open a path by themselves."""
    with reading(path):
        opened(path).close()


@cache
def _standard_input() -> bytes:
    """All of standard input, which can be read once."""
    if sys.stdin is None:
        raise InputError("cannot read -: standard input is closed")
    return sys.stdin.buffer.read()


def read_text(path: str | Path) -> str:
    """The text of a regular UTF-8 file, without a byte order mark; `-` is standard input."""
    with reading(path):
        file = BytesIO(_standard_input()) if str(path) == "-" else opened(path, copies=1)
        try:
            with TextIOWrapper(file, encoding="utf-8-sig") as characters:
                text = characters.read()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{_shown(path)} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv -t UTF-8"
            ) from None
    if not text.strip():
        raise InputError(f"{_shown(path)} is empty; expected text")
    return text


def read_json(path: str | Path) -> Any:
    """The value in a JSON file."""
    text = read_text(path)

    def finite_number(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            raise InputError(f"{_shown(path)} holds {literal[:40]}; expected finite numbers")
        return value

    try:
        return json.loads(text, parse_constant=finite_number, parse_float=finite_number)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
        raise InputError(f"{_shown(path)} is not JSON: {_reason(error)}") from None


def read_array(path: str | Path, wanted: str) -> NDArray[Any]:
    """The array in a NumPy file (.npy); nothing is unpickled.

    Args:
        wanted: what it should hold, in words for the message.
    """
    try:
        with opened(path, copies=1) as file:
            values = np.load(file, allow_pickle=False)
            if isinstance(values, np.ndarray):
                return values
        reason = "it holds several arrays"
    except InputError:
        raise
    except OSError as error:
        reason = _reason(error)
    except Exception as error:  # of tokenize, ast, zipfile and struct, beside NumPy's
        reason = "there is not enough memory for it" if isinstance(error, MemoryError) else "it is not a NumPy array"
    raise InputError(f"cannot read {_shown(path)}: {reason}; expected {wanted}")


def check_arrays(arrays: Any, path: str | Path) -> None:
    """Refuse a packed NumPy file (.npz) whose arrays are larger than memory: a small file can unpack to a large one.

    Args:
        arrays: the opened file.
    """
    size = sum(item.file_size for item in arrays.zip.infolist())
    check_fits(size, f"reading the arrays of {_shown(path)} ({size:,} bytes unpacked)", "give smaller arrays")


def write_text(path: str | Path, text: str) -> None:
    """Write text to a file as UTF-8, whole or not at all; `-` is standard output."""
    data = text.encode("utf-8", "backslashreplace")  # half a character of a file's JSON cannot be written
    if str(path) != "-":
        write_bytes(path, data)
    elif hasattr(sys.stdout, "buffer"):  # UTF-8 as in a file, whatever the terminal's encoding is
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:
        sys.stdout.write(data.decode())


def write_bytes(path: str | Path, *parts: bytes | memoryview) -> None:
    """Write bytes (parts, one after the other) to a file, whole or not at all: a failure midway leaves an old file as
    it was.

    A link is followed, and the permissions of an old file stay. A device or a pipe is written to as it is.
    """
    try:
        target = real_path(path)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if target.exists() and not target.is_file():  # replacing /dev/null by a file would be a bad surprise
            target.write_bytes(b"".join(parts))
        else:
            _replace(target, parts)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {_shown(path)}: {_reason(error)}; choose another path") from None


def _replace(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_names(target.parent)


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A new directory beside `out`, which takes its name when all went well, and goes otherwise.

    What it holds is on the disk before it gets that name.
    """
    target = real_path(out)
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        beside.mkdir()
        yield beside
        sync_tree(beside)
        if target.is_dir():
            target.rmdir()  # empty, or it was refused; one that was filled meanwhile stays
        beside.rename(target)
        sync_names(target.parent)
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.ENOTEMPTY:
            reason = "somebody else has written to it meanwhile"
        # safetensors raises another error for what the system refuses, and may not be installed
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise InputError(f"cannot write {out}: {' '.join(reason.split())}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def real_path(path: str | Path) -> Path:
    """Where a path leads, links followed."""
    try:
        found = Path(os.path.realpath(path))
    except ValueError:
        raise InputError(f"cannot write {str(path)!r:.80}: a name cannot hold a null byte") from None
    if found.is_symlink():
        raise InputError(f"cannot write {_shown(path)}: it is a link that leads back to itself; choose another path")
    return found


def is_below(name: str) -> bool:
    """Whether a path that a file names lies in the directory that it is taken from, by its words alone."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def make_folder(path: Path) -> None:
    """Make a directory and those above it, where they are missing; their names are on the disk afterwards."""
    missing = [item for item in (path, *path.parents) if not item.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for item in reversed(missing):
        sync_names(item.parent)


def sync(path: Path) -> None:
    """Force a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Force the names in a directory to the disk, where the file system lets one."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise


def sync_tree(folder: Path) -> None:
    """Force all that a directory holds, and its names, to the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_names(path)
        else:
            sync(path)
    sync_names(folder)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all; `-` is standard output. NaN and infinities become null.

    There is a line for each member of the value, and for each record of a member that holds records.
    """
    write_text(path, _lines(finite(value)) + "\n")


def _lines(value: Any, level: int = 0) -> str:
    """JSON of a finite value, at this level of the whole."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not inside or level == 2 or (level == 1 and not any(isinstance(item, (dict, list)) for item in inside)):
        return json.dumps(value, allow_nan=False)
    names = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    first, last = "{}" if isinstance(value, dict) else "[]"
    margin = "\n" + " " * level
    lines = [f"{margin} {name}{_lines(item, level + 1)}" for name, item in zip(names, inside, strict=True)]
    return f"{first}{','.join(lines)}{margin}{last}"


def finite(value: Any) -> Any:
    """The same value as JSON has it: NaN and infinities become None, NumPy arrays lists, NumPy scalars plain ones."""
    if isinstance(value, (np.ndarray, np.generic)):
        return finite(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _shown(path: str | Path) -> str:
    """A path on one line, whatever characters its name has."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or " ".join(str(error).split())).strip()
