"""Tokenizers of strangers: from tokenizer.json by the library that reads nothing else, others from their plain files.

Of tokenizer_config.json come the special tokens, as text, a few truth values, and without a tokenizer.json the
name of a class in transformers' table of tokenizers; no name of a file, and no vocabulary.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, require
from signalprop.files.checkpoint_folder import json_object
from signalprop.files.guard import alone, guarded

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("do_lower_case", "add_prefix_space", "add_bos_token", "add_eos_token", "legacy",
          "clean_up_tokenization_spaces", "strip_accents", "tokenize_chinese_chars", "keep_accents")  # fmt: skip
_OTHERS = ("MistralCommonBackend", "MistralCommonTokenizer", "RagTokenizer")  # they load further ones
# Of tokenizers without a tokenizer.json: the files that transformers' classes read, by their names.
FILES = (
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
    "spm.model", "source.spm", "target.spm", "bpe.codes", "dict.txt", "entity_vocab.json", "added_tokens.json",
)  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory holds any of the files that a tokenizer is read from."""
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", *FILES))


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a checkpoint's directory."""
    settings = json_object(folder / "tokenizer_config.json")
    tokens = {**_tokens(json_object(folder / "special_tokens_map.json")), **_tokens(settings)}
    flags = {key: settings[key] for key in _FLAGS if isinstance(settings.get(key), bool)}
    if (file := folder / "tokenizer.json").is_file():
        options = {key: "left" for key in ("padding_side", "truncation_side") if settings.get(key) == "left"}
        return tokenizer_file(file, tokens, **options)
    name = _class_name(folder, settings)
    with (
        alone(*(folder / name for name in FILES if (folder / name).is_file())) as place,
        guarded(folder, place, folder),
    ):
        (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **tokens, **flags}))
        auto = require("transformers", "models").AutoTokenizer
        return _named(auto.from_pretrained(place, local_files_only=True, trust_remote_code=False), folder)


def tokenizer_file(path: Path, tokens: dict[str, str] | None = None, **options: Any) -> Any:
    """The tokenizer in a tokenizer.json alone.

    Args:
        tokens: texts of special tokens by their names; those that it does not have are left out.
        options: of transformers' class.
    """
    package: Any = require("tokenizers", "models")
    transformers: Any = require("transformers", "models")
    with guarded(path, path):
        inner = package.Tokenizer.from_file(str(path))
        known = {name: text for name, text in (tokens or {}).items() if inner.token_to_id(text) is not None}
        found = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **known, **options)
    return _named(found, path.parent)


def _tokens(data: dict[str, Any]) -> dict[str, str]:
    """Texts of special tokens in an object, by their names."""
    found = {}
    for name in _SPECIAL:
        value = data.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _class_name(folder: Path, settings: dict[str, Any]) -> str:
    """The class of a tokenizer without a tokenizer.json, by its name or by the type of the model."""
    config = json_object(folder / "config.json")
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not name:
        name = _table().get(str(config.get("model_type")))
    known = set(_table().values())
    plain = str(name).removesuffix("Fast")
    found = next((one for one in (str(name), plain, f"{plain}Fast") if one in known and one not in _OTHERS), None)
    if found is None:
        raise InputError(
            f"{folder} has no tokenizer.json, and its tokenizer class {name!r:.80} is not among transformers' "
            "tokenizers; save it with its tokenizer.json"
        )
    return found


@cache
def _table() -> dict[str, str]:
    """Names of transformers' tokenizers by the type of the model; the classes by their names too."""
    auto: Any = require("transformers.models.auto.tokenization_auto", "models")
    found = {kind: name for kind, name in auto.TOKENIZER_MAPPING_NAMES.items() if name is not None}
    return {name: name for name in found.values()} | found


def _named(tokenizer: Any, folder: Path) -> Any:
    tokenizer.name_or_path = str(folder)
    return tokenizer
