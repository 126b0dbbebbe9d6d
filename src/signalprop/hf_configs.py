"""Hugging Face configurations -> Architecture, by plain keys: a directory is read without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.checkpoint_folder import check_links
from signalprop.files.storage import read_json
from signalprop.hf_defaults import DEFAULTS as DEFAULTS
from signalprop.hf_readers import READERS as READERS
from signalprop.hf_readers import REFUSED, Config
from signalprop.network.architecture import Architecture


def read(source: Any, **changes: Any) -> Architecture:
    """The Architecture of a Hugging Face config object, model, config dictionary, directory or config.json.

    `seq_len` is the number of positions that the config allows (of a sliding window, its width: beyond it the
    mask is not plainly causal, which an Architecture cannot say). Scaled rotary frequencies (`rope_type`
    other than `default`) are read as plain ones. Dropout inside the feed-forward sublayer (T5; `activation_dropout`)
    and layer dropping have no place in an Architecture and are not read. The sines of Whisper and Speech2Text (those of
    tensor2tensor) are read as those of Vaswani et al.: their slowest wave differs, and with it the table's mean by
    0.004 and its token correlation by 0.005 or less (256 to 768 features, 448 to 1500 tokens). Of Gemma 3's two rotary
    bases the one that more layers have is read; MPNet's bias on scores (one table for all layers) is not: predictions
    are those of a model where it is zero.

    Args:
        changes: fields of the Architecture to set otherwise.

    Raises:
        InputError: the family is not known, its attention or layout is not one that an Architecture can say, the file
            is not readable, or a value is missing or out of range.
    """
    config, class_name = _load(source)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise InputError(
            f"{unknown(family)}. For a model of your own give an Architecture and a Mapping (docs/measuring.md)"
        )
    config = {**DEFAULTS[family], **config}
    try:
        fields = READERS[family](config)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"this {family} config cannot be read: {type(error).__name__} {error}") from None
    fields["family"] = family
    if fields["kind"] == "encoder-decoder" and class_name.endswith(("ForCausalLM", "ForAudioClassification")):
        raise InputError(f"{class_name} is one stack of an encoder-decoder by itself; it is not supported")
    fields.update(_head(config, class_name, fields))
    if class_name == "T5EncoderModel":
        for name in ("n_decoder_layers", "target_len"):
            fields.pop(name, None)
        fields["kind"] = "encoder"
    changes = {key: value for key, value in changes.items() if value is not None}
    if "seq_len" in changes and "target_len" in fields and "target_len" not in changes:
        alike = fields["target_len"] == fields["seq_len"]
        changes["target_len"] = changes["seq_len"] if alike else min(fields["target_len"], changes["seq_len"])
    if "dropout" in changes:
        fields.pop("attention_dropout", None)
        fields.pop("embedding_dropout", None)
    return Architecture(**{**fields, **changes})


def unknown(family: Any) -> str:
    """Why a family cannot be read, in words."""
    if family in tuple(REFUSED):
        return f"the model family {family!r} is not supported: {REFUSED[family]}"
    return f"the model family {family!r:.60} is not known; known families: {', '.join(sorted(READERS))}"


def _load(source: Any) -> tuple[Config, str]:
    """(config dictionary, class name of the model or '')."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
            check_links(path.parent)
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
    names = source.get("architectures")
    return source, class_name or (str(names[0]) if isinstance(names, (list, tuple)) and names else "")


def _head(c: Config, class_name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """head, n_classes and head_transform, from the name of the model's class; without one, the family's usual head."""
    family = fields["family"]
    transform = family in ("bert", "roberta", "mpnet")
    tail = class_name.partition("For")[2]
    if class_name.endswith("LMHeadModel") or tail in ("MaskedLM", "CausalLM", "ConditionalGeneration", "PreTraining"):
        return {"head": "lm", "head_transform": transform}
    if tail.endswith("Classification"):
        return {
            "head": "classes",
            "tied_embeddings": False,
            "n_classes": c.get("num_labels") or len(c.get("id2label") or "01"),
        }
    if class_name:
        return {"head": "none", "tied_embeddings": False}
    if family in ("vit", "deit"):
        return {"head": "classes", "n_classes": c.get("num_labels") or len(c.get("id2label") or "01")}
    return {"head": "lm", "head_transform": transform}
