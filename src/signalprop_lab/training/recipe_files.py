"""Recipes as YAML: read, put onto the recipe that is their base, and changed by `key=value`."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BeforeValidator

from signalprop.errors import InputError, require, unknown
from signalprop.files.storage import read_text

_SHIPPED = "signalprop_lab.training.recipes"
AsTuple = BeforeValidator(lambda data: tuple(data) if isinstance(data, list) else data)  # lists in YAML
_LONGEST = 100_000  # characters of a recipe or a sweep


def shipped() -> list[str]:
    """Names of the recipes and sweeps that come with the package."""
    folder = resources.files(_SHIPPED)
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_yaml(source: str | Path) -> dict[str, Any]:
    """A YAML mapping: of a file, or of a recipe that comes with the package, by its name."""
    yaml = require("yaml", "training")
    path = Path(source)
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        text, shown = read_text(path), str(path)
    else:
        item = resources.files(_SHIPPED) / f"{source}.yaml"
        if not item.is_file():
            raise unknown("recipe", str(source), (name for name in shipped() if not name.startswith("sweep-")))
        text, shown = item.read_text("utf-8"), f"recipe {source}"
    data = _value(yaml, text, shown)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InputError(f"{shown} holds no mapping of names to values; see docs/training.md")
    return data


def read_recipe(source: str | Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe's mapping, with what it changes put into the recipe that it names as its `base`.

    `base` is a file (looked for beside this one first) or a recipe that comes with the package. Mappings are merged key
    by key; anything else, null included, takes the place of what the base has. `name` and `description` are a recipe's
    own: they do not come from its base.

    Args:
        above: recipes that lead here by their bases.
    """
    here = os.path.realpath(source) if Path(source).is_file() else str(source)
    if here in above:
        raise InputError(f"the recipes {' -> '.join((*above, here))} are based on one another")
    data = read_yaml(source)
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise InputError(f"{source}: base is {base!r:.60}; expected the name of a recipe, or a YAML file")
    below = read_recipe(beside(base, Path(source).parent), (*above, here))
    return _merged({key: value for key, value in below.items() if key not in ("name", "description")}, data)


def beside(base: str, folder: Path) -> str | Path:
    """A file that is named from this folder, if there is one; else the name as it is."""
    return folder / base if Path(base).suffix and (folder / base).is_file() else base


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _value(yaml: Any, text: str, shown: str) -> Any:
    """What a YAML text says, of the kinds that JSON has too: no dates, sets, bytes or tagged objects."""
    if len(text) > _LONGEST:
        raise InputError(f"{shown} has {len(text)} characters; a recipe is a page or two, {_LONGEST} at most")
    try:
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise InputError(f"{shown} has YAML aliases (*name); write the values out")
        data = yaml.load(text, Loader=_loader(yaml))
        json.dumps(data, ensure_ascii=False).encode()
    except TypeError as error:
        raise InputError(f"{shown} holds what JSON does not have ({error}); put it in quotation marks") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # also half a character, no such day
        if isinstance(error, InputError):
            raise
        raise InputError(f"{shown} is not YAML: {' '.join(str(error).split()):.200}") from None
    return data


@cache
def _loader(yaml: Any) -> Any:
    """YAML 1.1 takes 1e-3 for a string; here it is the number that it looks like."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)
    number = re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def with_settings(data: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A recipe's mapping with `key=value` put into it; keys have dots, values are YAML."""
    yaml = require("yaml", "training")
    changed: dict[str, Any] = copy.deepcopy(dict(data))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {setting!r} is not key=value, such as optimizer.learning_rate=1e-3")
        value = _value(yaml, text, f"the value of --set {setting!r:.80}") if text.strip() else None
        put(changed, key.strip(), value)
    return changed


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set `data[a][b][c]` for the key "a.b.c", in place, making mappings on the way."""
    *path, last = key.split(".")
    place = data
    for i, name in enumerate(path):
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise InputError(f"{key}: {'.'.join(path[: i + 1])} is {place!r}, not a mapping")
    place[last] = value


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first three fields in which two mappings differ, in words."""
    a, b = flat(before), flat(now)
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)][:3]

    def shown(value: Any) -> str:
        return "its default" if value is None else f"{value!r:.40}"

    return "; ".join(f"{name} was {shown(a.get(name))}, is {shown(b.get(name))}" for name in names)


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Values by their keys, with dots between them."""
    if not isinstance(data, Mapping):
        return {prefix: data}
    return {k: v for name, item in data.items() for k, v in flat(item, f"{prefix}.{name}".lstrip(".")).items()}
