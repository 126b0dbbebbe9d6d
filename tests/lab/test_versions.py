"""docs/versions.md and its records: the tests that were run exist, and `lowest` means what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from benchmarks.versions import ENVIRONMENTS, GROUPS, PAGE, RECORDS, page

from signalprop.files.storage import read_json

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOUND = {name: read_json(path) for name in ENVIRONMENTS if (path := RECORDS / f"{name}.json").exists()}


def test_the_page_is_that_of_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == "\n".join(page(FOUND)) + "\n"
    assert "lowest" in FOUND


@pytest.mark.parametrize("group", GROUPS)
def test_the_tests_that_it_runs_exist(group: str) -> None:
    paths = [word for word in GROUPS[group].split() if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_the_lowest_versions_are_the_lower_bounds() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, environment in ENVIRONMENTS.items():
        if environment.resolution != "highest":
            lines = [*PROJECT["dependencies"], *extras["models"], *(extras["training"] if environment.trains else [])]
            bounds = dict(match.groups() for line in lines if (match := re.fullmatch(r"([\w-]+)>=([\d.]+)", line)))
            found = FOUND[name]["versions"]
            assert {"torch", "transformers", "numpy"} <= bounds.keys() & found.keys()
            for package in bounds.keys() & found.keys():
                assert f"{found[package]}.".startswith(f"{bounds[package]}."), (name, package)


def test_every_python_that_is_classified_was_tested() -> None:
    stated = {item.rsplit(" ", 1)[1] for item in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", item)}
    assert stated == {record["versions"]["Python"].rpartition(".")[0] for record in FOUND.values()}
