"""What the documentation tells users to type does what it says.

Every fenced block of README.md and docs/ is run, read by what it is for, or named in NOT_RUN with the reason; a new
block that is none of these fails a test.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import typer.main
import yaml

from signalprop.cli import all_commands, command_line, run
from signalprop.schemes import SCHEMES

ROOT = Path(__file__).parent.parent
DOCS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
PAGES = ["README.md", *DOCS]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[\w-]+)?\)")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")

# Pages that take more than five seconds of a core, or start processes: `make test-slow` runs them.
SLOW = {"README.md"} | {
    f"docs/{name}.md" for name in ("api", "applying", "cli", "diagnosing", "tour", "training", "will-it-train")
}
# Pages that have to work in an empty directory; the others find what docs/index.md tells to make.
FROM_NOTHING = {"docs/index.md", "docs/tour.md"}
# Blocks that are not run, by their page and how they begin, and why.
_INSTALLS = "installs packages; make test and make demo are what CI and newcomers run"
_CLUSTER = "needs eight GPUs, or several machines; test_commands_in_the_text_exist reads recipe and settings"
NOT_RUN = {
    ("README.md", "make demo"): _INSTALLS,
    ("README.md", "layer  variance"): "output of make demo: test_the_demo_prints_what_the_readme_shows",
    (
        "docs/measuring.md",
        "signalprop explore",
    ): "serves until Ctrl-C; tests/lab/explorer starts it and drives its page",
    ("docs/tour.md", "git clone"): _INSTALLS,
    ("docs/index.md", "pip install"): _INSTALLS,
    ("docs/monitoring.md", "step 15:"): "a warning of a run that is sick; tests/monitoring/test_bands.py makes some",
    ("docs/monitoring.md", "step 102:"): "a warning of a loss that jumped; tests/monitoring/test_faults.py makes some",
    ("docs/training.md", "torchrun --nproc-per-node 8"): _CLUSTER,
    ("docs/training.md", "signalprop train llama-small"): "minutes; tests/lab/training/test_recipes.py shortens it",
    ("docs/training.md", "signalprop train gpt-small"): "minutes, and a kill; tests/lab/training/test_resume.py",
    ("docs/training.md", "the loss is not finite"): "of a run that diverges; tests/lab/training/test_divergence.py",
}


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(page, *found) for found in FENCE.findall((ROOT / page).read_text(encoding="utf-8"))]


ALL = [block for page in PAGES for block in blocks(page)]


def named(block: Block) -> set[tuple[str, str]]:
    """The entries of NOT_RUN that mean it."""
    return {(page, start) for page, start in NOT_RUN if page == block.page and block.text.startswith(start)}


def runs(block: Block) -> bool:
    """Is it run, or read, by `test_a_page_works_as_typed`?"""
    return block.language in RUN and not named(block)


class Reader:
    """Somebody who types a page's blocks one after the other, in the current directory."""

    def __init__(self, page: str, output: Callable[[], pytest.CaptureResult[str]]) -> None:
        self.page, self.output = page, output
        self.module = ModuleType("page_of_the_documentation")
        self.printed = ""  # by the last block that was run

    def sh(self, text: str) -> None:
        self.printed = ""
        for line in filter(None, text.splitlines()):
            program, *words = shlex.split(line, comments=True)
            if program == "torchrun":
                command = [sys.executable, "-m", "torch.distributed.run", *words]
                environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
                status, found, told = done.returncode, done.stdout, done.stderr
            else:
                assert program == "signalprop", f"{self.page}: {line}: a block of language console is not run"
                status, (found, told) = run(words), self.output()
            assert status == 0 and found, f"{self.page}: {line}: {told}"
            self.printed += found

    def python(self, text: str) -> None:
        exec(compile(text, self.page, "exec"), vars(self.module))
        self.printed, _ = self.output()

    def text(self, text: str) -> None:
        """Every line was printed by the block before; numbers may differ by rounding."""
        printed = [(numberless(line), numbers(line)) for line in self.printed.splitlines()]
        for line in re.sub(r"\n {20}", " ", text).splitlines():  # a page shows a line as a terminal wraps it
            alike = [found for words, found in printed if words == numberless(line)]
            assert any(found == pytest.approx(numbers(line), rel=1e-6) for found in alike), f"{self.page}: {line}"

    def yaml(self, text: str) -> None:
        from signalprop_lab.training.grid import load_sweep
        from signalprop_lab.training.recipe import load_recipe
        from signalprop_lab.training.sweep_definition import SCHEMA

        file = Path("block.yaml")
        file.write_text(text, encoding="utf-8")
        if yaml.safe_load(text).get("schema") == SCHEMA:
            assert load_sweep(file).cells
        else:
            assert load_recipe(file).name == yaml.safe_load(text)["name"]


