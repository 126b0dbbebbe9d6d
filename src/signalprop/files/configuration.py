"""What is taken from a stranger's configuration: a closed list, from which a fresh one is built.

transformers follows what a configuration says: names of other models, of kernels, of files. So nothing of a file
reaches it but, by the model's type, values for the fields of its configuration's class: numbers within bounds, and
words that transformers' code for that type has in it, which can choose among what is there and name nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, first_line, require

# The most that a number in a configuration may count, by its name; the largest default of transformers' is 20 million.
_MOST = {
    re.compile(r"(^|[_.])(n?layers?|blocks?|block_count|depths?|stages|experts|expert_count)$"): 10_000,
    re.compile(r"^num_(labels|classes)$"): 1_000_000,
    re.compile(""): 100_000_000,
}
_NO_SIZES = re.compile(r"(^rope_\w+|rotary_emb_base|theta|base_freq|_id|_ids|_index|factor)$")
# Read beside the fields that a class declares and what it takes in their place: of former versions, and of all models.
_FORMER = frozenset(
    ["num_labels", "rope_theta", "rope_scaling", "partial_rotary_factor", "per_layer_config", "tie_word_embeddings",
     "is_decoder", "add_cross_attention", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
     "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"]
)  # fmt: skip
# Fields that are tables of numbers and words; other objects are taken where a class has a configuration in that place.
_TABLES = frozenset(
    ["rope_parameters", "rope_scaling", "compress_rates", "relative_bias_args", "bin_configurations", "image_size",
     "projector_patch_to_query_dict", "intraclass_block_config", "per_layer_config"]
)  # fmt: skip
_TYPES = frozenset(["float64", "float32", "float16", "bfloat16"])
_WORD = r"[A-Za-z0-9][\w.+-]{0,60}"
_STAGES = re.compile(r"(stage|res|p)\d{1,3}|stem")  # what backbones call their parts
# Formats of weights that transformers itself reads, what is taken of their settings, and the words of these.
_QUANTIZED = ("fp8", "mxfp4")
_SETTINGS = ("quant_method", "activation_scheme", "fmt", "scale_fmt", "weight_block_size", "modules_to_not_convert")
_FORMATS = frozenset(["dynamic", "static", "e4m3", "e5m2", "float", "ue8m0", *_QUANTIZED])


def fresh_configuration(data: Mapping[str, Any], where: str | Path) -> Any:
    """A configuration of transformers with the values that are taken from the object of a config.json.

    Entries that its class does not have are not read. `architectures` is left out (`model_class` looks it up).

    Args:
        where: the file, for messages.

    Raises:
        InputError: a type that transformers does not have, or a value that is not taken.
    """
    name = data.get("model_type")
    cls = _class(name)
    if cls is None:
        if data.get("auto_map"):
            raise InputError(
                f"{where}: the model comes with its own code, which signalprop does not run; if you trust it, load the "
                "model with transformers (trust_remote_code=True) and give it to the Python function"
            )
        version = require("transformers", "models").__version__
        raise InputError(f"{where}: model_type is {name!r:.80}, which transformers {version} does not have")
    values = taken(data, cls, str(where))
    if isinstance(quantized := data.get("quantization_config"), dict):
        values["quantization_config"] = _quantization(quantized, f"{where}: quantization_config")
    return made(cls, values, where)


def made(cls: Any, values: Mapping[str, Any], where: str | Path) -> Any:
    """A configuration of a class with values that were taken.

    Raises:
        InputError: transformers refuses them; which entry, and what it expects there.
    """
    try:
        return cls(**values)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # of its checks, whose cause says more, or of its arithmetic
        reason = first_line(error.__cause__ or error).split(". Errors:")[0]
        entry = _culprit(cls, values)
        raise InputError(f"{where}: {entry and f'{entry}: '}transformers refuses it: {reason}") from None


def _culprit(make: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """The entry without which a configuration can be built, in dots where it is within another one; '' for none."""
    for key, value in values.items():
        with suppress(Exception):
            make(**{name: item for name, item in values.items() if name != key})
            inner = _culprit(partial(_with, make, values, key), value) if isinstance(value, dict) else ""
            return f"{key}.{inner}" if inner else key
    return ""


def _with(make: Callable[..., Any], values: Mapping[str, Any], key: str, **inner: Any) -> Any:
    return make(**{**values, key: inner})


def taken(data: Mapping[str, Any], cls: Any, where: str, usual: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What is taken from an object for a class of configurations, by the names of its fields.

    Args:
        usual: what transformers itself has in this place, which is taken whatever it is; None: the class's defaults.
    """
    code = _code_of(cls)
    usual = code.defaults if usual is None else usual
    found: dict[str, Any] = {}
    for key, value in data.items():
        inner = cls.sub_configs.get(key)
        at = f"{where}: {key}"
        if inner is not None and isinstance(value, dict):
            found[key] = _inner(value, inner, usual.get(key), at)
        elif key in ("id2label", "label2id"):
            found[key] = _labels(value, at)
        elif key in ("dtype", "torch_dtype"):
            if value is not None and value != "auto":
                found[key] = _word(str(value).removeprefix("torch."), _TYPES, at)
        elif key in code.keys:
            found[key] = value if value == usual.get(key) else _plain(key, value, code.words, at)
    check_sizes(found, where)
    return found


