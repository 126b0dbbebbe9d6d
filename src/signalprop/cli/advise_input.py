"""What `advise` is about: a configuration, a checkpoint, a training recipe, or the log of a monitor."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from signalprop.checkpoint_start import Subject, is_checkpoint, of_checkpoint
from signalprop.cli import sources
from signalprop.cli.options import name_and_options
from signalprop.data.batches import LONGEST, shortened
from signalprop.errors import InputError, require
from signalprop.files.storage import read_text
from signalprop.network.architecture import Architecture
from signalprop.results.findings import Findings
from signalprop.schemes.base import parametrized

_RECIPES = (".toml", ".yaml", ".yml")


def subject_of(what: str, changed: dict[str, Any], scheme: str | None) -> Subject:
    """What WHAT names, with the changes."""
    path = Path(what)
    if path.suffix == ".jsonl":
        return _of_log(path, changed, scheme)
    if path.suffix in _RECIPES:
        return _of_recipe(path, changed, scheme)
    if is_checkpoint(path) and not (changed or scheme):
        return of_checkpoint(path)
    return Subject(sources.parametrization(what, changed, scheme, longest=LONGEST))


def _of_recipe(path: Path, changed: dict[str, Any], scheme: str | None) -> Subject:
    """The network that a recipe of `signalprop train` builds, in YAML or TOML."""
    data = _read(path)
    model = data.get("model")
    if data.get("base") is not None:
        raise InputError(f"{path} changes the recipe {data['base']}; `signalprop train {path} --show` writes it whole")
    if not isinstance(model, dict) or not any(
        isinstance(model.get(name), of)
        for name, of in (("architecture", dict), ("huggingface", dict), ("pretrained", str))
    ):
        hint = "; torchtitan's has its sizes in code: give a config.json" if "flavor" in (model or ()) else ""
        raise InputError(
            f"{path} has no model.architecture, model.huggingface or model.pretrained, as a recipe of signalprop "
            f"train{hint}"
        )
    if model.get("pretrained"):
        return subject_of(model["pretrained"], changed, scheme)
    facts = _lengths(data.get("data"))
    if model.get("architecture"):
        fields = facts | model["architecture"] | changed
        preset = fields.pop("preset", None)
        architecture = Architecture(**fields) if preset is None else Architecture.preset(preset, **fields)
    else:
        architecture = Architecture.from_hf(model["huggingface"], **facts | changed)
    name, options = name_and_options(scheme) if scheme else (model.get("scheme"), dict(model.get("options") or {}))
    table = parametrized(shortened(architecture), name, **options)
    return Subject(table, None, f"the network of {path}")


def _read(path: Path) -> dict[str, Any]:
    text, data = read_text(path), None
    try:
        if path.suffix == ".toml":
            data = tomllib.loads(text)
        else:
            yaml = require("yaml", "training")
            data = yaml.safe_load(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}".splitlines()[0]) from None
    except Exception as error:  # of PyYAML, which is an extra
        raise InputError(f"{path} is not YAML: {error}".splitlines()[0]) from None
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}; expected a recipe, with a model")
    return data


def _lengths(data: Any) -> dict[str, Any]:
    """What the data of a recipe decide."""
    if not isinstance(data, dict):
        return {}
    tokenizer = data.get("tokenizer")
    size = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
    found = {"seq_len": data.get("seq_len"), "vocab_size": size}
    return {name: value for name, value in found.items() if value is not None}


def _of_log(path: Path, changed: dict[str, Any], scheme: str | None) -> Subject:
    """What a SignalMonitor found: the rules at its last sampled step, and its warnings."""
    from signalprop.report.monitored import events_of, line_of_log

    network, last, told = None, None, Findings()
    for number, line in enumerate(read_text(path).split("\n")[:-1], 1):
        row = line_of_log(line, f"{path}, line {number}")
        network = row.get("network", network)
        told += events_of(row)
        last = row if "findings" in row else last
    if last is None or not isinstance(network, dict):
        raise InputError(
            f"{path} names no network: it is not a log of SignalMonitor(jsonl=...), or one of an older version; "
            "give the ARCH"
        )
    shape = network.get("architecture")
    if not isinstance(shape, dict):
        raise InputError(f"{path}: the network has no architecture")
    architecture = shortened(Architecture(**shape)).replace(**changed)
    given, options = name_and_options(scheme or network.get("scheme"))
    table = parametrized(architecture, given, **options)
    found = Findings.from_json(last["findings"]) + told
    unknown = "" if given else f"the log does not name a scheme, {table.scheme} is assumed; "
    return Subject(table, found, f"{path}, up to step {last['step']}; {unknown}changes need a new start")
