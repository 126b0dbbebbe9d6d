"""Tensors of safetensors files: where each lies, checked before it is used, and its numbers piece by piece.

The format (https://huggingface.co/docs/safetensors): 8 bytes of length, a JSON header, and numbers without holes.
Nothing but the header and one piece is in memory, and no code of a file is run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.files.checkpoint_folder import INDEX, check_folder, shards
from signalprop.files.storage import opened, reading

_POINTER = b"version https://git-lfs"  # how the file begins that stands for one that was not fetched
PIECE = 1 << 18  # numbers that are read at once
_LONGEST_HEADER, _LONGEST_NAME, _MOST_AXES = 100_000_000, 1000, 32  # the first is the format's own limit
# Bits of a number, and how NumPy reads it: bfloat16 and float8 as words.
_READ_AS = {"F64": "<f8", "F32": "<f4", "F16": "<u2", "BF16": "<u2", "F8_E4M3": "<u1", "F8_E5M2": "<u1"}
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8, "F8_E8M0": 1}
_BYTES |= {name: np.dtype(read).itemsize for name, read in _READ_AS.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: the format's name, such as BF16. start: its first byte in the file. n_bytes: its length there.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int

    @property
    def n(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def readable(self) -> bool:
        """Whether it holds floating-point numbers that `pieces` can read."""
        return self.dtype in _READ_AS and self.n > 0

    def pieces(self, most: int = PIECE) -> Iterator[NDArray[Any]]:
        """Its numbers in order, at most so many at once: floats, or the words of F16, BF16 and float8.

        A piece holds until the next one is taken.
        """
        buffer = np.empty(min(most, self.n), _READ_AS[self.dtype])
        with reading(self.path), opened(self.path) as file:
            file.seek(self.start)
            for done in range(0, self.n, most):
                piece = buffer[: min(most, self.n - done)]
                if file.readinto(piece.view(np.uint8).data) != piece.nbytes:
                    raise InputError(f"{self.path} ended within {self.name!r:.80}; it has changed while it was read")
                yield piece


def stored_tensors(source: str | Path) -> list[StoredTensor]:
    """All tensors of a checkpoint: a .safetensors file, or a directory with one, or with shards and their index."""
    found: dict[str, StoredTensor] = {}
    for path in _files(Path(source)):
        for tensor in _header(path):
            if tensor.name in found:
                both = f"{found[tensor.name].path.name} and {path.name}"
                raise InputError(f"{both} both hold {tensor.name!r:.80}; keep one of them, or give one file")
            found[tensor.name] = tensor
    return list(found.values())


def _files(source: Path) -> list[Path]:
    if source.suffix == ".safetensors" and not source.is_dir():
        return [source]
    if not source.is_dir():
        raise InputError(
            f"{str(source)!r:.200} is neither a directory nor a .safetensors file; statistics of weights alone are of "
            "files on this disk (of a model on the hub: download it first)"
        )
    check_folder(source)
    names = shards(source) if (source / INDEX).is_file() else []
    missing = next((name for name in names if not (source / name).is_file()), None)
    if missing is not None:
        raise InputError(
            f"{source / INDEX} names {missing!r:.80}, which is missing; download the shards that are not there"
        )
    files = [source / name for name in names] or sorted(source.glob("*.safetensors"))
    if not files:
        raise InputError(f"{source} holds no .safetensors files, the only ones that are read; save the weights as such")
    return files


def _header(path: Path) -> list[StoredTensor]:
    """The tensors that a file's header names, in the order of their bytes, which leave no holes and do not overlap."""
    with reading(path), opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(len(_POINTER))
        if begin == _POINTER:
            raise InputError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` where it was cloned")
        length = int.from_bytes(begin[:8], "little")
        file.seek(8)
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise _wrong(path, f"its header of {length:,} bytes does not fit in its {size:,}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise _wrong(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _wrong(path, "its header is not a JSON object")
    start = 8 + length
    found = [_tensor(path, name, entry, start) for name, entry in header.items() if name != "__metadata__"]
    found.sort(key=lambda tensor: (tensor.start, tensor.n_bytes))
    for tensor in found:
        if tensor.start != start:
            raise _wrong(path, f"the bytes of {tensor.name!r:.80} do not follow those before them")
        start += tensor.n_bytes
    if start != size:
        raise _wrong(path, f"its tensors end at byte {start:,}, the file at {size:,}; it may be cut short")
    return found


def _tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    if len(name) > _LONGEST_NAME:
        raise _wrong(path, f"it has a tensor whose name has {len(name):,} characters")
    said: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not (
        isinstance(dtype, str)
        and _counts(shape, _MOST_AXES)
        and _counts(offsets, 2)
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    ):
        raise _wrong(path, f"its header has no dtype, shape and data_offsets of {name!r:.80}")
    n_bytes = offsets[1] - offsets[0]
    if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != n_bytes:
        raise _wrong(path, f"{name!r:.80} has {n_bytes:,} bytes, not those of {dtype} of shape {shape!s:.80}")
    return StoredTensor(name, path, dtype, tuple(shape), start + offsets[0], n_bytes)


def _counts(value: Any, most: int) -> TypeGuard[list[int]]:
    """Whether it is a list of at most so many numbers that can count bytes of a file."""
    return isinstance(value, list) and len(value) <= most and all(type(x) is int and 0 <= x < 1 << 63 for x in value)


def _wrong(path: Path, why: str) -> InputError:
    return InputError(f"{path} is not a whole safetensors file: {why}; download or save it again")
