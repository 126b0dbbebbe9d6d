"""What language models read and are asked for, and the cache of what was tokenized for them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from preparing import documents_of, example, labels_in, lines, recipe, validation
from signalprop.errors import InputError
from signalprop_lab.training.examples import (
    IGNORED,
    Prepared,
)
from signalprop_lab.training.recipe import Data, Tokenizer
from signalprop_lab.training.tasks import prepare
from signalprop_lab.training.tokenizers import ids_of, serialized, train
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
