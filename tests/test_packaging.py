"""What is shipped: the files of wheel and source distribution, and that both work where the repository is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from email import message_from_string
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="packages are built with what pip install 'signalprop[dev]' brings")

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

PROGRAM = """
import numpy as np
import signalprop as sp
from signalprop.schemes.base import fill

architecture: sp.Architecture = sp.Architecture.preset("tgs", n_layers=4)
table: sp.Parametrization = sp.scheme("deepscalelm", k=3.0)(architecture)
profile: sp.Profile = sp.predict(table)
last: float = profile.forward["stream_out"].variance[-1]
assert profile.gradient is not None
first: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]" = profile.gradient["stream_in"].log_variance
roles = ("query", "key", "value", "output", "up", "down")
own: sp.Parametrization = fill(architecture, sp.scheme("fixed"), dict.fromkeys(roles, 0.5))
print(float(last), first.shape, own.scheme)
"""
MISTAKES = """
import signalprop as sp

architecture = sp.Architecture.preset("tgs", n_layers=4)
sp.predict("tgs", fidelity=3)
sp.scheme("xavier")(architecture).nothing
sp.nothing
"""


def done(
    *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: int = 3600
) -> subprocess.CompletedProcess[str]:
    """A finished process, whatever its status."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def succeeded(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Its standard output."""
    process = done(*command, cwd=cwd, env=env)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def build(project: Path, out: Path, *targets: str) -> None:
    """Packages of a project, without isolation: nothing is downloaded."""
    chosen = [part for target in targets for part in ("--target", target)]
    succeeded(sys.executable, "-m", "hatchling", "build", "--directory", out, *chosen, cwd=project)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution of the working tree."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "wheel", "sdist")
    return out


@pytest.fixture(scope="session")
def wheel(packages: Path) -> Path:
    (found,) = packages.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def sdist(packages: Path) -> Path:
    (found,) = packages.glob("*.tar.gz")
    return found


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    found = contents(wheel)
    package = {name for name in found if ".dist-info/" not in name}
    expected = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.glob("signalprop*/**/*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert package == expected
    assert {"signalprop/py.typed", "signalprop_lab/training/recipes/gpt-small.yaml"} < package
    assert "signalprop/report/page.css" in package
    assert next(name for name in found if name.endswith("/LICENSE"))


def test_its_metadata(wheel: Path) -> None:
    data = next(data for name, data in contents(wheel).items() if name.endswith("/METADATA"))
    metadata = message_from_string(data.decode())
    assert (metadata["Name"], metadata["Version"]) == ("signalprop", PROJECT["version"])
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[><= ]", line)[0] for line in needed) == [
        "numpy",
        "pydantic",
        "rich",
        "safetensors",
        "typer",
    ]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_the_changelog_is_about_this_version_and_its_formats() -> None:
    import signalprop

    assert signalprop.__version__ == PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[?(\d[\w.]*)", changelog, re.MULTILINE)[0] == PROJECT["version"]
    listed = changelog.split("### File formats")[1].split("###")[0]
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCE.glob("signalprop*/**/*.py"))
    found = {
        (name, number)
        for number, names in re.findall(r"`signalprop/NAME/(\d+)`: ([^;.]+)[;.]", listed)
        for name in re.findall(r"`([\w-]+)`", names)
    }
    assert len(found) > 15 and found == set(re.findall(r'"signalprop/([\w-]+)/(\d+)"', code))


def test_the_source_distribution_is_lean_and_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    succeeded("tar", "-xzf", sdist, cwd=tmp_path)
    (project,) = tmp_path.iterdir()
    beside = {path.name for path in project.iterdir()} - {".gitignore", "PKG-INFO"}
    assert beside == {"src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    build(project, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert contents(again) == contents(wheel)


def environment(folder: Path, *requirements: str | Path) -> tuple[Path, dict[str, str]]:
    """The programs of a new virtual environment, and variables that hide this repository from them."""
    python = getattr(sys, "_base_executable", sys.executable)
    succeeded(python, "-m", "venv", folder, cwd=folder.parent)
    programs = folder / "bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints-dev.txt"]
    succeeded(*install, *requirements, cwd=folder.parent)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return programs, clean | {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_predicts_in_an_empty_environment(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    package: Path = request.getfixturevalue(kind)
    programs, env = environment(tmp_path / "venv", package)
    command = programs / "signalprop"
    where = succeeded(programs / "python", "-c", "import signalprop; print(signalprop.__file__)", cwd=tmp_path, env=env)
    assert where.startswith(str(tmp_path))
    listed = succeeded(programs / "python", "-m", "pip", "list", "--format=json", cwd=tmp_path, env=env)
    assert not {"torch", "transformers", "matplotlib"} & {item["name"] for item in json.loads(listed)}

    assert "predict" in succeeded(command, "--help", cwd=tmp_path, env=env)
    assert succeeded(command, "--version", cwd=tmp_path, env=env) == f"signalprop {PROJECT['version']}\n"
    tour = ("predict", "tgs", "--layers", "192", "--norm", "post", "--scheme", "xavier")
    assert "6.416e-06" in succeeded(command, *tour, cwd=tmp_path, env=env)
    assert "deepscalelm" in succeeded(command, "schemes", cwd=tmp_path, env=env)
    lacking = done(command, "compare", "tgs", cwd=tmp_path, env=env)
    assert (lacking.returncode, lacking.stderr.count("\n")) == (2, 1)
    assert "pip install 'signalprop[models]'" in lacking.stderr


@pytest.mark.slow
def test_types_are_shipped(wheel: Path, tmp_path: Path) -> None:
    """mypy --strict takes a right program that uses the installed wheel, and says what is wrong with another."""
    programs, env = environment(tmp_path / "venv", wheel)
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", programs / "python", "--config-file", "")
    assert "Success" in succeeded(*mypy, "program.py", cwd=tmp_path, env=env)
    assert succeeded(programs / "python", "program.py", cwd=tmp_path, env=env).endswith("(8,) fixed\n")
    wrong = done(*mypy, "mistakes.py", cwd=tmp_path, env=env)
    assert wrong.returncode == 1
    assert [line.split(":")[1] for line in wrong.stdout.splitlines()[:-1]] == ["5", "6", "7"]


@pytest.mark.slow
def test_the_demo_works_with_its_extras(wheel: Path, tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^DEMO := (.+)$", makefile, re.MULTILINE)
    programs, env = environment(tmp_path / "venv", f"{wheel}[models,report]")
    command = (
        programs / "signalprop",
        "compare",
        *found.group(1).split(),
        "--json",
        "demo.json",
        "--plot",
        "demo.html",
    )
    shown = succeeded(*command, cwd=tmp_path, env=env)
    assert re.search(r"^forward variance +0\.99", shown, re.MULTILINE)
    assert json.loads((tmp_path / "demo.json").read_text())["schema"] == "signalprop/comparison/1"
    assert (tmp_path / "demo.html").stat().st_size > 100_000
