"""Save a model with the scheme that it carries, or one that `build` made.

Beside the weights lies `signalprop.json` (the Parametrization and how it was applied) and, where the scheme added
parameters, `signalprop.safetensors`. A Hugging Face checkpoint stays one, with transformers' names in its files.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, bare
from signalprop.errors import InputError, first_line, refusing
from signalprop.files.storage import finite, make_folder, opened, write_bytes, write_json
from signalprop.files.validation import Value, typed
from signalprop.hooks import whole
from signalprop.models.transformer import Transformer
from signalprop.repair.record import Record, is_pretrained, the_record
from signalprop.repair.splices import Splice, trained_multipliers

SCHEMA = "signalprop/applied/1"
RECORD, TENSORS, WEIGHTS = "signalprop.json", "signalprop.safetensors", "model.safetensors"
ENTRY = "signalprop"  # in config.json, and in the metadata of safetensors files


class Document(Value):
    """signalprop.json.

    Attributes:
        kind: `transformers` (a checkpoint of theirs beside it), `module` (model.safetensors holds the state dict), or
            `built` (likewise, of a network that the parametrization alone describes).
        id: digest of the rest and of the added tensors, which the other files repeat.
        tensors: names of the added parameters, which signalprop.safetensors holds.
        shared: state-dict names whose tensor lies under another name.
        weights: `drawn` by the scheme, or `kept`, as they were before.
        by_hand: `apply` was given a mapping.
    """

    model_config = ConfigDict(title=RECORD)
    schema_: Literal["signalprop/applied/1"] = Field(alias="schema")
    kind: Literal["transformers", "module", "built"]
    class_name: str
    id: str
    match_eps: bool = False
    parametrization: dict[str, Any]
    tensors: list[str]
    shared: dict[str, str] = Field(default_factory=dict)
    weights: Literal["drawn", "kept"] = "drawn"
    by_hand: bool = False


@typed
def save(model: nn.Module | Anatomy, directory: str | Path, **options: Any) -> None:
    """Save an applied or a built model with its scheme, for `load`.

    A Hugging Face model is saved by its `save_pretrained` (`options` go there), any other as `model.safetensors`.
    signalprop's files are written whole or not at all, the record last; nothing is pickled.

    Raises:
        InputError: the model carries no scheme, its weights were not drawn yet, or the directory cannot be written.
    """
    inner = bare(model)
    if not isinstance(inner, Transformer):
        the_record(inner, drawn_before="saving")
    if is_pretrained(type(inner)):
        vanilla: Any = inner._vanilla if isinstance(inner, Splice) else type(inner)
        save_pretrained(inner, partial(vanilla.save_pretrained, inner), directory, **options)
        return
    if options.keys() - {"state_dict"}:
        raise InputError(
            f"save has no options {sorted(options)} for a {type(inner).__name__}; expected state_dict or none"
        )
    _save_module(inner, Path(directory), options.get("state_dict"))


def save_pretrained(
    model: nn.Module, vanilla_save: Callable[..., Any], directory: str | Path, *args: Any, **options: Any
) -> None:
    """Save a Hugging Face model with `vanilla_save`, its bound `save_pretrained`, and the record beside it."""
    record = the_record(model, drawn_before="saving")
    given = inspect.signature(vanilla_save).bind_partial(directory, *args, **options).arguments
    given |= given.pop("kwargs", {})
    if given.get("push_to_hub"):
        raise InputError("save first, then model.push_to_hub(name), which takes the scheme's files along")
    _check_directory(directory)
    tensors = added_tensors(model, given.get("state_dict"))
    document = _document(model, "transformers", record, tensors, {})
    config: Any = model.config
    setattr(config, ENTRY, {"scheme": record.parametrization.scheme, "id": document["id"]})
    try:
        with refusing(f"cannot save the {type(model).__name__}", "expected one that its save_pretrained saves"):
            vanilla_save(directory, *args, **options)
    except InputError as refused:
        error = refused.__cause__
        if error is not None and (isinstance(error, OSError) or "I/O error" in str(error)):
            raise error from None  # of the disk, not of the model
        raise
    finally:
        delattr(config, ENTRY)
    if given.get("is_main_process", True):
        _write_record(Path(directory), document, tensors)


def warn_of_plain_loading(model: nn.Module) -> None:
    """Warn that transformers alone would load another function, where it would."""
    record = the_record(model)
    spliced = any(isinstance(module, Splice) for module in model.modules() if module is not model)
    if spliced or record.changed:
        warnings.warn(
            f"this model carries scheme {record.parametrization.scheme!r}, which transformers' from_pretrained would "
            "silently leave out: load it with signalprop.load(directory), or signalprop.fold(model) before saving",
            UserWarning,
            stacklevel=3,
        )


def added_tensors(model: nn.Module, state: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The parameters that the scheme added, by their names in memory; from the state dict, where they are in it."""
    return {name: _whole((state or {}).get(name, parameter)) for name, parameter in trained_multipliers(model).items()}


def _whole(tensor: Tensor) -> Tensor:
    """A tensor by itself on the CPU, gathered where it is sharded."""
    return whole(tensor).detach().cpu().contiguous()


def _document(
    model: Any, kind: str, record: Record | None, tensors: dict[str, Tensor], shared: dict[str, str]
) -> dict[str, Any]:
    """The record as JSON; `record`: None of a network that was built."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": kind,
        "class_name": type(model).__name__,
        "parametrization": (model if record is None else record).parametrization.to_json(),
        "tensors": sorted(tensors),
        "shared": shared,
    }
    if record is not None:
        document |= {
            "match_eps": record.matched_eps,
            "weights": "kept" if record.kept else "drawn",
        }
        if record.mapping is not None and record.mapping.found is None:
            document["by_hand"] = True  # it has to be given to `load` again
    document = finite(document)
    return document | {"id": digest(document, tensors)}


def digest(document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A short name for the contents."""
    plain = {key: value for key, value in document.items() if key != "id"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _write_record(directory: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if tensors:
        write_tensors(directory / TENSORS, tensors, document["id"])
    else:
        (directory / TENSORS).unlink(missing_ok=True)
    write_json(directory / RECORD, document)


def _check_directory(directory: str | Path) -> None:
    if not str(directory):
        raise InputError("directory is empty; expected a path for a new one")
    if Path(directory).is_file():
        raise InputError(f"{directory} is a file; expected a directory, or a path for a new one")


def _save_module(model: nn.Module, directory: Path, state: dict[str, Any] | None) -> None:
    _check_directory(directory)
    make_folder(directory)
    own = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    shared = {name: first[id(tensor)] for name, tensor in own.items() if first.setdefault(id(tensor), name) != name}
    given = state if state is not None else own
    tensors = {name: _whole(given[name]) for name in own if name not in shared}
    record = None if isinstance(model, Transformer) else the_record(model)
    added = {} if record is None else added_tensors(model, state)
    document = _document(model, "built" if record is None else "module", record, added, shared)
    write_tensors(directory / WEIGHTS, tensors, document["id"])
    _write_record(directory, document, added)


# --- files of safetensors that bear the record's id ---------------------------------------------------------------


def write_tensors(path: Path, tensors: dict[str, Tensor], name: str) -> None:
    from safetensors.torch import save as serialised

    write_bytes(path, serialised(tensors, metadata={ENTRY: name}))


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that bears this id."""
    from safetensors import safe_open

    if not path.is_file():
        raise InputError(f"there is no {path}; the checkpoint is not complete")
    try:
        opened(path, copies=1).close()
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(ENTRY)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is not a mapping
    except InputError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise InputError(f"cannot read {path}: {reason}") from None
    if found != name:
        raise InputError(f"{path} and {RECORD} are not of one checkpoint: another model was saved over it")
    return tensors
