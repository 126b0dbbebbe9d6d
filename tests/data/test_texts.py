"""Text files of every kind are read without loss, in order and in pieces."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.data import texts as readers
from signalprop.data.batches import load_text
from signalprop.data.texts import pieces
from signalprop.errors import InputError, MissingExtra


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def documents(source: Any, field: str = "text") -> list[str]:
    out = [""]
    for text, ends in pieces(source, field):
        out[-1] += text
        out += [""] if ends else []
    return out[:-1]


@given(st.text(st.sampled_from("ab \n\té€"), max_size=300), st.integers(1, 40))
def test_nothing_is_lost_between_pieces(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE", size)
        found = list(readers._cut(text[i : i + size] for i in range(0, len(text), size)))
    assert "".join(piece for piece, _ in found) == text
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]
    assert all(len(piece) <= 2 * size for piece, _ in found)


@pytest.mark.parametrize(("suffix", "opener"), [("txt", open), ("txt.gz", gzip.open), ("txt.xz", lzma.open)])
def test_text(tmp_path: Path, suffix: str, opener: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(readers, "PIECE", 97)  # characters of several bytes lie across blocks
    text = "\n".join(["“Fellow citizens”", "größer — als", "日本語", ""] * 40)
    with opener(tmp_path / f"a.{suffix}", "wb") as file:
        file.write(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert documents(tmp_path / f"a.{suffix}") == [text]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "jsonl.gz", "JSONL"])
def test_json_lines(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 50)
    rows = [{"id": i, "body": f"Document {i}.\nThe énd.\x85" * i or None} for i in range(9)]
    content = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    path = written(tmp_path / f"a.{suffix}", gzip.compress(content) if "gz" in suffix else content)
    assert documents(path, "body") == [row["body"] for row in rows[1:]]
    with pytest.raises(InputError, match=r"line 1 has no text in 'text'; its fields: body, id; choose another field"):
        documents(path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"Document {i}. " * (i % 7 + 1) for i in range(200)]
    parquet.write_table(pyarrow.table({"id": range(200), "body": texts}), tmp_path / "a.parquet", row_group_size=30)
    assert documents(tmp_path / "a.parquet", "body") == texts
    with pytest.raises(InputError, match=r"no column 'text'; its columns: id, body"):
        documents(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"cannot read .*b.parquet"):
        documents(written(tmp_path / "b.parquet", "not one"))


def test_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Iterator[dict[str, str]]:
        asked.append((args, options))
        if args[0] == "no/such":
            raise ConnectionError("cannot reach it\nmore")
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __version__="4.0.0"))
    for name in ("somebody/set", "set:test", "somebody/set:raw:test"):
        assert documents(name) == ["one", "two"]
    assert asked == [
        (("somebody/set", None), {"split": "train", "streaming": True}),
        (("set", None), {"split": "test", "streaming": True}),
        (("somebody/set", "raw"), {"split": "test", "streaming": True}),
    ]
    monkeypatch.setattr(sys.modules["datasets"], "__version__", "3.6.0")  # it runs loading scripts
    with pytest.raises(MissingExtra, match=r"needs datasets 4.0 or newer, and 3.6.0 is installed"):
        documents("somebody/set")
    monkeypatch.setattr(sys.modules["datasets"], "__version__", "4.0.0")
    with pytest.raises(InputError, match="cannot read the data set 'no/such': cannot reach it; expected a file"):
        documents("no/such")
    with pytest.raises(InputError, match="expected name, name:split or name:configuration:split"):
        documents("a:b:c:d")


def test_bad_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 8)
    cases = [
        (b"seven\xc3\xa9" * 3 + b"\xff rest", r"not UTF-8 text \(byte 21\)"),
        (b"seven  \xc3", r"not UTF-8 text \(byte 7\)"),
        (b"", "holds no text"),
        (b" \n\n ", "holds no text"),
    ]
    for content, message in cases:
        with pytest.raises(InputError, match=message):
            documents(written(tmp_path / "a.txt", content))
    packed = lzma.compress(load_text()[:8000].encode())
    for name, content in (("a.xz", packed[:-40]), ("b.xz", b"none"), ("c.gz", gzip.compress(b"a" * 99)[:-9])):
        with pytest.raises(InputError, match=f"cannot read .*{name}"):
            documents(written(tmp_path / name, content))
    with pytest.raises(InputError, match=r"line 2 is not JSON"):
        documents(written(tmp_path / "a.jsonl", '{"text": "a"}\n{"text"\n'))
    with pytest.raises(InputError, match=r"line 1 has no text .*its fields: none"):
        documents(written(tmp_path / "a.jsonl", "[1, 2]\n"))
    for source in (tmp_path / "none", str(tmp_path / "none"), "./none", "none.txt", "a/b/none"):
        with pytest.raises(InputError, match="there is no such file"):
            documents(source)
    with pytest.raises(InputError, match="it is a directory"):
        documents(tmp_path)


@pytest.mark.parametrize(("end", "packed"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_line_without_an_end(end: str, packed: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: Any) -> None:
    """Of 67 million characters, here of a thousand: it is refused before the rest of the file is read."""
    monkeypatch.setattr(readers, "_LONGEST_LINE", 1000)
    file = written(tmp_path / f"a.jsonl{end}", packed(b"x" * 2000))
    with pytest.raises(InputError, match="a line of more than 1,000 characters"):
        list(pieces(file))
