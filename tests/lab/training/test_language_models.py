"""What language models read and are asked for, and the cache of what was tokenized for them."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preparing import documents_of, example, labels_in, lines, recipe, validation
from signalprop.errors import InputError
from signalprop_lab.training.examples import (
    IGNORED,
    Example,
    Ordered,
    Prepared,
    ahead,
    collate,
)
from signalprop_lab.training.recipe import Data, Tokenizer
from signalprop_lab.training.tasks import prepare
from signalprop_lab.training.tokenizers import ids_of, load, restore, serialized, train
from signalprop_lab.training.validation_split import split_documents

BYTES = {"kind": "bytes"}
BPE = {"kind": "bpe", "vocab_size": 300}


# --- language models ---------------------------------------------------------------------------------------


def test_causal_lm_asks_once_for_every_next_token(corpus: Path, cache: Path) -> None:
    r = recipe("causal-lm", cache, source=corpus, tokenizer=BYTES, seq_len=20)
    prepared = prepare(r)
    texts = split_documents(r.data).train
    expected = np.concatenate([[*(4 + byte for byte in text.encode()), 2] for text in texts])
    n = len(prepared.train)  # type: ignore[arg-type]
    assert n == (expected.size - 1) // 20
    found = [example(prepared, i) for i in range(n)]
    assert np.array_equal(np.concatenate([e["tokens"] for e in found]), expected[: 20 * n])
    assert np.array_equal(np.concatenate([e["labels"] for e in found]), expected[1 : 20 * n + 1])
    assert prepared.facts == {"vocab_size": 260, "seq_len": 20} and prepared.unit == ("tokens", 20)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "wordpiece", "unigram"])
@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_language_models(task: str, kind: str, corpus: Path, cache: Path) -> None:
    """Ids below the vocabulary's size, and a chance between nothing and that of a uniform guess."""
    prepared = prepare(recipe(task, cache, source=corpus, tokenizer={"kind": kind, "vocab_size": 280}, seq_len=16))
    size = prepared.facts["vocab_size"]
    assert size == len(prepared.tokenizer) <= 280
    for e in [example(prepared, i) for i in range(20)]:
        assert e["tokens"].shape == e["labels"].shape == (16,)
        assert e["tokens"].min() >= 0 and max(e["tokens"].max(), e["labels"].max()) < size
    assert 0 < prepared.chance(labels_in(validation(prepared))) < math.log(size)


def test_tokenizers_see_the_training_documents_only(tmp_path: Path, cache: Path) -> None:
    texts = [text + f" special{i:03d}special" * 20 for i, text in enumerate(documents_of(20))]
    r = recipe("causal-lm", cache, source=lines(tmp_path / "a.jsonl", [{"text": t} for t in texts]), tokenizer=BPE)
    kept = split_documents(r.data).train
    assert set(kept) < set(texts)
    expected = train(Tokenizer(kind="bpe", vocab_size=300), lambda: kept)
    assert serialized(prepare(r).tokenizer) == serialized(expected)
    assert serialized(expected) != serialized(train(Tokenizer(kind="bpe", vocab_size=300), lambda: texts))


def test_masks(corpus: Path, cache: Path) -> None:
    """15 % of the positions carry loss; of those 80 % read the mask, 10 % another token, 10 % their own."""
    r = recipe("masked-lm", cache, source=corpus, tokenizer=BYTES, seq_len=64)
    prepared = prepare(r)
    n = len(prepared.train)  # type: ignore[arg-type]
    ids = np.concatenate([[*(4 + byte for byte in text.encode()), 2] for text in split_documents(r.data).train])
    counts: Counter[str] = Counter()
    for i in range(n):
        own = ids[64 * i : 64 * (i + 1)]
        for seed in range(10):
            e = example(prepared, i, seed)
            asked = e["labels"] != IGNORED
            assert asked.any()
            assert np.array_equal(e["labels"][asked], own[asked])
            assert np.array_equal(e["tokens"][~asked], own[~asked])
            assert not np.any(asked & (own < 4)) and not np.any(np.isin(e["tokens"][asked], [0, 1, 2]))
            counts["text"] += int((own >= 4).sum())
            counts["asked"] += int(asked.sum())
            counts["masked"] += int((e["tokens"][asked] == 3).sum())
            counts["own"] += int((e["tokens"] == own)[asked].sum())
    rows = [("asked", "text", 0.15), ("masked", "asked", 0.8), ("own", "asked", 0.1 + 0.1 / 256)]
    for part, whole, share in rows:
        spread = math.sqrt(share * (1 - share) / counts[whole])
        assert abs(counts[part] / counts[whole] - share) < 4 * spread, part


