"""What the tests of diagnosing share: a trained tokenizer, and a tiny decoder that goes with it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import tiny
from signalprop.data.batches import load_text

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 400


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """A byte-level BPE of 400 tokens, as GPT-2 has it; id 0 ends a text."""
    return tiny.bpe(load_text()[:60_000], VOCABULARY)


@pytest.fixture(scope="session")
def tokenizer(bpe: Tokenizer) -> Any:
    """The same as a tokenizer of transformers."""
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


@pytest.fixture
def llama() -> Any:
    """A decoder of three layers, all of whose parameters have moved off their start."""
    model = tiny.llama(
        vocab_size=VOCABULARY, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=128, initializer_range=0.2,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
