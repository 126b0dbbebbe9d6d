"""Validated values and errors: every mistake is one line."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from signalprop.errors import InputError, MissingExtra, require
from signalprop.files.guard import guarded
from signalprop.files.validation import Value


class Point(Value):
    width: int = Field(ge=1)
    height: float = 1.0
    name: str = ""
    tags: tuple[str, ...] = ()


def message(call: Any) -> str:
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_numpy_scalars_count_as_numbers() -> None:
    point = Point(width=np.int32(3), height=np.float32(0.5))
    assert point == Point(width=3, height=0.5) and type(point.width) is int
    assert Point(width=3, height=2).height == 2.0


def test_an_unknown_field_gets_a_suggestion() -> None:
    assert "did you mean height?" in message(lambda: Point(width=1, heigth=2.0))
    assert "there is no such field" in message(lambda: Point(width=1, zzz=2.0))


def test_many_mistakes_make_one_readable_line() -> None:
    text = message(lambda: Point(width=0, height="x\ny", name=3, tags=5))
    assert text.startswith("Point: width: ") and "and 1 more" in text


def test_a_missing_extra_names_the_command() -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'signalprop\[models\]'") as caught:
        require("no_such_module_here.part", "models")
    assert "\n" not in str(caught.value) and "no_such_module_here" in str(caught.value)


class Line(Value):
    start: Point


def test_names_within_are_text() -> None:
    """YAML can write others: {100, x: 1} has the name 100."""
    assert "the name of a field is not text" in message(lambda: Line(start={100: None, "width": 1}))


# --- what a load of somebody's files may open: their directory and the installed packages, bytecode included


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


def test_links_lead_out_of_a_load_wherever_they_stand(tmp_path: Path) -> None:
    """A file's, a directory's, one that is stepped out of, and one that another load saw as a directory."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "sub", outside / "deep"):
        folder.mkdir(parents=True)
        (folder / "x").write_text("1")
    (outside / "x").write_text("1")
    with guarded("it", inside):
        assert (inside / "sub" / "x").read_text() == "1"
    (inside / "file").symlink_to(outside / "x")
    (inside / "link").symlink_to(outside / "deep")
    (inside / "sub" / "x").unlink()
    (inside / "sub").rmdir()
    (inside / "sub").symlink_to(outside)
    for path in ("file", "link/x", "link/../x", "sub/x"):
        with pytest.raises(InputError, match="it was not loaded"), guarded("it", inside):
            open(f"{inside}/{path}").close()


def test_a_library_that_goes_on_after_it_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("b")
    with pytest.raises(InputError, match="it was not loaded"), guarded("it"), suppress(BaseException):
        (tmp_path / "out").read_text()