def test_chance_is_the_cross_entropy_of_the_training_frequencies(corpus: Path, cache: Path) -> None:
    prepared = prepare(recipe("causal-lm", cache, source=corpus, tokenizer=BYTES, seq_len=20))
    n = len(prepared.train)  # type: ignore[arg-type]
    counts = Counter(labels_in([example(prepared, i) for i in range(n)]).tolist())
    total = sum(counts.values()) + 130
    asked = labels_in(validation(prepared))
    expected = -np.mean([math.log((counts[x] + 0.5) / total) for x in asked.tolist()])
    assert prepared.chance(asked) == pytest.approx(expected, rel=5e-3)  # windows leave out the last few
    three = replace(prepared, counts=np.array([2, 1, 0]))
    assert three.chance(np.array([0, -100, 2])) == pytest.approx(-(math.log(2.5 / 4.5) + math.log(0.5 / 4.5)) / 2)


def test_pretrained_tokenizers(corpus: Path, cache: Path, tmp_path: Path) -> None:
    own = train(Tokenizer(kind="bpe", vocab_size=280), lambda: documents_of(5))
    own.save_pretrained(tmp_path / "one")
    settings = {"kind": "pretrained", "path": str(tmp_path / "one")}
    prepared = prepare(recipe("causal-lm", cache, source=corpus, tokenizer=settings, seq_len=16))
    text = split_documents(Data(source=str(corpus))).train[0]
    assert example(prepared, 0)["tokens"].tolist() == next(ids_of(own, [text]))[:16].tolist()
    train(Tokenizer(kind="bpe", vocab_size=290), lambda: documents_of(5)).save_pretrained(tmp_path / "one")
    assert prepare(recipe("causal-lm", cache, source=corpus, tokenizer=settings, seq_len=16)).facts["vocab_size"] == 290
    own.mask_token = None
    own.save_pretrained(tmp_path / "two")
    settings["path"] = str(tmp_path / "two")
    with pytest.raises(InputError, match="has no mask token, which masked-lm reads"):
        prepare(recipe("masked-lm", cache, source=corpus, tokenizer=settings, seq_len=16))


# --- the cache ---------------------------------------------------------------------------------------------


def everything(prepared: Prepared) -> list[list[int]]:
    n = len(prepared.train)  # type: ignore[arg-type]
    found = [example(prepared, i) for i in range(n)] + validation(prepared)
    return [e["tokens"].tolist() for e in found]


@pytest.mark.parametrize("left", [0, 5, 100, -5])
def test_a_damaged_cache_is_made_anew(left: int, corpus: Path, tmp_path: Path) -> None:
    r = recipe("causal-lm", tmp_path, source=corpus, tokenizer={"kind": "bytes"}, seq_len=16)
    made = everything(prepare(r))
    (path,) = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:left])
    assert everything(prepare(r)) == made
    assert path.read_bytes() == content


