"""CONTRIBUTING.md, followed to the letter in a copy of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(.*?)^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w/]+\.py)`:\s*\Z")
BELOW = re.compile(r"`((?:docs|tests)/[\w./-]+)`,\s+below the row that begins\s+with\s+``(.+?)``:\s*\Z")


@dataclass(frozen=True)
class Step:
    """One block of the guide: its language, its text, and the words before it."""

    language: str
    text: str
    before: str


def steps(title: str) -> Iterator[Step]:
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert section is not None, title
    for before, language, text in BLOCK.findall(section[1]):
        yield Step(language, text, before)


ADD_A_SCHEME = tuple(steps("Add a scheme"))
ADD_A_KIND = tuple(steps("Add a kind of sublayer"))
ADD_A_FAMILY = tuple(steps("Add a family of transformers"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the repository holds, without what was made of it."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "out", "dist", "build", "gallery", "pictures")
    return Path(shutil.copytree(ROOT, tmp_path / "signalprop", ignore=left_out))


def run(line: str, copy: Path) -> str:
    """What a command prints, with the copy in place of the installed package."""
    words = shlex.split(line)
    command = {"signalprop": [sys.executable, "-m", "signalprop"], "python": [sys.executable]}[words[0]]
    env = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [*command, *words[1:]], cwd=copy, env=env, capture_output=True, text=True, timeout=3600, check=False
    )
    assert process.returncode == 0, f"{line}\n{process.stdout[-3000:]}{process.stderr[-3000:]}"
    return process.stdout


def write(step: Step, copy: Path) -> None:
    """The file that a block of Python is the text of, which is new."""
    named = FILE.search(step.before)
    path = copy / named[1]
    path.parent.mkdir(exist_ok=True)
    assert not path.exists()
    path.write_text(step.text, encoding="utf-8")


def insert(step: Step, copy: Path) -> None:
    """Rows below the one that the guide names."""
    named = BELOW.search(step.before)
    assert named is not None, step.before
    path = copy / named[1]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if line.strip().startswith(named[2].strip())]
    path.write_text("".join([*lines[: at + 1], step.text, *lines[at + 1 :]]), encoding="utf-8")


def follow(step: Step, copy: Path) -> list[str]:
    """Do what a block says; what its commands print."""
    if step.language == "sh":
        return [run(line, copy) for line in step.text.splitlines()]
    if step.language in ("markdown", "text"):
        insert(step, copy)
    elif step.language == "python" and FILE.search(step.before):
        write(step, copy)
    elif step.language == "python":
        (copy / "typed.py").write_text(step.text, encoding="utf-8")
        return [run("python typed.py", copy)]
    else:
        assert step.language == "console"  # what takes long, or is this very suite
    return []


def test_a_new_file_is_a_new_scheme(copy: Path) -> None:
    """The first two steps of the guide: nothing but the new file has to know the scheme."""
    write(ADD_A_SCHEME[0], copy)
    assert ADD_A_SCHEME[1].language == "sh"
    predict, table, _ = ADD_A_SCHEME[1].text.splitlines()
    assert re.search(r"^stream, first/last +variance 1\.000 -> 67\.1", run(predict, copy), re.MULTILINE)
    assert re.search(r"query 0\.0625 .*down\s+0\.03125", run(table, copy), re.DOTALL)


@pytest.mark.slow
def test_the_guide_to_a_family_works_as_typed(copy: Path) -> None:
    """It is read, predicted, measured, applied, checked and folded; the differential tests run for it, and pass."""
    printed, *_, tests = [text for step in ADD_A_FAMILY for text in follow(step, copy)]
    told = dict(line.split(": ") for line in printed.splitlines())
    assert {told[name] for name in ("parameters", "initialisation", "applied", "folded")} == {"True"}
    predicted, measured = (float(number) for number in told["variance"].split())
    assert measured == pytest.approx(predicted, rel=0.15)
    passed = re.search(r"^=*\s*(\d+) passed", tests, re.MULTILINE)
    assert passed is not None and int(passed[1]) >= 10


@pytest.mark.slow
def test_the_guide_works_as_typed(copy: Path) -> None:
    """All of it, the tests that it runs and the pages that it writes included."""
    printed = [text for step in ADD_A_SCHEME for text in follow(step, copy)]
    passed = [int(match[1]) for text in printed if (match := re.search(r"^=+ (\d+) passed", text, re.MULTILINE))]
    assert any(re.search(r"^bamboo .*^lecun ", text, re.MULTILINE | re.DOTALL) for text in printed)
    assert len(passed) == 3 and passed[1] > 15  # every family
    growth = (copy / "records" / "growth.md").read_text(encoding="utf-8")
    assert "| `lecun` | pre | O(N^1.00) | O(N^0.86) | O(log N) | O(1) |" in growth
    assert "| `lecun` | post |" in growth


@pytest.mark.slow
def test_a_new_folder_is_a_new_kind_of_sublayer(copy: Path) -> None:
    """Its whole guide: predicted, built, measured, applied, counted, printed and verified like the others."""
    *_, looked, verified = [text for step in ADD_A_KIND for text in follow(step, copy)]
    told = dict(line.split(": ") for line in looked.splitlines())
    assert [told[name] for name in ("table", "settings", "parameters", "operations")] == ["True"] * 4
    assert told["applied"] == "True True"
    # nats of variance, over all sublayers: attention and feed-forwards of the same network are as far off
    for fidelity in ("moments", "kernel"):
        assert all(float(error) < 0.2 for error in told[fidelity].split())
    assert verified.count("short convolution sublayer") == 4 and "wrong" not in verified


def test_no_file_is_longer_than_400_lines() -> None:
    files = [file for room in ("src", "tests", "benchmarks") for file in (ROOT / room).rglob("*.[pj][ys]")]
    assert len(files) > 500
    assert [file.name for file in files if len(file.read_text(encoding="utf-8").splitlines()) > 400] == []
