"""Arguments of a wrong type: every public function and class answers in one line that names what was expected."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import signalprop as sp
from damage import check_line
from signalprop.errors import InputError
from test_public_api import ENTRIES


class Wrong:
    """Of no type that anything takes."""


TABLE = sp.scheme("xavier")(sp.Architecture.preset("tgs", n_layers=2, d_model=16, n_heads=2, d_ff=32, seq_len=8))
PROFILE = sp.predict(TABLE)
MODEL = torch.nn.Linear(2, 2)
# what stands in the other positions, by the words of a parameter's annotation
GOOD: dict[str, Any] = {
    "Parametrization": TABLE, "Architecture": TABLE.architecture, "Profile": PROFILE, "nn.Module": MODEL, "str": "x",
    "int": 1, "float": 0.5, "bool": True, "str | Path": Path("nowhere"), "Path": Path("nowhere"),
    "Embedding": TABLE.embedding,
    "Mapping[str, Any]": {}, "Dictionary[str, Any]": {}, "Scheme": sp.scheme("xavier"),
    "FloatArray": PROFILE.forward["stream_in"].variance,
    "Source": "predicted", "Form": "corrected", "Function": abs, "str | Scheme | Parametrization": "xavier",
    "Any": None, "Batch | Dictionary[str, Any]": {}, "Iterable[Batch]": [],
}  # fmt: skip
INSTANCES: dict[str, Any] = {
    "Architecture": TABLE.architecture, "Parametrization": TABLE, "Profile": PROFILE,
    "Series": PROFILE.forward["stream_in"], "InputStatistics": sp.InputStatistics(),
    "Comparison": sp.compare(PROFILE, PROFILE), "Trace": sp.trace(TABLE),
}  # fmt: skip


CALLBACKS = {"SignalCallback", "LightningSignalCallback"}  # they import a trainer, and take what it hands them


def good(annotation: str) -> Any:
    return GOOD.get(annotation, [] if annotation.startswith(("Sequence", "tuple")) else {})


def wrong(annotation: str) -> Iterator[Any]:
    """Values that no reader of the annotation would take for right."""
    words = set(annotation.replace("|", " ").replace("[", " ").replace("]", " ").replace(",", " ").split())
    loose = words & {"ArrayLike", "Array", "Any"}
    yield Wrong()
    if "None" not in words:
        yield None
    if not words & {"str", "Path", "Source", "Form", "Fidelity", "Mode", "Literal"} and not loose:
        yield "x"
    if not words & {"int", "float"} and not loose:
        yield 3
    yield b"x"
    yield 1j


def public() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Every position of every public function, constructor and method: its name, what to call, the parameter."""
    for entry in ENTRIES:
        if entry.name in CALLBACKS:
            continue
        item = entry.item
        if inspect.isfunction(item):
            found = [(entry.name, item)]
        elif inspect.isclass(item) and not issubclass(item, Exception):
            own = dataclasses.is_dataclass(item) and entry.name in (*sp.__all__, "Batch")
            found = [(entry.name, item)] if own or hasattr(item.__init__, "__wrapped__") else []
            found += [
                (f"{entry.name}.{name}", getattr(item, name))
                for name, member in vars(item).items()
                if isinstance(member, classmethod | staticmethod) and not name.startswith("_")
            ]
            one = INSTANCES.get(entry.name)
            found += [
                (f"{entry.name}.{name}", getattr(one, name))
                for name, member in vars(item).items()
                if one is not None and inspect.isfunction(member) and not name.startswith("_")
            ]
        else:
            continue
        for name, function in found:
            for key, parameter in inspect.signature(function).parameters.items():
                if parameter.annotation not in ("Any", parameter.empty) and parameter.kind is not parameter.VAR_KEYWORD:
                    yield f"{entry.module}.{name}", function, key


PLACES = list(public())
NAMES = sorted({name for name, _, _ in PLACES})


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_type_is_refused_by_name(name: str) -> None:
    """In every position."""
    for function, key in ((function, key) for other, function, key in PLACES if other == name):
        parameters = inspect.signature(function).parameters
        for value in wrong(str(parameters[key].annotation)):
            positional, named = [], {}
            for other, parameter in parameters.items():
                optional = other != key and parameter.default is not parameter.empty
                if optional or parameter.kind is parameter.VAR_KEYWORD:
                    continue
                given = value if other == key else good(str(parameter.annotation))
                before_others = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
                by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
                if by_place or (before_others and parameter.kind is parameter.POSITIONAL_OR_KEYWORD):
                    positional.append(given)
                else:
                    named[other] = given
            with pytest.raises(InputError, match=r"expected|takes a|no text|unknown scheme") as caught:
                function(*positional, **named)
            check_line(str(caught.value))


def test_every_name_of_the_package_is_tried() -> None:
    tried = {name.removeprefix("signalprop.").partition(".")[0] for name, _, _ in PLACES if name.count(".") < 3}
    values = {"SCHEMES", "InputError", "MissingExtra", "Scheme", *CALLBACKS}
    values |= {"Equivalence"}  # an answer, whose methods take nothing or anything
    assert set(sp.__all__) - values <= tried and len(PLACES) > 150


def test_numbers_of_numpy_are_pythons() -> None:
    import numpy as np

    architecture = sp.Architecture.preset("tgs", n_layers=np.int64(2))
    table = sp.scheme("xavier", gain=np.float64(1))(architecture.replace(seq_len=8))
    assert sp.trace(table, at=[np.int64(1)]).at == (1,)
