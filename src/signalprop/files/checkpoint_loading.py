"""The only place where transformers and datasets load anything: nothing that a checkpoint brings is run.

A checkpoint gives a configuration that is built anew (`signalprop.files.configuration`), safetensors or GGUF and a
tokenizer, each handed to transformers in a separate directory, offline and under a guard. A test reads the source tree
and finds any other such call.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, require
from signalprop.files.checkpoint_folder import INDEX, WEIGHTS, check_folder, json_object, shards, weights
from signalprop.files.checkpoint_tokenizers import FILES, tokenizer_of
from signalprop.files.configuration import fresh_configuration, made, taken
from signalprop.files.guard import alone, budget, guarded
from signalprop.files.limits import memory_free
from signalprop.files.model_size import BUDGET, check_gguf, check_model, sizes_alone
from signalprop.files.storage import read_json, write_json

_OTHER_MODELS = frozenset(["GPT2DoubleHeadsModel"])  # in none of transformers' tables


def configuration(place: str | Path, **changes: Any) -> Any:
    """The configuration of a directory or of a name on the hub, built anew from what is taken of its config.json.

    Args:
        changes: entries of config.json that the user gives.
    """
    folder = _folder(place)
    file = folder / "config.json"
    if not file.is_file():
        instead = "; give the .gguf file itself" if any(folder.glob("*.gguf")) else ""
        raise InputError(f"cannot read a configuration from {folder}: it holds no config.json{instead}")
    data = read_json(file)
    if not isinstance(data, dict):
        raise InputError(f"{file} holds no configuration; expected a JSON object with a model_type")
    if "num_labels" in changes:
        data = {key: value for key, value in data.items() if key not in ("id2label", "label2id")}
    with _built(file):
        found = fresh_configuration(data | changes, file)
    names = data.get("architectures")
    found.architectures = [name for name in names if isinstance(name, str)] if isinstance(names, list) else None
    found.name_or_path = str(place)
    return found


def configuration_of(family: str, **fields: Any) -> Any:
    """A configuration of a family (a `model_type` of transformers), with fields that somebody gives.

    Raises:
        ValueError: a family that transformers does not have. InputError: a field that is not taken.
    """
    mapping: Any = require("transformers", "models").models.auto.configuration_auto.CONFIG_MAPPING
    if family not in mapping:
        raise ValueError(f"transformers has no {family}")
    where = f"the configuration of {family}"
    with _built(where):
        found = taken(fields, mapping[family], where)
        if left := sorted(set(fields) - set(found)):
            raise InputError(f"{where} takes no {left[0]:.80}; delete it")
        return made(mapping[family], found, where)


def model_class(name: str, where: str | Path) -> Any:
    """The class of a model that a file names.

    Args:
        where: the file or directory, for the message.
    """
    transformers = require("transformers", "models")
    found = getattr(transformers, name, None) if name in _model_classes() else None
    if found is None:
        raise InputError(
            f"{where} needs the class {name:.80}, which is not among the models of transformers "
            f"{transformers.__version__}; expected the name of one, such as LlamaForCausalLM"
        )
    return found


def pretrained(cls: Any, place: str | Path, config: Any = None, **options: Any) -> Any:
    """What `from_pretrained` of a class of transformers returns; weights are read from safetensors only.

    Args:
        cls: a class of a model, one of transformers (`model_class`) or an auto class.
        config: from `configuration`; None: that of the place.
        options: of `from_pretrained`.
    """
    folder = _folder(place, with_weights=True)
    config = copy.deepcopy(configuration(place) if config is None else config)
    check_model(lambda: _made(cls, config), place, _itemsize(config, options))
    files = weights(folder)
    options = {"config": config, "use_safetensors": True, **options}
    generation = json_object(folder / "generation_config.json")
    with alone(*files) as only, guarded(place, only, *files):
        if generation:
            numbers = {key: value for key, value in generation.items() if _is_number(value)}
            write_json(only / "generation_config.json", numbers)
        found = _matching(cls, place, only, **options)
        model = found[0] if isinstance(found, tuple) else found
        model.config._name_or_path = model.name_or_path = str(place)
    return found


def fresh(cls: Any, config: Any) -> Any:
    """A model of a class with fresh weights, as its configuration says."""
    check_model(lambda: _made(cls, config), "this configuration", _itemsize(config, {}))
    with guarded("this configuration"), budget(memory_free() or 1 << 40, "this configuration"):
        return _made(cls, config)


def without_numbers(cls: Any, config: Any) -> Any:
    """A model of a class on the meta device. Raises whatever transformers raises."""
    with _built("this configuration"), sizes_alone():
        return _made(cls, config)


def tokenizer(place: str | Path) -> Any:
    """The tokenizer of a directory or of a name on the hub."""
    folder = Path(place) if Path(place).is_dir() else fetched(str(place), ["*.json", *FILES], without=["*/*"])
    check_folder(folder)
    return tokenizer_of(folder)


def gguf_model(path: Path, **options: Any) -> Any:
    """The model in a GGUF file; nothing that lies beside it is read. `options`: of `from_pretrained`."""
    transformers = require("transformers", "models")
    cls = transformers.AutoModelForCausalLM
    with budget(BUDGET + path.stat().st_size, path):
        said = _gguf(path, transformers.AutoConfig.from_pretrained)
    with _built(path):
        config = fresh_configuration(said.to_dict(), path)
    check_model(lambda: _made(cls, config), path, _itemsize(config, options))
    model = _gguf(path, lambda place, **given: _matching(cls, path, place, **given), config=config, **options)
    model.config._name_or_path = model.name_or_path = str(path.parent)
    return model


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file; nothing that lies beside it is read."""
    return _gguf(path, require("transformers", "models").AutoTokenizer.from_pretrained)


