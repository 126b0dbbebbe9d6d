"""The public interface: `__all__` of the public modules against docs/api.md, and what the docstrings say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import signalprop

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|autofunction|autoclass|autoexception|py:data):: (\S+)((?:\n +:.*)*)", re.M
)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Documented:
    """One entry of the page. members: None, or the names that the page asks for ("": all of them)."""

    module: str
    name: str
    members: str | None

    @property
    def item(self) -> Any:
        return getattr(import_module(self.module), self.name)


def documented() -> Iterator[Documented]:
    """The entries of the page, in its order."""
    module = ""
    for kind, target, options in DIRECTIVE.findall(PAGE):
        if kind == "currentmodule":
            module = target
        else:
            home, _, name = target.rpartition(".")
            members = re.search(r":members:(.*)", options)
            yield Documented(home or module, name, None if members is None else members[1].strip())


ENTRIES = tuple(documented())
MODULES = sorted({entry.module for entry in ENTRIES})


@pytest.mark.parametrize("module", MODULES)
def test_what_is_public_is_documented_and_what_is_documented_is_public(module: str) -> None:
    home = import_module(module)
    listed = home.__all__
    assert len(set(listed)) == len(listed)
    shown = {entry.name for entry in ENTRIES if entry.module == module}
    assert shown <= set(listed)
    everywhere = {id(entry.item) for entry in ENTRIES}
    missing = [
        name for name in listed if name not in shown and id(getattr(import_module(module), name)) not in everywhere
    ]
    assert missing == []


def test_every_public_name_has_an_example_that_is_run() -> None:
    """In a Python block of a page, of the README or of CONTRIBUTING; the tests of those pages run them.

    Lightning is not installed for the tests: its callback has its example in the docstring, and tests of its own.
    """
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    examples = "".join(block for page in pages for block in PYTHON.findall(page.read_text(encoding="utf-8")))
    assert [entry.name for entry in ENTRIES if not re.search(rf"\b{entry.name}\b", examples)] == [
        "LightningSignalCallback"
    ]


def members_of(entry: Documented) -> Iterator[tuple[str, Any]]:
    """Functions of an entry: itself, or the methods and properties that the page shows."""
    item = entry.item
    if inspect.isfunction(item):
        yield entry.name, item
    elif inspect.isclass(item) and entry.members is not None:
        wanted = re.split(r"[, ]+", entry.members) if entry.members else list(vars(item))
        for name in wanted:
            member = vars(item)[name]
            found = getattr(member, "__func__", getattr(member, "fget", member))
            if not name.startswith("_") and inspect.isfunction(found):
                yield f"{entry.name}.{name}", found


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_say_what_goes_in_what_goes_wrong_and_what_the_fields_are(module: str) -> None:
    for entry in (entry for entry in ENTRIES if entry.module == module):
        for name, function in members_of(entry):
            text = inspect.getdoc(function)
            assert text, f"{name}: no docstring"
            assert text.split("\n\n")[0].rstrip().endswith((".", ":", ")")), f"{name}: the first sentence has no end"
            parameters = [key for key in inspect.signature(function).parameters if key not in ("self", "cls")]
            assert [key for key in parameters if not re.search(rf"\b{key}\b", text)] == [], name
            assert "raise InputError" not in inspect.getsource(function) or "Raises:" in text, name
        if inspect.isclass(item := entry.item):
            text = inspect.getdoc(item)
            assert text and text != inspect.getdoc(object), entry.name
            fields = [field.name for field in dataclasses.fields(item)] if dataclasses.is_dataclass(item) else []
            fields += list(getattr(item, "model_fields", {}))
            assert [key for key in fields if not key.startswith("_") and not re.search(rf"\b{key}\b", text)] == []


def test_the_pages_import_what_is_public() -> None:
    public = {id(entry.item) for entry in ENTRIES}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for code in PYTHON.findall(page.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "signalprop":
                    module = import_module(str(node.module))
                    hidden = [item.name for item in node.names if id(getattr(module, item.name)) not in public]
                    assert hidden == [], page
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sp":
                    assert node.attr in signalprop.__all__, f"{page}: sp.{node.attr}"


def test_all_names_of_the_package_come_when_they_are_asked_for() -> None:
    assert set(signalprop.__all__) == set(dir(signalprop))
    code = (
        "import sys, signalprop\n"
        "assert set(signalprop.__all__) <= set(dir(signalprop))\n"
        "import signalprop.schemes, signalprop.diagnosis, signalprop_lab.studies.growth, signalprop.theory.bounds\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'plotly', 'scipy', 'pandas', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    light = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (light.returncode, light.stdout) == (0, "[]\n"), light.stderr
    names: dict[str, Any] = {}
    exec("from signalprop import *", names)
    assert set(signalprop.__all__) == set(names) - {"__builtins__"}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = signalprop.nothing
