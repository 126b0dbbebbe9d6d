"""What a load of somebody's files may open: their directory and the installed packages, bytecode included."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from signalprop.errors import InputError
from signalprop.files.guard import guarded

_LOAD = """
import tempfile
tempfile.gettempdir()
from signalprop.files.guard import guarded
with guarded("a directory", "."):
    import colorsys
"""


@pytest.mark.slow
def test_bytecode_may_lie_where_python_was_told_to_put_it(tmp_path: Path) -> None:
    """A first import writes there, in the middle of a load."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPYCACHEPREFIX"] = str(tmp_path / "bytecode")
    done = subprocess.run([sys.executable, "-c", _LOAD], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "bytecode").rglob("colorsys*.pyc"))


def test_a_file_elsewhere_a_program_a_pickle_and_a_connection_end_a_load(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    (tmp_path / "out").write_text("b")
    with guarded("it", tmp_path / "in"):
        assert (tmp_path / "in" / "a").read_text() == "a"
    wanted = r"it was not loaded: it leads to .*out, which no checkpoint may"
    with pytest.raises(InputError, match=wanted), guarded("it", tmp_path / "in"):
        (tmp_path / "out").read_text()
    with pytest.raises(InputError, match=r"leads to os\.system"), guarded("it", tmp_path / "in"):
        os.system("true")
    with pytest.raises(InputError, match=r"leads to subprocess\.Popen"), guarded("it", tmp_path / "in"):
        subprocess.run(["true"], check=False)
    with pytest.raises(InputError, match=r"leads to pickle\.find_class"), guarded("it", tmp_path / "in"):
        pickle.loads(pickle.dumps(Path("a")))
    with pytest.raises(InputError, match=r"leads to socket\."), guarded("it", tmp_path / "in"):
        socket.create_connection(("127.0.0.1", 9))


def test_a_library_that_goes_on_after_it_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("b")
    with pytest.raises(InputError, match="it was not loaded"), guarded("it"), suppress(BaseException):
        (tmp_path / "out").read_text()
