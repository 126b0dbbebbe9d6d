"""Tensors of a saved model, in a file of safetensors that bears its id."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from signalprop.errors import InputError, first_line, require
from signalprop.files.storage import opened, write_bytes

RECORD, TENSORS, WEIGHTS = "signalprop.json", "signalprop.safetensors", "model.safetensors"
ENTRY = "signalprop"  # in config.json, and in the metadata of safetensors files


def write_tensors(path: Path, tensors: dict[str, Tensor], name: str) -> None:
    require("safetensors", "models")
    from safetensors.torch import save as serialised

    data = serialised(tensors, metadata={ENTRY: name, "format": "pt"})
    write_bytes(path, *_with_sorted_metadata(data))


def _with_sorted_metadata(data: bytes) -> tuple[bytes, memoryview]:
    """Header and numbers of a file of safetensors, whose library leaves the order of the metadata to chance."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, memoryview(data)[8 + size :]


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that bears this id."""
    require("safetensors", "models")
    from safetensors import safe_open

    if not path.is_file():
        raise InputError(f"there is no {path}; the checkpoint is not complete")
    try:
        opened(path, copies=1).close()
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(ENTRY)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is not a mapping
    except InputError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise InputError(f"cannot read {path}: {reason}") from None
    if found != name:
        raise InputError(f"{path} and {RECORD} are not of one checkpoint: another model was saved over it")
    return tensors
