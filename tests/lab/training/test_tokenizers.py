"""Tokenizers that are trained on text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preparing import documents_of
from signalprop.errors import InputError
from signalprop_lab.training.recipe import Tokenizer
from signalprop_lab.training.tokenizers import ids_of, load, restore, serialized, train

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
