"""What ARCH and --scheme name: presets, configurations, directories, files of parametrizations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from signalprop.checkpoint_start import carried_by
from signalprop.cli.options import name_and_options
from signalprop.data.batches import shortened
from signalprop.errors import InputError, first_line
from signalprop.files.storage import read_json
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import SCHEMA, Parametrization
from signalprop.schemes import Scheme, scheme
from signalprop.schemes.base import parametrized


def scheme_or_table(given: str) -> Scheme | Parametrization:
    """What --scheme names: a scheme with its options, or the parametrization in a JSON file."""
    if given.endswith(".json"):
        return Parametrization.load(given)
    name, options = name_and_options(given)
    return scheme(_one(name or given), **options)


def is_directory(source: str) -> bool:
    """Whether an ARCH names a Hugging Face directory (or its config.json)."""
    path = Path(source)
    return path.is_dir() or path.name == "config.json"


def is_gguf(source: str) -> bool:
    """Whether it names a GGUF file, which holds a whole model."""
    return source.lower().endswith(".gguf")


def is_model(source: str) -> bool:
    """Whether it names a model that is measured as it is, where it is not built with a scheme."""
    return is_directory(source) or is_gguf(source)


def check_as_it_is(changed: dict[str, Any], scheme: str | None = None) -> None:
    """Raise InputError where options change a directory's model: fields of its architecture, or its scheme."""
    if changed.keys() - {"seq_len"} or scheme:
        raise InputError("the model of a directory is taken as it is; only --seq-len can change")


def check_built(**given: Any) -> None:
    """Raise InputError where an option, by its name, that is of a directory's model is given for one that is built."""
    for name, value in given.items():
        if value:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} is for a directory's model as it is; an ARCH is built with --scheme")


def parametrization(
    source: str,
    changed: dict[str, Any],
    scheme: str | None,
    qk_scale: float = 1.0,
    longest: int | None = None,
) -> Parametrization:
    """The table of numbers that ARCH, the changes and the scheme name.

    Args:
        longest: tokens per sequence at most, where neither `changed` nor a finished parametrization says how many.

    Without a scheme, a checkpoint that `signalprop.save` wrote has the one that it carries.
    """
    name, options = name_and_options(scheme)
    data = _file(source)
    finished = _finished(source, data, changed or scheme)
    if finished is not None:
        return _scaled(finished, qk_scale)
    carried = None if scheme else carried_by(Path(source))
    if carried is not None and not changed and longest is None:
        return _scaled(carried, qk_scale)
    if carried is not None:
        name, options = carried.scheme, dict(carried.options)
    architecture = _architecture(source, data, changed)
    if longest is not None:
        architecture = shortened(architecture, longest).replace(**lengths(changed))
    return _scaled(parametrized(architecture, _one(name) if name else None, **options), qk_scale)


def _one(name: str) -> str:
    """A scheme's name; several of them are taken apart before."""
    if "," in name:
        raise InputError(f"--scheme is {name!r:.80}; expected one scheme here (predict takes several)")
    return name


def read_architecture(source: str, changed: dict[str, Any]) -> Architecture:
    """The architecture that ARCH names, changed."""
    data = _file(source)
    finished = _finished(source, data, changed)
    return _architecture(source, data, changed) if finished is None else finished.architecture


def _finished(source: str, data: dict[str, Any] | None, changes: Any) -> Parametrization | None:
    """The parametrization in ARCH's file; None where it holds none."""
    if data is None or data.get("schema") != SCHEMA:
        return None
    if changes:
        raise InputError(f"{source} is a finished parametrization; it takes no changes and no --scheme")
    return Parametrization.from_json(data)


def lengths(changed: dict[str, Any]) -> dict[str, Any]:
    """Those of the changes that are lengths of sequences."""
    return {name: value for name, value in changed.items() if name in ("seq_len", "target_len")}


def _file(source: str) -> dict[str, Any] | None:
    """The object in the JSON file that ARCH names, None if it names none."""
    path = Path(source)
    if is_directory(source) or not (path.suffix == ".json" or path.exists()):
        return None
    try:
        data = read_json(path)
    except InputError:
        if path.suffix == ".json":
            raise
        raise InputError(
            f"{source} holds no architecture in JSON; expected such a file, a preset's name or a Hugging Face directory"
        ) from None
    if not isinstance(data, dict):
        raise InputError(f"{source} holds a {type(data).__name__}; expected an object with the architecture's fields")
    return data


def _architecture(source: str, data: dict[str, Any] | None, changed: dict[str, Any]) -> Architecture:
    if is_directory(source):
        return Architecture.from_hf(Path(source), **changed)
    if data is None:
        if "/" in source or Path(source).suffix[1:2].isalpha():  # a preset may have a dot: phi-1.5
            return Architecture.from_hf(_on_the_hub(source), **changed)
        return Architecture.preset(source, **changed)
    if "schema" in data:
        raise InputError(f"{source} has schema {data['schema']!r}; expected {SCHEMA!r} or an architecture's fields")
    if "model_type" in data:
        return Architecture.from_hf(data, **changed)
    return Architecture(**data).replace(**changed)


def _on_the_hub(name: str) -> Any:
    """The configuration of `owner/model` on the hub; without a connection of transformers' cache."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise InputError(f"there is no file or directory {name}")
    from signalprop.files.checkpoint_loading import configuration

    try:
        return configuration(name)
    except InputError:
        raise
    except Exception as error:  # of many kinds: no connection, no such model, no permission
        raise InputError(
            f"there is no directory {name} here, and no model of that name could be had from the hub "
            f"({first_line(error)}); give a directory, or a preset's name"
        ) from None


def _scaled(p: Parametrization, qk_scale: float) -> Parametrization:
    if qk_scale == 1:
        return p
    if not 0 < qk_scale < 1e6:
        raise InputError(f"--qk-scale is {qk_scale}; expected a positive number below a million")
    return p.with_columns(**{f"weight__{role}": p.weights[role] * qk_scale for role in ("query", "key")})
