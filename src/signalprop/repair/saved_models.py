"""Load a model that `save` wrote: the same function, with the scheme that it carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import attach, require_roles
from signalprop.attachment.mapping import Mapping
from signalprop.errors import InputError, first_line, require
from signalprop.files import checkpoint_loading
from signalprop.files.checkpoint_folder import check_folder
from signalprop.files.storage import read_json
from signalprop.files.validation import typed
from signalprop.models import build
from signalprop.network.parametrization import Parametrization
from signalprop.network.presets import preset_instead
from signalprop.repair.installation import install
from signalprop.repair.record import Record, record_of
from signalprop.repair.saving import (
    ENTRY,
    RECORD,
    SCHEMA,
    TENSORS,
    WEIGHTS,
    Document,
    added_tensors,
    digest,
    read_tensors,
)  # fmt: skip
from signalprop.repair.undoing import all_or_nothing, everything
from signalprop.streams.wrappers import unwrapped


@typed
def load(
    directory: str | Path, model: nn.Module | None = None, *, mapping: Mapping | None = None, **options: Any
) -> nn.Module:
    """Load an applied or a built model: weights, scheme, trained multipliers. The same function, bit by bit.

    Args:
        directory: written by `save`, or by `save_pretrained` of an applied model.
        model: for a custom module: a fresh one, without scheme, to fill. Leave it out for a checkpoint of
            transformers, whose class `config.json` names, and for a built model.
        mapping: if the model was mapped by hand.
        options: of `from_pretrained` (`dtype`, `device_map`, ...).

    Raises:
        InputError: a plain checkpoint, a damaged one, one of another version, or another model; one line.
    """
    folder = Path(directory)
    if folder.is_dir():
        check_folder(folder)
    raw, document = _read_record(folder)
    added = read_tensors(folder / TENSORS, document.id) if document.tensors else {}
    if sorted(added) != document.tensors or digest(raw, added) != document.id:
        raise InputError(f"{folder / RECORD} or {TENSORS} has been changed since it was saved; save the model again")
    try:
        table = Parametrization.from_json(document.parametrization)
    except InputError as error:
        raise InputError(f"{folder / RECORD}: {error}") from None
    if document.kind == "built":
        if model is not None or mapping is not None or options:
            raise InputError(f"{folder} holds a network that signalprop built; give the directory alone")
        return _built(folder, document, table)
    if document.kind == "module":
        if model is None:
            raise InputError(f"{folder} holds a {document.class_name}; give model=, a fresh one, to be filled")
        if options:
            raise InputError(f"load has no options {sorted(options)} for a custom module; give the model alone")
        model = unwrapped(model)
        if record_of(model) is not None:
            raise InputError("model= already carries a scheme; give a fresh one, without")
    else:
        if model is not None:
            raise InputError(f"{folder} is a checkpoint of transformers, which names its class; leave out model=")
        model = _from_pretrained(folder, document, options)
    with all_or_nothing(model, everything(model) if document.kind == "module" else ()):
        if mapping is None and document.by_hand:
            raise InputError(f"{folder} was saved with a mapping; give the same one, mapping=")
        attached = attach(model, mapping)
        if attached.mapping.stream_only and attached.mapping.architecture != table.architecture:
            attached = require_roles(attached)
        record = install(attached, table, match_eps=document.match_eps)
        record.kept = document.weights == "kept"
        if document.kind == "module":
            _fill_module(folder, document, model)
        _fill_added(folder, added, model, record)
    return model


def _read_record(folder: Path) -> tuple[dict[str, Any], Document]:
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
    return data, Document(**{str(key): value for key, value in data.items()})


def _from_pretrained(folder: Path, document: Document, options: dict[str, Any]) -> nn.Module:
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


def _built(folder: Path, document: Document, table: Parametrization) -> nn.Module:
    """The network of a table with the stored weights, in the type that they have."""
    types = {tensor.dtype for tensor in read_tensors(folder / WEIGHTS, document.id).values()}
    floating = [dtype for dtype in types if dtype.is_floating_point]
    model = build(table, seed=0, dtype=floating[0] if len(floating) == 1 else torch.float32)
    _fill_module(folder, document, model)
    return model.eval()  # as a checkpoint of transformers is loaded


def _fill_module(folder: Path, document: Document, model: nn.Module) -> None:
    tensors = read_tensors(folder / WEIGHTS, document.id)
    try:
        state = tensors | {alias: tensors[name] for alias, name in document.shared.items()}
        model.load_state_dict(state)
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the weights in {folder} do not fit this {type(model).__name__}: {reason:.200}") from None


def _fill_added(folder: Path, tensors: dict[str, Tensor], model: nn.Module, record: Record) -> None:
    """Fill the parameters that the scheme added."""
    wanted = added_tensors(model)
    if {name: t.shape for name, t in wanted.items()} != {name: t.shape for name, t in tensors.items()}:
        raise InputError(f"{folder / TENSORS} has other multipliers than scheme {record.parametrization.scheme!r} adds")
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.get_parameter(name).copy_(tensor)
