"""The public interface: `__all__` of the public modules against docs/api.md, and what the docstrings say."""

from __future__ import annotations

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


def test_all_names_of_the_package_come_when_they_are_asked_for() -> None:
    assert set(signalprop.__all__) == set(dir(signalprop))
    code = (
        "import sys, signalprop\n"
        "assert set(signalprop.__all__) <= set(dir(signalprop))\n"
        "import signalprop.schemes, signalprop.diagnosis, signalprop_lab.studies.growth, signalprop.theory.bounds\n"
        "from signalprop.network.duals import _table; assert _table.cache_info().currsize == 0\n"
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