RUN: dict[str, Callable[[Reader, str], None]] = {
    "sh": Reader.sh,
    "python": Reader.python,
    "": Reader.text,
    "text": Reader.text,
    "yaml": Reader.yaml,
}


def numberless(line: str) -> str:
    return NUMBER.sub("#", line)


def numbers(line: str) -> list[float]:
    return [float(found.replace(",", "")) for found in NUMBER.findall(line)]


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what docs/index.md tells to make for trying the examples."""
    monkeypatch.chdir(tmp_path)
    made = [block.text for block in blocks("docs/index.md") if block.language == "python"]
    assert len(made) == 1
    exec(compile(made[0], "docs/index.md", "exec"), {})
    assert {"my-checkpoint", "book.txt"} <= {path.name for path in tmp_path.iterdir()}
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in PAGES
        if any(runs(block) for block in blocks(page))
    ],
)
def test_a_page_works_as_typed(
    page: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Block after block, in one directory; what the page shows as output was printed by the block before."""
    monkeypatch.chdir(tmp_path if page in FROM_NOTHING else request.getfixturevalue("examples"))
    monkeypatch.setattr("signalprop.schemes.base.SCHEMES", dict(SCHEMES))  # a scheme that a page adds stays there
    capsys.readouterr()
    reader = Reader(page, capsys.readouterr)
    monkeypatch.setitem(sys.modules, reader.module.__name__, reader.module)  # dataclasses look their module up
    for block in blocks(page):
        if runs(block):
            RUN[block.language](reader, block.text)


def test_every_block_is_run_or_named() -> None:
    """A new block has to be of a language that is run, or to stand in NOT_RUN with a reason."""
    loose = [block for block in ALL if not (runs(block) or named(block))]
    assert [block for block in loose if not block.language.startswith("{")] == []  # what Sphinx reads: test_site.py
    assert set(NOT_RUN) == set().union(*map(named, ALL)), "no such block any more"
    for page in PAGES:  # an indented block, or one that is not closed, would be read by nobody here
        assert (ROOT / page).read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), page


# --- commands and names in the text -----------------------------------------------------------------------------------

COMMANDS = typer.main.get_command(command_line(all_commands())).commands  # type: ignore[attr-defined]
INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


def typed() -> list[tuple[str, str]]:
    """Commands that a page names in its text, or in a block that is not run."""
    found = []
    for page in PAGES:
        text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
        found += [(page, " ".join(code.split())) for code in INLINE.findall(text)]
    found += [(block.page, line) for block in ALL if not runs(block) for line in block.text.splitlines()]
    return [(page, line) for page, line in found if re.search(r"(?:^|-m )signalprop [a-z]", line)]


