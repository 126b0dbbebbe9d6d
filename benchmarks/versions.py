"""The tests that touch other packages, under the lowest and the newest versions of those: docs/versions.md.

    python -m benchmarks.versions                  # all environments (hours: each installs PyTorch, gigabytes of it)
    python -m benchmarks.versions lowest 3.13      # some; the page takes the others from the record
    python -m benchmarks.versions --page           # only the page

Needs `uv` on the path, which makes the environments and finds the Pythons that are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from signalprop.files.storage import read_json, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "versions"
PAGE = ROOT / "docs" / "versions.md"
SCHEMA = "signalprop/versions/1"
PACKAGES = ("torch", "transformers", "numpy", "pydantic", "typer", "scikit-learn", "accelerate", "peft", "optuna")
EXTRAS = "models,report,explore,diagnose"
TESTING = ("accelerate>=1.3", "tensorboard>=2.17", "pyarrow>=17",
           "pytest>=8.2", "hypothesis>=6.100", "mpmath>=1.3", "dks>=0.1.2", "absl-py>=2", "lightning>=2.4",
           "datasets>=2.19", "httpx2>=2", "hatchling>=1.25")  # fmt: skip
VERSIONS = """
import json, sys
from importlib.metadata import distributions
held = {item.metadata["Name"]: item.version for item in distributions()}
print(json.dumps({"Python": sys.version.split()[0]} | {name: held.get(name, "none") for name in sys.argv[1:]}))
"""


@dataclass(frozen=True)
class Environment:
    """Where tests run.

    python: its version. resolution: uv's word for which versions of packages it takes. trains: whether it has the
    extra `training`, which needs a newer transformers than the others.
    """

    python: str
    resolution: str
    trains: bool = True


ENVIRONMENTS = {
    "lowest": Environment("3.11", "lowest-direct", trains=False),
    "lowest-training": Environment("3.11", "lowest-direct"),
    "3.12": Environment("3.12", "highest"),
    "3.13": Environment("3.13", "highest"),
}
RECIPES = "recipes, checkpoints"  # needs the extra `training`
GROUPS = {
    "command line": "tests/cli/test_process.py",
    "schemes": "tests/schemes/test_registry.py tests/schemes/test_deepscalelm.py",
    "tables, configurations, data": "tests/network/test_parametrization.py tests/test_hf_configs.py tests/data/test_batches.py",
    "reference models against transformers": "tests/models/test_families.py",
    "probes, every family": "tests/measurement/test_measure_families.py tests/measurement/test_reading.py",
    "torch.compile": "tests/models tests/measurement -k 'compiled or compiles_to_one_graph'",
    "applied against built": "tests/repair/test_equal_to_built.py -k 'in_single and (admin or e-spa or t-fixup)'",
    "saving, folding": "tests/repair/test_saving.py tests/repair/test_folding.py -k 'save or deepscalelm-simple'",
    RECIPES: "tests/lab/training/test_recipes.py tests/lab/training/test_checkpoints.py",
    "monitoring": "tests/monitoring",
    "report": "tests/report/test_html.py tests/report/test_plots.py",
    "diagnosis": "tests/diagnosis",
}


def prepared(folder: Path, environment: Environment) -> Path:
    """The Python of an environment, which is made where it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        if shutil.which("uv") is None:
            raise SystemExit("this needs uv, which makes the environments: pip install uv")
        make = ["uv", "venv", "--quiet", "--python", environment.python, str(folder)]
        subprocess.run(make, check=True, cwd=ROOT)
        install = ["uv", "pip", "install", "--quiet", "--python", str(python), "--resolution", environment.resolution]
        extras = f".[{EXTRAS},training]" if environment.trains else f".[{EXTRAS}]"
        subprocess.run([*install, "--editable", extras, *TESTING], check=True, cwd=ROOT)
    return python


def versions(python: Path) -> dict[str, str]:
    """What an environment holds."""
    found = subprocess.run(
        [python, "-c", VERSIONS, *PACKAGES], check=True, capture_output=True, text=True, cwd=ROOT / "docs"
    )
    return dict(json.loads(found.stdout))


def outcome(python: Path, arguments: str) -> dict[str, Any]:
    """Counts of tests by what became of them, and the names of those that failed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    # what one package of some version says about another's next is nobody's fault
    command = f"{python} -m pytest -q -p no:cacheprovider -W ignore::DeprecationWarning {arguments}"
    text = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, check=False).stdout
    last = text.rstrip().splitlines()[-1] if text.strip() else ""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    return {"counts": counts, "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)}


def shown(result: Mapping[str, Any] | None) -> str:
    """A cell of the table."""
    if result is None:
        return "not run"
    return ", ".join(f"{n} {word}" for word, n in result["counts"].items()) or "none ran"


INTRODUCTION = """\
# Versions

Python 3.11, 3.12 and 3.13; PyTorch 2.6 or newer; transformers 4.51 or newer, and 5.3 or newer for `train` and `sweep`,
which go through its Trainer. CI runs all tests on Python 3.11 with the newest packages and the PyTorch of
`constraints-dev.txt`. This page is about the ends of the range, each in an environment of its own: `python -m
benchmarks.versions` makes them, runs the tests that touch other packages, and writes this page. Those called `lowest`
have the lowest version of every package that `pyproject.toml` names, with and without the extra `training`, the others
the newest there were.
"""


def page(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of docs/versions.md."""
    head = ["| | " + " | ".join(records) + " |", "| --- |" + " --- |" * len(records)]
    yield INTRODUCTION
    yield from head
    for package in ("Python", *PACKAGES):
        yield f"| {package} | " + " | ".join(record["versions"][package] for record in records.values()) + " |"
    yield from ("", "What became of the tests:", "", *head)
    for group in GROUPS:
        yield f"| {group} | " + " | ".join(shown(record["results"].get(group)) for record in records.values()) + " |"
    for name, record in records.items():
        for result in record["results"].values():
            yield from (f"\n* {name} fails `{test}`" for test in result["failed"])


def write_page() -> None:
    """docs/versions.md from the records there are."""
    paths = {name: RECORDS / f"{name}.json" for name in ENVIRONMENTS}
    write_text(PAGE, "\n".join(page({name: read_json(path) for name, path in paths.items() if path.exists()})) + "\n")


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; default: all")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "versions", help="where environments lie")
    given = parser.parse_args()
    RECORDS.mkdir(exist_ok=True)
    for name in [] if given.page else given.names or ENVIRONMENTS:
        python = prepared(given.folder / name, ENVIRONMENTS[name])
        record: dict[str, Any] = {"schema": SCHEMA, "versions": versions(python), "results": {}}
        for group, arguments in GROUPS.items():
            if group == RECIPES and not ENVIRONMENTS[name].trains:
                continue
            record["results"][group] = outcome(python, arguments)
            print(
                name,
                group,
                shown(record["results"][group]),
                *record["results"][group]["failed"],
                sep="\n  ",
                flush=True,
            )
            write_json(RECORDS / f"{name}.json", record)
    write_page()


if __name__ == "__main__":
    main()