def data_set(name: str, configuration: str | None, **options: Any) -> Any:
    """A data set of the hub, or of files (`name` is then a builder of `datasets`, such as json); `options`: of
    `datasets.load_dataset`."""
    return require("datasets", "datasets").load_dataset(name, configuration, **options)


def saved_data_set(folder: Path) -> Any:
    """What `save_to_disk` of `datasets` wrote: Arrow files and JSON."""
    return require("datasets", "datasets").load_from_disk(str(folder))


def fetched(name: str, patterns: Sequence[str], without: Sequence[str] = ()) -> Path:
    """The local copy of some files of a checkpoint on the hub, in the directory of their commit; not looked through."""
    hub = require("huggingface_hub", "models")
    return Path(hub.snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(without)))


def _folder(place: str | Path, *, with_weights: bool = False) -> Path:
    """The directory of a checkpoint, that of its local copy where it is on the hub, looked through."""
    folder = Path(place)
    if not folder.is_dir():
        folder = fetched(str(place), ["*.json"], without=["*/*"])
        if with_weights:
            folder = fetched(str(place), ["*.json", *(shards(folder) if (folder / INDEX).is_file() else [WEIGHTS])])
    check_folder(folder)
    return folder


@contextmanager
def _built(where: str | Path) -> Iterator[None]:
    """Around what makes objects of a stranger's values: nothing is opened, and memory ends at a budget."""
    with guarded(where), budget(BUDGET, where):
        yield


def _is_number(value: Any) -> bool:
    """Whether it is a number, a truth value or a list of whole numbers, as most of what says how to generate."""
    if isinstance(value, list):
        return all(isinstance(item, int) for item in value)
    return isinstance(value, (bool, int, float))


def _made(cls: Any, config: Any) -> Any:
    config = copy.deepcopy(config)  # some classes write into it
    if hasattr(cls, "_from_config"):
        return cls._from_config(config)
    return cls.from_config(config, trust_remote_code=False)


def _itemsize(config: Any, options: dict[str, Any]) -> float:
    """Bytes of each of a model's numbers, at least, where it is loaded with these options."""
    name = str(options.get("dtype") or "auto")
    if name == "auto":
        if getattr(config, "quantization_config", None):
            return 0.5
        name = str(getattr(config, "dtype", None) or "float32")
    return {"float64": 8, "float32": 4}.get(name.removeprefix("torch."), 2)


def _matching(cls: Any, where: str | Path, place: str | Path, **options: Any) -> Any:
    """`from_pretrained`, which by itself says where weights have other shapes in a report that is silenced."""
    informed = options.pop("output_loading_info", False)
    tolerant = options.pop("ignore_mismatched_sizes", False)
    try:
        model, found = cls.from_pretrained(place, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except RuntimeError as error:
        if "above report" not in str(error):
            raise
        raise InputError(f"the weights in {where} cannot be converted to those of a {cls.__name__}") from None
    others = sorted(found["mismatched_keys"])
    if others and not tolerant:
        name, there, wanted = others[0]
        more = f" (and so {len(others) - 1} more)" if len(others) > 1 else ""
        raise InputError(
            f"{name} has the shape {tuple(there)} in the weights and {tuple(wanted)} by the configuration{more}; the "
            f"two in {where} are not of one model, or config.json was changed"
        )
    return (model, found) if informed else model


def _gguf(path: Path, load: Callable[..., Any], **options: Any) -> Any:
    """transformers would read configurations and adapters beside the file, so it sees the file alone."""
    check_gguf(path)
    with alone(path) as place, redirect_stderr(io.StringIO()), guarded(path, place, path):
        return load(place, gguf_file=path.name, trust_remote_code=False, **options)


@cache
def _model_classes() -> frozenset[str]:
    """Names of models in transformers' tables, which the auto classes choose from."""
    found = vars(require("transformers.models.auto.modeling_auto", "models")).items()
    tables = [table for name, table in found if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES")]
    rows = [row if isinstance(row, (tuple, list)) else (row,) for table in tables for row in table.values()]
    return _OTHER_MODELS.union(*rows)
