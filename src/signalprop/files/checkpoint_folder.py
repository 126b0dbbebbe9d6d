"""What a checkpoint that somebody else made may have us read: files of its own directory, and no code.

transformers follows what the files of a checkpoint say: it reads the shards that an index names, the base model that an
adapter names and the vocabularies that a tokenizer's configuration names, wherever they are, and takes kernels from the
hub. So a directory is looked through before it is handed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import read_json

_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def check_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a checkpoint's directory whose files lead out of it, or that asks for code.

    Args:
        trust_remote_code: kernels that are taken from the hub are trusted.

    Raises:
        InputError: a link, a shard, a vocabulary or an adapter's base model that lies elsewhere; a kernel of the hub;
            an index or a configuration that cannot be read, or with names that cannot be printed.
    """
    check_links(folder)
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds an adapter (adapter_config.json), whose base model lies elsewhere; merge the two first, "
            "with merge_and_unload of peft, and give the merged checkpoint (of a training run: its directory folded)"
        )
    for index in sorted(folder.glob("*.index.json")):
        shards = _object(index).get("weight_map")
        for name in shards.values() if isinstance(shards, dict) else ():
            if not isinstance(name, str) or not (_inside(folder, folder / name) or _links_weights(folder, name)):
                raise InputError(f"{index} names the file {name!r:.80}, which does not lie in its directory")
    tokenizer = _object(folder / "tokenizer_config.json")
    listed = tokenizer.get("fast_tokenizer_files")
    named = [(key, value) for key, value in tokenizer.items() if key.endswith("_file")]
    named += [("fast_tokenizer_files", value) for value in (listed if isinstance(listed, list) else ())]
    for key, value in named:
        if isinstance(value, str) and _is_file(folder / value) and not _inside(folder, folder / value):
            raise InputError(f"{folder / 'tokenizer_config.json'}: {key} is {value!r:.80}, outside of its directory")
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        strange = next((key for key, _ in _entries(_object(file)) if not key.isprintable()), None)
        if strange is not None:  # tokenizers prints the names of fields that it does not know, as they are
            raise InputError(f"{file} has a field {strange!r:.80}, a name that cannot be printed")
    _object(folder / "generation_config.json")  # in place of a damaged one transformers takes defaults, silently
    if trust_remote_code:
        return
    for key, value in _entries(_object(folder / "config.json")):
        if key in _KERNELS and isinstance(value, str) and "/" in value:
            raise InputError(
                f"{folder / 'config.json'}: {key} is {value!r:.80}, code of the hub, which is not run "
                "unless you trust it (--trust-remote-code of signalprop diagnose); else delete the entry"
            )


def check_links(folder: Path) -> None:
    """Refuse a directory one of whose files is a link to somewhere else.

    The hub's cache keeps its own beside, and weights (`.safetensors`) may be links: people keep them on other disks,
    and reading a file as weights gives nothing else away.

    Raises:
        InputError: there is one.
    """
    for path in sorted(folder.iterdir()):
        outside = path.is_symlink() and _is_file(path) and not _inside(folder, path)
        if outside and not _links_weights(folder, path.name):
            raise InputError(f"{path} is a link that leads out of its directory; put the file itself in its place")


def _inside(folder: Path, path: Path) -> bool:
    """Whether what a path leads to lies in a directory, or where the hub's cache keeps the files of a snapshot."""
    root = os.path.realpath(folder)
    if os.path.basename(os.path.dirname(root)) == "snapshots":
        root = os.path.dirname(os.path.dirname(root))
    try:
        return os.path.commonpath([root, os.path.realpath(path)]) == root
    except (OSError, ValueError):  # a null byte, or too long a name
        return False


def _links_weights(folder: Path, name: str) -> bool:
    """Whether a name is that of a link in the directory to weights, wherever these are."""
    return "/" not in name and name.endswith(".safetensors") and os.path.islink(folder / name)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file or something else in it, which its own reader refuses."""
    data = read_json(path) if path.is_file() else {}
    return data if isinstance(data, dict) else {}


def _entries(data: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object and of all within it."""
    waiting = [data]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield from item.items()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
