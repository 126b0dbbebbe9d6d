"""The recipe of docs/measuring.md, as it stands there, on the frameworks that install on a CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import signalprop as sp

WORDS = 99
PAGE = Path(__file__).parent.parent / "docs" / "measuring.md"


def recipe() -> Any:
    """The function `watched` of the page."""
    (code,) = re.findall(r"```python\n(def watched\(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 20
    names = {"sp": sp, "torch": torch}
    exec(code, names)
    return names["watched"]


def of_x_transformers() -> Any:
    package = pytest.importorskip("x_transformers")
    layers = package.Decoder(dim=64, depth=3, heads=4, attn_dim_head=16)
    return package.TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=layers)


def of_litgpt() -> Any:
    found = pytest.importorskip("importlib.util").find_spec("litgpt")
    if found is None:
        pytest.skip("pip install litgpt")
    package = ModuleType("litgpt")  # its __init__ imports servers and tokenizers, which no model needs
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["litgpt"] = package
    from litgpt.config import Config
    from litgpt.model import GPT

    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": WORDS, "padded_vocab_size": WORDS, "block_size": 32}
    return GPT(Config(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("made", "layers"), [(of_x_transformers, 6), (of_litgpt, 3)])  # the first lists branches
def test_a_recipe(made: Any, layers: int, capsys: Any) -> None:
    torch.manual_seed(0)
    batches = [torch.randint(0, WORDS, (4, 16)) for _ in range(3)]

    def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    monitor = recipe()(made(), batches, loss_of)
    said = capsys.readouterr().out
    assert "median errors" in said  # the start was compared with its prediction
    assert said.count("/variance") == layers
    assert not monitor.warnings
