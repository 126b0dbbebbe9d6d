"""Tiny models and tokenizers of transformers, for tests that need any."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

transformers = pytest.importorskip("transformers")
# what transformers calls the argument, and the output, of keys and values that were seen: the latter until 5.23
CACHE = "cache" if "cache" in signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"


def gpt2(seed: int = 0, **changes: Any) -> Any:
    """A GPT-2 of two layers."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}
    config = transformers.GPT2Config(**sizes | {"bos_token_id": 0, "eos_token_id": 0} | changes)
    return transformers.GPT2LMHeadModel(config)


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama of two layers."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))


def bpe(text: str, size: int, *special: str) -> Tokenizer:
    """Byte-level BPE, as GPT-2 has it; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>", *special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def wordpiece(text: str, size: int) -> Tokenizer:
    """WordPiece, as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = ["[PAD]", "[UNK]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer
