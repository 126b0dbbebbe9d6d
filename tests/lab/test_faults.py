"""Commands that are killed, stopped, or without room: nothing half written has a final name, the next call goes on."""

from __future__ import annotations

import errno
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import killing
from signalprop import cli

FULL = Path("/dev/full")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("faults") / "given"
    killing.prepare(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "kills"),
    [("apply", 2)]
    + [
        pytest.param(name, 6, marks=slow)
        for name in ("report", "apply", "fold", "train", "sweep", "diagnose", "reproduce", "kernel")
    ],
)
@pytest.mark.slow
def test_killed_in_place_of_a_change(name: str, kills: int, given: Path, tmp_path: Path) -> None:
    """As it gives the last file its name, and at others of the changes to files that it makes."""
    case, whole = killing.cases(given)[name], tmp_path / "whole"
    undisturbed = killing.run(case.arguments, whole)
    assert undisturbed.status == 0, undisturbed.err
    n = len(undisturbed.changes)
    for change in {n, *random.Random(7).sample(range(2, n), min(kills - 1, n - 2))}:
        folder = tmp_path / f"killed-{change}"
        ended = killing.run(case.arguments, folder, (change, signal.SIGKILL))
        if ended.status == 0 and case.goes_on:
            continue  # the clock decides how many changes a sweep makes
        assert ended.status == -signal.SIGKILL and len(ended.changes) == change
        if not case.goes_on:
            there = [item for item in case.written if (folder / item).exists()]
            assert there != [*case.written] and killing.different(whole, folder, there) == []
        again = killing.remade(case, folder)
        assert again.status == 0, again.err
        assert killing.different(whole, folder, case.written) == []


@slow
@pytest.mark.parametrize(("number", "status", "word"), [(signal.SIGTERM, 143, "terminated"),
                                                        (signal.SIGINT, 130, "interrupted")])  # fmt: skip
def test_stopped_nothing_stays(number: signal.Signals, status: int, word: str, given: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    ended = killing.run(killing.cases(given)["fold"].arguments, folder, (3, number))
    assert (ended.status, ended.out) == (status, "")
    assert ended.err.splitlines()[-1] == f"signalprop: {word}" and "Traceback" not in ended.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143), (ValueError(), 1)])
def test_stopped_while_a_library_makes_a_class(
    stop: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11 makes a RuntimeError of what is raised in __set_name__, as when a signal comes while one imports."""

    class Member:
        def __set_name__(self, owner: type, name: str) -> None:
            raise stop

    def command(**_: object) -> None:
        try:
            type("Owner", (), {"member": Member()})
        except RuntimeError:
            raise
        except BaseException as error:  # as later versions of Python leave it
            raise RuntimeError("wrapped") from error

    monkeypatch.setattr(cli, "command_line", lambda _: command)
    assert cli.run([]) == status
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("fold", "applied/deep/model.safetensors"),
        ("fold", "applied/deep/signalprop.json"),
        ("fold", "applied/deep/generation_config.json"),
        ("diagnose", "plain/generation_config.json"),
        ("diagnose", "plain/config.json"),
    ],
)
def test_half_a_file_of_a_model_is_refused(command: str, file: str, given: Path, tmp_path: Path) -> None:
    mine, folder = tmp_path / "given", tmp_path / "out"
    shutil.copytree(given, mine)
    os.truncate(mine / file, (mine / file).stat().st_size // 2)
    ended = killing.here(killing.cases(mine)[command].arguments, folder)
    assert ended.status == 2, ended.err
    said = [line for line in ended.err.splitlines() if line.startswith("signalprop: ")]
    assert len(said) == 1 and str((mine / file).parent) in said[0] and "Traceback" not in ended.err
    assert list(folder.iterdir()) == []


class TestDisks:
    """Full or read-only: one line, exit status 2, nothing half written, and the next call goes on."""

    @pytest.fixture
    def mounted(self, tmp_path: Path) -> Iterator[Path]:
        """A file system of 64 KiB in memory, where the system lets us have one."""
        folder = tmp_path / "mounted"
        folder.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", folder], capture_output=True)
        if made.returncode:
            pytest.skip("only root can mount a file system")
        yield folder
        subprocess.run(["umount", folder], check=True)

    @pytest.mark.parametrize("name", ["fold", "apply"])
    def test_no_room_for_the_weights(self, name: str, given: Path, tmp_path: Path) -> None:
        """safetensors has an error of its own for it; the system refuses to let a file grow, as on a full disk."""
        case = killing.cases(given)[name]
        ended = killing.here(case.arguments, tmp_path / "full", room=20_000)
        assert ended.status == 2, ended.err
        line = ended.err.splitlines()[-1]
        assert line.startswith(f"signalprop: cannot write {case.once[0]}: ") and "File too large" in line
        assert "Traceback" not in ended.err
        assert {path.name for path in (tmp_path / "full").iterdir()} == set()

    @pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
    @pytest.mark.parametrize("redirected", [">/dev/full", pytest.param(">&-", marks=slow)])
    def test_standard_output_that_takes_nothing(self, redirected: str) -> None:
        command = f"{shlex.quote(sys.executable)} -m signalprop predict tgs --layers 2 {redirected}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
        if redirected == ">&-":  # closed by whoever wants to hear nothing
            assert (done.returncode, done.stderr) == (0, "")
        else:
            assert done.returncode == 1
            assert done.stderr.count("\n") == 1 and os.strerror(errno.ENOSPC) in done.stderr

    @pytest.mark.parametrize("name", ["fold", "apply", "report"])
    def test_a_read_only_directory(self, name: str, given: Path, mounted: Path) -> None:
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        ended = killing.here(killing.cases(given)[name].arguments, mounted)
        assert ended.status == 2 and ended.err.count("\n") == 1, ended.err
        assert ended.err.startswith("signalprop: cannot write ") and list(mounted.iterdir()) == []

    @slow
    @pytest.mark.parametrize("name", ["train", "sweep", "diagnose", "fold"])
    @pytest.mark.parametrize("pages", [1, 12, 30])
    def test_full_at_another_place(self, name: str, pages: int, given: Path, mounted: Path) -> None:
        case, whole = killing.cases(given)[name], mounted.with_name("whole")
        subprocess.run(["mount", "-o", f"remount,size={pages * 4096}", mounted], check=True)
        ended = killing.run(case.arguments, mounted)
        some = name in ("sweep", "diagnose")  # write what they can, and end with status 1
        assert ended.status in ((0, 1, 2) if some else (0, 2)), ended.err
        assert "Traceback" not in ended.err and list(mounted.rglob("*.tmp")) == []
        assert not ended.status or any(line.startswith("signalprop: ") for line in ended.err.splitlines())
        subprocess.run(["mount", "-o", "remount,size=64m", mounted], check=True)
        again = killing.remade(case, mounted)
        assert again.status == 0, again.err
        assert killing.run(case.arguments, whole).status == 0
        assert killing.different(whole, mounted, case.written) == []