@pytest.mark.slow
def test_processes_that_start_at_once(corpus: Path, tmp_path: Path) -> None:
    """They wait for the one that makes it, and read the same."""
    code = (
        "import sys; from signalprop_lab.training.tokenized import encoded;"
        "from signalprop_lab.training.recipe import Data; text = [open(sys.argv[1]).read()];"
        "data = Data(cache=sys.argv[2], tokenizer={'kind': 'bpe', 'vocab_size': 300});"
        "print([ids.ids.sum() for ids in encoded(data, [text], [text])[1]])"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(corpus), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate()[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(outputs) == 1 and outputs != {""}
    assert len(list(tmp_path.glob("texts-*.safetensors"))) == 1


def test_a_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write the cache .*; name another directory with data\.cache$"):
        prepare(recipe("causal-lm", tmp_path / "file" / "in", source=corpus, tokenizer=BYTES, seq_len=16))


# --- tokenizers that are trained on text


KINDS = ("bytes", "bpe", "wordpiece", "unigram")
TEXTS = documents_of(20)
NAMES = "<pad>", "<s>", "</s>", "<mask>", "<unk>"
ANY = st.text(max_size=60) | st.lists(st.sampled_from([*NAMES, "tree", "<", " ", "\n", "ä", "\0"]), max_size=12).map(
    "".join
)


@lru_cache
def trained(kind: Any) -> Any:
    return train(Tokenizer(kind=kind, vocab_size=300), lambda: TEXTS)


def ids(tokenizer: Any, text: str) -> list[int]:
    return next(ids_of(tokenizer, [text])).tolist()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@given(text=ANY)
def test_decoding_gives_the_text_back(kind: str, text: str) -> None:
    assert trained(kind).decode(ids(trained(kind), text)) == text


@given(text=ANY)
def test_bytes_are_numbered_in_order_behind_the_special_tokens(text: str) -> None:
    assert ids(trained("bytes"), text) == [4 + byte for byte in text.encode()]


@pytest.mark.parametrize("kind", KINDS)
def test_restored_and_saved_ones_give_the_same_ids(kind: str, tmp_path: Path) -> None:
    text = TEXTS[0] + " unseen <mask> words, 1234"
    expected = ids(trained(kind), text)
    assert ids(restore(serialized(trained(kind))), text) == expected
    trained(kind).save_pretrained(tmp_path)
    assert ids(load(str(tmp_path)), text) == expected
    assert ids(load(str(tmp_path / "tokenizer.json")), text) == expected


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    for path in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "none"):
        with pytest.raises(InputError, match=r"^cannot read the tokenizer .*; expected a directory, .*$"):
            load(str(path))
    letters = " ".join(map(chr, range(0x4E00, 0x5000)))
    with pytest.raises(InputError, match=r"no unigram tokenizer can be trained on this text .*; change data.tokenizer"):
        train(Tokenizer(kind="unigram", vocab_size=300), lambda: [letters])


# --- examples in a fixed order, and in padded batches


PADS = {"tokens": 9, "keep": 0, "labels": IGNORED}


class Numbers:
    """The i-th example holds i, and a number drawn for it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def example(self, i: int, rng: np.random.Generator) -> Example:
        return {"tokens": np.array([i, rng.integers(1 << 30)])}


@given(n=st.integers(1, 20), seed=st.integers(0, 5), data=st.data())
def test_the_same_examples_in_whatever_order_they_are_read(n: int, seed: int, data: st.DataObject) -> None:
    wanted = data.draw(st.permutations(range(3 * n)))
    straight, crooked = Ordered(Numbers(n), 3 * n, seed), Ordered(Numbers(n), 3 * n, seed)
    expected = [straight[i]["tokens"].tolist() for i in range(3 * n)]
    found = {i: crooked[i]["tokens"].tolist() for i in wanted}
    assert [found[i] for i in range(3 * n)] == expected
    for turn in range(3):
        assert sorted(x[0] for x in expected[turn * n : (turn + 1) * n]) == list(range(n))


def test_what_comes_next_is_read_while_a_step_is_done() -> None:
    second, ended = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        try:
            for i in range(50):
                if i == 1:
                    second.set()
                yield i
            raise InputError("row 51 is damaged")
        finally:
            ended.set()

    found = ahead(slow(), 3)
    assert next(found) == 0
    assert second.wait(20)  # nobody has asked for it yet
    assert [next(found) for _ in range(49)] == list(range(1, 50))
    with pytest.raises(InputError, match="row 51"):  # in the thread that trains
        next(found)
    ended.clear()
    stopped = ahead(slow(), 3)
    next(stopped)
    stopped.close()  # a run that ends before its data leaves no thread that reads on
    assert ended.wait(20)
    assert list(ahead(iter(range(2)), 5)) == [0, 1]


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_shorter_ones_are_filled_up_at_the_end(lengths: list[int]) -> None:
    examples = [
        {"tokens": np.arange(n), "keep": np.ones(n, np.bool_), "labels": np.arange(n), "frames": np.ones((n, 2), "f4")}
        for n in lengths
    ]
    batch = collate(examples, PADS)
    for i, n in enumerate(lengths):
        assert batch["tokens"][i].tolist() == [*range(n), *[9] * (max(lengths) - n)]
        assert batch["labels"][i].tolist() == [*range(n), *[-100] * (max(lengths) - n)]
        assert batch["keep"][i].sum() == n
        assert batch["frames"][i].sum() == 2 * n
    assert batch["keep"].dtype == torch.bool and batch["frames"].dtype == torch.float32
