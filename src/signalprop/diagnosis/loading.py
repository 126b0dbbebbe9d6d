"""Models from Hugging Face directories, GGUF files and names on the hub.

Weights are read from safetensors and GGUF, which hold numbers only; pickled ones, which can run any code as they load,
are refused. Code that a checkpoint brings is run where that is asked for and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from signalprop.errors import InputError, first_line, require
from signalprop.files import checkpoint_loading
from signalprop.files.checkpoint_folder import check_folder
from signalprop.files.checkpoint_tokenizers import has_tokenizer, tokenizer_file
from signalprop.files.storage import check_regular
from signalprop.files.tensor_files import stored_tensors
from signalprop.files.validation import typed
from signalprop.network.presets import preset_instead

if TYPE_CHECKING:
    from torch import nn

Precision = Literal["float32", "float64", "bfloat16", "float16", "auto"]
PRECISIONS = ("float32", "float64", "bfloat16", "float16", "auto")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Loaded:
    """A model to look at.

    Attributes:
        model: in evaluation mode. tokenizer: of transformers; None where the checkpoint brings none.
        name: the last part of where it came from.
        notes: what was found missing, in words.
    """

    model: nn.Module
    tokenizer: Any | None
    name: str
    notes: tuple[str, ...] = ()


@typed
def load(source: str | Path, *, dtype: Precision = "float32") -> Loaded:
    """A trained model and its tokenizer.

    Args:
        source: a Hugging Face directory (also one that `signalprop apply` wrote), a .gguf file, or the name of a model
            on the hub; without a connection a name works only where the model is in transformers' cache.
        dtype: of the weights in memory; `auto` takes them as they are stored. GGUF files are de-quantized.

    Raises:
        InputError: nothing there, weights that are pickled or damaged, a class that transformers does not have, code
            that is not trusted, or a tokenizer that cannot be read.
    """
    if dtype not in PRECISIONS:
        raise InputError(f"dtype is {dtype!r}; expected one of {', '.join(PRECISIONS)}")
    path = Path(source)
    notes: tuple[str, ...] = ()
    if path.suffix.lower() == ".gguf":
        model = _gguf(path, dtype)
    else:
        model = read_model(source, dtype=dtype)
        wanted = (_class_names(getattr(model, "config", None)) or [type(model).__name__])[0]
        if type(model).__name__ != wanted and not hasattr(model, "signalprop_record"):
            notes = (f"the checkpoint has no weights for the head of a {wanted}; without it there is no loss",)
    tokenizer = read_tokenizer(source)
    if tokenizer is None:
        notes += ("no tokenizer: words are numbered by their frequency, so a loss on text says nothing of training",)
    return Loaded(model.eval(), tokenizer, path.resolve().name, notes)


def read_model(
    source: str | Path,
    *,
    dtype: Precision = "float32",
    random_init: bool = False,
    seed: int = 0,
    hint: str = "",
) -> nn.Module:
    """The model of a directory or name, with its saved weights or freshly initialised.

    A model that was saved with a scheme carries it again; a fresh one is initialised by its scheme, else by
    transformers. Where a checkpoint has the weights of a model and not those of the head that its configuration names
    (sentence encoders often), the model comes without a head: one of random weights would say nothing.

    Args:
        source: a directory, a file in it, or a name on the hub. dtype: as in `load`.
        seed: of a fresh initialisation. hint: what to do instead if no weights can be read.
    """
    transformers = _transformers()
    import torch

    place = _place(source)
    if isinstance(place, str):
        place = _copy_with_record(place) or place
    if isinstance(place, Path):
        check_folder(place)
    if isinstance(place, Path) and (place / "signalprop.json").is_file():
        from signalprop.models.transformer import Transformer, build
        from signalprop.repair import initialize
        from signalprop.repair import load as load_applied

        applied = load_applied(place)
        if dtype != "auto":
            applied = applied.to(getattr(torch, dtype))
        if random_init and isinstance(applied, Transformer):
            return build(applied.parametrization, seed=seed, dtype=next(applied.parameters()).dtype).eval()
        if random_init:
            initialize(applied, seed=seed)
        return applied
    with _told(f"cannot read a configuration from {place}", place):
        config = checkpoint_loading.configuration(place)
    cls = _class_of(config, place)
    if not random_init and isinstance(place, Path):
        _refuse_pickles(place, hint)
    with _told(f"cannot load the model in {place}", place, "" if random_init else hint):
        if random_init:
            torch.manual_seed(seed % 2**63)
            fresh: nn.Module = checkpoint_loading.fresh(cls, config)
            return fresh if dtype == "auto" else fresh.to(getattr(torch, dtype))
        options: dict[str, Any] = {"output_loading_info": True, "dtype": dtype}
        loaded: nn.Module
        for tried in (cls, transformers.AutoModel):
            loaded, found = checkpoint_loading.pretrained(tried, place, config, **options)
            missing = sorted(name for name in found["missing_keys"] if "pooler" not in name.split("."))
            if not missing or not _only_head(loaded, missing):
                break
    kept = getattr(config, "dtype", None)
    if kept is not None:  # what the checkpoint has; transformers writes what was asked for
        loaded.config.dtype = kept
    if missing:
        raise InputError(
            f"the checkpoint in {place} has no weights for {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}, which would be random; it is incomplete"
        )
    return loaded


def read_structure(source: str | Path) -> nn.Module:
    """The model of a directory or name on the meta device: its modules, without numbers."""
    _transformers()
    place = _place(source)
    with _told(f"cannot read a configuration from {place}", place):
        config = checkpoint_loading.configuration(place)
        model: Any = checkpoint_loading.without_numbers(_class_of(config, place), config)
        model.tie_weights()  # as a model that is loaded; without numbers nothing has tied them
    found: nn.Module = model.eval()
    return found


def parameters_of(source: str | Path) -> int:
    """How many numbers a model has, by the headers of its files or by its configuration; 0 where neither says it.

    Of a GGUF file about one for each byte: they have 4 to 16 bits. What is wrong with the files, reading them says.
    """
    with suppress(Exception):
        path = Path(source)
        if path.suffix.lower() == ".gguf":
            return path.stat().st_size
        if path.exists():
            folder = folder_of(path)
            if any(folder.glob("*.safetensors")):
                return sum(tensor.n for tensor in stored_tensors(folder))
            return sum(tensor.numel() for tensor in read_structure(folder).parameters())
    return 0


def stored_in_half(source: str | Path) -> int:
    """How many numbers a plain checkpoint in half precision holds; 0 of any other, or of one that cannot be read."""
    with suppress(Exception):
        tensors = stored_tensors(Path(source))
        half = {tensor.dtype for tensor in tensors} & {"BF16", "F16"}
        return sum(tensor.n for tensor in tensors) if half and not (Path(source) / "signalprop.json").is_file() else 0
    return 0


def read_tokenizer(source: str | Path) -> Any | None:
    """The tokenizer in a model's folder, or in its GGUF file; None if there is none."""
    _transformers()
    path = Path(source)
    place = path.parent if path.suffix.lower() == ".gguf" else _place(source)
    try:
        if path.suffix.lower() == ".gguf":
            return checkpoint_loading.gguf_tokenizer(path)
        if isinstance(place, Path) and not has_tokenizer(place):
            return None
        return checkpoint_loading.tokenizer(place)
    except InputError:
        raise
    except Exception as error:
        reason = error
    try:  # without the files that the family's class asks for
        return tokenizer_file(folder_of(source) / "tokenizer.json")
    except Exception:
        if path.suffix.lower() == ".gguf":
            raise InputError(
                f"cannot read the tokenizer in {path}: {first_line(reason)}; put the tokenizer.json of the "
                "original model next to it"
            ) from None
        raise InputError(_why(f"cannot read the tokenizer of {source}", place, reason)) from None


