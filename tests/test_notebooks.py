"""The notebooks of examples/: run from top to bottom they show what is stored in them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from signalprop.schemes import SCHEMES

notebooks = pytest.importorskip("benchmarks.notebooks")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# Those that import transformers, or draw: seconds.
SLOW = ("my-checkpoint", "repair-my-model", "will-it-train")


def outputs(notebook: dict[str, Any]) -> list[str]:
    """What every code cell prints and shows, as text."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    parts = [item.get("text", item.get("data", {}).get("text/plain")) for cell in cells for item in cell["outputs"]]
    return ["".join(lines) for lines in parts]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in notebooks.names()]
)
def test_a_notebook_shows_what_it_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words to the letter; numbers but for the rounding of another processor."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signalprop.schemes.base.SCHEMES", dict(SCHEMES))  # a scheme that it adds stays there
    found, kept = outputs(notebooks.executed(name)), outputs(notebooks.stored(name))
    assert kept
    assert [NUMBER.sub("#", text) for text in found] == [NUMBER.sub("#", text) for text in kept]
    for new, old in zip(found, kept, strict=True):
        numbers = [[float(x) for x in NUMBER.findall(text)] for text in (new, old)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=1e-6), new


@pytest.mark.parametrize("name", notebooks.names())
def test_its_first_cell_installs_from_the_clone_or_the_index(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing where signalprop is; else the clone that the notebook is in, or the index, with extras that exist."""
    first = "".join(next(cell["source"] for cell in notebooks.stored(name)["cells"] if cell["cell_type"] == "code"))
    project = tomllib.loads((notebooks.FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    exec(first, {})
    assert calls == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for folder, source in ((notebooks.FOLDER, str(notebooks.FOLDER.parent)), (tmp_path, project["name"])):
        monkeypatch.chdir(folder)
        exec(first, {})
        *command, asked = calls.pop()
        found, _, extras = asked.partition("[")
        assert (command[1:], found) == (["-m", "pip", "install", "--quiet"], source)
        assert set(filter(None, extras.removesuffix("]").split(","))) <= set(project["optional-dependencies"])
