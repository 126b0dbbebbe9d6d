"""Whether the model that a checkpoint's configuration describes fits into memory, before transformers makes any of it.

A configuration of a few hundred bytes can ask for any number of layers. The model is built on the meta device, where
tensors have sizes and no numbers, within a budget for all else that it makes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signalprop.errors import InputError, require
from signalprop.files.configuration import check_sizes
from signalprop.files.guard import budget, guarded
from signalprop.files.limits import check_fits, memory_limit
from signalprop.files.storage import opened

if TYPE_CHECKING:
    from torch import Tensor, nn

BUDGET = 1 << 30  # bytes that objects may take which hold no numbers of a model
_TENSOR = 1_000  # bytes of a parameter beside its numbers, at least
_MOST_TENSORS = 300_000  # the largest checkpoint known, of 384 experts in 60 layers, has 70,000, and as many scales
# GGUF: struct's letters of the types of values; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NO_MODEL = ("general.", "tokenizer.", "split.")  # entries that say nothing of sizes of the model
_STRING, _ARRAY, _MOST_DIMS = 8, 9, 8


def check_model(make: Callable[[], nn.Module], where: str | Path, itemsize: float = 4) -> None:
    """Refuse a model whose parameters and buffers are larger than memory.

    Args:
        make: makes the model, on PyTorch's default device, which is the meta device here. Its errors are left to
            whoever makes the model in earnest.
        where: for messages. itemsize: bytes of each number.
    """
    from torch.nn.modules import module as modules

    limit = memory_limit()
    total, tensors = 0.0, 0

    def needs(size: float) -> None:
        check_fits(size, f"the model of {where}", "correct its sizes, or use a larger machine")

    def count(_: Any, name: str, tensor: Tensor | None) -> None:
        nonlocal total, tensors
        if tensor is not None:
            total += tensor.numel() * itemsize + _TENSOR
            tensors += 1
            if tensors > _MOST_TENSORS:
                raise InputError(f"the model of {where} has more than {_MOST_TENSORS:,} tensors; correct its sizes")
            if limit is not None and total > 2 * limit:  # a tied table is counted twice until it is tied
                needs(total / 2)

    handles = [
        modules.register_module_parameter_registration_hook(count),
        modules.register_module_buffer_registration_hook(count),
    ]
    try:
        with guarded(where), budget(BUDGET, where), sizes_alone():
            model = make()
    except InputError:
        raise
    except Exception:
        return
    finally:
        for handle in handles:
            handle.remove()
    needs(itemsize * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())))


@contextmanager
def sizes_alone() -> Iterator[None]:
    """Models of transformers are built on the meta device, and nothing is drawn for them."""
    import torch

    initialization: Any = require("transformers.initialization", "models")
    with torch.random.fork_rng(devices=[]), torch.device("meta"), initialization.no_init_weights():
        yield


def check_gguf(path: Path) -> None:
    """Refuse a GGUF file whose header counts more than the file holds, or sizes beyond what models have.

    The package gguf believes such counts: an array of 2^60 numbers takes memory until there is none.
    """
    try:
        with opened(path) as file:
            metadata = _Header(file).metadata()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: it is not a GGUF file, or it is damaged ({error!s:.80})") from None
    check_sizes({key: value for key, value in metadata.items() if not key.startswith(_NO_MODEL)}, path)


class _Header:
    """The header of a GGUF file, read front to back: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

    def __init__(self, file: BufferedReader) -> None:
        self.file = file
        self.size = file.seek(0, 2)
        file.seek(0)
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = file.read(4)
        self.order = "<" if version[:2] != b"\0\0" else ">"

    def number(self, letter: str) -> Any:
        return struct.unpack(self.order + letter, self.file.read(struct.calcsize(letter)))[0]

    def count(self, each: int, what: str) -> int:
        """A number of things of `each` bytes at least, all of which the rest of the file can hold."""
        n: int = self.number("Q")
        if n * each > self.size - self.file.tell():
            raise ValueError(f"it counts {n:,} {what} and ends before")
        return n

    def text(self) -> bytes:
        return self.file.read(self.count(1, "characters"))

    def metadata(self) -> dict[str, Any]:
        """Its numbers by name; and, on the way, whether all that it counts is there."""
        tensors = self.count(24, "tensors")
        values: dict[str, Any] = {}
        for _ in range(self.count(13, "entries")):
            name = self.text().decode("utf-8", "replace")
            kind = self.number("I")
            if kind == _ARRAY:
                self.skip_array()
            elif kind == _STRING:
                self.text()
            else:
                values[name] = self.number(_SCALARS[kind])
        for _ in range(tensors):
            self.text()
            dims = self.number("I")
            if dims > _MOST_DIMS:
                raise ValueError(f"a tensor has {dims:,} dimensions")
            self.file.seek(8 * dims + 12, 1)
        if self.file.tell() > self.size:
            raise ValueError("it is cut short")
        return values

    def skip_array(self) -> None:
        kind = self.number("I")
        if kind == _STRING:
            for _ in range(self.count(8, "texts")):
                self.file.seek(self.count(1, "characters"), 1)
        elif kind in _SCALARS:
            each = struct.calcsize(_SCALARS[kind])
            self.file.seek(each * self.count(each, "numbers"), 1)
        else:
            raise ValueError("it has an array of arrays")
