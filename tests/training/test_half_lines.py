"""A sweep's log with half a line, and a cache with a half-filled directory, of processes that died."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.training.cache import cached

pytest.importorskip("optuna")

from signalprop.training.queueing import FileLock, storage_of


@given(
    lines=st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b" ") + b"\n"), max_size=5),
    half=st.builds(
        lambda text, n: text.replace(b"\n", b" ") + n * b"x", st.binary(max_size=40), st.integers(0, 12_000)
    ),
)
def test_half_a_line_goes_and_no_more(lines: list[bytes], half: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        file.write_bytes(b"".join(lines) + half)
        lock = FileLock(Path(folder) / "lock", file)
        lock.acquire()
        lock.release()
        assert file.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_study_goes_on_behind_half_a_line(share: float, tmp_path: Path) -> None:
    """As a full disk, or a kill in the midst of a write, leaves it; what was whole is all there."""
    import optuna

    study = optuna.create_study(storage=storage_of(tmp_path, None), study_name="s")
    study.set_user_attr("first", 1)
    size = os.path.getsize(tmp_path / "study.log")
    study.set_user_attr("second", "x" * 500)
    os.truncate(tmp_path / "study.log", size + int(share * (os.path.getsize(tmp_path / "study.log") - size)))
    for third in (3, 4):  # the line behind the half one is the one that would be lost with it
        again = optuna.load_study(storage=storage_of(tmp_path, None), study_name="s")
        again.set_user_attr(f"n{third}", third)
    attributes = optuna.load_study(storage=storage_of(tmp_path, None), study_name="s").user_attrs
    assert attributes == {"first": 1, "n3": 3, "n4": 4}


def test_what_a_dead_process_had_begun_to_cache_goes(tmp_path: Path) -> None:
    begun, other = tmp_path / "ids.0123456789abcdef.tmp", tmp_path / "ids2.0123456789abcdef.tmp"
    for folder in (begun, other):
        folder.mkdir()
        (folder / "train.npy").write_bytes(b"half")
    made = cached(tmp_path, "ids", lambda folder: (folder / "train.npy").write_bytes(b"whole") and None)
    assert (made / "train.npy").read_bytes() == b"whole"
    assert not begun.exists() and other.exists()
