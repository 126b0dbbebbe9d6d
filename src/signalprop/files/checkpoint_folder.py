"""What a checkpoint that somebody else made may have us read: files of its own directory, and no code.

transformers follows what the files of a checkpoint say: it reads the shards that an index names, the base model that an
adapter names and the vocabularies that a tokenizer's configuration names, wherever they are, and takes kernels from the
hub. So a directory is looked through before it is handed over, by `signalprop.files.checkpoint_loading`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.model_size import check_counts
from signalprop.files.storage import check_regular, read_json

_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")  # transformers' and PyTorch's own


def check_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a checkpoint's directory whose files lead out of it, or that asks for code.

    Args:
        trust_remote_code: kernels that are taken from the hub, and other models that are loaded with it, are trusted.
    """
    check_links(folder)
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds an adapter (adapter_config.json), whose base model lies elsewhere; merge the two first, "
            "with merge_and_unload of peft, and give the merged checkpoint (of a training run: its directory folded)"
        )
    for index in sorted(folder.glob("*.index.json")):
        shards = json_object(index).get("weight_map")
        for name in shards.values() if isinstance(shards, dict) else ():
            if not isinstance(name, str) or not (_inside(folder, folder / name) or _links_weights(folder, name)):
                raise InputError(f"{index} names the file {name!r:.80}, which does not lie in its directory")
    tokenizer = json_object(folder / "tokenizer_config.json")
    listed = tokenizer.get("fast_tokenizer_files")
    named = [(key, value) for key, value in tokenizer.items() if key.endswith("_file")]
    named += [("fast_tokenizer_files", value) for value in (listed if isinstance(listed, list) else ())]
    for key, value in named:
        if isinstance(value, str) and _is_file(folder / value) and not _inside(folder, folder / value):
            raise InputError(f"{folder / 'tokenizer_config.json'}: {key} is {value!r:.80}, outside of its directory")
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        strange = next((key for key, _ in _entries(json_object(file)) if not key.isprintable()), None)
        if strange is not None:  # tokenizers prints the names of fields that it does not know, as they are
            raise InputError(f"{file} has a field {strange!r:.80}, a name that cannot be printed")
    json_object(folder / "generation_config.json")  # in place of a damaged one transformers takes defaults, silently
    configurations = sorted(folder.glob("config*.json"))  # transformers chooses among several by its version
    for file in configurations:
        check_counts(json_object(file), file)
        for key, value in _entries(json_object(file)):
            names = value if isinstance(value, list) else [value]
            if key == "configuration_files" and any(folder / str(name) not in configurations for name in names):
                raise InputError(f"{file}: {key} is {value!r:.80}; expected names of config*.json in its directory")
            if key == "transformers_weights" and not (isinstance(value, str) and _inside(folder, folder / value)):
                raise InputError(f"{file}: {key} is {value!r:.80}, which does not lie in its directory")
        if not trust_remote_code:
            check_kernels(json_object(file), file)


def check_kernels(data: Any, where: str | Path) -> None:
    """Refuse a configuration that asks for kernels of the hub, or for weights of another model.

    Args:
        data: the object in its file. where: the file, for the message.
    """
    for key, value in _entries(data):
        if "implementation" in key:
            other = next(
                (name for name in _strings(value) if name.removeprefix("paged|") not in _IMPLEMENTATIONS), None
            )
            if other is not None:
                raise InputError(
                    f"{where}: {key} is {other!r:.80}, which may be code of the hub, which is not run unless you trust "
                    "it (--trust-remote-code of signalprop diagnose); else delete the entry"
                )
        if key == "use_pretrained_backbone" and value:
            raise InputError(f"{where}: {key} asks for the weights of another model; give a checkpoint that has them")


def check_code(path: Path) -> None:
    """Refuse a configuration beside a GGUF file that asks for code of its own."""
    if any(key == "auto_map" and value for key, value in _entries(json_object(path))):
        raise InputError(
            f"{path} brings code of its own (auto_map), which is not run beside a GGUF file; move the .gguf file into "
            "a directory of its own"
        )


def check_links(folder: Path) -> None:
    """Refuse a directory one of whose files is a link to somewhere else, or a pipe, a device or a socket.

    The hub's cache keeps its own beside, and weights (`.safetensors`) may be links: people keep them on other disks,
    and reading a file as weights gives nothing else away.
    """
    for path in sorted((*folder.iterdir(), *folder.glob("additional_chat_templates/*"))):
        if path.exists() and not path.is_dir() and not path.is_file():
            check_regular(path)
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


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value, but for the names of fields."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, (dict, list)):
            waiting += item.values() if isinstance(item, dict) else item


def json_object(path: Path) -> dict[str, Any]:
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
