"""The only place where transformers and datasets load anything: nothing that a checkpoint brings is run.

Every directory is looked through first (`check_folder`), the classes that its files name are looked up in transformers'
own lists, `trust_remote_code` is always given, and transformers cannot ask whether code may run. A test reads the
source tree and finds any other call that loads.
"""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache, partial
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, release, require
from signalprop.files.checkpoint_folder import check_code, check_folder, check_kernels, json_object
from signalprop.files.model_size import check_counts, check_gguf, check_model

_TOKENIZERS = frozenset(
    ["PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "PythonBackend", "SentencePieceBackend"]
)
_LOADS_OTHERS = frozenset(["RagTokenizer"])  # it loads two tokenizers from directories below, without asking us
_OTHER_MODELS = frozenset(["GPT2DoubleHeadsModel"])  # in none of transformers' tables


def configuration(place: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a directory or of a name on the hub."""
    transformers = require("transformers", "models")
    with _looked_through(place, trust_remote_code) as found:
        return transformers.AutoConfig.from_pretrained(place, **found)


def configuration_of(family: str, **fields: Any) -> Any:
    """A configuration of a family (a `model_type` of transformers), with fields that somebody gives."""
    check_kernels(fields, f"the configuration of {family}")
    check_counts(fields, f"the configuration of {family}")
    return require("transformers", "models").AutoConfig.for_model(family, **fields)


def model_class(name: str, where: str | Path) -> Any:
    """The class of a model that a file names.

    Args:
        where: the file or directory, for the message.
    """
    transformers = require("transformers", "models")
    found = getattr(transformers, name, None) if name in _model_classes() else None
    if found is None:
        raise InputError(
            f"{where} asks for the class {name:.80}, which is not among the models of transformers "
            f"{transformers.__version__}; expected the name of one, such as LlamaForCausalLM"
        )
    return found


def pretrained(cls: Any, place: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """What `from_pretrained` of a class of transformers returns; weights are read from safetensors only.

    Args:
        cls: a class of a model, one of transformers' own (`model_class`) or an auto class.
        options: of `from_pretrained`.
    """
    transformers = require("transformers", "models")
    with _looked_through(place, trust_remote_code) as found:
        if not trust_remote_code:
            config = transformers.AutoConfig.from_pretrained(place, **found)
            check_model(lambda: _made(cls, config), place, _itemsize(config, options))
        return _matching(cls, place, place, use_safetensors=True, **found, **options)


def fresh(cls: Any, config: Any, *, trust_remote_code: bool = False) -> Any:
    """A model of a class with fresh weights, as its configuration says."""
    with _never_asked():
        if not trust_remote_code:
            check_model(lambda: _made(cls, config), "this configuration", _itemsize(config, {}))
        return _made(cls, config, trust_remote_code)


def without_numbers(cls: Any, config: Any) -> Any:
    """A model of a class on the meta device. Raises whatever transformers raises."""
    with _never_asked(), require("torch", "models").device("meta"):
        return _made(cls, config)


def tokenizer(place: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a directory or of a name on the hub."""
    transformers = require("transformers", "models")
    with _looked_through(place, trust_remote_code, tokenizer=True) as found:
        return transformers.AutoTokenizer.from_pretrained(place, **found)


def tokenizer_file(path: Path) -> Any:
    """The tokenizer in a tokenizer.json alone."""
    return require("transformers", "models").PreTrainedTokenizerFast(tokenizer_file=str(path))


def gguf_model(path: Path, **options: Any) -> Any:
    """The model in a GGUF file; nothing that lies beside it is read. `options`: of `from_pretrained`."""
    transformers = require("transformers", "models")
    cls = transformers.AutoModelForCausalLM
    config = _gguf(path, transformers.AutoConfig.from_pretrained)
    check_model(lambda: _made(cls, config), path, _itemsize(config, options))
    model = _gguf(path, partial(_matching, cls, path), config=config, **options)
    model.config._name_or_path = model.name_or_path = str(path.parent)
    return model


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file; nothing that lies beside it is read."""
    for name in ("config.json", "tokenizer_config.json"):
        check_code(path.parent / name)
    return _gguf(path, require("transformers", "models").AutoTokenizer.from_pretrained)


def data_set(name: str, configuration: str | None, **options: Any) -> Any:
    """A data set of the hub, or of files (`name` is then a builder of `datasets`, such as json); `options`: of
    `datasets.load_dataset`. Loading scripts are not run."""
    datasets = require("datasets", "datasets")
    if release(datasets.__version__) < (4, 0):  # later ones cannot run any, and refuse to be told
        options["trust_remote_code"] = False
    return datasets.load_dataset(name, configuration, **options)


def saved_data_set(folder: Path) -> Any:
    """What `save_to_disk` of `datasets` wrote: Arrow files and JSON."""
    return require("datasets", "datasets").load_from_disk(str(folder))


def fetched(name: str, patterns: Sequence[str], without: Sequence[str] = ()) -> Path:
    """The local copy of some files of a checkpoint on the hub, in the directory of their commit; not looked through."""
    hub = require("huggingface_hub", "models")
    return Path(hub.snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(without)))


@contextmanager
def _looked_through(place: str | Path, trust_remote_code: bool, *, tokenizer: bool = False) -> Iterator[dict[str, Any]]:
    """Look through a checkpoint, and give the options with which transformers loads what was looked through."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if Path(place).is_dir():
        folder = Path(place)
    else:  # of the hub: its small files first, and then the others of the same commit
        folder = fetched(str(place), ["*.json"], without=["*/*"])
        options["revision"] = folder.name
    check_folder(folder, trust_remote_code=trust_remote_code)
    if tokenizer and not trust_remote_code:
        _check_tokenizer(folder)
    with _never_asked():
        yield options


def _check_tokenizer(folder: Path) -> None:
    """Refuse a class of transformers that is not one of its tokenizers; transformers would call anything of its own."""
    transformers = require("transformers", "models")
    for path in (folder / "tokenizer_config.json", *sorted(folder.glob("config*.json"))):
        name = json_object(path).get("tokenizer_class")
        plain = name.rstrip() if isinstance(name, str) else ""
        while plain.endswith("Fast"):  # transformers takes it off where it finds nothing
            plain = plain.removesuffix("Fast")
        names = {name, plain, f"{plain}Fast"} if plain else set()
        if names & _tokenizer_classes() - _LOADS_OTHERS:
            continue
        if any(hasattr(transformers, str(name)) for name in names):
            raise InputError(
                f"{path} asks for the tokenizer class {name!r:.80}, which is not among transformers' tokenizers; "
                "expected the name of one, such as PreTrainedTokenizerFast"
            )


@contextmanager
def _never_asked() -> Iterator[None]:
    """Where transformers would ask on the terminal whether code may run, it raises ValueError."""
    module: Any = require("transformers.dynamic_module_utils", "models")
    kept = module.TIME_OUT_REMOTE_CODE
    module.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        module.TIME_OUT_REMOTE_CODE = kept


def _made(cls: Any, config: Any, trust_remote_code: bool = False) -> Any:
    config = copy.deepcopy(config)  # some classes write into it
    if hasattr(cls, "_from_config"):
        return cls._from_config(config)
    return cls.from_config(config, trust_remote_code=trust_remote_code)


def _itemsize(config: Any, options: dict[str, Any]) -> float:
    """Bytes of each of a model's numbers, at least, where it is loaded with these options."""
    name = next((str(options[key]) for key in ("dtype", "torch_dtype") if options.get(key)), "auto")
    if name == "auto":
        if getattr(config, "quantization_config", None):
            return 0.5
        name = str(getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float32")
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
    with tempfile.TemporaryDirectory() as alone, _never_asked(), redirect_stderr(io.StringIO()):
        os.symlink(path.resolve(), Path(alone) / path.name)
        return load(alone, gguf_file=path.name, trust_remote_code=False, **options)


@cache
def _model_classes() -> frozenset[str]:
    """Names of models in transformers' tables, which the auto classes choose from."""
    return _names_in("transformers.models.auto.modeling_auto", "MODEL") | _OTHER_MODELS


@cache
def _tokenizer_classes() -> frozenset[str]:
    """Names of tokenizers in transformers' table."""
    return _names_in("transformers.models.auto.tokenization_auto", "TOKENIZER") | _TOKENIZERS


def _names_in(module: str, beginning: str) -> frozenset[str]:
    found = vars(require(module, "models")).items()
    tables = [table for name, table in found if name.startswith(beginning) and name.endswith("_MAPPING_NAMES")]
    rows = [row if isinstance(row, (tuple, list)) else (row,) for table in tables for row in table.values()]
    return frozenset(name for row in rows for name in row if isinstance(name, str))
