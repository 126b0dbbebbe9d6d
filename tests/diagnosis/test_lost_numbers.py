"""What a loader or a converter left out: gains, biases, scales; labels, new rows, padding, calls that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diagnosing import text_batch, tiny
from signalprop.attachment.anatomy import attach
from signalprop.diagnosis.ends import ends_of
from signalprop.diagnosis.lost_numbers import lost_numbers
from signalprop.diagnosis.parts import parts_of
from signalprop.diagnosis.wiring import wiring_of


def each(model: Any, word: str, change: Callable[[Tensor], object]) -> None:
    found = [p for name, p in model.named_parameters() if word in name]
    assert found
    with torch.no_grad():
        for p in found:
            change(p)


def in_eight_bits(p: Tensor) -> object:
    return p.copy_((p * 448 / p.abs().max()).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("family", "word", "change", "name", "says"),
    [
        (
            "gemma3",
            "q_norm",
            lambda p: p.fill_(0.5),
            "norm gains not loaded",
            "self_attn.q_norm are all 0.5, while those",
        ),
        (
            "llama",
            "layernorm",
            lambda p: p.fill_(1.0),
            "norm gains not loaded",
            "model.layers.*.input_layernorm, model",
        ),
        ("gpt2", "ln_2.bias", lambda p: p.zero_(), "biases of zeros", "transformer.h.*.ln_2 are 0 in every layer"),
        ("gpt2", "c_attn.bias", lambda p: p.zero_(), "biases of zeros", "queries and values are 0"),
        ("llama", "proj", lambda p: p.mul_(200).round_(), "scales lost", "hold whole numbers up to"),
        (
            "llama",
            "proj",
            in_eight_bits,
            "scales lost",
            "whose largest is 448 in 28 of 28",
        ),
    ],
)
def test_what_was_left_out(family: str, word: str, change: Callable[[Tensor], object], name: str, says: str) -> None:
    model = tiny(family)
    assert not list(lost_numbers(attach(model)))
    each(model, word, change)
    (found,) = lost_numbers(attach(model))
    assert found.name == name and says in found.text


def test_final_norm_alone_and_one_layer_alone_are_no_matter_of_kinds() -> None:
    model = tiny("llama")
    each(model, "model.norm", lambda p: p.fill_(1.0))
    each(model, "layers.1.input_layernorm", lambda p: p.fill_(1.0))
    assert not list(lost_numbers(attach(model)))


def test_feed_forwards_of_which_no_unit_is_alive() -> None:
    model = tiny("opt")
    batch = text_batch(model)
    assert not [one for one in parts_of(attach(model), batch) if one.name == "dead units"]
    each(model, "layers.2.fc1.bias", lambda p: p.fill_(-30.0))
    (found,) = [one for one in parts_of(attach(model), batch) if one.name == "dead units"]
    assert found.layers == (2,)


def test_the_loss_of_the_word_itself_and_of_the_one_after_the_next() -> None:
    """Logits that say the token `ahead` places on: that loss alone is small."""
    model = tiny("llama", tie_word_embeddings=False)
    batch = text_batch(model, length=30)
    ids = torch.as_tensor(batch.tokens)
    for ahead, small in ((0, 0), (2, 1)):
        said = F.one_hot(ids.roll(-ahead, 1), model.config.vocab_size) * 20.0
        hook = model.lm_head.register_forward_hook(lambda *_, said=said: said)
        found = ends_of(attach(model), batch)
        hook.remove()
        assert found is not None and len(found.other_losses) == 2
        assert found.other_losses[small] < 0.1 < 5 < found.other_losses[1 - small]


def test_new_rows_that_take_the_answers() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    batch = text_batch(model)
    found = ends_of(attach(model), batch)
    assert found is not None and not found.outlying
    each(model, "lm_head", lambda p: p[-5:].mul_(8.0))
    found = ends_of(attach(model), batch)
    assert found is not None
    (row,) = found.outlying
    assert row.table == "head" and row.row >= 92 and row.losses[0] > row.losses[1] + 0.3


class Reader(nn.Module):
    """Words of a table, mixed with the mean of all that are read; dropout that stays on."""

    def __init__(self, mixes: bool, drops: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)
        self.mixes, self.drops = mixes, drops

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + x.mean(1, keepdim=True) if self.mixes else x
        return self.head(F.dropout(x, 0.5) if self.drops else x)


@pytest.mark.parametrize(
    ("mixes", "drops", "names"),
    [(False, False, []), (True, False, ["padding is read"]), (True, True, ["differs between calls"])],
)
def test_padding_and_calls_that_differ(mixes: bool, drops: bool, names: list[str]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 20, (1, 12))
    found = wiring_of(Reader(mixes, drops).eval(), {"ids": ids}, own=False, causal=False)
    assert [one.name for one in found] == names