def test_commands_in_the_text_exist() -> None:
    """Names of commands, their options, and the recipes with the fields that `train` is given."""
    from signalprop_lab.training.recipe import load_recipe

    found = typed()
    assert len(found) > 30
    for page, line in found:
        name, *words = shlex.split(line.split("signalprop ", 1)[1], comments=True)
        assert name in COMMANDS, f"{page}: {line}"
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts} | {"--help"}
        assert [word for word in words if word.startswith("--") and word not in known] == [], f"{page}: {line}"
        if name == "train" and words and re.fullmatch(r"[a-z][\w-]*", words[0]):  # the name of a recipe, no file
            settings = [value for word, value in pairwise(words) if word == "--set"]
            assert load_recipe(words[0], settings).name, f"{page}: {line}"


def test_extras_and_targets_in_the_text_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        extras = {extra for names in re.findall(r"signalprop\[([\w,]+)\]", text) for extra in names.split(",")}
        assert extras <= set(project["optional-dependencies"]), page
        assert set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)) <= targets, page


def _module(name: str) -> object:
    """Of the library, or of the laboratory."""
    try:
        return import_module(f"signalprop.{name}")
    except ModuleNotFoundError:
        return import_module(f"signalprop_lab.{name}")


def test_what_pages_name_is_there() -> None:
    """Tests, files, and scripts that `python -m` runs; on pages of the papers functions of a table's last column.

    Sphinx checks the links of the pages, not those of the README, the records and the tests' README.
    """
    tests = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    known = set(re.findall(r"(?:def|class) (\w+)", "".join(tests.values()))) | set(tests)
    beside = ["README.md", "tests/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    beside += [path.relative_to(ROOT).as_posix() for path in (ROOT / "records").rglob("*.md")]
    named, links, functions = [], [], []
    for page in (*PAGES, *beside[1:]):
        text = (ROOT / page).read_text(encoding="utf-8")
        if not page.startswith(("records", "CH", "CON")):
            of_tests = re.findall(r"\btests/[\w/]+\.py|(?<=`)test_\w+(?=`)|(?<=`)Test\w+(?=`)|(?<=::)\w+", text)
            assert set(of_tests) - known == set(), page
            named += of_tests + [(page, name) for name in re.findall(r"(?:benchmarks|src)/[\w/]+\.py", text)]
        named += [(page, name.replace(".", "/")) for name in re.findall(r"python -m (benchmarks(?:\.\w+)*)", text)]
        if page in beside and not page.startswith("CON"):
            links += [((ROOT / page).parent, target) for target in LINK.findall(text) if "://" not in target]
        if page.startswith("docs/papers/"):
            functions += re.findall(r"^\|.*\| (`[^|]+`) \|$", text, re.MULTILINE)
    files = [name for name in named if isinstance(name, tuple)]
    assert len(named) > 150 and len(files) > 15 and len(links) > 60 and len(functions) > 20
    ends = ("", ".py", "/__init__.py")
    lost = [name for name in files if not any((ROOT / f"{name[1]}{end}").is_file() for end in ends)]
    assert lost + [link for link in links if not (link[0] / link[1]).exists()] == []
    for row in functions:
        module = ""
        for name in re.findall(r"`([\w.]+)`", row):
            module, name = name.rsplit(".", 1) if "." in name else (module, name)
            owner, _, inner = module.rpartition(".")
            home = getattr(_module(owner), inner) if inner[:1].isupper() else _module(module)
            assert hasattr(home, name), row


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of the table that README.md shows: predictions to their last digit, measurements to what another processor
    may round otherwise."""
    monkeypatch.chdir(tmp_path)
    found = re.search(r"^DEMO := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = next(block for block in blocks("README.md") if block.text.startswith("layer "))
    assert run(["compare", *shlex.split(found[1])]) == 0
    printed = [(numberless(line), numbers(line)) for line in capsys.readouterr().out.splitlines()]
    for line in filter(None, shown.text.splitlines()):
        alike = [values for words, values in printed if words.split() == numberless(line).split()]
        assert any(values == pytest.approx(numbers(line), rel=0.02) for values in alike), line
        predicted = [values[1::3] for values in alike]  # after the layer; a measurement has its error
        assert any(values == pytest.approx(numbers(line)[1::3], rel=7e-4) for values in predicted), line
