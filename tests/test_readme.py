"""What the documentation tells users to type does what it says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from signalprop.cli import run
from signalprop.schemes import SCHEMES

ROOT = Path(__file__).parent.parent
_PAGES = (
    "README.md",
    "docs/cli.md",
    "docs/schemes.md",
    "docs/applying.md",
    "docs/kernels.md",
    "docs/monitoring.md",
    "docs/diagnosing.md",
    "docs/install.md",
    "docs/will-it-train.md",
    "docs/remove-skips.md",
    "docs/deep-layers.md",
    "docs/scale-out.md",
    "docs/training.md",
)
PAGES = [page for page in _PAGES if (ROOT / page).is_file()]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)\)")


def blocks(page: str, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if found == language]


def commands(page: str) -> list[str]:
    return [line for code in blocks(page, "sh") for line in code.splitlines() if line.startswith("signalprop ")]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder but for a small checkpoint and a text, under the names that the pages use."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from signalprop.data import load_text

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "my-checkpoint")
    (tmp_path / "book.txt").write_text(load_text()[:50_000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_run(page: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands(page):
        capsys.readouterr()
        status = run(shlex.split(line)[1:])
        captured = capsys.readouterr()
        assert status == 0, f"{line}: {captured.err}"
        assert captured.out, line


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_runs(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page_of_the_documentation")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("signalprop.schemes.base.SCHEMES", dict(SCHEMES))  # a scheme that a page adds stays there
    for code in blocks(page, "python"):
        exec(compile(code, page, "exec"), vars(module))


def test_the_tour_works_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block after block in an empty folder; what the page shows is among what was printed."""
    monkeypatch.chdir(tmp_path)
    printed = ""
    for language, code in BLOCK.findall((ROOT / "docs/tour.md").read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(code, "docs/tour.md", "exec"), {})
        elif language == "text":
            assert [line for line in code.splitlines() if line not in printed.splitlines()] == []
        else:
            assert language == "sh"
            capsys.readouterr()
            for line in code.splitlines():
                assert run(shlex.split(line)[1:]) == 0, f"{line}: {capsys.readouterr().err}"
            printed = capsys.readouterr().out
    assert (tmp_path / "tour.html").stat().st_size > 1_000_000  # the plotting library is in it


def test_the_pages_are_the_ones_expected() -> None:
    assert {"README.md", "docs/cli.md"} <= {page for page in PAGES if commands(page)}


def test_the_printed_gradients_are_those_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("README.md", "python")[0]
    exec(compile(code, "README.md", "exec"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name, _ in printed] == ["xavier", "deepscalelm"]
    for name, value in printed:
        shown = re.search(rf"^{name} (-\d+\.\d+)$", readme, re.MULTILINE)
        assert shown is not None
        assert float(shown.group(1)) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("page", [*PAGES, "docs/index.md"])
def test_links_lead_somewhere(page: str) -> None:
    source = (ROOT / page).read_text(encoding="utf-8")
    targets = [target for target in LINK.findall(source) if not target.startswith("http")]
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert missing == []
