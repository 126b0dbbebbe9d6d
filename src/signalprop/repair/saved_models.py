"""Save a model with the scheme that it carries, or one that `build` made, and load it again as the same function.

Beside the weights lies `signalprop.json` (the Parametrization and how it was applied) and, where the scheme added
parameters, `signalprop.safetensors`. A Hugging Face checkpoint stays one: the names in its files are transformers' own.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from signalprop.attachment.arguments import BatchArguments
from signalprop.attachment.attached import attach, require_roles
from signalprop.attachment.live_model import unwrapped
from signalprop.attachment.mapping import Mapping
from signalprop.attachment.mapping_file import mapping_json, mapping_of_json
from signalprop.errors import InputError, first_line, refusing, require
from signalprop.files import checkpoint_loading
from signalprop.files.checkpoint_folder import check_folder
from signalprop.files.storage import finite, make_folder, read_json, write_json
from signalprop.files.validation import Value, typed
from signalprop.models import build
from signalprop.models.transformer import Transformer
from signalprop.network.parametrization import Parametrization
from signalprop.network.presets import preset_instead
from signalprop.repair.initialisation import whole
from signalprop.repair.installation import install
from signalprop.repair.module_swaps import Splice
from signalprop.repair.record import Record, is_pretrained, record_of, the_record
from signalprop.repair.saved_tensors import ENTRY, RECORD, TENSORS, WEIGHTS, read_tensors, write_tensors
from signalprop.repair.undoing import all_or_nothing, everything

SCHEMA = "signalprop/applied/1"


class _Document(Value):
    """signalprop.json.

    Attributes:
        kind: `transformers` (a checkpoint of theirs beside it), `module` (model.safetensors holds the state dict), or
            `built` (likewise, of a network that the parametrization alone describes).
        id: digest of the rest and of the added tensors, which the other files repeat.
        tensors: names of the added parameters, which signalprop.safetensors holds.
        shared: state-dict names whose tensor lies under another name.
        weights: `drawn` by the scheme, or `kept`, as they were before.
        mapping: the mapping that `apply` was given, where a file can say it.
    """

    model_config = ConfigDict(title=RECORD)
    schema_: Literal["signalprop/applied/1"] = Field(alias="schema")
    kind: Literal["transformers", "module", "built"]
    class_name: str
    id: str
    mode: Literal["gauge", "absorbed"] = "gauge"
    match_eps: bool = False
    parametrization: dict[str, Any]
    tensors: list[str]
    shared: dict[str, str] = Field(default_factory=dict)
    weights: Literal["drawn", "kept"] = "drawn"
    mapping: dict[str, Any] | None = None


# --- saving ----------------------------------------------------------------------------------------------


@typed
def save(model: nn.Module, directory: str | Path, **options: Any) -> None:
    """Save an applied or a built model with its scheme, for `load`.

    A Hugging Face model is saved by its own `save_pretrained` (`options` go there), any other as `model.safetensors`.
    Files of our own are written whole or not at all, the record last; nothing is pickled.

    Raises:
        InputError: the model carries no scheme, its weights were not drawn yet, or the directory cannot be written.
    """
    inner = unwrapped(model)
    if not isinstance(inner, Transformer):
        _refuse_pending(the_record(inner))
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
    """Save a Hugging Face model with `vanilla_save`, its own bound `save_pretrained`, and the record beside it.

    Raises:
        InputError: as `save`; pickled weights or an upload were asked for.
    """
    record = the_record(model)
    _refuse_pending(record)
    given = inspect.signature(vanilla_save).bind_partial(directory, *args, **options).arguments
    given |= given.pop("kwargs", {})
    if given.get("safe_serialization") is False:
        raise InputError("signalprop saves safetensors only; leave out safe_serialization=False")
    if given.get("push_to_hub"):
        raise InputError("save first, then model.push_to_hub(name), which takes the scheme's files along")
    tensors = added_tensors(model, record, given.get("state_dict"))
    document = _document(model, record, "transformers", tensors)
    config: Any = model.config
    setattr(config, ENTRY, {"scheme": record.parametrization.scheme, "mode": record.mode, "id": document["id"]})
    try:
        with refusing(f"cannot save the {type(model).__name__}", "expected one that its own save_pretrained saves"):
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


def added_tensors(model: nn.Module, record: Record, state: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The parameters that the scheme added, by their names in memory; from the state dict, where they are in it."""
    out: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if any(name == path or name.startswith(f"{path}.") for path in record.added):
            found = (state or {}).get(name, parameter)
            out[name] = _whole(found)
    return out


def _whole(tensor: Tensor) -> Tensor:
    """A tensor by itself on the CPU, gathered where it is sharded."""
    return whole(tensor).detach().cpu().contiguous()


def _refuse_pending(record: Record) -> None:
    if record.pending:
        raise InputError("the weights have not been drawn yet; call signalprop.initialize(model) before saving")


def _document(
    model: nn.Module, record: Record, kind: str, tensors: dict[str, Tensor], shared: dict[str, str] | None = None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": kind,
        "class_name": type(model).__name__,
        "mode": record.mode,
        "match_eps": record.matched_eps,
        "parametrization": record.parametrization.to_json(),
        "tensors": sorted(tensors),
        "shared": shared or {},
    } | ({"weights": "kept"} if record.kept else {})
    by_hand = record.mapping
    if by_hand is not None and not by_hand.found and isinstance(by_hand.arguments, BatchArguments):
        with suppress(InputError):  # what no file can say has to be given to `load` again
            document["mapping"] = mapping_json(by_hand, model)
    document = finite(document)
    return document | {"id": _digest(document, tensors)}


def _built_document(model: Transformer, shared: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "built",
        "class_name": type(model).__name__,
        "parametrization": model.parametrization.to_json(),
        "tensors": [],
        "shared": shared,
    }
    document = finite(document)
    return document | {"id": _digest(document, {})}


def _digest(document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
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


def _save_module(model: nn.Module, directory: Path, state: dict[str, Any] | None) -> None:
    if directory.is_file():
        raise InputError(f"{directory} is a file; expected a directory, or a path for a new one")
    make_folder(directory)
    own = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    shared = {name: first[id(tensor)] for name, tensor in own.items() if first.setdefault(id(tensor), name) != name}
    given = state if state is not None else own
    tensors = {name: _whole(given[name]) for name in own if name not in shared}
    if isinstance(model, Transformer):
        added: dict[str, Tensor] = {}
        document = _built_document(model, shared)
    else:
        record = the_record(model)
        added = added_tensors(model, record, state)
        document = _document(model, record, "module", added, shared)
    write_tensors(directory / WEIGHTS, tensors, document["id"])
    _write_record(directory, document, added)


# --- loading ---------------------------------------------------------------------------------------------


@typed
def load(
    directory: str | Path, model: nn.Module | None = None, *, mapping: Mapping | None = None, **options: Any
) -> nn.Module:
    """Load an applied or a built model: weights, scheme, trained multipliers. The same function, bit by bit.

    Args:
        directory: that `save`, or `save_pretrained` of an applied model, wrote.
        model: for a module of your own: a fresh one, without scheme, which is filled. Leave it out for a checkpoint of
            transformers, whose class `config.json` names, and for a built model.
        mapping: where the model was mapped by hand, in a way that the saved record cannot say.
        options: of `from_pretrained` (`dtype`, `device_map`, ...).

    Raises:
        InputError: a plain checkpoint, a damaged one, one of another version, or another model; one line.
    """
    folder = Path(directory)
    if folder.is_dir():
        check_folder(folder)
    raw, document = _read_record(folder)
    added = _read_added(folder, raw, document)
    table = _parametrization(folder, document)
    if document.kind == "built":
        if model is not None or mapping is not None or options:
            raise InputError(f"{folder} holds a network that signalprop built; give the directory alone")
        return _built(folder, document, table)
    if document.kind == "module":
        if model is None:
            raise InputError(f"{folder} holds a {document.class_name}; give model=, a fresh one, to be filled")
        if options:
            raise InputError(f"load has no options {sorted(options)} for a module of your own; give the model alone")
        model = unwrapped(model)
        if record_of(model) is not None:
            raise InputError("model= already carries a scheme; give a fresh one, without")
    else:
        if model is not None:
            raise InputError(f"{folder} is a checkpoint of transformers, which names its class; leave out model=")
        model = _from_pretrained(folder, document, options)
    with all_or_nothing(model, everything(model) if document.kind == "module" else ()):
        if mapping is None and document.mapping is not None:
            mapping = mapping_of_json(document.mapping, model)
        attached = attach(model, mapping)
        if attached.mapping.stream_only and attached.mapping.architecture != table.architecture:
            attached = require_roles(attached)
        if attached.mapping.found and attached.mapping.architecture != table.architecture:
            raise InputError(f"{folder} was saved with a mapping made by hand; give the same one, mapping=")
        record = install(attached, table, mode=document.mode, match_eps=document.match_eps, by_hand=mapping)
        record.kept = document.weights == "kept"
        if document.kind == "module":
            _fill_module(folder, document, model)
        _fill_added(folder, added, model, record)
    return model


def _read_record(folder: Path) -> tuple[dict[str, Any], _Document]:
    """signalprop.json as it is, and checked."""
    path = folder / RECORD
    if not path.is_file():
        if not folder.is_dir():
            instead = preset_instead(folder)
            raise InputError(f"there is no directory {folder}; expected one that signalprop.save wrote{instead}")
        raise InputError(
            f"{folder} has no {RECORD}, so it is a plain checkpoint, without a scheme that could be loaded or folded; "
            "load it with transformers, or give it a scheme with `signalprop apply` first"
        )
    data = read_json(path)
    if not isinstance(data, dict) or not str(data.get("schema")).startswith("signalprop/applied/"):
        raise InputError(f"{path} is not the record of an applied model; save the model again")
    if data["schema"] != SCHEMA:
        raise InputError(f"{path} was written by another version of signalprop: {data['schema']}, expected {SCHEMA}")
    return data, _Document(**{str(key): value for key, value in data.items()})


def _parametrization(folder: Path, document: _Document) -> Parametrization:
    try:
        return Parametrization.from_json(document.parametrization)
    except InputError as error:
        raise InputError(f"{folder / RECORD}: {error}") from None


def _from_pretrained(folder: Path, document: _Document, options: dict[str, Any]) -> nn.Module:
    """The vanilla model of the checkpoint."""
    transformers: Any = require("transformers", "models")
    config = read_json(folder / "config.json")
    entry = config.get(ENTRY) if isinstance(config, dict) else None
    if not isinstance(entry, dict) or entry.get("id") != document.id:
        raise InputError(
            f"{folder / RECORD} and config.json are not of one checkpoint: another model was saved over it; remove "
            f"{RECORD} to load that one with transformers"
        )
    if "trust_remote_code" in options:
        raise InputError("load has no option trust_remote_code: an applied model is of a class of transformers itself")
    cls = checkpoint_loading.model_class(document.class_name, folder)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would report the multipliers, which are read below
    try:
        loaded, report = checkpoint_loading.pretrained(cls, folder, output_loading_info=True, **options)
    except InputError:
        raise
    except Exception as error:  # libraries raise errors of many kinds on files that are not what they should be
        reason = first_line(error)
        raise InputError(f"cannot load the weights in {folder}: {reason}") from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"the weights in {folder} lack {', '.join(missing[:3])}; they are of another model, or damaged"
        )
    if hasattr(loaded.config, ENTRY):
        delattr(loaded.config, ENTRY)
    model: nn.Module = loaded
    return model


