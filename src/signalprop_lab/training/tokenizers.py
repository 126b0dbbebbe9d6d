"""Tokenizers: trained on text (bytes, byte-level BPE, WordPiece, unigram), or loaded; all as those of transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.errors import InputError, refusing, require
from signalprop.files import checkpoint_loading
from signalprop.files.checkpoint_tokenizers import tokenizer_file
from signalprop.network.inputs import IntArray
from signalprop_lab.training.recipe import Tokenizer

PAD, BEGIN, END, MASK, UNKNOWN = "<pad>", "<s>", "</s>", "<mask>", "<unk>"
_SPECIAL = (PAD, BEGIN, END, MASK)  # in this order, from id 0 on; what does not read bytes has UNKNOWN as well
_TOGETHER = 32  # texts that are encoded at a time
_LETTERS = 1000  # of a WordPiece tokenizer; rarer ones are unknown
_DIGITS = 4  # of a unigram tokenizer's log probabilities
Texts = Callable[[], Iterable[str]]


def train(settings: Tokenizer, texts: Texts) -> Any:
    """A tokenizer of the kind that the settings name.

    The special tokens come first: pad, begin, end, mask, and unknown where some characters have no id; their names
    within a text are text. The same texts give the same tokenizer.

    Args:
        texts: gives what it is trained on, in pieces, every time that it is called; `bytes` reads none of it.
    """
    if settings.kind == "pretrained":
        raise InputError("a pretrained tokenizer is loaded, not trained")
    build = {"bytes": _bytes, "bpe": _bpe, "wordpiece": _wordpiece, "unigram": _unigram}[settings.kind]
    return _wrapped(build(require("tokenizers", "models"), settings, texts))


def restore(text: str) -> Any:
    """The tokenizer that `serialized` wrote."""
    package = require("tokenizers", "models")
    with refusing("the cached tokenizer is damaged", "delete the cache"):
        return _wrapped(package.Tokenizer.from_str(text))


def serialized(tokenizer: Any) -> str:
    """A trained tokenizer as the text of a tokenizer.json."""
    text: str = tokenizer.backend_tokenizer.to_str()
    return text


def load(path: str) -> Any:
    """A tokenizer of transformers: of a directory, a tokenizer.json, or a name on the hub."""
    require("transformers", "models")
    place = Path(path)
    expected = "expected a directory, a tokenizer.json or a name on the hub"
    with refusing(f"cannot read the tokenizer {path}", expected):
        return tokenizer_file(place) if place.is_file() else checkpoint_loading.tokenizer(path)


def ids_of(tokenizer: Any, texts: Iterable[str]) -> Iterator[IntArray]:
    """The ids of each text, without special tokens around it."""
    source = iter(texts)
    while batch := list(islice(source, _TOGETHER)):
        with refusing("the tokenizer cannot read the text", "expected one with an unknown token"):
            rows = tokenizer(batch, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for row in rows:
            yield np.array(row, np.int64)


def special_ids(tokenizer: Any) -> IntArray:
    """Ids that stand for no text."""
    return np.array(sorted(set(tokenizer.all_special_ids)), np.int64)


def separator(tokenizer: Any) -> int | None:
    """What stands between documents: the end token, else the one between sentences (BERT); None: there is neither."""
    return _first_id(tokenizer, "eos_token_id", "sep_token_id")


def begin_of(tokenizer: Any) -> int | None:
    """The id that stands before a text, or None."""
    return _first_id(tokenizer, "cls_token_id", "bos_token_id")


def pad_of(tokenizer: Any) -> int:
    """The id that fills texts up; 0 if there is none."""
    return _first_id(tokenizer, "pad_token_id") or 0


def _first_id(tokenizer: Any, *names: str) -> int | None:
    return next((found for name in names if isinstance(found := getattr(tokenizer, name, None), int)), None)


def _wrapped(inner: Any) -> Any:
    transformers = require("transformers", "models")
    names = {"pad_token": PAD, "bos_token": BEGIN, "eos_token": END, "mask_token": MASK}
    if inner.token_to_id(UNKNOWN) is not None:
        names["unk_token"] = UNKNOWN
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, cls_token=BEGIN, sep_token=END, split_special_tokens=True, **names
    )


def _bytes(package: Any, settings: Tokenizer, texts: Texts) -> Any:
    """Every byte of UTF-8 is a token: byte-level BPE without merges, ids in the order of the bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_names = bytes_to_unicode()  # type: ignore[no-untyped-call]
    names = {name: i for i, name in enumerate((*_SPECIAL, *(byte_names[byte] for byte in range(256))))}
    inner = package.Tokenizer(package.models.BPE(vocab=names, merges=[]))
    inner.add_special_tokens(list(_SPECIAL))
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = package.decoders.ByteLevel()
    return inner


