"""Files: one line when something is wrong, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from commandline import refusal_of
from signalprop.files import storage
from signalprop.files.storage import read_json, read_text, write_bytes, write_json, write_text

VALUES = [
    {},
    [],
    None,
    "é\n",
    0,
    {"a": {}},
    {"a": [], "b": [{}]},
    [[]],
    [[[1]], {"a": [{"b": None}]}],
    {"": {"": [1.5, True]}},
]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | int]]:
    """What is forced to the disk (by its inode) and renamed (to which name), in its order."""
    done: list[tuple[str, str | int]] = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def forced(descriptor: int) -> None:
        done.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        done.append(("replace", Path(target).name))
        replace(source, target)

    def renamed(self: Path, target: Any) -> Path:
        done.append(("rename", Path(target).name))
        return rename(self, target)

    monkeypatch.setattr(storage.os, "fsync", forced)
    monkeypatch.setattr(storage.os, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    return done


class TestReading:
    def test_text_without_its_byte_order_mark(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\n")
        assert read_text(tmp_path / "a.txt") == "café\n"

    @pytest.mark.parametrize("data", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
    def test_empty(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "a.txt").write_bytes(data)
        assert "is empty" in refusal_of(lambda: read_text(tmp_path / "a.txt"))

    def test_missing_directory_and_impossible_paths(self, tmp_path: Path) -> None:
        assert "No such file" in refusal_of(lambda: read_text(tmp_path / "none.txt"))
        assert "directory" in refusal_of(lambda: read_text(tmp_path))
        assert "null" in refusal_of(lambda: read_text("a\0b"))
        refusal_of(lambda: read_text("two\nlines"))

    @pytest.mark.parametrize(
        "text",
        [
            "{",
            '{"a": 1',
            "[1, 2,]",
            "nonsense",
            '{"a": NaN}',
            '{"a": -Infinity}',
            '{"a": 1e999}',
            "[" * 100_000,
            "1" * 5000,
        ],
    )
    def test_what_is_not_json(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.json").write_text(text)
        assert "a.json" in refusal_of(lambda: read_json(tmp_path / "a.json"))


class TestWriting:
    def test_round_trip(self, tmp_path: Path) -> None:
        value = {"a": [1, 2.5, None, True], "b": {"c": "é"}, "tiny": 5e-324, "third": 1 / 3}
        write_json(tmp_path / "a.json", value)
        assert read_json(tmp_path / "a.json") == value

    @pytest.mark.parametrize("value", VALUES)
    def test_any_value_comes_back(self, value: Any, tmp_path: Path) -> None:
        write_json(tmp_path / "a.json", value)
        assert json.loads((tmp_path / "a.json").read_text("utf-8")) == value

    def test_a_line_for_each_record(self, tmp_path: Path) -> None:
        records = [{"n": n, "values": [n] * 50, "inside": {"a": {"b": []}}} for n in range(20)]
        write_json(
            tmp_path / "a.json", {"schema": "s", "machine": {"cores": 2, "name": "x"}, "rows": records, "no": []}
        )
        lines = (tmp_path / "a.json").read_text().splitlines()
        assert lines[:4] == ["{", ' "schema": "s",', ' "machine": {"cores": 2, "name": "x"},', ' "rows": [']
        assert [json.loads(line.rstrip(",")) for line in lines[4:24]] == records
        assert lines[24:] == [" ],", ' "no": []', "}"]

    def test_dash_is_standard_output(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        write_json("-", {"a": 1})
        assert json.loads(capsys.readouterr().out) == {"a": 1}

    @pytest.mark.parametrize("failing", ["fsync", "replace"])
    def test_a_failure_midway_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        target = tmp_path / "a.txt"
        target.write_text("old")

        def broken(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(storage.os, failing, broken)
        assert "No space left" in refusal_of(lambda: write_text(target, "new"))
        assert target.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]

    def test_an_interrupt_midway_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        (tmp_path / "a.txt").write_text("old")
        monkeypatch.setattr(storage.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_text(tmp_path / "a.txt", "new")
        assert (tmp_path / "a.txt").read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]

    def test_names_are_on_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rename that a power cut undoes has written nothing: the directory is forced to the disk after it."""
        done = watched(monkeypatch)
        write_text(tmp_path / "a.txt", "x")
        assert done[-2:] == [("replace", "a.txt"), ("fsync", tmp_path.stat().st_ino)]
        done.clear()
        with storage.written_whole(tmp_path / "out") as beside:
            (beside / "inner").mkdir()
            (beside / "inner" / "b").write_text("x")
            (beside / "a").write_text("x")
        out = tmp_path / "out"
        wanted = {("fsync", path.stat().st_ino) for path in (out, *out.rglob("*"))}
        at = done.index(("rename", "out"))
        assert set(done[:at]) == wanted and done[at + 1 :] == [("fsync", tmp_path.stat().st_ino)]

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
    def test_a_file_system_that_does_not_force_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        real = os.fsync

        def forced(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            real(descriptor)

        monkeypatch.setattr(storage.os, "fsync", forced)
        if number == errno.EINVAL:
            write_text(tmp_path / "a.txt", "x")
        else:
            assert os.strerror(number) in refusal_of(lambda: write_text(tmp_path / "a.txt", "x"))

    def test_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        assert "directory" in refusal_of(lambda: write_text(tmp_path, "x"))
        assert "No such file" in refusal_of(lambda: write_text(tmp_path / "none" / "a.txt", "x"))
        refusal_of(lambda: write_text(tmp_path / "file" / "a.txt", "x"))
        refusal_of(lambda: write_text("a\0b", "x"))

    def test_permissions_and_links_stay(self, tmp_path: Path) -> None:
        target, link = tmp_path / "a.txt", tmp_path / "link"
        target.write_text("old")
        target.chmod(0o600)
        link.symlink_to(target)
        write_text(link, "new")
        assert link.is_symlink() and target.read_text() == "new"
        assert stat.S_IMODE(target.stat().st_mode) == 0o600

    def test_a_device_is_not_replaced_by_a_file(self) -> None:
        write_bytes(os.devnull, b"x")
        assert not Path(os.devnull).is_file()