def quiet() -> None:
    """Without progress bars and reports of transformers."""
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def folder_of(source: str | Path) -> Path:
    """A directory, or the one that a file is in."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        check_regular(path)
    return path.parent


def _gguf(path: Path, dtype: Precision) -> nn.Module:
    """The model in a GGUF file, as transformers reads it. It can be saved: nothing in it is quantized any more."""
    if not path.is_file():
        raise InputError(f"cannot read {path}: there is no such file")
    _transformers()
    require("gguf", "diagnose")
    with _told(f"cannot load the model in {path}", path):
        model = checkpoint_loading.gguf_model(path, dtype="float32" if dtype == "auto" else dtype)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    loaded: nn.Module = model
    return loaded


def _transformers() -> Any:
    require("torch", "models")
    found = require("transformers", "models")
    quiet()
    return found


def _place(source: str | Path) -> str | Path:
    """The directory of a source that exists here; else the name that it is on the hub."""
    path = Path(source)
    if path.exists():
        folder = folder_of(path)
        if path.is_file() and not any((folder / name).exists() for name in ("config.json", "signalprop.json")):
            raise InputError(f"{path} is not a model, and no config.json is next to it; give a model's directory")
        return folder
    text = str(source)
    # a name on the hub is `model` or `owner/model`
    if isinstance(source, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1 or path.suffix == ".json":
        raise InputError(f"cannot read {text}: there is no such file or directory")
    return text


def _copy_with_record(name: str) -> Path | None:
    """The local copy of a model on the hub that was saved with its scheme; None of another, or if there is none."""
    try:
        folder = checkpoint_loading.fetched(name, ["*.json"], without=["*/*"])
        if (folder / "signalprop.json").is_file():
            return checkpoint_loading.fetched(name, ["*.json", "*.safetensors"], without=["*/*"])
    except Exception:  # of many kinds; reading the configuration says why
        pass
    return None


def _class_of(config: Any, place: str | Path) -> Any:
    """The class of transformers that a configuration names."""
    names = _class_names(config)
    return checkpoint_loading.model_class(names[0], place) if names else require("transformers", "models").AutoModel


def _class_names(config: Any) -> list[str]:
    """The classes that a configuration names; whatever else its file has in that place counts for nothing."""
    found = getattr(config, "architectures", None)
    return [name for name in found if isinstance(name, str)] if isinstance(found, (list, tuple)) else []


def _only_head(model: nn.Module, missing: Sequence[str]) -> bool:
    """Whether all missing weights are outside the base model below the head."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    return hasattr(model, prefix) and not any(name.startswith(f"{prefix}.") for name in missing)


def _refuse_pickles(folder: Path, hint: str) -> None:
    """Raise InputError where a directory's only weights are pickled."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        raise InputError(
            f"cannot load the model in {folder}: its weights are pickled ({pickled[0]}), which can run any code as "
            f"they load; {hint or 'save them as safetensors first, where you trust them'}"
        )


@contextmanager
def _told(what: str, place: str | Path, hint: str = "") -> Iterator[None]:
    """One line for whatever libraries raise on files that are not what they should be; `hint`: what to do instead."""
    try:
        yield
    except Exception as error:
        said = str(error) if isinstance(error, InputError) else _why(what, place, error)
        raise InputError(f"{said}; {hint}" if hint else said) from None


def _why(what: str, place: str | Path, error: Exception) -> str:
    """One line for an error of transformers."""
    text = first_line(error)
    if isinstance(place, str):
        return (
            f"{what}: {text.rstrip('.')}; expected a directory, a .gguf file, or the name of a model on the hub "
            f"(without a connection: one that is in transformers' cache){preset_instead(place)}"
        )
    return f"{what}: {text}"