def _bpe(package: Any, settings: Tokenizer, texts: Texts) -> Any:
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts(), trainer)
    return inner


def _wordpiece(package: Any, settings: Tokenizer, texts: Texts) -> Any:
    """The trainer numbers the letters within words in an order that changes: here they come first."""
    normalizer = package.normalizers.BertNormalizer(lowercase=settings.lowercase)
    seen: Counter[str] = Counter()
    for text in texts():
        seen.update(normalizer.normalize_str(text))
    most = min(_LETTERS, settings.vocab_size // 4)  # the same again within words, and half of the ids for longer ones
    letters = sorted(c for c, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:most])
    first = [*_SPECIAL, UNKNOWN, *letters, *(f"##{c}" for c in letters)]
    first = [name for name in first if not name.removeprefix("##").isspace()]
    pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    drawn = package.Tokenizer(package.models.WordPiece(unk_token=UNKNOWN))
    drawn.normalizer, drawn.pre_tokenizer = normalizer, pre_tokenizer
    trainer = package.trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size, special_tokens=first, limit_alphabet=most, show_progress=False
    )
    drawn.train_from_iterator(texts(), trainer)
    inner = package.Tokenizer(package.models.WordPiece(vocab=drawn.get_vocab(), unk_token=UNKNOWN))
    inner.normalizer, inner.pre_tokenizer = normalizer, pre_tokenizer
    inner.decoder = package.decoders.WordPiece()
    inner.add_special_tokens([*_SPECIAL, UNKNOWN])
    return inner


def _unigram(package: Any, settings: Tokenizer, texts: Texts) -> Any:
    drawn = package.Tokenizer(package.models.Unigram())
    spaces = package.normalizers.Replace(package.Regex(r"\s+"), " ")
    normalizer = package.normalizers.Sequence([package.normalizers.NFKC(), spaces])
    apart = package.pre_tokenizers.Split("<", "isolated")  # else <pad> in a text would be a piece
    pre_tokenizer = package.pre_tokenizers.Sequence([package.pre_tokenizers.Metaspace(), apart])
    drawn.normalizer, drawn.pre_tokenizer = normalizer, pre_tokenizer
    special = [*_SPECIAL, UNKNOWN]
    trainer = package.trainers.UnigramTrainer(
        vocab_size=settings.vocab_size, special_tokens=special, unk_token=UNKNOWN, show_progress=False
    )
    with refusing("no unigram tokenizer can be trained on this text", "change data.tokenizer.vocab_size"):
        drawn.train_from_iterator(texts(), trainer)
    pieces = [(piece, score) for piece, score in json.loads(drawn.to_str())["model"]["vocab"] if piece not in special]
    vocabulary = [(name, 0.0) for name in special] + _settled(pieces)
    inner = package.Tokenizer(package.models.Unigram(vocabulary, unk_id=special.index(UNKNOWN), byte_fallback=False))
    inner.normalizer, inner.pre_tokenizer = normalizer, pre_tokenizer
    inner.decoder = package.decoders.Metaspace()
    inner.add_special_tokens(special)
    return inner


def _settled(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Pieces by falling log probability, without what changes from one training to the next.

    The trainer sums in an order that changes, so scores are rounded; and letters that it would have dropped get scores
    of steps of 1e-4 above the smallest, in an order that changes: they all get the smallest score of the others.
    """
    longer = [score for piece, score in pieces if len(piece) > 1]
    lowest = min(longer, default=0.0)
    added = lowest + 1e-4 * (len(pieces) - len(longer) + 1)
    settled = [
        (piece, round(lowest if len(piece) == 1 and score < added else score, _DIGITS)) for piece, score in pieces
    ]
    return sorted(settled, key=lambda item: (-item[1], item[0]))
