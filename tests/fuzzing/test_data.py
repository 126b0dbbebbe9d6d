"""Every kind of data that is read, damaged: text, tables, images, sound, NumPy files; and small files that unpack to
much."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from damage import Bomb, as_json, damaged, damaged_bytes, examine
from signalprop.cli.loading import called_with
from signalprop.data.batches import load_frames
from signalprop.data.texts import pieces
from signalprop.errors import InputError
from signalprop.files.storage import read_array
from signalprop_lab.training import images, pairs_and_labels, sources, speech
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import Place

BOOK = "Fellow citizens,\r\nthe union is strong. caf\u00e9 \U0001f600\n".encode() * 3
ROW = {"text": "one two", "label": "x", "n": 3}


def exhaust(found: Iterator[Any]) -> None:
    for _ in found:
        pass


def texts(path: Path) -> None:
    exhaust(sources.documents(Data(source=str(path)), Place(str(path), "train")))


def classes(path: Path) -> None:
    exhaust(pairs_and_labels.classified(Data(source=str(path)), Place(str(path), "train"))[0])


def pairs(path: Path) -> None:
    exhaust(pairs_and_labels.pairs(Data(source=str(path)), Place(str(path), "train")))


def pictures(path: Path) -> None:
    exhaust(images.labelled_images(Data(source=str(path)), Place(str(path), "train"))[0])


def speeches(path: Path) -> None:
    exhaust(speech.utterances(Data(source=str(path)), Place(str(path), "train")))


def lines_of(row: Any) -> st.SearchStrategy[bytes]:
    found = st.lists(damaged(row, 2) | st.just(row), min_size=1, max_size=3)
    return found.map(lambda rows: "\n".join(map(as_json, rows)).encode())


def stored(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def picture(kind: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(buffer, kind)
    return buffer.getvalue()


def sound(kind: str) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(800), 16_000, format=kind)
    return buffer.getvalue()


def parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet as format_

    buffer = io.BytesIO()
    format_.write_table(pyarrow.Table.from_pylist([ROW, ROW]), buffer)
    return buffer.getvalue()


late = st.deferred
# the file that is damaged, what may stand in it, the file or directory that is read, what reads it
SUBJECTS: dict[str, tuple[str, st.SearchStrategy[bytes], str, Callable[[Path], Any]]] = {
    "text": ("a.txt", damaged_bytes(BOOK), "a.txt", texts),
    "text, gz": ("a.txt.gz", damaged_bytes(gzip.compress(BOOK)), "a.txt.gz", texts),
    "text, xz": ("a.txt.xz", damaged_bytes(lzma.compress(BOOK)), "a.txt.xz", texts),
    "JSON lines": ("a.jsonl", lines_of(ROW), "a.jsonl", texts),
    "JSON lines of a diagnosis": ("a.jsonl", lines_of(ROW), "a.jsonl", lambda path: exhaust(pieces(path))),
    "JSON lines, bytes": ("a.jsonl", damaged_bytes(json.dumps(ROW).encode()), "a.jsonl", texts),
    "classes": ("a.jsonl", lines_of(ROW), "a.jsonl", classes),
    "csv": ("a.csv", damaged_bytes(b'text,label\n"one, two",x\nthree,y\n'), "a.csv", classes),
    "tsv": ("a.tsv", damaged_bytes(b"source\ttarget\none\teins\ntwo\tzwei\n"), "a.tsv", pairs),
    "translations": ("a.jsonl", lines_of({"translation": {"en": "a", "de": "b"}}), "a.jsonl", pairs),
    "parquet": ("a.parquet", late(lambda: damaged_bytes(parquet())), "a.parquet", texts),
    **{
        f"image, {kind}": (f"set/a/0.{kind.lower()}", late(lambda kind=kind: damaged_bytes(picture(kind))), "set",
        pictures)
        for kind in ("PNG", "GIF", "BMP", "JPEG")
    },
    "images by path": ("a.jsonl", lines_of({"image": "set/a/0.png", "label": 1}), "a.jsonl", pictures),
    "images in rows": ("a.jsonl", lines_of({"image": [[1, 2], [3, 4]], "label": 1}), "a.jsonl", pictures),
    "sound, WAV": ("a.wav", late(lambda: damaged_bytes(sound("WAV"))), "a.tsv", speeches),
    "sound, FLAC": ("a.wav", late(lambda: damaged_bytes(sound("FLAC"))), "a.tsv", speeches),
    "sounds by path": ("a.jsonl", lines_of({"audio": "a.wav", "text": "hello"}), "a.jsonl", speeches),
    "sounds in rows": (
        "a.jsonl", lines_of({"audio": {"array": [0.0] * 500, "sampling_rate": 16_000}, "text": "hello"}), "a.jsonl",
        speeches,
    ),
    "frames": ("a.npy", damaged_bytes(stored(np.zeros((4, 8)))), "a.npy", load_frames),
}  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS)
def test_damaged_data(subject: str, tmp_path: Path) -> None:
    name, content, read, reader = SUBJECTS[subject]
    for folder in ("a", "b"):
        (tmp_path / "set" / folder).mkdir(parents=True)
    (tmp_path / "set" / "b" / "0.png").write_bytes(picture("PNG"))
    (tmp_path / "a.tsv").write_text("audio\ttext\na.wav\thello\n")

    def act() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # its remarks on what it reads all the same
            reader(tmp_path / read)

    examine(tmp_path / name, content, act)


class TestPickles:
    """Pickles in the places of data are not loaded."""

    @pytest.mark.parametrize("name", ["a.npy"])
    def test_numpy_files(self, tmp_path: Path, name: str) -> None:
        bytes_ = stored(np.array([Bomb(tmp_path / "ran")], dtype=object))
        for content in (bytes_, pickle.dumps(Bomb(tmp_path / "ran"))):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(InputError):
                load_frames(tmp_path / name)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("name", ["a.pt", "a.bin", "a.npz", "a.safetensors"])
    def test_inputs_of_a_model(self, tmp_path: Path, name: str) -> None:
        """Of --inputs, by whatever name."""
        file = tmp_path / name
        if name == "a.npz":
            np.savez(file, input_ids=np.array([Bomb(tmp_path / "ran")], dtype=object))
        else:
            file.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
        with pytest.raises(InputError, match=r"cannot be read|pickle"):
            called_with(torch.nn.Linear(2, 2), file)
        assert not (tmp_path / "ran").exists()

    def test_a_table_of_cells(self, tmp_path: Path) -> None:
        row = {"text": pickle.dumps(Bomb(tmp_path / "ran"), 0).decode("latin-1")}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        texts(tmp_path / "a.jsonl")
        assert not (tmp_path / "ran").exists()


class TestSize:
    """Headers that promise more than there is."""

    def test_an_array_of_exabytes(self, tmp_path: Path) -> None:
        content = stored(np.zeros((2, 2))).replace(b"(2, 2), }  ", b"(%d,), }" % 2**58)
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(InputError, match="there is not enough memory for it"):
            read_array(tmp_path / "a.npy", "numbers")
