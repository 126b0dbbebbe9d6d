"""constraints-dev.txt: complete, in agreement with every bound, and what this environment and the Makefile take."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LINES = [line for line in (ROOT / "constraints-dev.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
PINS = dict(line.split("==") for line in LINES)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def needed(extra: str) -> list[Requirement]:
    """What an extra of this project asks for, with the extras of its own that it names."""
    found = [*map(Requirement, PROJECT["dependencies"])]
    for item in map(Requirement, PROJECT["optional-dependencies"][extra]):
        found += [r for name in item.extras for r in needed(name)] if item.name == PROJECT["name"] else [item]
    return found


def closure(extra: str) -> Iterator[tuple[str, Requirement]]:
    """Everything that an extra brings here, each with who asks for it."""
    waiting = [(PROJECT["name"], item) for item in needed(extra)]
    seen = set()
    while waiting:
        asker, item = waiting.pop()
        if (asker, str(item)) in seen:
            continue
        seen.add((asker, str(item)))
        yield asker, item
        for line in distribution(item.name).requires or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": name}) for name in ("", *item.extras)):
                waiting.append((item.name, inner))


def test_all_that_is_installed_for_development_is_in_it_and_keeps_every_bound_of_everybody() -> None:
    brought = {canonicalize_name(item.name) for _, item in closure("dev")}
    assert len(brought) > 100 and brought <= PINS.keys()
    broken = [
        f"{asker} asks for {item}, not {PINS[name]}"
        for asker, item in closure("dev")
        if not item.specifier.contains(PINS[name := canonicalize_name(item.name)], prereleases=True)
    ]
    assert broken == []


def test_this_environment_is_made_of_it() -> None:
    """Where it is not: `make test` in a clone without .venv."""
    held = {name: version(name).partition("+")[0] for name in {canonicalize_name(r.name) for _, r in closure("dev")}}
    assert {name: held[name] for name in held if held[name] != PINS[name]} == {}


@pytest.mark.parametrize("target", ["demo", "test", "docs"])
def test_make_installs_exact_versions_in_a_folder_whose_path_has_spaces(target: str, tmp_path: Path) -> None:
    """With programs that only write down with what they were called."""
    folder = tmp_path / "a b 'c'"
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("Makefile", "constraints-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("python", "ruff", "mypy", "lint-imports", "signalprop"):
        (programs / name).write_text('#!/bin/sh\necho "$0 $*" "[$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT]" >> called\n')
        (programs / name).chmod(0o755)
    env = {"PATH": os.environ["PATH"]}
    made = subprocess.run(["make", target], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stderr) == (0, "")
    first, *others = (folder / "called").read_text().splitlines()
    assert "-m pip install" in first and first.endswith("[constraints-dev.txt constraints-dev.txt]")
    assert others and not [line for line in others if "pip" in line]
