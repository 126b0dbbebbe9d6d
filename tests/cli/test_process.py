"""The command as a process: what it imports, how it ends, what it says without PyTorch."""

from __future__ import annotations

import shlex
import subprocess
import sys

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
