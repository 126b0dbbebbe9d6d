"""Results of commands: each is written whatever became of the others, and what could not be is said at the end."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commandline import TINY, Command
from signalprop.cli import output
from signalprop.errors import InputError

COMMANDS: dict[str, list[str]] = {
    "predict": ["predict", "tgs", *TINY],
    "compare": ["compare", "tgs", *TINY, "--seeds", "1"],
    "kernel": ["kernel", "tgs", *TINY],
    "schemes": ["schemes", "xavier", "--for", "tgs", "--layers", "2"],
    "cost": ["predict", "tgs", "--cost"],
}
DRAWN = ("predict", "compare", "kernel")


def cannot(*_: Any, **__: Any) -> None:
    raise InputError("cannot write it: the disk is full")


def broken(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("compare", "kernel") else ()) for n in COMMANDS]
)
def test_json_that_cannot_be_written(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = command(*COMMANDS[name])
    monkeypatch.setattr(output, "write_json", cannot)
    plot = ["--plot", str(tmp_path / "p.png")] if name in DRAWN else []
    ended = command(*COMMANDS[name], *plot, "--json", str(tmp_path / "r.json"))
    assert ended.status == 1 and ended.err.splitlines()[-1] == "signalprop: cannot write it: the disk is full"
    assert ended.out.startswith(whole.out[: 40 if name == "kernel" else None])
    assert (tmp_path / "p.png").exists() == bool(plot) and not re.search("^json ", ended.out, re.MULTILINE)


@pytest.mark.parametrize(("name", "fault"), [("predict", cannot), ("compare", broken), ("kernel", cannot)])
def test_a_picture_that_cannot_be_drawn(
    name: str, fault: Callable[..., None], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from signalprop.report import plots

    monkeypatch.setattr(plots, "save_figure", fault)
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")]
    ended = command(*COMMANDS[name], *files)
    last = "cannot write it" if fault is cannot else "ZeroDivisionError: division by zero"
    assert ended.status == 1 and ended.err.splitlines()[-1].startswith(f"signalprop: {last}")
    assert json.loads((tmp_path / "r.json").read_text()) and re.search("^json ", ended.out, re.MULTILINE)
    assert len(ended.out.splitlines()) > 5 and "plot " not in ended.out


def test_a_table_that_cannot_be_made(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from signalprop.report import tables

    monkeypatch.setattr(tables, "profile_table", broken)
    files = [tmp_path / "r.json", tmp_path / "p.png"]
    ended = command(*COMMANDS["predict"], "--json", str(files[0]), "--plot", str(files[1]))
    assert ended.status == 1 and "ZeroDivisionError" in ended.err and all(file.exists() for file in files)


def test_a_reader_that_leaves_costs_no_file(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`signalprop predict ... --plot p.png | head` draws."""
    from signalprop.report import tables

    def leave(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(tables, "profile_table", leave)
    monkeypatch.setattr("signalprop.cli._reader_left", lambda: 0)
    ended = command(*COMMANDS["predict"], "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png"))
    assert ended.status == 0 and (tmp_path / "r.json").exists() and (tmp_path / "p.png").exists()


def test_a_verdict_is_said_beside_what_could_not_be_written(
    command: Command, hf_directories: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "write_json", cannot)
    asked = ["check", str(hf_directories / "gpt2"), "--scheme", "deepscalelm", "--json", str(tmp_path / "c.json")]
    ended = command(*asked)
    assert ended.status == 1 and len(ended.err.splitlines()[-2:]) == 2
    assert "the disk is full" in ended.err.splitlines()[-2] and "are wrong" in ended.err.splitlines()[-1]


# --- the command as a process: what it imports, how it ends, what it says without PyTorch


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from signalprop.cli import run
sys.exit(run(["compare", "tgs"]))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_predict_imports_nothing_heavy() -> None:
    heavy = {"torch", "scipy", "matplotlib", "transformers", "tokenizers", "sklearn", "pandas", "rich"}
    done = python(
        "import sys; from signalprop.cli import run\n"
        "for arch in ('tgs', 'gpt2'):\n"
        "    assert run(['predict', arch, '--layers', '2']) == 0\n"
        f"print('heavy', sorted({heavy!r} & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy []"


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "signalprop"]
    good = subprocess.run(
        [*command, "predict", "tgs", "--cost"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run([*command, "predict", "tgs", "--set", "dropout=1"], capture_output=True, text=True,
                         timeout=120, check=False)  # fmt: skip
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error() -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m signalprop predict tgs --all | head -n 1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_without_pytorch_the_extra_is_named() -> None:
    done = python(BLOCKED)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "torch" in done.stderr and "pip install 'signalprop[models]'" in done.stderr
