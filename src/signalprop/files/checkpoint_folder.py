"""Which files of a checkpoint's directory are read: plain ones, inside it, by names that stand here or in its index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.guard import within
from signalprop.files.storage import check_regular, read_json

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def check_folder(folder: Path) -> None:
    """Refuse an adapter, and a directory one of whose files is a link to somewhere else, a pipe, a device or a socket.

    The hub's cache has other files there, and weights (`.safetensors`) may be links: people keep them on other disks,
    and reading a file as weights gives nothing else away.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_dir() and not path.is_file():
            check_regular(path)
        if path.is_symlink() and path.exists() and path.suffix != ".safetensors" and not _inside(folder, path):
            raise InputError(f"{path} is a link that leads out of its directory; put the file itself in its place")
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds an adapter (adapter_config.json), whose base model is elsewhere; merge the two first, "
            "with merge_and_unload of peft, and give the merged checkpoint (of a training run: its directory folded)"
        )


def shards(folder: Path) -> list[str]:
    """Names of the files that its index names, or of the one that stands alone; none where there is neither."""
    index = json_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict):
        return [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    return sorted(set(map(str, index.values())))


def weights(folder: Path) -> list[Path]:
    """The index of the weights, if there is one, and the files of the weights.

    Raises:
        InputError: none there, or a name that is missing, leads elsewhere or is not that of a `.safetensors` file.
    """
    names = shards(folder)
    if not names:
        raise InputError(
            f"cannot load the weights in {folder}: it holds neither {WEIGHTS} nor {INDEX}; only safetensors are read"
        )
    for name in names:
        if os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise InputError(f"{folder / INDEX} names {name!r:.80}; expected .safetensors files next to it")
        if not (folder / name).is_file():
            raise InputError(f"{folder / INDEX} names {name!r:.80}, which is missing; download all shards")
    return [*([folder / INDEX] if (folder / INDEX).is_file() else []), *(folder / name for name in names)]


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file or something else in it."""
    data = read_json(path) if path.is_file() else {}
    return data if isinstance(data, dict) else {}


def _inside(folder: Path, path: Path) -> bool:
    """Whether what a path leads to lies in a directory, or where the hub's cache keeps the files of a snapshot."""
    root = os.path.realpath(folder)
    if os.path.basename(os.path.dirname(root)) == "snapshots":
        root = os.path.dirname(os.path.dirname(root))
    return within(os.path.realpath(path), (root,))
