"""Hugging Face configurations -> Architecture, by plain keys: a directory is read without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signalprop.errors import InputError
from signalprop.families import find, unknown
from signalprop.files.checkpoint_folder import check_folder
from signalprop.files.configuration import check_sizes
from signalprop.files.storage import read_json
from signalprop.network.architecture import READERS, Architecture

if TYPE_CHECKING:
    from signalprop.families.base import Config, Family

_REMEDY = "give an Architecture, or the model itself, in which it is found"


def read(source: Any, **changes: Any) -> Architecture:
    """The Architecture of a Hugging Face config object, model, config dictionary, directory or config.json.

    `seq_len` is the number of positions that the config allows (where layers have a sliding window, its
    width: give `seq_len` to look beyond it). Scaled rotary frequencies (`rope_type`
    other than `default`) are read as plain ones. Dropout inside the feed-forward sublayer (`activation_dropout`) and
    layer dropping have no place in an Architecture and are not read. Where else a family says more than an Architecture
    can, its file in `signalprop.families` says what is read instead.

    Args:
        changes: fields of the Architecture to set otherwise.

    Raises:
        InputError: the family is not known, its attention or layout is not one that an Architecture can say, the file
            is not readable, or a value is missing or out of range.
    """
    config, class_name = _load(source)
    family = find(config.get("model_type"))
    if family is None:
        raise InputError(f"{_REMEDY}: {unknown(config.get('model_type'))}")
    return read_as(family, config, class_name, **changes)


READERS[:] = [read]  # Architecture.from_hf


def read_as(family: Family, config: Config, class_name: str, /, **changes: Any) -> Architecture:
    """The Architecture of a configuration, read as one of a family; see `read`.

    Args:
        class_name: of the model; "" where it is not known. changes: fields of the Architecture to set otherwise.
    """
    name = family.model_type
    try:
        fields = family.read(config)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"this {name} config cannot be read: {type(error).__name__} {error}") from None
    fields |= {"family": name, "init_scale": family.initialisation.scale(config)}
    if fields["kind"] == "encoder-decoder" and class_name.endswith(("ForCausalLM", "ForAudioClassification")):
        raise InputError(f"{class_name} is a single stack of an encoder-decoder, which is not supported")
    fields.update(_head(config, class_name, family))
    if class_name in family.encoder_classes:
        for name in ("n_decoder_layers", "target_len"):
            fields.pop(name, None)
        fields["kind"] = "encoder"
    changes = {key: value for key, value in changes.items() if value is not None}
    if "seq_len" in changes and fields.get("target_len", fields["seq_len"]) != fields["seq_len"]:
        changes = {"target_len": min(fields["target_len"], changes["seq_len"])} | changes
    if "dropout" in changes:
        fields.pop("attention_dropout", None)
        fields.pop("embedding_dropout", None)
    found = Architecture(**fields)
    return found.replace(**changes) if changes else found


def _load(source: Any) -> tuple[Config, str]:
    """(config dictionary, class name of the model or '')."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
            check_folder(path.parent)
            if not path.is_file():
                raise InputError(f"{source} holds no config.json; expected a Hugging Face model directory")
        source = read_json(path)
        if not isinstance(source, dict):
            raise InputError(f"{path} holds no configuration; expected a JSON object with a model_type")
    class_name = ""
    if not isinstance(source, Mapping):
        inner = getattr(source, "config", None)
        if inner is not None:
            class_name, source = type(source).__name__, inner
        if not hasattr(source, "to_dict"):
            raise InputError(
                f"cannot read an architecture from a {type(source).__name__}; expected a Hugging Face model, config, "
                "dictionary, or path of a directory or config.json"
            )
        source = source.to_dict()
    check_sizes(dict(source), "the configuration")
    names = source.get("architectures")
    return source, class_name or (str(names[0]) if isinstance(names, (list, tuple)) and names else "")


def _head(c: Config, class_name: str, family: Family) -> dict[str, Any]:
    """head, n_classes and head_transform, from the name of the model's class; without one, the family's usual head."""
    transform = family.head_transform
    classes = {"head": "classes", "n_classes": c.get("num_labels") or len(c.get("id2label") or "01")}
    tail = class_name.partition("For")[2]
    if class_name.endswith("LMHeadModel") or tail in ("MaskedLM", "CausalLM", "ConditionalGeneration", "PreTraining"):
        return {"head": "lm", "head_transform": transform}
    if tail.endswith("Classification"):
        return {**classes, "tied_embeddings": False}
    if class_name:
        return {"head": "none", "tied_embeddings": False}
    if family.head == "classes":
        return classes
    return {"head": "lm", "head_transform": transform}