def check_sizes(data: Any, where: str | Path) -> None:
    """Refuse an object that counts what no model has: layers by the billion, or sizes beyond a hundred million."""
    waiting: list[tuple[str, Any]] = [("", data)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(name), item) for name, item in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(key, item) for item in value]
        elif isinstance(value, int) and not isinstance(value, bool) and not _NO_SIZES.search(key):
            most = next(most for name, most in _MOST.items() if name.search(key))
            if abs(value) > most:
                raise InputError(f"{where}: {key} is {_shown(value)}; expected at most {most:,}")


@dataclasses.dataclass(frozen=True)
class _Code:
    """What transformers' code says of a type: the fields of its configuration, their defaults, and words in it."""

    keys: frozenset[str]
    words: frozenset[str]
    defaults: Mapping[str, Any]


@cache
def _code_of(cls: Any) -> _Code:
    from transformers import PretrainedConfig

    source = "".join(_source(kind) for kind in cls.__mro__ if kind is not PretrainedConfig)
    fields = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    fields |= set(re.findall(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)[\"']", source)) | _FORMER
    words = set(re.findall(rf"[\"'`]({_WORD})[\"'`]", source)) | _common_words()
    try:
        defaults = cls().to_dict()
    except Exception:  # two of its classes cannot be built without values
        defaults = {}
    fields |= set(defaults)
    fields -= {field.name for field in dataclasses.fields(PretrainedConfig)} - _COMMON
    fields -= {"model_type", "quantization_config"}
    return _Code(frozenset(name for name in fields if not name.startswith("_")), frozenset(words), defaults)


_COMMON = frozenset(["output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "problem_type"])


def _source(cls: Any) -> str:
    """The code of a model's package, that of its configuration and of its model."""
    import sys

    file = getattr(sys.modules[cls.__module__], "__file__", None) or ""
    folder = Path(file).parent
    if not cls.__module__.startswith("transformers.models."):
        return ""
    files = [*sorted(folder.glob("configuration_*.py")), *sorted(folder.glob("modeling_*.py"))]
    return "".join(path.read_text("utf-8") for path in files)


@cache
def _common_words() -> frozenset[str]:
    """Names of activations, of rotations and of kinds of layers."""
    activations: Any = require("transformers.activations", "models")
    rotary: Any = require("transformers.modeling_rope_utils", "models")
    settings: Any = require("transformers.configuration_utils", "models")
    kinds = getattr(settings, "ALLOWED_LAYER_TYPES", ())
    problems = ("regression", "single_label_classification", "multi_label_classification")
    return frozenset([*activations.ACT2FN, *rotary.ROPE_INIT_FUNCTIONS, *kinds, *problems, "default"]) | _TYPES


def _class(name: Any) -> Any:
    transformers: Any = require("transformers", "models")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return mapping[name] if isinstance(name, str) and name in mapping else None


def _inner(value: dict[str, Any], cls: Any, usual: Any, where: str) -> dict[str, Any]:
    """Of a configuration within another one, of a class or (`AutoConfig`) of the type that it names."""
    usual = usual if isinstance(usual, dict) else {}
    if not getattr(cls, "model_type", ""):
        name = value.get("model_type", usual.get("model_type"))
        cls = _class(name) or (cls if dataclasses.is_dataclass(cls) else None)
        if cls is None:
            raise InputError(f"{where}: model_type is {name!r:.80}, which transformers does not have")
    same = usual.get("model_type") == cls.model_type
    found = taken(value, cls, where, usual if same else None)
    return found | ({"model_type": cls.model_type} if cls.model_type else {})


def _plain(key: str, value: Any, words: frozenset[str], where: str) -> Any:
    """A number, a truth value, a word, a list of these or, of the fields that have them, a table."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, str):
        return _word(value, words, where)
    if isinstance(value, list):
        return [_plain(key, item, words, where) for item in value]
    if isinstance(value, dict) and key in _TABLES and all(re.fullmatch(_WORD, name) for name in value):
        return {name: _plain(key, item, words, f"{where}.{name}") for name, item in value.items()}
    raise InputError(f"{where} is {_shown(value)}, which is not taken from a checkpoint; delete the entry")


def _word(value: str, words: frozenset[str], where: str) -> str:
    if value in words or _STAGES.fullmatch(value):
        return value
    raise InputError(
        f"{where} is {value!r:.80}; expected a word that transformers has for this type of model; paths, addresses and "
        "names of other models are not taken from a checkpoint"
    )


def _labels(value: Any, where: str) -> Any:
    """Names of classes by number, or numbers by name: texts, which nothing follows."""
    if value is None:
        return None
    if isinstance(value, dict) and all(isinstance(item, (str, int)) for item in value.values()):
        return value
    raise InputError(f"{where} is {_shown(value)}; expected names of classes by their numbers")


def _quantization(data: dict[str, Any], where: str) -> dict[str, Any]:
    method = data.get("quant_method")
    if method not in _QUANTIZED:
        raise InputError(
            f"{where}: quant_method is {method!r:.40}; expected one of {', '.join(_QUANTIZED)}; other packages "
            "read the others: save the weights in bfloat16 first"
        )
    listed = data.get("modules_to_not_convert")
    names = [name for name in listed if re.fullmatch(r"[\w.*]{1,200}", str(name))] if isinstance(listed, list) else []
    words = {"modules_to_not_convert": frozenset(map(str, names))}
    found = {
        key: _plain(key, data[key], words.get(key, _FORMATS), f"{where}.{key}") for key in _SETTINGS if key in data
    }
    check_sizes(found, where)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) < 10**18:
        return f"{value:,}"
    return f"a number of {value.bit_length():,} bits" if isinstance(value, int) else f"{value!r:.80}"
