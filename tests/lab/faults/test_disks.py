"""Disks that are full or read-only: one line, exit status 2, nothing half written, and the next call goes on."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import killing
from signalprop.errors import InputError
from signalprop.files.storage import written_whole

FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("disks") / "given"
    killing.prepare(folder, trained_run=False)
    return folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB in memory, where the system lets us have one."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["fold", "apply", "diagnose"])
def test_no_room_for_the_weights(name: str, given: Path, tmp_path: Path) -> None:
    """safetensors has an error of its own for it; the system refuses to let a file grow, as on a full disk."""
    case = killing.cases(given)[name]
    arguments = [*case.arguments]
    if name == "diagnose":  # pictures and page are not what this is about
        del arguments[arguments.index("--plot") :]
        arguments.append("--no-report")
    ended = killing.run(arguments, tmp_path / "full", file_size=20_000)
    assert ended.status == (1 if name == "diagnose" else 2), ended.err
    line = ended.err.splitlines()[-1]
    assert line.startswith(f"signalprop: cannot write {case.once[0]}: ") and "File too large" in line
    assert "Traceback" not in ended.err
    written = ["d.json"] if name == "diagnose" else []  # which there is room for
    assert [path.name for path in (tmp_path / "full").iterdir()] == written


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), InputError("y")])
def test_other_errors_of_what_fills_a_directory_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    def fill() -> None:
        with written_whole(tmp_path / "out") as beside:
            (beside / "file").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("redirected", [">/dev/full", ">&-"])
def test_standard_output_that_takes_nothing(redirected: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m signalprop predict tgs --layers 2 {redirected}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    if redirected == ">&-":  # closed by whoever wants to hear nothing
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1 and os.strerror(errno.ENOSPC) in done.stderr


def test_a_thread_without_room_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The writer of TensorBoard's files hands its error to the next call; a traceback of its thread adds nothing."""
    from signalprop_lab.training.run import _writers_leave_errors

    def fail(number: int) -> None:
        raise OSError(number, os.strerror(number))

    before = threading.excepthook
    seen: list[int | None] = []
    threading.excepthook = lambda thrown: seen.append(getattr(thrown.exc_value, "errno", None))
    try:
        with _writers_leave_errors():
            for number in (errno.ENOSPC, errno.EFBIG, errno.EBADF):
                thread = threading.Thread(target=fail, args=(number,))
                thread.start()
                thread.join()
        thread = threading.Thread(target=fail, args=(errno.ENOSPC,))
        thread.start()
        thread.join()
    finally:
        threading.excepthook = before
    assert seen == [errno.EBADF, errno.ENOSPC]
    assert capsys.readouterr().err == ""


def test_what_is_said_after_the_bar_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TrainerState

    from signalprop_lab.training.callbacks import Progress

    bar = Progress("tiny", 4, "tokens", None)
    bar.on_train_begin(None, TrainerState(max_steps=8), None)
    assert not capsys.readouterr().err.endswith("\n")
    for _ in range(2):
        bar.close()
    assert capsys.readouterr().err.count("\n") == 1


def test_a_read_only_directory(given: Path, mounted: Path) -> None:
    for name, case in killing.cases(given).items():
        if name in ("fold", "apply", "report"):
            subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
            ended = killing.run(case.arguments, mounted)
            assert ended.status == 2 and ended.err.count("\n") == 1, ended.err
            assert ended.err.startswith("signalprop: cannot write ")
            subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
            assert list(mounted.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "sweep", "diagnose", "fold"])
@pytest.mark.parametrize("pages", [1, 2, 5, 12, 16, 20, 30, 45])
def test_full_at_another_place(name: str, pages: int, given: Path, mounted: Path) -> None:
    case = killing.cases(given)[name]
    subprocess.run(["mount", "-o", f"remount,size={pages * 4096}", mounted], check=True)
    ended = killing.run(case.arguments, mounted)
    assert ended.status in (0, 1, 2), ended.err
    assert "Traceback" not in ended.err and killing.broken(mounted) == []
    if ended.status:
        assert any(line.startswith("signalprop: ") for line in ended.err.splitlines())
    assert killing.leftovers(mounted) == []
    subprocess.run(["mount", "-o", "remount,size=64m", mounted], check=True)
    again = killing.remade(case, mounted)
    assert again.status == 0, again.err
    assert killing.run(case.arguments, mounted.with_name("whole")).status == 0
    assert killing.different(mounted.with_name("whole"), mounted, case.written) == []
