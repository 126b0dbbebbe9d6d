"""Tensors of safetensors files: where each lies, checked before it is used, and its numbers piece by piece.

The format (https://huggingface.co/docs/safetensors): 8 bytes of length, a JSON header, and numbers without holes.
Nothing but the header and one piece is in memory, and no code of a file is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.files.checkpoint_folder import INDEX, check_folder, weights
from signalprop.files.storage import opened, reading

_POINTER = b"version https://git-lfs"  # how the file begins that stands for one that was not fetched
PIECE = 1 << 18  # numbers that are read at once
_LONGEST_NAME, _MOST_AXES = 1000, 32
# How NumPy reads a number: bfloat16 and float8 as words.
_READ_AS = {"F64": "<f8", "F32": "<f4", "F16": "<u2", "BF16": "<u2", "F8_E4M3": "<u1", "F8_E5M2": "<u1"}


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
    indexed = (source / INDEX).is_file()
    files = weights(source)[1:] if indexed else sorted(source.glob("*.safetensors"))
    if not files:
        raise InputError(f"{source} holds no .safetensors files, the only ones that are read; save the weights as such")
    return files


def _header(path: Path) -> list[StoredTensor]:
    """The tensors that a file's header names, in the order of their bytes.

    The package safetensors has checked that these leave no holes, do not overlap, and fit the shapes and the file.
    """
    from safetensors import SafetensorError, safe_open

    with reading(path), opened(path) as file:
        begin = file.read(len(_POINTER))
        if begin == _POINTER:
            raise InputError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` where it was cloned")
        try:
            with safe_open(path, framework="np"):
                length = int.from_bytes(begin[:8], "little")
        except SafetensorError as error:
            raise InputError(f"{path} is not a whole safetensors file ({error}); download or save it again") from None
        file.seek(8)
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, said in header.items():
        if len(name) > _LONGEST_NAME or len(said["shape"]) > _MOST_AXES:
            raise InputError(
                f"{path} has a tensor with a name of {len(name):,} characters and {len(said['shape'])} axes; at most "
                f"{_LONGEST_NAME:,} and {_MOST_AXES} are read"
            )
    found = [
        StoredTensor(name, path, said["dtype"], tuple(said["shape"]), 8 + length + start, end - start)
        for name, said in header.items()
        for start, end in [said["data_offsets"]]
    ]
    return sorted(found, key=lambda tensor: (tensor.start, tensor.n_bytes))