def _built(folder: Path, document: _Document, table: Parametrization) -> nn.Module:
    """The network of a table with the stored weights, in the type that they have."""
    types = {tensor.dtype for tensor in read_tensors(folder / WEIGHTS, document.id).values()}
    floating = [dtype for dtype in types if dtype.is_floating_point]
    model = build(table, seed=0, dtype=floating[0] if len(floating) == 1 else torch.float32)
    _fill_module(folder, document, model)
    return model.eval()  # as a checkpoint of transformers is loaded


def _fill_module(folder: Path, document: _Document, model: nn.Module) -> None:
    tensors = read_tensors(folder / WEIGHTS, document.id)
    try:
        state = tensors | {alias: tensors[name] for alias, name in document.shared.items()}
        model.load_state_dict(state)
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the weights in {folder} do not fit this {type(model).__name__}: {reason:.200}") from None


def _read_added(folder: Path, raw: dict[str, Any], document: _Document) -> dict[str, Tensor]:
    """The parameters that the scheme added, where the digest of record and parameters is right."""
    tensors = read_tensors(folder / TENSORS, document.id) if document.tensors else {}
    if sorted(tensors) != document.tensors or _digest(raw, tensors) != document.id:
        raise InputError(f"{folder / RECORD} or {TENSORS} has been changed since it was saved; save the model again")
    return tensors


def _fill_added(folder: Path, tensors: dict[str, Tensor], model: nn.Module, record: Record) -> None:
    """Fill the parameters that the scheme added."""
    wanted = added_tensors(model, record)
    if {name: t.shape for name, t in wanted.items()} != {name: t.shape for name, t in tensors.items()}:
        raise InputError(f"{folder / TENSORS} has other multipliers than scheme {record.parametrization.scheme!r} adds")
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.get_parameter(name).copy_(tensor)
