"""Files that users name: regular ones are read, and nothing else, since a pipe or a device may have no end."""

from __future__ import annotations

import io
import os
import signal
import socket
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from signalprop.cli.loading import called_with
from signalprop.data.batches import load_frames
from signalprop.data.texts import pieces
from signalprop.errors import InputError
from signalprop.files import storage
from signalprop.files.checkpoint_folder import check_folder
from signalprop.files.limits import memory_limit
from signalprop.files.storage import read_array, read_json, read_text
from signalprop.repair import load

posix = pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices of POSIX")
READERS: dict[str, Callable[[Path], Any]] = {
    "text": read_text,
    "json": read_json,
    "array": lambda path: read_array(path, "numbers"),
    "frames": load_frames,
    "pieces": lambda path: list(pieces(path)),
}


@pytest.fixture(autouse=True)
def _not_for_ever() -> Iterator[None]:
    """What waits for a pipe, or reads a device to its end, fails."""
    if sys.platform == "win32":
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError("a file was read for two minutes")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["pipe", "socket", "device", "link to a device"])
def special(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "x"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        monkeypatch.chdir(tmp_path)  # the name of a socket has 108 bytes at most
        with socket.socket(socket.AF_UNIX) as end:
            end.bind("x")
            yield path
        return
    elif request.param == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    yield path


@posix
class TestSpecialFiles:
    @pytest.mark.parametrize("reader", READERS)
    def test_are_refused_and_not_waited_for(self, special: Path, reader: str) -> None:
        with pytest.raises(InputError, match=r"it is a (pipe|socket|device); expected a regular file"):
            READERS[reader](special)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "signalprop.json"])
    def test_in_a_checkpoint(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name)
        for reader in (check_folder, load):
            with pytest.raises(InputError, match=f"{name}: it is a pipe"):
                reader(tmp_path)

    def test_among_images(self, tmp_path: Path) -> None:
        pytest.importorskip("datasets")
        from signalprop_lab.training.images import labelled_images
        from signalprop_lab.training.recipe import Data
        from signalprop_lab.training.sources import training_place

        (tmp_path / "one").mkdir()
        os.mkfifo(tmp_path / "one" / "a.png")
        data = Data(source=str(tmp_path))
        with pytest.raises(InputError, match="it is a pipe"):
            list(labelled_images(data, training_place(data))[0])


def test_pictures_of_more_pixels_than_memory_holds(tmp_path: Path) -> None:
    """A PNG file of 70 bytes that says that it is 20,000 pixels wide and high."""
    pytest.importorskip("datasets")
    from signalprop_lab.training.images import labelled_images
    from signalprop_lab.training.recipe import Data
    from signalprop_lab.training.sources import training_place

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(content)
    data = Data(source=str(tmp_path))
    with pytest.raises(InputError, match=r"cannot read the image .*400000000 pixels"):
        list(labelled_images(data, training_place(data))[0])


def test_standard_input_is_read_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    storage._standard_input.cache_clear()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfcaf\xc3\xa9")))
    assert [read_text("-"), read_text(Path("-"))] == ["café", "café"]  # it is there once, and may be asked for twice
    storage._standard_input.cache_clear()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="standard input is closed"):
        read_text("-")


class TestSizes:
    @pytest.mark.parametrize("reader", ["text", "json", "array", "frames"])
    def test_a_file_larger_than_memory_is_refused_before_it_is_read(self, tmp_path: Path, reader: str) -> None:
        limit = memory_limit()
        with (tmp_path / "x").open("wb") as file:
            try:
                file.truncate(limit + 1)  # takes no room on the disk
            except OSError:
                pytest.skip("the file system has no files of this size")
        with pytest.raises(InputError, match=rf"reading .*x \({limit + 1:,} bytes\) needs at least"):
            READERS[reader](tmp_path / "x")

    def test_a_small_file_of_large_arrays(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", a=np.zeros(3))
        content = bytearray((tmp_path / "x.npz").read_bytes())
        with zipfile.ZipFile(tmp_path / "x.npz") as file:
            central = file.start_dir
        content[central + 20 : central + 28] = b"\xfe\xff\xff\xff" * 2  # packed and unpacked size: 4.3 GB
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("signalprop.files.limits.memory_limit", lambda: 1 << 31)
            with pytest.raises(InputError, match=r"4,294,967,294 bytes unpacked\) needs at least 4.3 GB"):
                called_with(torch.nn.Linear(2, 2), tmp_path / "x.npz")
